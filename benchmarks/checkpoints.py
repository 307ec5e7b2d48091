"""Measures how much longer training takes with checkpoints.

    python benchmarks/checkpoints.py --config=configs/pgpt.py:quickstart --every=50

Each round measures the time of --every training steps twice, with a checkpoint and without:

- With a checkpoint, saving starts before the first step. The time ends when the steps and the checkpoint are complete.
- Without a checkpoint, the time ends when the steps are complete.

Prints both times and the relative overhead. The last line is a JSON object.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

sys.path.insert(0, str(Path(__file__).parent.parent))  # lets recipes import configs/base.py

from smallgpt_jax import cli
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.training.program import build_program

_CONFIG = cli.define_config()
_EVERY = flags.DEFINE_integer("every", 50, "Training steps per measurement.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 8, "Number of rounds; each has one measurement with a checkpoint and one without.", lower_bound=1)


def main() -> None:
    config = _CONFIG.value
    program = build_program(config)
    shape = (config.train.batch_size, config.model.context_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
    batch = Batch(jax.device_put(tokens, sharding.batch_sharding(program.mesh)))
    state, step = program.initial_state(), program.compile_train_step()
    run_step = program.bind(step)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), config.train.keep_checkpoints)

        def measure(saves: bool) -> float:
            nonlocal state
            started = time.perf_counter()
            if saves:
                checkpoints.save(int(state.step), state)
            for _ in range(_EVERY.value):
                state, metrics = run_step(state, batch)
            jax.block_until_ready(metrics)
            checkpoints.wait_until_finished()
            return time.perf_counter() - started

        measure(True)
        pairs = [(measure(True), measure(False)) for _ in range(_ROUNDS.value)]
        checkpoints.close()
    with_it, without = (statistics.median(times) for times in zip(*pairs))
    cost = statistics.median(a / b for a, b in pairs) - 1
    print(f"{_EVERY.value} steps take {with_it:.2f} s with a checkpoint and {without:.2f} s without; "
          f"overhead {cost:+.1%}")
    print(json.dumps({"every": _EVERY.value, "seconds_with": with_it, "seconds_without": without,
                      "cost": cost, "pairs": pairs}))


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
