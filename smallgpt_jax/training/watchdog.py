"""Ends a run that hangs, so that a launch script or cluster can restart it."""

import faulthandler
import os
import tempfile
import threading
import time

from smallgpt_jax.output import print_error
from smallgpt_jax.run.clock import PHASES, RunClock

_STALLED_STATUS = 124  # the exit status of the shell command `timeout`
_PRINTING_SECONDS = 10.0
# These phases have no steps, and may take longer than a step: _LONG_FACTOR times the limit.
_LONG_PHASES = ("restart", "save", "evaluate")
_LONG_FACTOR = 4


class Watchdog:
    """Ends the process with _STALLED_STATUS if no training step finishes for `seconds`, or if one of
    _LONG_PHASES takes _LONG_FACTOR × `seconds`; never if `seconds` is 0. Waiting for data counts.
    """

    def __init__(self, clock: RunClock, seconds: float):
        self._clock, self._limit, self._done = clock, seconds, threading.Event()
        self._interval = min(seconds / 10, 10.0)
        self._thread = threading.Thread(target=self._watch, name="stall watchdog", daemon=True)

    def __enter__(self):
        if self._limit:
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        if self._limit:
            self._thread.join()

    def _watch(self) -> None:
        idle, last, checked = 0.0, None, time.monotonic()
        while not self._done.wait(self._interval):
            now, phase = time.monotonic(), self._clock.phase
            # If more time has passed since the last check, the whole process was suspended. That is
            # not a hang.
            idle += min(now - checked, 2 * self._interval)
            checked = now
            is_long = phase in _LONG_PHASES
            position = self._clock.progress, is_long
            if position != last:
                idle, last = 0.0, position
            limit = (_LONG_FACTOR if is_long else 1) * self._limit
            if idle >= limit:
                reason = f"no training step has finished for {limit:g} seconds"
                setting = "config.train.stall_seconds"
                if is_long:
                    reason = f"{PHASES[phase]} has taken {limit:g} seconds"
                    setting = f"{_LONG_FACTOR} × {setting}"
                self._end(f"{reason} ({setting})")

    def _end(self, reason: str) -> None:
        # Ends the process even if nobody reads standard error.
        threading.Timer(_PRINTING_SECONDS, os._exit, (_STALLED_STATUS,)).start()
        print_error(
            f"error: {reason}; rerun the same command to resume from the newest checkpoint. Stacks "
            "of all threads:"
        )
        # A dump to a full pipe would stop all threads, and the timer.
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stacks:
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            print_error(stacks.read())
        os._exit(_STALLED_STATUS)  # a regular exit would wait for the threads that hang
