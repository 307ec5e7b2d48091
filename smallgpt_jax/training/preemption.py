"""Stop requests: the user presses Ctrl-C, or a scheduler or preempted machine sends SIGTERM.

After a stop request, the run finishes its step, saves and ends. A second request, or a request
while there is nothing to save yet, for example during compilation, ends it at once without saving:
a command exits. In a notebook, whose kernel has to survive, or in a user's script, Ctrl-C raises
KeyboardInterrupt, as it does without these handlers.
"""

import contextlib
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import StoppedError, ends_on_interrupt
from smallgpt_jax.output import print_error

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A signal that arrives again within REPEAT_SECONDS does not count as a second request, because the
# shell command `timeout` sends its signal twice.
REPEAT_SECONDS = 0.5
_UNSAVED = "stopped without saving; rerun the same command to resume from the newest checkpoint, if there is one"
_FINISHING = {
    signal.SIGTERM: "SIGTERM: finishing this step and saving; a second SIGTERM stops at once",
    signal.SIGINT: "finishing this step and saving; press Ctrl-C again to stop at once",
}


class StopRequest:
    def __init__(self, unsaved: str, exits: bool):
        self.unsaved = unsaved  # message if the process exits without saving
        self.exits = exits  # on Ctrl-C that cannot wait for a save; otherwise KeyboardInterrupt
        self.signal: int | None = None
        self.can_save = False
        self._answer = None
        self._signal_time = 0.0  # in seconds, by time.monotonic()

    def is_requested_anywhere(self) -> bool:
        """Returns the same result in all processes (collective)."""
        if distributed.is_single_process():
            return self.signal is not None
        # Each call starts a collective and returns the result of the previous call, so that no
        # process waits for another.
        answer, self._answer = self._answer, distributed.start_any_process(self.signal is not None)
        return answer is not None and bool(answer)

    def raise_stopped(self, step: int):
        raise StoppedError(
            f"stopped after step {step} and saved; rerun the same command to resume",
            128 + (self.signal or signal.SIGTERM),
        )

    def _waits_for_save(self, number: int) -> bool:
        """Returns whether a signal is a first request, which it records, or a repetition of it: then
        the run saves and ends by itself.
        """
        if self.signal is None and self.can_save:
            self.signal, self._signal_time = number, time.monotonic()
            start = "\n" if sys.stderr.isatty() else ""  # after the progress and "^C"
            print_error(f"{start}{_FINISHING[number]}")
            return True
        return self.signal == number and time.monotonic() < self._signal_time + REPEAT_SECONDS

    def _handle_in_thread(self, number: int) -> None:
        if number == signal.SIGINT and not self.exits:
            return  # `_interrupt` handles it
        if self._waits_for_save(number):
            return
        # The process ends here: the main thread may be in a library call for minutes.
        again = "second request: " if self.signal else ""
        # The main thread goes on, and must not print after the message.
        with contextlib.redirect_stdout(io.StringIO()):
            print_error(f"{again}{self.unsaved}")
            os._exit(128 + number)

    def _interrupt(self, number: int, _) -> None:
        # KeyboardInterrupt must be raised in the main thread.
        if not self.exits and not self._waits_for_save(number):
            raise KeyboardInterrupt


@contextlib.contextmanager
def handle_signals(unsaved: str = _UNSAVED) -> Iterator[StopRequest]:
    """Yields the request that SIGTERM and Ctrl-C set, in place of the handlers that libraries have
    installed. Outside the main thread, which alone may set handlers, nothing sets it.
    """
    stop = StopRequest(unsaved, exits=ends_on_interrupt())
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # Python calls a handler in the main thread, which a library call can block for minutes. But at
    # once, it writes the signal's number to a socket (`set_wakeup_fd`), from which a thread reads.
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen():
        while numbers := reader.recv(16):
            for number in numbers:
                if number in _SIGNALS:
                    stop._handle_in_thread(number)

    # Without a handler, no number is written and SIGTERM ends the process; this one leaves SIGTERM
    # to the thread.
    handlers = {signal.SIGTERM: lambda *_: None, signal.SIGINT: stop._interrupt}
    before = {number: signal.signal(number, handlers[number]) for number in _SIGNALS}
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # ends the listening thread
        thread.join()
        reader.close()
