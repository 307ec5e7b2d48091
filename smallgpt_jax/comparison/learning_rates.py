"""Learning-rate grids: a model is trained at several multiples of its own learning rate, and the
best one is chosen.
"""

import math
from collections.abc import Callable

from smallgpt_jax.analysis.record import Grid, GridRate
from smallgpt_jax.run.config import Config


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
    losses make the same grid.
    """
    multiples = tuple(sorted(map(float, multiples)))
    grid = _grid(seed, learning_rate, multiples, loss_of)
    for _ in range(max_added):
        if not grid.edge:
            break
        if grid.edge == "lowest":
            added = multiples[0] * multiples[0] / multiples[1]
        else:
            added = multiples[-1] * multiples[-1] / multiples[-2]
        added = float(f"{added:.6g}")  # rounded, because folder names contain the multiple
        multiples = tuple(sorted((*multiples, added)))
        grid = _grid(seed, learning_rate, multiples, loss_of)
    return grid


def _grid(
    seed: int,
    learning_rate: float,
    multiples: tuple[float, ...],
    loss_of: Callable[[float], float | None],
) -> Grid:
    rates = []
    for multiple in multiples:
        loss = loss_of(multiple)
        diverged = loss == math.inf
        rates.append(GridRate(multiple, None if diverged else loss, diverged))
    return Grid(seed, learning_rate, tuple(rates))


def scale(config: Config, multiple: float) -> Config:
    optimizer = config.optimizer
    return config.replace(
        optimizer={
            "learning_rate": multiple * optimizer.learning_rate,
            "final_learning_rate": multiple * optimizer.final_learning_rate,
        }
    )


def format_multiple(multiple: float) -> str:
    """Returns a multiple as text, such as "2" or "0.25". Different multiples give different
    texts.
    """
    return str(multiple).removesuffix(".0")
