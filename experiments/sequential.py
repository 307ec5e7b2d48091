"""How often looks after each seed are wrong, and how many seeds they need.

    python experiments/sequential.py              # seconds on one core

Prints four tables:

- equal models: the share in which a difference is ever told, with a look after each seed
- unequal models: the share of pairs that are decided within 20 seeds, and the mean number of
  seeds, beside a t-test with a fixed number of seeds
- searches of 100 questions that change nothing but the seed: the share that ever gets "better"
- widths of the intervals beside those of the t distribution
"""

import json
import sys
from pathlib import Path

import numpy as np
from absl import app, flags
from scipy import special

sys.path.insert(0, str(Path(__file__).parents[1]))  # without an installation

from smallgpt_jax.analysis.sequential import PRECISION, interval, level_of_question

_COMPARISONS = flags.DEFINE_integer("comparisons", 10_000, "Pairs of equal models.")
_SEARCHES = flags.DEFINE_integer("searches", 1000, "Searches that change nothing but the seed.")
LEVEL = 0.05
SEEDS = 20
QUESTIONS, SEEDS_OF_QUESTION = 100, 10
EFFECTS = (0.5, 1.0, 2.0, 4.0)  # in standard deviations of the differences
FIXED_SEEDS = (3, 5, 10)


def main(_) -> None:
    random = np.random.default_rng(0)
    result = {
        "equal": equal_models(random),
        "unequal": unequal_models(random),
        "search": searches(random),
        "width": widths(),
    }
    print(json.dumps(result))


def equal_models(random) -> dict[str, dict[str, float]]:
    shape = (_COMPARISONS.value, SEEDS)
    bimodal = np.where(random.random(shape) < 1 / 3, 0.3, 0.0) - np.where(
        random.random(shape) < 1 / 3, 0.3, 0.0
    )
    kinds = {
        "normal": random.standard_normal(shape),
        "t3": random.standard_t(3, shape),
        "bimodal": bimodal + 0.02 * random.standard_normal(shape),
        "skewed": random.exponential(1, shape) - 1,
    }
    rows = {}
    for kind, differences in kinds.items():
        rows[kind] = {
            "sequential": percent((log_evidence(differences) >= -np.log(LEVEL)).any(1)),
            "repeated t-test": percent(is_significant(differences).any(1)),
        }
        print(f"equal models, {kind}: told in %: {rows[kind]}")
    return rows


def unequal_models(random) -> dict[float, dict[str, float]]:
    rows = {}
    for effect in EFFECTS:
        differences = random.standard_normal((_COMPARISONS.value, SEEDS)) + effect
        told = log_evidence(differences) >= -np.log(LEVEL)
        seeds = np.where(told.any(1), told.argmax(1) + 1, SEEDS)
        rows[effect] = {"told": percent(told.any(1)), "seeds": round(float(seeds.mean()), 1)}
        significant = is_significant(differences)
        for count in FIXED_SEEDS:
            rows[effect][f"t-test, {count} seeds"] = percent(significant[:, count - 1])
        print(f"effect {effect:g} deviations: {rows[effect]}")
    return rows


def searches(random) -> dict[str, float]:
    levels = np.array([level_of_question(number + 1, LEVEL) for number in range(QUESTIONS)])
    passed, naive = np.zeros(_SEARCHES.value, bool), np.zeros(_SEARCHES.value, bool)
    for search in range(_SEARCHES.value):
        differences = random.standard_normal((QUESTIONS, SEEDS_OF_QUESTION))
        is_better = np.cumsum(differences, axis=1) < 0
        told = log_evidence(differences) >= -np.log(levels)[:, None]
        passed[search] = (told & is_better).any()
        naive[search] = (is_significant(differences)[:, -1] & is_better[:, -1]).any()
    row = {"gate": percent(passed), "a t-test per question": percent(naive)}
    print(f"searches of {QUESTIONS} questions in which one was better, %: {row}")
    return row


def widths() -> dict[int, float]:
    """Half widths in estimated standard deviations, beside t · s / √n."""
    rows = {}
    for count in (2, 3, 5, 10, 20):
        differences = np.linspace(-1, 1, count)
        low, high = interval((differences / differences.std(ddof=1)).tolist(), LEVEL)
        fixed = special.stdtrit(count - 1, 1 - LEVEL / 2) / np.sqrt(count)
        rows[count] = {"sequential": round((high - low) / 2, 2), "t": round(float(fixed), 2)}
    print(f"half widths: {rows}")
    return rows


def log_evidence(differences: np.ndarray) -> np.ndarray:
    """`analysis.sequential.evidence` after each seed, for all rows at once."""
    count = np.arange(1, differences.shape[1] + 1)
    squares = np.cumsum(differences**2, axis=1)
    left = squares - np.cumsum(differences, axis=1) ** 2 / (count + PRECISION)
    prior = 0.5 * np.log(PRECISION / (count + PRECISION))
    return prior + count / 2 * np.log(squares / left)


def is_significant(differences: np.ndarray) -> np.ndarray:
    """Whether a two-sided t-test of the seeds so far tells a difference; False for one seed."""
    count = np.arange(1, differences.shape[1] + 1)
    mean = np.cumsum(differences, axis=1) / count
    variance = np.cumsum(differences**2, axis=1) / count - mean**2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / np.sqrt(variance / (count - 1))
    limits = np.array([np.inf, *special.stdtrit(count[1:] - 1, 1 - LEVEL / 2)])
    return t > limits


def percent(values: np.ndarray) -> float:
    return round(100 * float(np.mean(values)), 1)


if __name__ == "__main__":
    app.run(main)
