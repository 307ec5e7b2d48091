"""Paired comparisons of losses over seeds: t-intervals, Holm's correction, and the number of seeds
that would decide.

Runs with the same seed read the same batches, so a difference is taken seed by seed. Losses are
{name: {seed: loss}}.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special  # not scipy.stats, whose import takes longer than an answer of `choose`

LEVEL = 0.05  # probability of at least one false verdict in a family of comparisons
POWER = 0.8  # probability that the seeds that `seeds_needed` returns reveal a difference
MAX_SEEDS = 10_000
ROUNDING = 1e-4  # nats; smaller spreads are not told apart

Losses = Mapping[str, Mapping[int, float]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The loss of `name` minus the loss of `other`, over the seeds of both."""

    name: str
    other: str
    seeds: int
    mean: float | None  # None without a common seed
    deviation: (
        float | None
    )  # standard deviation over seeds; this and the next two: None with fewer than two seeds
    half_width: float | None  # of the 95% interval of the mean; not corrected
    p_value: float | None  # two-sided, with Holm's correction for the family of comparisons
    comparisons: int  # in the family

    @property
    def verdict(self) -> str:
        if self.p_value is None:
            return "no interval"
        if self.p_value >= LEVEL:
            return "not distinguishable"
        return "lower" if self.mean < 0 else "higher"

    @property
    def seeds_needed(self) -> int | None:
        """The seeds that would decide, at the observed difference and spread; None if unknown or
        above MAX_SEEDS.
        """
        if self.p_value is None:
            return None
        return seeds_needed(self.mean, self.deviation, LEVEL / self.comparisons)


def compare_pairs(losses: Losses, pairs: Sequence[tuple[str, str]]) -> list[Difference]:
    """Returns the difference of each (name, other), as one family of comparisons."""
    samples = [paired_differences(losses[name], losses[other]) for name, other in pairs]
    tested = [number for number, sample in enumerate(samples) if len(sample) > 1]
    adjusted = dict(zip(tested, holm([p_value(samples[number]) for number in tested])))
    return [
        Difference(
            *pair,
            len(sample),
            float(sample.mean()) if len(sample) else None,
            *((float(sample.std(ddof=1)), half_width(sample)) if len(sample) > 1 else (None, None)),
            adjusted.get(number),
            len(tested),
        )
        for number, (pair, sample) in enumerate(zip(pairs, samples))
    ]


def paired_differences(losses: Mapping[int, float], others: Mapping[int, float]) -> np.ndarray:
    return np.array(
        [losses[seed] - others[seed] for seed in sorted(losses.keys() & others.keys())], np.float64
    )


def half_width(sample: np.ndarray, level: float = LEVEL) -> float:
    """Returns half the width of the t-interval of the mean of at least two values, which misses it
    with `level`.
    """
    return (
        student_quantile(1 - level / 2, len(sample) - 1)
        * float(sample.std(ddof=1))
        / math.sqrt(len(sample))
    )


def student_quantile(probability: float, degrees: float) -> float:
    if math.isinf(degrees):
        return float(special.ndtri(probability))
    return float(special.stdtrit(degrees, probability))


def p_value(sample: np.ndarray) -> float:
    """Returns the two-sided p-value of the t-test that the mean of at least two values is zero."""
    error = sample.std(ddof=1) / math.sqrt(len(sample))
    if error == 0:
        return float(sample.mean() == 0)
    return float(2 * special.stdtr(len(sample) - 1, -abs(sample.mean()) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values with Holm's correction. All that are below a level have a joint error rate
    below it.
    """
    order, adjusted, largest = np.argsort(p_values, kind="stable"), [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def seeds_needed(mean: float, deviation: float, level: float = LEVEL) -> int | None:
    """Returns the fewest seeds at which a paired t-test finds a difference of `mean` with 80%
    power.
    """
    if mean == 0:
        return None
    if deviation == 0:
        return 2
    counts = range(2, MAX_SEEDS + 1)
    index = bisect.bisect_left(
        counts, POWER, key=lambda seeds: power(abs(mean) / deviation, seeds, level)
    )
    return counts[index] if index < len(counts) else None


def power(effect: float, seeds: int, level: float) -> float:
    """Returns the probability that a two-sided paired t-test finds a difference of `effect`
    standard deviations.
    """
    critical, shift = student_quantile(1 - level / 2, seeds - 1), effect * math.sqrt(seeds)
    if (
        shift > 30 + critical
    ):  # the noncentral t-distribution is not computed accurately so far from zero
        return 1.0
    # The other tail, a verdict of the wrong sign, has no weight where the power is near 80%.
    return float(1 - special.nctdtr(seeds - 1, shift, critical))


# ------------------------------------------------------------------ spreads of several samples
@dataclasses.dataclass(frozen=True)
class Prior:
    """A typical variance of several samples. It counts as much as a sample with `degrees` degrees
    of freedom.
    """

    variance: float
    degrees: float  # 0 if the samples have nothing in common, inf if all have one variance

    def shrink(self, variance: float, degrees: int) -> tuple[float, float]:
        """Returns the variance of one sample, drawn towards the typical one, and its degrees of
        freedom.
        """
        total = self.degrees + degrees
        if math.isinf(total):
            return self.variance, total
        return (self.degrees * self.variance + degrees * variance) / total, total


def variance_prior(variances: Sequence[float], degrees: Sequence[int]) -> Prior:
    """Returns the prior that explains how much the variances differ (Smyth, 2004,
    doi:10.2202/1544-6115.1027, 6.2).
    """
    if len(variances) < 2:
        return Prior(0.0, 0.0)
    half = np.array(degrees) / 2
    logs = np.log(np.maximum(variances, ROUNDING**2)) - special.digamma(half) + np.log(half)
    excess = logs.var(ddof=1) - special.polygamma(1, half).mean()
    if excess <= 0:
        return Prior(float(np.exp(logs.mean())), math.inf)
    half_degrees = inverse_trigamma(excess)
    return Prior(
        float(np.exp(logs.mean() + special.digamma(half_degrees) - np.log(half_degrees))),
        2 * half_degrees,
    )


def inverse_trigamma(value: float) -> float:
    """Returns x > 0 with trigamma(x) = value, by Newton's method for 1/trigamma, which is nearly
    linear.
    """
    x = 0.5 + 1 / value
    for _ in range(50):
        found = special.polygamma(1, x)
        x += found * (1 - found / value) / special.polygamma(2, x)
    return float(x)
