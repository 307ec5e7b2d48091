"""When a run saves and evaluates."""

from typing import NamedTuple


class Schedule(NamedTuple):
    """The steps after which a run saves and evaluates. It does both after the last step."""

    steps: int
    eval_every: int
    checkpoint_every: int

    def saves(self, step: int) -> bool:
        return step >= self.steps or step % self.checkpoint_every == 0

    def evaluates(self, step: int) -> bool:
        return step >= self.steps or step % self.eval_every == 0
