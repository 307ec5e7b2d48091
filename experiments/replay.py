"""How many runs compare.most_seeds would have saved, and how often its verdicts are wrong.

    python experiments/replay.py                     # minutes of one core
    python experiments/replay.py --table=equal --records=300
    python experiments/replay.py --table=rounds --records=10000 --models=2 --effects=0

Prints four tables; docs/records.md has the results of the first three:

- record: docs/results/scaling.json, its seeds in each order. Runs that the rounds would have trained,
  and the verdicts beside those of the fixed design with all seeds, by size and by budget
- more: records with more seeds, drawn with the means and the deviations of the models of that
  record; beside it, how many pairs two other tests tell with all seeds, at the same level
- equal: records of equal models; the share in which a difference is ever told, with a look after
  each seed
- rounds: whole comparisons, in which one model is better than the others, which are equal. The share
  with a false verdict on equal models after any round, the share in which the better one is told
  from all others, and the mean number of seeds; beside t-tests at the same level
"""

import collections
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))  # without an installation

from smallgpt_jax.analysis import contest, record, spreads
from smallgpt_jax.analysis.candidates import evidence_of, level_of_pair
from smallgpt_jax.analysis.choice import default_choices
from smallgpt_jax.analysis.contest import compare_pairs, draw_losses
from smallgpt_jax.analysis.findings import LEVEL, Pair
from smallgpt_jax.analysis.further_runs import Rounds, next_seeds
from smallgpt_jax.analysis.record import Record

_RESULTS = flags.DEFINE_string(
    "results", str(Path(__file__).parents[1] / "docs/results/scaling.json"), "Record."
)
_TABLES = flags.DEFINE_list("table", ["record", "more", "equal", "rounds"], "Tables to print.")
_RECORDS = flags.DEFINE_integer("records", 100, "Made-up records per row of `equal`, `rounds`.")
_MODELS = flags.DEFINE_multi_integer("models", [2, 4, 7], "Models of these records.")
_EFFECTS = flags.DEFINE_list(
    "effects", ["0", "0.5", "1", "2", "4"], "Effects of `rounds`, in deviations of a difference."
)
_DRAWN = flags.DEFINE_integer("drawn", 8, "Drawn records per row of `more`.")
STAKE = 0.01  # the default of compare.stake
KINDS = ("normal", "20× spreads", "t3", "bimodal")
FIRST, MOST = 3, 10  # seeds of these records
Losses = Mapping[str, Sequence[float]]  # by name, in the order of the seeds


def main(_) -> None:
    contest.DRAWS = 1000
    tables = {
        "record": of_record,
        "more": of_more_seeds,
        "equal": of_equal,
        "rounds": of_rounds,
    }
    result = {}
    for table in _TABLES.value:
        started = time.monotonic()
        result[table] = tables[table]()
        print(f"{table}: {time.monotonic() - started:.0f} s", flush=True)
    print(json.dumps(result))


def train_rounds(losses: Losses, rounds: Rounds) -> Iterator[dict[str, int]]:
    """Yields the number of seeds of each name after each round."""
    counts = dict.fromkeys(losses, rounds.first)
    while True:
        yield counts
        known = {name: losses[name][:count] for name, count in counts.items()}
        following = next_seeds(known, rounds)
        if following == counts:
            return
        counts = following


def after_rounds(losses: Losses, rounds: Rounds) -> dict[str, int]:
    return list(train_rounds(losses, rounds))[-1]


def agreement(fixed: Sequence[str], asked: Sequence[str]) -> collections.Counter:
    """Counts the verdicts beside those of the fixed design."""
    counts = collections.Counter(pairs=len(fixed), told=0, same=0, opposite=0, open=0, further=0)
    for one, other in zip(fixed, asked, strict=True):
        is_told, is_asked_told = one != "cannot tell", other != "cannot tell"
        counts["told"] += is_told
        counts["same"] += is_told and one == other
        counts["opposite"] += is_told and is_asked_told and one != other
        counts["open"] += is_told and not is_asked_told
        counts["further"] += is_asked_told and not is_told
    return counts


# ------------------------------------------------------------------ the record
def of_record() -> list[dict]:
    """The first round has two of the three seeds, because with three there is nothing to save."""
    whole = record.read(Path(_RESULTS.value))
    seeds = sorted({run.seed for run in whole.runs})
    level = level_of_pair(run.name for run in whole.runs)
    rounds = Rounds(len(seeds) - 1, len(seeds), STAKE, level)
    fixed = verdicts_of(whole)
    all_seeds = verdicts_of(dataclasses.replace(whole, seeds_as_needed=True))
    totals = {where: collections.Counter() for where in fixed}
    limits = {where: agreement(fixed[where], all_seeds[where]) for where in fixed}
    fixed_told = 0
    for losses in by_names(whole).values():
        fixed_told += count_told(t_tests(losses, level))
    shares = []
    for order in itertools.permutations(seeds):
        replayed = replay(whole, order, rounds)
        shares.append(len(replayed.runs) / len(whole.runs))
        verdicts = verdicts_of(replayed)
        for where in fixed:
            totals[where] += agreement(fixed[where], verdicts[where])
    rows = []
    for where, counts in totals.items():
        rows.append({"where": where, "orders": len(shares), **counts})
        print(f"record, {where}: {dict(counts)}; same test, all seeds: {dict(limits[where])}")
    print(f"record, sizes: a t-test with all seeds at the same level tells {fixed_told}")
    print(f"record, share of the runs: {np.mean(shares):.2f}", flush=True)
    return [*rows, {"share": float(np.mean(shares))}]


