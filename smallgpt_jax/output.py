"""Standard output and standard error of work that has to go on when nobody can read them any more."""

import contextlib
import os
import sys
from collections.abc import Iterator


class BestEffortStream:
    """A text stream that drops what cannot be written, and tries again with the next text."""

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
    """Keeps a full disk or a closed pipe from raising errors where `sys.stdout` or `sys.stderr` is written.

    `name` is "stdout" or "stderr". A stream that cannot be written at the end either is replaced, since Python
    would exit with status 120 when it fails to flush it.
    """
    stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
    setattr(sys, name, BestEffortStream(stream))
    try:
        yield
    finally:
        try:
            stream.flush()
        except OSError:
            stream = open(os.devnull, "w")  # noqa: SIM115
        setattr(sys, name, stream)
