"""How a run is asked to stop: SIGTERM (schedulers, preempted machines) or Ctrl-C.

The run finishes its step, saves and ends. Where there is nothing to save, while programs are compiled
for instance, it ends at once; so it does when it is asked a second time.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from smallgpt_jax import distributed
from smallgpt_jax.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ONE_REQUEST = 0.5  # seconds: `timeout` and others signal a process and then its group


class Stop:
    """Whether this run has been asked to stop."""

    def __init__(self):
        self.asked: int | None = None  # the signal
        self.has_something_to_save = False
        self._answer = None
        self._when = 0.0  # it was asked

    def is_agreed(self) -> bool:
        """Whether a process of this run has been asked; the same answer in all of them, each time.

        With several processes, what is answered is the question of the call before this one: nobody
        waits for it.
        """
        if distributed.alone():
            return self.asked is not None
        answer, self._answer = self._answer, distributed.ask_all(self.asked is not None)
        return answer is not None and bool(answer)

    def end(self, step: int):
        """Raises what ends the run after `step`, which is saved."""
        raise Stopped(f"stopped after step {step}, which is saved; the same command goes on from there",
                      128 + (self.asked or signal.SIGTERM))

    def _notice(self, number: int) -> None:
        """In a thread of its own: the main thread may be inside of a library for minutes."""
        if self.asked is None and self.has_something_to_save:
            self.asked, self._when = number, time.monotonic()
            return
        if self.asked == number and time.monotonic() < self._when + ONE_REQUEST:
            return
        again = "a second time: " if self.asked else ""
        print(f"{again}stopped at once; what is saved is whole, the same command goes on from there",
              file=sys.stderr, flush=True)
        os._exit(128 + number)


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
    """Notices SIGTERM and Ctrl-C while it lasts. In threads other than the main one it does nothing."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen():
        while numbers := ours.recv(16):
            for number in numbers:
                if number in SIGNALS:
                    stop._notice(number)

    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        theirs.close()  # which ends the thread
        thread.join()
        ours.close()