def replay(whole: Record, order: Sequence[int], rounds: Rounds) -> Record:
    """Returns the record of the runs that the rounds train, with seeds in this order."""
    kept: set[tuple[str, int]] = set()
    for losses in by_size(whole, order).values():
        for name, count in after_rounds(losses, rounds).items():
            kept |= {(name, seed) for seed in order[:count]}
    runs = tuple(run for run in whole.runs if (run.name, run.seed) in kept)
    return dataclasses.replace(whole, runs=runs, seeds_as_needed=True)


def by_size(whole: Record, order: Sequence[int]) -> dict[str, Losses]:
    """Returns the losses of the longest runs by size and name."""
    longest = {(run.name, run.seed): run for run in whole.runs if run.horizon == 1}
    sizes: dict[str, dict[str, list[float]]] = {}
    for name, run in {name: run for (name, _), run in longest.items()}.items():
        sizes.setdefault(run.size, {})[name] = [longest[name, seed].loss for seed in order]
    return sizes


def verdicts_of(of: Record) -> dict[str, list[str]]:
    """Returns the verdicts of the longest runs of each size, and those at the budgets of the
    report.
    """
    evidence = evidence_of(of)
    sizes, budgets = [], []
    for losses in by_names(of).values():
        sizes += verdicts(losses, evidence.pair_level)
    for choice in default_choices(evidence):
        if choice.contest and choice.refusal != "beyond":
            pairs = sorted(map(sorted_pair, choice.contest.pairs))
            budgets += [verdict for *_, verdict in pairs]
    return {"sizes": sizes, "budgets": budgets}


def by_names(of: Record) -> dict[str, np.ndarray]:
    """Returns the losses of the longest runs, (names, seeds), by size; NaN without a run."""
    sizes: dict[str, dict[str, dict[int, float]]] = {}
    for run in of.runs:
        if run.horizon == 1:
            sizes.setdefault(run.size, {}).setdefault(run.name, {})[run.seed] = run.loss
    # Names in alphabetical order, because records differ in which run is the first.
    return {
        size: spreads.matrix([losses for _, losses in sorted(names.items())])
        for size, names in sorted(sizes.items())
    }


def sorted_pair(pair: Pair) -> tuple[str, str, str]:
    """Returns the pair with its models in alphabetical order."""
    if pair.model < pair.other:
        return pair.model, pair.other, pair.verdict
    opposite = {"lower": "higher", "higher": "lower", "cannot tell": "cannot tell"}
    return pair.other, pair.model, opposite[pair.verdict]


def verdicts(losses: np.ndarray, pair_level: float | None) -> list[str]:
    """Returns the verdicts on all pairs of rows; without a level, those of the fixed design."""
    estimate = spreads.estimate_alone(losses)
    names = list(map(str, range(len(losses))))
    pairs = compare_pairs(names, estimate, draw_losses(estimate), pair_level)
    return [pair.verdict for pair in pairs]


# ------------------------------------------------------------------ more seeds
def of_more_seeds() -> list[dict]:
    whole = record.read(Path(_RESULTS.value))
    level = level_of_pair(run.name for run in whole.runs)
    rows = []
    for most in (10, 20):
        rounds = Rounds(FIRST, most, STAKE, level)
        total, trained, runs = collections.Counter(), 0, 0
        for losses, true in drawn_losses(whole, most):
            names = dict(zip(map(str, range(len(losses))), losses.tolist()))
            counts = after_rounds(names, rounds)
            asked = verdicts(first_seeds(losses, counts), level)
            total += agreement(verdicts(losses, None), asked)
            total["wrong"] += false_verdicts(asked, true)
            total["same test, all seeds"] += count_told(verdicts(losses, level))
            total["t-test at this level, all seeds"] += count_told(t_tests(losses, level))
            trained, runs = trained + sum(counts.values()), runs + losses.size
        row = {"seeds": most, "share": round(trained / runs, 3), **total}
        print(f"more: {row}", flush=True)
        rows.append(row)
    return rows


def first_seeds(losses: np.ndarray, counts: Mapping) -> np.ndarray:
    """Returns the losses, (models, seeds), with NaN after the first ones of each model."""
    is_known = np.arange(losses.shape[1]) < np.array(list(counts.values()))[:, None]
    return np.where(is_known, losses, np.nan)


