"""Ends a run that hangs, so that a launch script or cluster can restart it."""

import faulthandler
import os
import sys
import tempfile
import threading
import time

from smallgpt_jax.run.clock import RunClock

STALLED_STATUS = 124  # the exit status of the shell command `timeout`
PRINTING_SECONDS = 10.0
EXEMPT_PHASES = ("restart", "save", "evaluate")


class Watchdog:
    """Ends the process with STALLED_STATUS if no training step finishes for `seconds`; never if
    `seconds` is 0. Waiting for data counts; EXEMPT_PHASES do not.
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
        idle, progress, checked = 0.0, self._clock.progress, time.monotonic()
        while not self._done.wait(self._interval):
            now = time.monotonic()
            # If more time has passed since the last check, the whole process was suspended. That is
            # not a hang.
            idle += min(now - checked, 2 * self._interval)
            checked = now
            if self._clock.progress != progress or self._clock.phase in EXEMPT_PHASES:
                idle, progress = 0.0, self._clock.progress
            if idle >= self._limit:
                self._end()

    def _end(self) -> None:
        # Ends the process even if nobody reads standard error.
        threading.Timer(PRINTING_SECONDS, os._exit, (STALLED_STATUS,)).start()
        print(
            f"error: no training step has finished for {self._limit:g} seconds "
            "(config.train.stall_seconds); rerun the same command to resume from the newest "
            "checkpoint. Stacks of all threads:",
            file=sys.stderr,
            flush=True,
        )
        with tempfile.TemporaryFile(
            "w+"
        ) as stacks:  # a dump to a full pipe would stop all threads, and the timer
            faulthandler.dump_traceback(stacks)
            stacks.seek(0)
            print(stacks.read(), file=sys.stderr, flush=True)
        os._exit(STALLED_STATUS)  # a regular exit would wait for the threads that hang
