"""Measures what the objectives of configs/compare/objectives.py cost in training: FLOPs, memory and time.

    python benchmarks/objective_costs.py

- FLOPs: three times the matrix products of the forward pass per token, with the heads for further tokens, which the
  FLOPs of other commands leave out. Without the optimizer.
- memory: temporary bytes of the compiled training step.
- time: processor time of a training step, the least of --rounds. All objectives are timed in turn.

The table shows each number divided by that of causal. The last line of standard output has the numbers as JSON.
"""

import functools
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

sys.path.insert(0, str(Path(__file__).parent.parent))  # lets this program import configs

from configs.compare import objectives
from smallgpt_jax import cli
from smallgpt_jax.comparison import budget
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.models.flops import count_operations
from smallgpt_jax.run.config import Config
from smallgpt_jax.training.program import Program, build_program
from smallgpt_jax.training.step import microbatch_loss

_ROUNDS = flags.DEFINE_integer("rounds", 8, "Timings of each objective.", lower_bound=1)
STEPS = 5  # per timing


def batch_of(config: Config) -> Batch:
    shape = config.train.batch_size, config.model.context_length + 1
    return Batch(np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32))


def flops_per_token(program: Program) -> float:
    model = program.model.clone(config=program.config.replace(model={"attention": "counted"}).model)
    batch, state = batch_of(program.config), program.abstract_state
    examples = jax.eval_shape(program.objective.examples, batch, jax.random.key(0))
    loss = functools.partial(
        microbatch_loss, model=model, objective=program.objective, constants=None, step_key=jax.random.key(0),
        total=1.0, microbatches=1)
    products = count_operations(loss, {**state.params, **state.heads}, {}, 0, examples).products
    return 3 * products / batch.tokens_BxT1[:, 1:].size


def main() -> None:
    configs = {name: Config.of(config) for name, config in budget.resolve_runs(objectives.get_config()).items()}
    programs = {name: build_program(config, jax.devices()[:1]) for name, config in configs.items()}
    compiled = {name: program.compile_train_step() for name, program in programs.items()}
    found = {name: {"flops": flops_per_token(program),
                    "memory": compiled[name].memory_analysis().temp_size_in_bytes, "seconds": np.inf}
             for name, program in programs.items()}
    states = {name: program.initial_state() for name, program in programs.items()}
    for _ in range(1 + _ROUNDS.value):
        for name, program in programs.items():
            step = program.bind(compiled[name])
            batch = jax.device_put(batch_of(program.config), sharding.batch_sharding(program.mesh))
            started = time.process_time()
            for _ in range(STEPS):
                states[name], metrics = step(states[name], batch)
            jax.block_until_ready(metrics)
            found[name]["seconds"] = min(found[name]["seconds"], (time.process_time() - started) / STEPS)
    for name, costs in found.items():
        print(name, *(f"{kind} × {value / found['causal'][kind]:.2f}" for kind, value in costs.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    cli.run(main)