def count_told(of: Sequence[str]) -> int:
    return sum(verdict != "cannot tell" for verdict in of)


def t_tests(losses: np.ndarray, level: float) -> list[str]:
    """Returns the verdicts of a fixed design that divides its level among all pairs, too."""
    estimate = spreads.estimate_alone(losses)
    verdicts_of_pairs = []
    for other, one in itertools.combinations(range(len(losses)), 2):
        difference = estimate.difference(one, other)
        is_told = abs(difference.mean) > difference.half_width(1 - level)
        verdicts_of_pairs.append("told" if is_told else "cannot tell")
    return verdicts_of_pairs


def drawn_losses(whole: Record, seeds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields losses, (models, seeds), and true losses of each size of the record."""
    rng = np.random.default_rng(seeds)
    for losses in by_names(whole).values():
        estimate = spreads.estimate_alone(losses)
        deviations = np.sqrt(estimate.own_variances)
        for _ in range(_DRAWN.value):
            noise = rng.standard_normal((len(losses), seeds))
            yield estimate.means[:, None] + deviations[:, None] * noise, estimate.means


def false_verdicts(asked: Sequence[str], true: np.ndarray) -> int:
    """Counts verdicts that the true losses contradict."""
    false = 0
    # in the order of compare_pairs
    for verdict, (other, one) in zip(asked, itertools.combinations(range(len(true)), 2)):
        right = "lower" if true[one] < true[other] else "higher"
        false += verdict not in ("cannot tell", right)
    return false


# ------------------------------------------------------------------ equal models
def of_equal() -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for kind, models in itertools.product(KINDS, _MODELS.value):
        false = sum(is_ever_told(noise(kind, models, rng)) for _ in range(_RECORDS.value))
        percent = round(100 * false / _RECORDS.value, 1)
        rows.append({"kind": kind, "models": models, "told in %": percent})
        print(f"equal: {rows[-1]}", flush=True)
    return rows


def is_ever_told(losses: np.ndarray) -> bool:
    return any(told_pairs(losses[:, :seeds]).any() for seeds in range(FIRST, MOST + 1))


def told_pairs(losses: np.ndarray) -> np.ndarray:
    """Returns, for each pair of models, whether its verdict is certain."""
    estimate = spreads.estimate_alone(losses)
    pairs = list(itertools.combinations(range(len(losses)), 2))
    told = []
    for one, other in pairs:
        difference = estimate.difference(one, other)
        half = difference.half_width_at_all_looks(LEVEL / len(pairs))
        told.append(abs(difference.paired) > half)
    return np.array(told)


def noise(kind: str, models: int, rng: np.random.Generator) -> np.ndarray:
    shape = (models, MOST)
    if kind == "t3":
        return rng.standard_t(3, shape)
    if kind == "bimodal":  # a third of the runs learn to copy
        return 0.3 * (rng.random(shape) < 1 / 3) + 0.02 * rng.standard_normal(shape)
    widths = 20 ** rng.random((models, 1)) if kind == "20× spreads" else 1.0
    return widths * rng.standard_normal(shape)


# ------------------------------------------------------------------ whole comparisons
def of_rounds() -> list[dict]:
    rng = np.random.default_rng(0)
    rows = []
    for models, effect in itertools.product(_MODELS.value, map(float, _EFFECTS.value)):
        totals: collections.Counter = collections.Counter()
        for _ in range(_RECORDS.value):
            losses = noise("normal", models, rng)
            losses[0] -= effect * math.sqrt(2)  # the deviation of a difference of two runs
            totals.update(outcome(losses, is_first_better=effect > 0))
        shares = {what: round(total / _RECORDS.value, 4) for what, total in totals.items()}
        rows.append({"models": models, "effect": effect, **shares})
        print(f"rounds: {rows[-1]}", flush=True)
    return rows


def outcome(losses: np.ndarray, is_first_better: bool) -> dict[str, float]:
    """Returns what the rounds say of models that are equal, up to the first one."""
    of_first = slice(0, len(losses) - 1)  # its pairs come first
    equal = slice(len(losses) - 1, None) if is_first_better else slice(None)
    looks = list(looks_of(losses))
    is_told, counts = looks[-1]
    result = {
        "equal ones told": any(told[equal].any() for told, _ in looks),
        "first told": bool(is_told[of_first].all()),
        "seeds": float(np.mean(counts)),
    }
    for seeds in (5, MOST):
        fixed = t_tests(losses[:, :seeds], LEVEL / len(is_told))
        result[f"first told by t-tests, {seeds} seeds"] = "cannot tell" not in fixed[of_first]
    return result


def looks_of(losses: np.ndarray) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yields `told_pairs` after each round, and the number of seeds of each model."""
    rounds = Rounds(FIRST, MOST, STAKE, LEVEL / math.comb(len(losses), 2))
    for counts in train_rounds(dict(enumerate(losses.tolist())), rounds):
        yield told_pairs(first_seeds(losses, counts)), list(counts.values())


if __name__ == "__main__":
    app.run(main)
