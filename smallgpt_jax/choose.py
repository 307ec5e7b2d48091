"""Chooses a model for a budget from the results of a comparison, or says why they do not tell.

    python -m smallgpt_jax.choose --results=runs/scaling/results.json --flops=1e15
    python -m smallgpt_jax.choose --results=runs/paper/results.json --decode_ms=40 --batch=32
    python -m smallgpt_jax.choose --results=runs/paper/results.json --next

Give one budget. --flops and --seconds are training budgets; the others limit the trained model.
Prints the model or models that may be the best with their probabilities, the loss at stake, the
trained models that are best for their cost, and the command that trains the chosen one.

--next prints which run would tell most: the one that lowers the loss at stake most per FLOP.
"""

import dataclasses
import json
import math

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.analysis.budgets import BATCH_BUDGETS, BUDGETS, DECODING_BATCHES
from smallgpt_jax.formatting import finite
from smallgpt_jax.report import choosing, words

_RESULTS = flags.DEFINE_string("results", None, "results.json of a comparison.")
_LIMITS = {
    name: flags.DEFINE_float(name, None, f"Budget: {words.BUDGET_NAMES[name]}.") for name in BUDGETS
}
_BATCH = flags.DEFINE_integer(
    "batch",
    None,
    f"Batch size of decoding: for --decode_ms, one of {DECODING_BATCHES}; for --memory, any. "
    "Default: 1.",
    lower_bound=1,
)
_MODELS = flags.DEFINE_list(
    "models",
    [],
    "Models to choose among, separated by commas. Default: all, also those that were trained with "
    "less than the budget.",
)
_NEXT = flags.DEFINE_bool(
    "next", False, "Instead of a budget: print which run to train next, or that none is worth it."
)
_JSON = flags.DEFINE_bool("json", False, "Print the answer as one JSON object.")
flags.mark_flag_as_required("results")


def main() -> None:
    # a limit of 0 is given, too
    limits = {name: flag.value for name, flag in _LIMITS.items() if flag.value is not None}
    if _NEXT.value:
        others = [*limits, *(["batch"] if _BATCH.value else [])]
        if others:
            cli.fail(f"--next: cannot be combined with --{others[0]}", status=2)
        advice = choosing.choose_next(_RESULTS.value, models=_MODELS.value)
        print(json.dumps(dataclasses.asdict(advice)) if _JSON.value else advice)
        return
    budget, limit = _one_budget(limits)
    _check_batch(budget, _BATCH.value)
    answer = choosing.choose(_RESULTS.value, budget, limit, _BATCH.value or 1, _MODELS.value)
    if _JSON.value:
        print(json.dumps(finite(dataclasses.asdict(answer))))
    else:
        print(answer, end="")


def _one_budget(limits: dict[str, float]) -> tuple[str, float]:
    if len(limits) != 1:
        named = " and ".join(f"--{name}" for name in limits)
        choices = ", ".join(f"--{name}" for name in BUDGETS)
        together = f"{named} cannot be combined; " if limits else ""
        cli.fail(f"{together}give one of {choices}, or --next", status=2)
    ((budget, limit),) = limits.items()
    if not 0 < limit < math.inf:
        cli.fail(f"--{budget}={limit}: must be a finite number above 0", status=2)
    return budget, limit


def _check_batch(budget: str, batch: int | None) -> None:
    if batch is None:
        return
    if budget not in BATCH_BUDGETS:
        cli.fail(f"--batch: does not apply to --{budget}; remove it", status=2)
    if budget == "decode_ms" and batch not in DECODING_BATCHES:
        cli.fail(
            f"--batch={batch}: decoding is measured at "
            f"{' and '.join(map(str, DECODING_BATCHES))}; use one of these",
            status=2,
        )


if __name__ == "__main__":
    cli.run(main, uses_jax=False)
