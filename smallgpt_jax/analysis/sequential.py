"""Differences of two models that may be looked at after each seed.

A t-test at 5% that is repeated after each seed finds a difference of equal models in far more than
5% of the cases. The evidence here holds at all looks together: if the models are equal, the
probability that it ever reaches 1/level is at most the level (Ville's inequality).

It is the likelihood ratio of a mixture over effects, in standard deviations, against no effect, with
the standard deviation unknown (Lai, 1976, doi:10.1214/aos/1176343406; Wang & Ramdas, arXiv
2310.03722). The differences are those of runs with the same order of batches, one per seed.
"""

import math
from collections.abc import Sequence

import numpy as np

# Effects are mixed with a normal distribution of this precision: large effects, of about 3 standard
# deviations, need the fewest seeds (experiments/sequential.py).
PRECISION = 0.1


def evidence(differences: Sequence[float]) -> float:
    """Returns how many times likelier the differences are with an effect than without one."""
    count = len(differences)
    total = math.fsum(differences)
    squares = math.fsum(x * x for x in differences)
    if count < 2 or squares == 0:  # one difference says nothing, whatever it is
        return 1.0
    # The sum of squares that the effect does not explain; n·x²·p/(n + p) of n equal ones x,
    # with p = PRECISION.
    unexplained = squares - total * total / (count + PRECISION)
    log_prior = 0.5 * math.log(PRECISION / (count + PRECISION))
    log_evidence = log_prior + count / 2 * math.log(squares / unexplained)
    return math.exp(min(log_evidence, 700.0))  # exp of more is no float


def interval(differences: Sequence[float], level: float = 0.05) -> tuple[float, float]:
    """Returns the interval of the means that the evidence does not exclude, those with
    evidence(differences − mean) < 1/level.

    With a probability of 1 − level, the intervals of all looks contain the true mean. Of few
    differences, it is infinite.
    """
    count = len(differences)
    if count < 2:
        return -math.inf, math.inf
    mean = math.fsum(differences) / count
    variance = math.fsum((x - mean) ** 2 for x in differences) / (count - 1)
    half = half_width(count, variance, count - 1, level)
    return mean - half, mean + half


def half_width(count: int, variance: float, degrees: float, level: float) -> float:
    """Returns half the width of `interval` around the mean of `count` differences, from their sample
    variance; inf with too few. The variance has more degrees of freedom than count − 1 if it was
    drawn towards those of other pairs (`spreads.VariancePrior`).
    """
    if count < 1 or degrees <= 0:
        return math.inf
    # squares / unexplained where the evidence is 1/level (see `evidence`), solved for the mean
    ratio = (math.sqrt((count + PRECISION) / PRECISION) / level) ** (2 / (degrees + 1))
    slack = 1 - ratio * PRECISION / (count + PRECISION)
    if slack <= 0:  # the evidence cannot reach 1/level, however large the mean
        return math.inf
    return math.sqrt((ratio - 1) * degrees * variance / (count * slack))


def seeds_of_effects(squares: np.ndarray, level: float) -> np.ndarray:
    """Returns after how many seeds the evidence for an effect is about 1/level, so that it is found.
    `squares` are those of effects in standard deviations.
    """
    # The evidence for n differences with the mean effect x is
    #     √(p/(n + p)) · ((1 + x²)/(1 + x²·p/(n + p)))^(n/2)
    # Solved for n, with the last n on the right side.
    seeds = np.full(np.shape(squares), 2.0)
    for _ in range(20):  # converges: the right side grows with ln(n)
        unexplained = PRECISION / (seeds + PRECISION)  # fraction of the squares
        needed = math.log(1 / level) - 0.5 * np.log(unexplained)
        per_seed = 0.5 * np.log((1 + squares) / (1 + squares * unexplained))
        seeds = np.maximum(needed / np.maximum(per_seed, 1e-9), 2.0)
    return seeds


def level_of_question(number: int, level: float = 0.05) -> float:
    """Returns the level of one of many questions: 1/2 + 1/6 + 1/12 + … = 1."""
    return level / (number * (number + 1))
