"""Best-effort output: a command ignores write errors and does not wait for readers."""

import contextlib
import io
import os
import select
import sys
import threading
import time
from collections.abc import Iterator

from smallgpt_jax.formatting import duration

PATIENCE_SECONDS = 1.0  # a reader that takes nothing for this long is not waited for
_MAX_PENDING = 1 << 20  # bytes that are kept for a slow reader


class _BestEffortStream:
    """Drops text that cannot be written."""

    def __init__(self, stream):
        self._stream, self._writer = stream, None
        # A write to a full pipe or to a paused terminal would block the run. So a thread writes.
        if isinstance(stream, io.TextIOWrapper):  # not, for example, the output of a notebook
            with contextlib.suppress(OSError):  # no file descriptor, or it cannot be written
                stream.flush()
                self._writer = _BackgroundWriter(stream.fileno())

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            if self._writer and self._writer.is_usable():
                self._writer.write(text.encode(self._stream.encoding, self._stream.errors))
            else:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            if self._writer and self._writer.is_usable():
                self._writer.flush()
            else:
                self._stream.flush()

    def close_writer(self) -> bool:
        """Returns whether all text is written; not if the reader does not take it."""
        return self._writer is None or self._writer.close()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


class _BackgroundWriter:
    def __init__(self, descriptor: int):
        self._descriptor, self._process = descriptor, os.getpid()
        self._changed = threading.Condition()  # of the next four
        self._pending = bytearray()
        self._num_written = 0
        self._is_blocked = False  # the reader takes nothing
        self._is_closed = False
        self._thread = threading.Thread(target=self._write_pending, name="output", daemon=True)

    def is_usable(self) -> bool:
        # A forked process does not have the thread.
        return os.getpid() == self._process

    def write(self, data: bytes) -> None:
        with self._changed:
            # not earlier: host_memory.configure has to precede all threads
            if not self._thread.ident:
                self._thread.start()
            if len(self._pending) < _MAX_PENDING:
                self._pending += data
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all is written, or the reader has taken nothing for PATIENCE_SECONDS."""
        with self._changed:
            while self._pending and not self._is_blocked:
                before = self._num_written
                # progress, however slow, is waited for
                self._is_blocked = not self._changed.wait_for(
                    lambda: self._num_written > before, PATIENCE_SECONDS
                )

    def close(self) -> bool:
        """Returns whether everything is written."""
        self.flush()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return not self._pending

    def _write_pending(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if self._is_closed:
                    return
                chunk = bytes(self._pending[:4096])
            try:
                written = os.write(self._descriptor, chunk)
            except BlockingIOError:  # the descriptor does not block
                time.sleep(0.01)
                continue
            except OSError:
                written = len(chunk)
            with self._changed:
                del self._pending[:written]  # perhaps only a part of the chunk
                self._num_written += written
                self._is_blocked = False
                self._changed.notify_all()


@contextlib.contextmanager
def best_effort(name: str) -> Iterator[None]:
    """Ignores write errors of the stream sys.`name`, and drops all output if nobody reads."""
    stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(stream, _BestEffortStream):
        yield
        return
    wrapped = _BestEffortStream(stream)
    setattr(sys, name, wrapped)
    try:
        yield
    finally:
        is_read = wrapped.close_writer()
        setattr(sys, name, stream if is_read else open(os.devnull, "w"))  # noqa: SIM115
        drop_unwritable(name)


def drop_unwritable(name: str) -> None:
    """Replaces the stream sys.`name` by one that drops everything, if it cannot be written."""
    # Python flushes both streams at exit, and would exit with status 120 if that failed.
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


def print_error(text: str) -> None:
    """Prints a line on standard error at once, also if that is a pipe."""
    print(text, file=sys.stderr, flush=True)


class StatusLine:
    """One line on standard error, updated in place on a terminal; elsewhere nothing."""

    def __init__(self):
        self.is_on_terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self.is_on_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        self.show("")


@contextlib.contextmanager
def elapsed_time_shown(
    text: str, seconds: float = 1.0, line_seconds: float = 30.0
) -> Iterator[None]:
    """Shows `text` and the elapsed time on standard error: on a terminal in one line, every
    `seconds`; elsewhere in a new line every `line_seconds`.
    """
    line, started, is_done = StatusLine(), time.monotonic(), threading.Event()

    def update():
        if line.is_on_terminal:
            line.show(f"{text} … {duration(0)}")
        while not is_done.wait(seconds if line.is_on_terminal else line_seconds):
            elapsed = f"{text} … {duration(time.monotonic() - started)}"
            if line.is_on_terminal:
                line.show(elapsed)
            else:
                print_error(elapsed)
        line.clear()

    # A thread, because the caller is in a library, such as a compiler, for minutes.
    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
