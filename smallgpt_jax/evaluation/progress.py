"""Progress of an evaluation, on standard error."""

import sys
import time

from smallgpt_jax.formatting import duration
from smallgpt_jax.output import StatusLine


class ScoringProgress:
    """Updates one line on a terminal; elsewhere, prints a new line every ten seconds."""

    def __init__(self):
        self._line, self._shown_at, self._started = StatusLine(), 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are done. `what` names them, such as "texts scored"."""
        now = time.monotonic()
        if done <= 1 or not self._started:  # a new count: an evaluation may have several
            self._started = self._shown_at = now
        # a log that is not a terminal keeps every line
        pause = 0.2 if self._line.is_on_terminal else 10
        if done < total and now - self._shown_at < pause:
            return
        self._shown_at = now
        if done >= total:
            return self._line.clear()
        left = (now - self._started) * (total - done) / max(done, 1)
        text = f"{done:,} of {total:,} {what}   {duration(left)} left"
        if self._line.is_on_terminal:
            self._line.show(text)
        else:
            print(text, file=sys.stderr, flush=True)
