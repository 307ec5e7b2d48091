"""Chooses a model for a budget from the results of a comparison, or says why they do not tell.

    python -m smallgpt_jax.choose --results=runs/scaling/results.json --flops=1e15
    python -m smallgpt_jax.choose --results=runs/paper/results.json --decode_ms=40 --batch=32

Give one budget. --flops and --seconds are training budgets; the others limit the trained model.
Prints the Pareto front of the loss against this cost, the probability of each model of being the
best, and the command that trains the chosen one.
"""

import dataclasses
import json
import math

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.comparison import choice, costs
from smallgpt_jax.storage.paths import as_path

_RESULTS = flags.DEFINE_string("results", None, "results.json of a comparison.")
_BUDGETS = {
    name: flags.DEFINE_float(name, None, f"Budget: {budget.label}.")
    for name, budget in costs.BUDGETS.items()
}
_BATCH = flags.DEFINE_integer(
    "batch",
    None,
    f"Batch size of decoding: for --decode_ms, one of {costs.DECODING_BATCHES}; for --memory, "
    "any. Default: 1.",
    lower_bound=1,
)
_JSON = flags.DEFINE_bool("json", False, "Print the answer as one JSON object.")
flags.mark_flag_as_required("results")


def main() -> None:
    given = {name: flag.value for name, flag in _BUDGETS.items() if flag.value is not None}
    if len(given) != 1:
        found = (
            f"{' and '.join(f'--{name}' for name in given)} cannot be combined; " if given else ""
        )
        cli.fail(f"{found}give one of {', '.join(f'--{name}' for name in _BUDGETS)}", status=2)
    ((budget, limit),) = given.items()
    if not 0 < limit < math.inf:
        cli.fail(f"--{budget}={limit}: must be a finite number above 0", status=2)
    if _BATCH.value is not None and budget not in costs.BATCH_BUDGETS:
        cli.fail(f"--batch: does not apply to --{budget}; remove it", status=2)
    if budget == "decode_ms" and _BATCH.value not in (None, *costs.DECODING_BATCHES):
        cli.fail(
            f"--batch={_BATCH.value}: decoding is measured at "
            f"{' and '.join(map(str, costs.DECODING_BATCHES))}; use one of these",
            status=2,
        )
    answer = choice.choose(as_path("--results", _RESULTS.value), budget, limit, _BATCH.value or 1)
    print(json.dumps(dataclasses.asdict(answer)) if _JSON.value else choice.format_answer(answer))


if __name__ == "__main__":
    cli.run(main)
