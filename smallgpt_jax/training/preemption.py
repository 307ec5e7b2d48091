"""Stop requests: the user presses Ctrl-C, or a scheduler or preempted machine sends SIGTERM.

After a stop request, the run finishes its step, saves and ends. A second request, or a request
while there is nothing to save yet, for example during compilation, ends it at once without saving:
a command exits. In a notebook, whose kernel has to survive, Ctrl-C raises KeyboardInterrupt.
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
from smallgpt_jax.errors import StoppedError

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
        """Returns the same result in all processes (collective).

        With several processes, each call starts a collective and returns the result of the previous
        call, so that no process waits for another.
        """
        if distributed.is_single_process():
            return self.signal is not None
        answer, self._answer = self._answer, distributed.start_any_process(self.signal is not None)
        return answer is not None and bool(answer)

    def raise_stopped(self, step: int):
        raise StoppedError(
            f"stopped after step {step} and saved; rerun the same command to resume",
            128 + (self.signal or signal.SIGTERM),
        )

    def _is_met(self, number: int) -> bool:
        """Returns whether the run ends by itself, with a save."""
        if self.signal is None and self.can_save:
            self.signal, self._signal_time = number, time.monotonic()
            start = "\n" if sys.stderr.isatty() else ""  # after the progress and "^C"
            print(f"{start}{_FINISHING[number]}", file=sys.stderr, flush=True)
            return True
        return self.signal == number and time.monotonic() < self._signal_time + REPEAT_SECONDS

    def _handle(self, number: int) -> None:
        """Runs in a separate thread, because library calls can block the main thread for
        minutes.
        """
        if (number == signal.SIGINT and not self.exits) or self._is_met(number):
            return
        again = "second request: " if self.signal else ""
        # The main thread goes on, and must not print after the message.
        with contextlib.redirect_stdout(io.StringIO()):
            print(f"{again}{self.unsaved}", file=sys.stderr, flush=True)
            os._exit(128 + number)

    def _interrupt(self, number: int, _) -> None:
        """Runs in the main thread."""
        if not self.exits and not self._is_met(number):
            raise KeyboardInterrupt


@contextlib.contextmanager
def handle_signals(unsaved: str = _UNSAVED, exits: bool = True) -> Iterator[StopRequest]:
    """Records SIGTERM and Ctrl-C, without the handlers of libraries; outside the main thread,
    records nothing. `exits`: see `StopRequest`.
    """
    stop = StopRequest(unsaved, exits)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen():
        while numbers := ours.recv(16):
            for number in numbers:
                if number in _SIGNALS:
                    stop._handle(number)

    handlers = {signal.SIGTERM: lambda *_: None, signal.SIGINT: stop._interrupt}
    before = {number: signal.signal(number, handlers[number]) for number in _SIGNALS}
    descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.close()  # ends the listening thread
        thread.join()
        ours.close()
