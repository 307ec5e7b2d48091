"""Renders chat templates in a process of their own, with bounded time and memory.

A chat template is a program that comes with somebody else's tokenizer. Jinja's sandbox keeps it
away from files and from Python's objects, but not from endless loops or from texts of gigabytes,
and a thread that runs one cannot be interrupted. So the operating system bounds the process.
"""

import contextlib
import datetime
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from smallgpt_jax.formatting import short_reason

SECONDS = 10.0  # of processor time, per conversation
_MEMORY_BYTES = 2**31
_MAX_CHARACTERS = 2**26  # of all renderings of a conversation
CONTENT = "\ufdd0"  # a Unicode noncharacter
_SERVE = (
    "import sys; sys.path[:] = {}; from smallgpt_jax.data.template_process import serve; serve()"
)


class Rendering(NamedTuple):
    length: int  # of the conversation, in messages
    add_generation_prompt: bool
    marked: int | None = None  # the message whose content is replaced by CONTENT


def render(
    source: str, messages: str, renderings: Sequence[Rendering], variables: Mapping[str, str]
) -> list[str]:
    """Returns one text per rendering.

    `messages` are a JSON array. Raises ValueError if the template is wrong or fails, or takes too
    much time or memory.
    """
    request = {
        "source": source,
        "messages": messages,
        "renderings": renderings,
        "variables": variables,
        "seconds": SECONDS,
    }
    reply = _renderer(os.getpid()).answer(_to_line(request))
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply["texts"]


def _to_line(content: Mapping) -> bytes:
    # JSON may contain half a surrogate pair.
    return json.dumps(content, ensure_ascii=False).encode(errors="surrogatepass") + b"\n"


def _from_line(line: bytes) -> dict:
    return json.loads(line.decode(errors="surrogatepass"))


@functools.cache
def _renderer(process: int) -> "_Renderer":
    """Returns the renderer of a process: a forked one must not share the pipes of its parent."""
    return _Renderer()


class _Renderer:
    """The process that renders: started when needed, and again if a template has ended it."""

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def answer(self, request: bytes) -> dict:
        with self._lock:
            self._process = self._process or self._start()
            with contextlib.suppress(BrokenPipeError):  # it has ended; its status tells why
                self._process.stdin.write(request)
                self._process.stdin.flush()
            reply = self._process.stdout.readline()
            if reply.endswith(b"\n"):
                return _from_line(reply)
            status = self._process.wait()
            self._process = None
        if status == -signal.SIGPROF:  # the signal of ITIMER_PROF has ended it
            return {"error": f"takes longer than {SECONDS:g} seconds"}
        return {"error": f"its process has ended with status {status}"}

    @staticmethod
    def _start() -> subprocess.Popen:
        # With the modules that this process has found, not with those of the current folder.
        return subprocess.Popen(
            [sys.executable, "-c", _SERVE.format(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )


def serve() -> None:
    """Answers each line of standard input. SIGPROF ends the process if an answer takes too long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with contextlib.suppress(OSError, ValueError):  # the limit is lower already, or not supported
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    for line in sys.stdin.buffer:
        try:
            reply = {"texts": _render(**_from_line(line))}
        except MemoryError:
            reply = {"error": f"needs more than {_MEMORY_BYTES // 2**30} GiB of memory"}
        except Exception as error:  # a template can raise any exception
            reply = {"error": short_reason(error)}
        sys.stdout.buffer.write(_to_line(reply))
        sys.stdout.buffer.flush()


def _render(
    source: str,
    messages: str,
    renderings: list[tuple[int, bool, int | None]],
    variables: dict[str, str],
    seconds: float,
) -> list[str]:
    texts, characters = [], 0
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of processor time
        template, conversation = _compile(source), json.loads(messages)
        for length, add_generation_prompt, marked in renderings:
            written = conversation[:length]
            if marked is not None:
                written[marked] = {**written[marked], "content": CONTENT}
            # As in transformers. Templates ask whether `tools` is none; undefined is not none.
            text = template.render(
                messages=written,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
            characters += len(text)
            if characters > _MAX_CHARACTERS:
                raise ValueError(f"writes more than {_MAX_CHARACTERS:,} characters")
            texts.append(text)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return texts


@functools.lru_cache
def _compile(source: str):
    """Templates have the names of transformers: `tojson` escapes nothing, `strftime_now` tells the
    time, and the tags `generation` and `endgeneration` write nothing.
    """
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)
