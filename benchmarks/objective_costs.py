"""Measures what the objectives of configs/compare/objectives.py cost in training: FLOPs, memory and
time.

    python benchmarks/objective_costs.py

- FLOPs: three times the matrix products of the forward pass per token, with the heads for further
  tokens. Without the optimizer.
- memory: temporary bytes of the compiled training step.
- time: processor time of a training step, the least of --rounds. All objectives are timed in turn.

The table shows each number divided by that of causal.
"""

import functools
import json
import time

from absl import flags
from measuring import Training, in_turn, seconds_of

from configs.compare import objectives
from smallgpt_jax import cli
from smallgpt_jax.comparison import recipe
from smallgpt_jax.models.flops import train_flops_per_token

_ROUNDS = flags.DEFINE_integer("rounds", 8, "Timings of each objective.", lower_bound=1)
STEPS = 5  # per timing


def main() -> None:
    trainings = {
        name: Training(config)
        for name, config in recipe.resolve_runs(objectives.get_config()).items()
    }
    seconds = in_turn(
        {
            name: functools.partial(
                seconds_of, functools.partial(training.run, STEPS), time.process_time
            )
            for name, training in trainings.items()
        },
        _ROUNDS.value,
    )
    found = {
        name: {
            "flops": train_flops_per_token(
                training.program.model, training.program.objective.terms.values()
            ),
            "memory": training.compiled.memory_analysis().temp_size_in_bytes,
            "seconds": min(seconds[name]) / STEPS,
        }
        for name, training in trainings.items()
    }
    for name, costs in found.items():
        print(
            name,
            *(f"{kind} × {value / found['causal'][kind]:.2f}" for kind, value in costs.items()),
        )
    print(json.dumps(found))


if __name__ == "__main__":
    cli.run(main)
