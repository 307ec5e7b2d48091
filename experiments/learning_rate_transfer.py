"""Measures how the best learning rate depends on the width, with and without muP.

    python experiments/learning_rate_transfer.py --config=configs/gpt.py:tiny --widths=32,64,128 --steps=300

At each width, the model is trained at several multiples of config.optimizer.learning_rate, always
on the same batches. The loss of a run is the mean training loss of its last tenth. The best rate is
the minimum of the parabola through the lowest loss and its neighbors. The base model of muP is the
narrowest one, so its results count for both.

Prints a table, and the largest best rate divided by the smallest.
"""

import json
import math

import jax
import numpy as np
from absl import flags
from coordinates import at_size

from benchmarks.measuring import table
from smallgpt_jax import cli
from smallgpt_jax.analysis.description import minimum_of
from smallgpt_jax.analysis.record import Grid, GridRate
from smallgpt_jax.comparison.runs import with_rate_multiple
from smallgpt_jax.run.config import Config
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.opening import open_pipeline

_CONFIG = cli.define_config()
_WIDTHS = flags.DEFINE_list("widths", ["32", "64", "128"], "Values of config.model.d_model.")
_MULTIPLES = flags.DEFINE_list(
    "multiples", ["0.5", "1", "2", "4", "8", "16"], "Multiples of the learning rate."
)
_STEPS = flags.DEFINE_integer("steps", 300, "Training steps of each run.", lower_bound=10)


def grid(config: Config, multiples: list[float]) -> Grid:
    """Returns the losses at all multiples, with one compiled step, whose input is the learning
    rate.
    """
    program = build_program(config, jax.devices()[:1])
    pipeline = open_pipeline(config, program)

    def final_loss(multiple: float) -> float:
        step = program.bind(with_rate_multiple(config, multiple))
        state, losses = program.initial_state(config.train.seed), []
        for i in range(config.train.steps):
            state, metrics = step(state, pipeline.to_devices(pipeline.train_batches[i]))
            losses.append(metrics["loss"])
        return float(np.mean(losses[-(config.train.steps // 10) :]))

    rates = []
    for multiple in multiples:
        loss = final_loss(multiple)
        diverged = not math.isfinite(loss)
        rates.append(GridRate(multiple, None if diverged else loss, diverged))
    return Grid(config.train.seed, config.optimizer.learning_rate, tuple(rates))


def best_rate(found: Grid) -> float:
    """Returns the rate at the minimum of the parabola, or the best rate of the grid if it is at an
    edge.
    """
    return found.learning_rate * (minimum_of(found) or found.best)


def main() -> None:
    with _CONFIG.value.unlocked():
        _CONFIG.value.train.steps = _STEPS.value
    config = Config.of(_CONFIG.value)
    widths, multiples = sorted(map(int, _WIDTHS.value)), sorted(map(float, _MULTIPLES.value))
    grids = {
        "without muP": {
            width: grid(at_size(config, "d_model", width, 0), multiples) for width in widths
        }
    }
    grids["with muP"] = {
        widths[0]: grids["without muP"][widths[0]],
        **{
            width: grid(at_size(config, "d_model", width, widths[0]), multiples)
            for width in widths[1:]
        },
    }
    rates = [multiple * config.optimizer.learning_rate for multiple in multiples]
    print(
        table(
            ["", "width", *(f"{rate:.3g}" for rate in rates), "best"],
            (
                [
                    name,
                    width,
                    *(f"{loss:.4f}" for loss in found.losses.values()),
                    f"{best_rate(found):.3g}"
                    + (f" ({found.edge} of the grid)" if found.edge else ""),
                ]
                for name, by_width in grids.items()
                for width, found in by_width.items()
            ),
        )
    )
    best = {
        name: {width: best_rate(found) for width, found in by_width.items()}
        for name, by_width in grids.items()
    }
    for name, by_width in best.items():
        print(
            f"{name}: the best rates differ by a factor of "
            f"{max(by_width.values()) / min(by_width.values()):.2f}"
        )
    print(
        json.dumps(
            {
                "config": config.to_dict(),
                "best": best,
                "losses": {
                    name: {width: found.losses for width, found in by_width.items()}
                    for name, by_width in grids.items()
                },
            }
        )
    )


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
