"""How often decisions of `compare` and `choose` are wrong, on records of made-up models.

    python experiments/decisions.py                      # all tables; about half an hour of one core
    python experiments/decisions.py --records=1000 --table=choices --kinds=normal

docs/comparison.md has the results. A choice is asked at a random budget of each record:

| column | content |
|---|---|
| equal | records of equal models in which one is chosen, %; each is wrong |
| chosen | records of unequal models in which one is chosen, % |
| wrong | those in which another model is better at the budget, % of all records |

The models differ by 0.5 to 4 deviations of the typical model over seeds. The losses of two models
with the same order of batches have the correlation 0 or 0.8.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))  # without an installation

from experiments import made_up
from experiments.made_up import KINDS, Design
from smallgpt_jax.analysis import contest
from smallgpt_jax.analysis.candidates import evidence_of
from smallgpt_jax.analysis.choice import Chooser
from smallgpt_jax.analysis.equal_flops import compare_at_equal_flops, find_multipliers

_RECORDS = flags.DEFINE_integer("records", 200, "Records per cell of a table.")
_KINDS = flags.DEFINE_list("kinds", list(KINDS), "Kinds of records.")
_DRAWS = flags.DEFINE_integer("draws", contest.DRAWS, "Possible worlds per answer.")
_TABLES = flags.DEFINE_list("table", ["choices", "budgets"], "choices, budgets or both.")
MODELS, SEEDS = (2, 4, 8), (2, 3, 5, 10)
CORRELATIONS = (0.0, 0.8)
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.975, 1.0)
# Typical deviation over seeds, by kind, in nats.
TYPICAL = {"20× spreads": 4.5 * made_up.DEVIATION, "bimodal": 0.14}


def main(_) -> None:
    contest.DRAWS = _DRAWS.value
    result = {}
    for table in _TABLES.value:
        started = time.monotonic()
        result[table] = {"choices": choices, "budgets": budgets}[table]()
        print(f"{table}: {time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps(result))


def design_of(kind: str, models: int, seeds: int, **fields) -> Design:
    sizes = 4 if kind == "unequal grids" else 2
    return Design(kind, models, seeds, **{"sizes": sizes, **fields})


def spread_of(kind: str, rng: np.random.Generator) -> float:
    """Returns how much the models of a record differ, in nats."""
    typical = TYPICAL.get(kind, made_up.DEVIATION)
    return typical * math.exp(rng.uniform(math.log(0.5), math.log(4)))


# ------------------------------------------------------------------ choices
def choices() -> list[dict]:
    rows = []
    for kind in _KINDS.value:
        said: list[tuple[float, bool]] = []
        cells_of_kind: list[dict] = []
        for models in MODELS:
            cells = [choices_of(design_of(kind, models, seeds), said) for seeds in SEEDS]
            shown = "  ".join(
                f"{c['equal']:5.1f}/{c['chosen']:3.0f}/{c['wrong']:4.1f}" for c in cells
            )
            print(f"{kind}, {models} models, equal/chosen/wrong by seeds: {shown}", flush=True)
            cells_of_kind += cells
        print(f"{kind}, all/chosen/wrong: {totals(cells_of_kind)}", flush=True)
        print(f"{kind}, said/right: {calibration(said)}", flush=True)
        rows += cells_of_kind
        rows.append({"kind": kind, "calibration": calibration(said)})
    return rows


def totals(cells: Sequence[dict]) -> tuple[int, int, int]:
    """Returns the numbers of records of unequal models, of those with a choice, and of wrong ones."""
    records = _RECORDS.value * len(cells)
    chosen, wrong = (sum(cell[field] for cell in cells) for field in ("chosen", "wrong"))
    return records, round(chosen * _RECORDS.value / 100), round(wrong * _RECORDS.value / 100)


def choices_of(design: Design, said: list[tuple[float, bool]]) -> dict:
    key = [design.models, design.seeds, len(design.kind)]
    rng, equal_rng = np.random.default_rng(key), np.random.default_rng([*key, 1])
    equal = chosen = wrong = 0
    for number in range(_RECORDS.value):
        correlation = CORRELATIONS[number % 2]
        is_chosen, *_ = ask(design, 0.0, correlation, equal_rng)
        equal += is_chosen
        spread = spread_of(design.kind, rng)
        is_chosen, is_right, probabilities = ask(design, spread, correlation, rng)
        chosen += is_chosen
        wrong += is_chosen and not is_right
        said += probabilities
    counts = {"equal": equal, "chosen": chosen, "wrong": wrong}
    percent = {name: 100 * count / _RECORDS.value for name, count in counts.items()}
    return {"kind": design.kind, "models": design.models, "seeds": design.seeds, **percent}


def ask(
    design: Design, spread: float, correlation: float, rng: np.random.Generator
) -> tuple[bool, bool, list[tuple[float, bool]]]:
    """Returns whether a model is chosen at a random budget, whether it is the best, and each
    probability from 0.5 on, with whether its model is the best.
    """
    models = made_up.draw_models(design, spread, rng)
    record = made_up.make_record(design, models, correlation, rng)
    costs = [run.last.flops for run in record.runs]
    budget = math.exp(rng.uniform(math.log(min(costs)), math.log(1.2 * max(costs))))
    losses = made_up.best_at(models, budget, range(design.sizes))
    best = models[int(losses.argmin())].name
    answer = Chooser(evidence_of(record), "flops").contest(budget)
    said = [
        (one.probability, one.model == best)
        for one in answer.standings
        if one.probability >= BINS[0] and one.known in ("trained", "interpolated")
    ]
    return answer.chosen is not None, answer.chosen == best, said


def calibration(said: Sequence[tuple[float, bool]]) -> list[tuple[float, float, int]]:
    """Returns for each bin of probabilities their mean, how often they were right, and how many."""
    rows = []
    for low, high in itertools.pairwise(BINS):
        of_bin = [pair for pair in said if low <= pair[0] < high or pair[0] == high == 1.0]
        if of_bin:
            mean, right = np.mean(of_bin, axis=0)
            rows.append((round(float(mean), 3), round(float(right), 3), len(of_bin)))
    return rows


# ------------------------------------------------------------------ over budgets
def budgets() -> list[dict]:
    """Of two models over five sizes and four lengths: false segments of equal models, and how often
    multipliers cover the true one.
    """
    rows = []
    for kind in _KINDS.value:
        for seeds in SEEDS:
            design = design_of(kind, 2, seeds, sizes=5, lengths=(0.125, 0.25, 0.5, 1.0))
            rows.append(budgets_of(design))
            print(rows[-1], flush=True)
    return rows


def budgets_of(design: Design) -> dict:
    rng = np.random.default_rng([design.seeds, len(design.kind)])
    false = covered = given = refused = 0
    for number in range(_RECORDS.value):
        correlation = CORRELATIONS[number % 2]
        models = made_up.draw_models(design, 0.0, rng)
        evidence = evidence_of(made_up.make_record(design, models, correlation, rng))
        (order,) = compare_at_equal_flops(evidence, models[0].name)
        false += any(segment.better for segment in order.segments)
        budget = math.exp(rng.uniform(math.log(2e12), math.log(5e14)))
        for multiplier in find_multipliers(evidence, models[0].name, [budget]):
            if multiplier.refusal:
                refused += 1
            else:
                given += 1
                covered += multiplier.interval.low <= 1 <= multiplier.interval.high
    return {
        "kind": design.kind,
        "seeds": design.seeds,
        "false segments": 100 * false / _RECORDS.value,
        "covered": 100 * covered / given if given else None,
        "refused": 100 * refused / _RECORDS.value,
    }


if __name__ == "__main__":
    app.run(main)
