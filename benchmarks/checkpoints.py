"""Measures how much longer training takes with checkpoints.

    python benchmarks/checkpoints.py --config=configs/pgpt.py:quickstart --every=50

Each round measures the time of --every training steps twice, with a checkpoint and without:

- With a checkpoint, saving starts before the first step. The time ends when the steps and the
  checkpoint are complete.
- Without a checkpoint, the time ends when the steps are complete.

Prints both times and the relative overhead.
"""

import json
import tempfile
from pathlib import Path

import jax
from absl import flags
from measuring import Training, median_and_ratio, seconds_of

from smallgpt_jax import cli
from smallgpt_jax.run.checkpoint import Checkpoints

_CONFIG = cli.define_config()
_EVERY = flags.DEFINE_integer("every", 50, "Training steps per measurement.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
    "rounds",
    8,
    "Number of rounds; each has one measurement with a checkpoint and one without.",
    lower_bound=1,
)


def main() -> None:
    training = Training(_CONFIG.value, jax.devices())
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), _CONFIG.value.train.keep_checkpoints)

        def with_checkpoint() -> None:
            checkpoints.save(int(training.state.step), training.state)
            training.run(_EVERY.value)
            checkpoints.wait_until_finished()

        with_checkpoint()
        pairs = [
            (seconds_of(with_checkpoint), seconds_of(lambda: training.run(_EVERY.value)))
            for _ in range(_ROUNDS.value)
        ]
        checkpoints.close()
    with_it, without, ratio = median_and_ratio(pairs)
    print(
        f"{_EVERY.value} steps take {with_it:.2f} s with a checkpoint and {without:.2f} s without; "
        f"overhead {ratio - 1:+.1%}"
    )
    print(
        json.dumps(
            {
                "every": _EVERY.value,
                "seconds_with": with_it,
                "seconds_without": without,
                "cost": ratio - 1,
                "pairs": pairs,
            }
        )
    )


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
