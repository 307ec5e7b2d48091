"""Best-effort standard output and standard error: a command ignores write errors and continues."""

import contextlib
import os
import select
import sys
from collections.abc import Iterator


class BestEffortStream:
    """A text stream that ignores write errors and drops the unwritten text."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


@contextlib.contextmanager
def best_effort(name: str) -> Iterator[None]:
    """Inside the context, ignores errors of writes to a standard stream, such as a full disk or a closed pipe.

    `name` is the attribute of `sys` that holds the stream: "stdout" or "stderr".
    """
    stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
    setattr(sys, name, BestEffortStream(stream))
    try:
        yield
    finally:
        setattr(sys, name, stream)
        drop_unwritable(name)


def drop_unwritable(name: str) -> None:
    """Replaces a standard stream by the null device if the stream cannot be flushed.

    Python flushes both standard streams at exit. If that failed, Python would exit with status 120. `name` is "stdout"
    or "stderr".
    """
    try:
        getattr(sys, name).flush()
    except OSError:
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def is_output_closed() -> bool:
    """Returns whether standard output is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError):  # standard output has no file descriptor
        return False
