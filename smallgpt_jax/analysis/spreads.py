"""How much losses vary over seeds, and what of it two models share.

A loss is taken as

    loss of a model and an order of batches = expected loss + effect of the order + own noise

Runs with the same order of batches share its effect as far as their losses are correlated: past the
point where models learn to copy, nearly all of it, before, nearly nothing. So the effect is
subtracted as far as the losses of the models show one. What is left is each model's own noise. Few
seeds do not determine its variance, so it is drawn towards that of the record's other models.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special  # not scipy.stats, whose import takes longer than an answer of `choose`

ROUNDING = 1e-4  # nats; smaller deviations are not told apart
MAX_CORRELATION = 0.95


@dataclasses.dataclass(frozen=True)
class Prior:
    """The typical variance of a record's losses over seeds."""

    variance: float
    degrees: float  # it counts as much as a sample with so many degrees of freedom
    pooled: float  # degrees of freedom of all samples together; no variance is known better

    def shrink(self, variances: np.ndarray, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the variances, drawn towards the typical one, and their degrees of freedom.

        The mean of both, weighted by degrees of freedom (limma: Smyth, 2004,
        doi:10.2202/1544-6115.1027, section 3): a variance of 4 with 2 degrees and a prior of 1 with
        4 give (2·4 + 4·1) / 6 = 2 with 6 degrees. A model with a single run gets the widest one.
        """
        own, prior = np.asarray(degrees, float), min(self.degrees, self.pooled)
        total = prior + own
        mean = (prior * self.variance + own * variances) / np.maximum(total, 1e-9)
        capped = np.minimum(total, self.pooled)
        is_known = own > 0
        if not is_known.all() and is_known.any():
            mean = np.where(is_known, mean, mean[is_known].max())
            capped = np.where(is_known, capped, capped[is_known].min())
        return np.maximum(mean, ROUNDING**2), capped


def fit_prior(
    variances: Sequence[float], degrees: Sequence[float], pooled: float | None = None
) -> Prior:
    """Returns the prior that explains how much sample variances differ (Smyth, 2004, section 6.2).

    The logarithm of a sample variance with d degrees of freedom has the variance trigamma(d/2) if
    all true variances are equal. What the logarithms vary more than that is how much the true
    variances differ: trigamma(degrees/2).
    """
    variances = np.maximum(np.asarray(variances, float), ROUNDING**2)
    degrees = np.asarray(degrees, float)
    pooled = float(degrees.sum()) if pooled is None else pooled
    if len(variances) < 2:
        return Prior(float(variances.sum()), 0.0, pooled)
    half = degrees / 2
    logs = np.log(variances) - special.digamma(half) + np.log(half)
    excess = logs.var(ddof=1) - special.polygamma(1, half).mean()
    if excess <= 0:  # no more than by chance: all have one variance
        return Prior(float((variances * degrees).sum() / degrees.sum()), math.inf, pooled)
    prior = _inverse_trigamma(excess)
    typical = math.exp(logs.mean() + special.digamma(prior) - math.log(prior))
    return Prior(typical, 2 * prior, pooled)


def prior_of_blocks(blocks: Sequence[np.ndarray], pooled: float) -> Prior:
    """Returns the prior of the own noise in several arrays of losses (models, orders), such as one
    per size and length.

    `pooled` are the independent degrees of freedom: lengths of one run are not independent.
    """
    samples = [sample_variances(block) for block in blocks]
    total = _prior_of([(variances, degrees) for _, variances, degrees in samples], pooled)
    own = []
    for block, (_, _, degrees) in zip(blocks, samples):
        deviations = own_deviations(block, total)
        adjusted, left = without_order_effects(block, deviations, correlation(block, deviations))
        own.append((sample_variances(adjusted)[1] / left, degrees * left))
    return _prior_of(own, pooled)


def _prior_of(samples: Sequence[tuple[np.ndarray, np.ndarray]], pooled: float) -> Prior:
    if not samples:
        return Prior(0.0, 0.0, pooled)
    variances, degrees = (np.concatenate(parts) for parts in zip(*samples))
    is_known = degrees > 0
    return fit_prior(variances[is_known], degrees[is_known], pooled)


def _inverse_trigamma(value: float) -> float:
    """Returns x > 0 with trigamma(x) = value, by Newton's method for 1/trigamma, which is nearly
    linear.
    """
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = special.polygamma(1, x)
        x += trigamma * (1 - trigamma / value) / special.polygamma(2, x)
    return float(x)


# ------------------------------------------------------------------ losses of several models
def matrix(losses: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Returns the losses of models by order of batches as an array (models, orders); NaN where a
    model has no run.
    """
    orders = sorted(set().union(*losses))
    return np.array([[row.get(order, math.nan) for order in orders] for row in losses], float)


def sample_variances(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the means, variances (0 of a single run) and degrees of freedom of each row, without
    its NaN.
    """
    known = ~np.isnan(losses)
    counts = known.sum(1)
    means = np.where(known, losses, 0).sum(1) / counts
    squares = np.where(known, losses - means[:, None], 0) ** 2
    return means, squares.sum(1) / np.maximum(counts - 1, 1), counts - 1


def own_deviations(losses: np.ndarray, prior: Prior) -> np.ndarray:
    """Returns the standard deviations of the rows; of a single run, that of the prior."""
    _, variances, degrees = sample_variances(losses)
    shrunk, _ = prior.shrink(variances, degrees)
    return np.sqrt(np.maximum(np.where(degrees > 0, variances, shrunk), ROUNDING**2))


def correlation(losses: np.ndarray, deviations: np.ndarray) -> float:
    """Returns how strongly the losses of two models with the same order of batches agree, at least.

    It is the mean product of two models' residuals in standard deviations, minus its standard error
    1/√n for n independent products: a few products agree by chance. 0 if that is below 0.
    """
    known = ~np.isnan(losses)
    means, _, _ = sample_variances(losses)
    residuals = np.where(known, (losses - means[:, None]) / deviations[:, None], 0)
    common = known.astype(int) @ known.T
    products = np.maximum(common[np.triu_indices(len(losses), 1)] - 1, 0).sum()
    if products == 0:
        return 0.0
    # Of each order: the sum over all pairs of models, from (a + b + c)² = a² + b² + c² + 2(ab + …).
    total = (residuals.sum(0) ** 2 - (residuals**2).sum(0)).sum() / 2
    return float(np.clip(total / products - 1 / math.sqrt(products), 0, MAX_CORRELATION))


def without_order_effects(
    losses: np.ndarray, deviations: np.ndarray, correlated: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the losses without the effects of the orders of batches, and for each model the share
    of its own noise that is left in them.

    `deviations` are those of the models' own runs, not drawn towards others: a model that an order
    does not move must not be moved by its effect on others.

    The effect of an order, in standard deviations, is the mean residual of the k models that have
    read it, drawn to zero by its reliability λ = kρ / (1 − ρ + kρ) (best linear prediction, for
    example Robinson, 1991, doi:10.1214/ss/1177011926); ρ is the correlation. With ρ = 0 nothing is
    subtracted, with ρ near 1 all that the models have in common, as in paired differences. A model
    with fewer orders than others is compared as if it had read them all: its mean changes by the
    effects of those that it has read. Effects and means are computed in turn until they agree.
    """
    if correlated == 0:
        return losses, np.ones(len(losses))
    known = ~np.isnan(losses)
    readers = known.sum(0)
    reliability = readers * correlated / (1 - correlated + readers * correlated)
    effects = np.zeros(losses.shape[1])
    for _ in range(30):
        adjusted = losses - math.sqrt(correlated) * deviations[:, None] * effects
        means, _, _ = sample_variances(adjusted)
        residuals = np.where(known, (losses - means[:, None]) / deviations[:, None], 0)
        effects = reliability * residuals.sum(0) / readers / math.sqrt(correlated)
    adjusted = losses - math.sqrt(correlated) * deviations[:, None] * effects
    # A k-th of the subtracted mean residual is the model's own noise: (1 − λ/k)² of it is left, and
    # (λ/k)² of that of k − 1 others has come in.
    left = 1 - (2 * reliability - reliability**2) / np.maximum(readers, 1)
    return adjusted, np.where(known, left, 0).sum(1) / known.sum(1)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Expected losses of models, as if all had read the same orders of batches; (models,) arrays."""

    means: np.ndarray
    variances: np.ndarray  # of one run around its mean, own noise only
    counts: np.ndarray  # of runs
    degrees: np.ndarray  # of freedom of `variances`
    deviations: np.ndarray  # of one run, with the effect of its order
    correlation: float
    common: np.ndarray  # (models, models) orders that both have read

    @property
    def errors(self) -> np.ndarray:
        """The variances of `means`."""
        return self.variances / self.counts

    def difference(self, one: int, other: int) -> "Difference":
        """Returns the expected loss of `one` minus that of `other`."""
        errors = self.errors[[one, other]]
        # Of a sum of two variances (Satterthwaite, 1946, doi:10.2307/3002019).
        degrees = self.degrees[[one, other]]
        if degrees.min() > 0:
            degrees = errors.sum() ** 2 / (errors**2 / degrees).sum()
        return Difference(
            float(self.means[one] - self.means[other]),
            math.sqrt(errors.sum()),
            float(np.min(degrees)),
            int(self.common[one, other]),
        )


@dataclasses.dataclass(frozen=True)
class Difference:
    """An expected difference, whose error has Student's t-distribution."""

    mean: float
    error: float  # standard error of the mean
    degrees: float
    orders: int  # that both models have read

    @property
    def p_value(self) -> float:
        """The two-sided p-value of no difference; 1 if the spread is unknown."""
        if self.degrees == 0:
            return 1.0
        return float(2 * special.stdtr(self.degrees, -abs(self.mean) / self.error))

    def half_width(self, probability: float) -> float:
        """Returns half the width of the interval that contains the difference with a probability;
        infinite if the spread is unknown.
        """
        if self.degrees == 0:
            return math.inf
        return float(special.stdtrit(self.degrees, (1 + probability) / 2)) * self.error


def estimate(losses: np.ndarray, prior: Prior, correlated: float | None = None) -> Estimate:
    """Returns the expected losses of models, (models, orders) with NaN for missing runs.

    `correlated` is the correlation of two models' losses with the same order of batches; None: as
    these losses show it.
    """
    known = ~np.isnan(losses)
    _, variances, degrees = sample_variances(losses)
    total, _ = prior.shrink(variances, degrees)
    deviations = own_deviations(losses, prior)
    if correlated is None:
        correlated = correlation(losses, deviations)
    adjusted, left = without_order_effects(losses, deviations, correlated)
    means, variances, degrees = sample_variances(adjusted)
    own, own_degrees = prior.shrink(variances / left, degrees * left)
    common = known.astype(int) @ known.T
    return Estimate(means, own, degrees + 1, own_degrees, np.sqrt(total), correlated, common)
