"""Learning-rate grids: a model is trained at several multiples of its own learning rate, and the
best one is chosen.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from smallgpt_jax.run.config import Config


class Minimum(NamedTuple):
    """The minimum of a parabola in ln(learning rate)."""

    multiple: float
    loss: float
    curvature: float  # second derivative of the loss in ln(learning rate)

    @property
    def rise(self) -> float:
        """How much higher the loss is at half and at twice the rate of the minimum."""
        return self.curvature * math.log(2) ** 2 / 2


@dataclasses.dataclass(frozen=True)
class Grid:
    """A model's losses after training at two or more multiples of its own learning rate."""

    # not one of the comparison: the lowest of several losses of a seed is lower than an average one
    seed: int
    learning_rate: float  # the model's own learning rate, which is multiplied
    # {multiple: validation loss after the last step}, in ascending order of the multiples. A loss
    # is infinite if the run has diverged, and None if the run is not finished.
    losses: dict[float, float | None]

    @property
    def is_finished(self) -> bool:
        return None not in self.losses.values()

    @property
    def best(self) -> float | None:
        """The multiple with the lowest loss (in a tie, the lowest multiple); None until all runs
        are finished.
        """
        return (
            min(self.losses, key=lambda multiple: (self.losses[multiple], multiple))
            if self.is_finished
            else None
        )

    @property
    def has_diverged(self) -> bool:
        """Whether the model has diverged at every multiple."""
        return all(loss == math.inf for loss in self.losses.values())

    @property
    def edge(self) -> str:
        """Returns "lowest" or "highest" if the best multiple is the lowest or highest of the grid,
        else "".
        """
        return {min(self.losses): "lowest", max(self.losses): "highest"}.get(self.best, "")

    @property
    def minimum(self) -> Minimum | None:
        """The minimum of the parabola through the best rate and its two neighbors.

        Returns None if the best rate is at an edge, if a run at a neighbor has diverged, or if all
        three losses are equal.
        """
        if self.best is None or self.edge:
            return None
        multiples = list(self.losses)
        near = multiples[multiples.index(self.best) - 1 :][:3]
        (x0, x1, x2), (y0, y1, y2) = map(math.log, near), map(self.losses.get, near)
        if not max(y0, y2) < math.inf:
            return None
        slope, next_slope = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
        curvature = 2 * (next_slope - slope) / (x2 - x0)
        if curvature <= 0:
            return None
        x = (x0 + x1) / 2 - slope / curvature
        loss = y1 + (slope + curvature * (x1 - x0) / 2) * (x - x1) + curvature * (x - x1) ** 2 / 2
        return Minimum(math.exp(x), loss, curvature)


def search(
    seed: int,
    learning_rate: float,
    multiples: tuple[float, ...],
    max_added: int,
    loss_of: Callable[[float], float | None],
) -> Grid:
    """Returns the grid of the multiples to train, as far as the known losses determine them.

    If the best multiple is the lowest or highest, one more is added beyond it, at an equal ratio: 4
    after 1 and 2. This is repeated, at most `max_added` times, while the best multiple is at an
    end. `loss_of` maps a multiple to its loss, as in `Grid.losses`. Processes that know the same
    losses find the same grid.
    """
    grid = Grid(
        seed,
        learning_rate,
        {float(multiple): loss_of(float(multiple)) for multiple in sorted(multiples)},
    )
    for _ in range(max_added):
        if not grid.edge:
            break
        lowest, second, *_ = grid.losses
        *_, last_but_one, highest = grid.losses
        added = (
            lowest * lowest / second if grid.edge == "lowest" else highest * highest / last_but_one
        )
        added = float(f"{added:.6g}")  # rounded, because folder names contain the multiple
        grid = Grid(
            seed, learning_rate, dict(sorted({**grid.losses, added: loss_of(added)}.items()))
        )
    return grid


def scale(config: Config, multiple: float) -> Config:
    return config.replace(
        optimizer={
            field: multiple * getattr(config.optimizer, field)
            for field in ("learning_rate", "final_learning_rate")
        }
    )


def format_multiple(multiple: float) -> str:
    """Returns a multiple as text, such as "2" or "0.25". Different multiples give different
    texts.
    """
    return str(multiple).removesuffix(".0")
