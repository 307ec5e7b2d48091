"""Wall time of a session, by phase: training steps, starting, waiting for data, saving, evaluating.

A session begins when a run is started or resumed, and ends when the run finishes, stops or fails.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator

# Phases other than training steps → name in the goodput message. In the phase "data_wait", the host
# waits for a batch; the devices may still be busy with the previous step.
PHASES = {
    "restart": "starting",
    "data_wait": "waiting for data",
    "save": "saving",
    "evaluate": "evaluating",
}
_LARGE_EVALUATION_SHARE = 0.2


class RunClock:
    def __init__(self):
        self._began = time.monotonic()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._reported = dict.fromkeys(PHASES, 0.0)
        self.phase: str | None = "restart"  # None: training steps
        self.progress = 0  # increases with every finished step, save and evaluation

    def start_training(self) -> None:
        self._seconds["restart"] = self._elapsed()
        self.phase = None

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        outer_phase, self.phase = self.phase, phase
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - began
            self.phase = outer_phase
            if phase != "data_wait":  # the step that follows counts
                self.progress += 1

    def wait_for(self, batches: Iterable) -> Iterator:
        batches = iter(batches)
        while True:
            with self.during("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def training_seconds(self) -> float:
        """Excludes saving and evaluating."""
        return self._elapsed() - sum(
            self._seconds[phase] for phase in ("restart", "save", "evaluate")
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def lap(self) -> dict[str, float]:
        """Returns seconds per phase since the last call; the first call, also restart_seconds."""
        phases = ["data_wait", "save"]
        if not self._reported["restart"]:
            phases.append("restart")
        lap = {f"{phase}_seconds": self._seconds[phase] - self._reported[phase] for phase in phases}
        self._reported = dict(self._seconds)
        return lap

    def goodput_message(self) -> str:
        total = self._elapsed()
        # Time outside the other phases is training. Here, waiting for data is lost time; the logged
        # speed (`training_seconds`) includes it.
        training = total - sum(self._seconds.values())
        lost = ", ".join(
            f"{seconds:,.1f} s {PHASES[phase]}"
            for phase, seconds in self._seconds.items()
            if seconds
        )
        message = (
            f"goodput {training / total:.1%}: {training:,.1f} of {total:,.1f} s in training steps; "
            f"{lost}"
        )
        share = self._seconds["evaluate"] / total
        if share > _LARGE_EVALUATION_SHARE:
            message += (
                f"\nevaluation took {share:.0%} of the time; for less, increase "
                "config.train.eval_every or decrease config.train.eval_steps"
            )
        return message
