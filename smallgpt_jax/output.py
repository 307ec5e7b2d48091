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
    """Ignores errors of writing to `sys.stdout` or `sys.stderr` inside the context, such as a full disk or closed pipe.

    `name` is "stdout" or "stderr".
    """
    stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
    setattr(sys, name, BestEffortStream(stream))
    try:
        yield
    finally:
        setattr(sys, name, stream)
        drop_unwritable(name)


def drop_unwritable(name: str) -> None:
    """Replaces `sys.stdout` or `sys.stderr` by the null device if it cannot be flushed.

    Python flushes both streams at exit, and exits with status 120 if this fails.
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
