"""Measures how much longer a step takes in a full training run than alone.

    python benchmarks/loop.py --config=configs/gpt.py:quickstart --steps=400 --config.train.checkpoint_every=50

Each round measures --steps steps twice:

- in a full run, which reads data and writes progress, metrics.jsonl, TensorBoard files and
  checkpoints
- alone: only calls of the compiled training step, always with the same batch

The time of a full run is computed from the speeds that it logs, except the first. These speeds
exclude compilation, evaluation and the start of a checkpoint. They include the slowdown while a
checkpoint is written in the background.

Prints the milliseconds per step in a full run and alone, and the relative overhead.
"""

import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
from absl import flags
from measuring import median_and_ratio

from smallgpt_jax import cli
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import METRICS_FILE
from smallgpt_jax.training import trainer
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.opening import open_pipeline

_CONFIG = cli.define_config()
_STEPS = flags.DEFINE_integer("steps", 400, "Steps per run.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer(
    "rounds",
    3,
    "Number of rounds; each measures a full run and the training step alone.",
    lower_bound=1,
)


def run_seconds(config) -> float:
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere):
            trainer.train_and_evaluate(config, folder)
        speeds = [
            line["tokens_per_second"]
            for line in read_lines(Path(folder) / METRICS_FILE)
            if line["split"] == "train"
        ]
    tokens_per_step = config.train.batch_size * config.model.context_length
    # Each logged speed covers the same number of steps, so the mean needs no weights.
    return statistics.mean(tokens_per_step / speed for speed in speeds[1:])


def step_seconds(config) -> float:
    program = build_program(config)
    text = open_pipeline(config, program)
    batch = text.to_devices(text.train_batches[0])
    state, run_step = program.initial_state(config.train.seed), program.bind(config)
    for step in range(config.train.log_every + _STEPS.value):
        if step == config.train.log_every:
            jax.block_until_ready(state)
            started = time.perf_counter()
        state, _ = run_step(state, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - started) / _STEPS.value


def main() -> None:
    config = _CONFIG.value
    with config.unlocked():
        config.train.steps, config.train.eval_every, config.train.eval_steps = (
            _STEPS.value,
            _STEPS.value,
            1,
        )
    if _STEPS.value % config.train.log_every or _STEPS.value == config.train.log_every:
        cli.fail(
            f"--steps={_STEPS.value}: must be a multiple of "
            f"config.train.log_every={config.train.log_every}, and at least twice as large"
        )
    pairs = [(run_seconds(config), step_seconds(config)) for _ in range(_ROUNDS.value)]
    whole, bare, ratio = median_and_ratio(pairs)
    print(
        f"A step takes {1000 * whole:.2f} ms in a full run and {1000 * bare:.2f} ms alone; "
        f"overhead {ratio - 1:+.1%}"
    )
    print(
        json.dumps(
            {
                "steps": _STEPS.value,
                "run_seconds": whole,
                "step_seconds": bare,
                "cost": ratio - 1,
                "pairs": pairs,
            }
        )
    )


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    cli.run(main)
