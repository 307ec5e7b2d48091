"""How much losses vary over seeds, and the differences of two models against it.

Runs with the same order of batches share its effect: past the point where models learn to copy,
nearly all of their variance, before, nearly none. So two models are compared order by order, and
only the variance of these differences counts. A few seeds do not determine it; it is drawn towards
that of the record's other pairs of models.
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from scipy import special  # not scipy.stats, whose import takes longer than an answer of `choose`

from smallgpt_jax.analysis import sequential
from smallgpt_jax.analysis.findings import Mode

ROUNDING = 1e-4  # nats; smaller deviations are not told apart
_SPLIT_LEVEL = 0.01  # probability that normally distributed losses are called two modes
_COPYING = 0.5  # nats; gap in the loss of repeats between seeds that copy and those that do not
_ONE_OF_TWENTY, _SEVERAL = 0.05, 0.02  # probabilities, see `_more_split_than_by_chance`
_MIN_DEGREES = 2  # degrees of freedom of a record's differences from which a model can be chosen
_SAMPLES = 20_000  # simulated, of `_critical_ratio`


@dataclasses.dataclass(frozen=True)
class VariancePrior:
    """The typical variance of the differences of two models' losses, over the pairs of a record."""

    variance: float  # of the difference of two runs with the same order of batches
    degrees: float  # it counts as much as a sample with so many degrees of freedom
    total_degrees: float  # of all samples; a shrunken variance gets at most so many
    least: float = 0.0  # no variance is taken to be smaller

    @property
    def is_known(self) -> bool:
        """Whether any two models have two common seeds: only then does a difference have a spread."""
        return self.total_degrees > 0

    @property
    def is_enough(self) -> bool:
        """Whether a model can be chosen: a spread of one difference may be small by chance."""
        return self.total_degrees >= _MIN_DEGREES

    def shrink(
        self, variances: np.ndarray, degrees: np.ndarray, noise: np.ndarray | float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns sample variances drawn towards the typical one, and their degrees of freedom, which
        grow by those of the prior. `noise`: see `Contender.noise`.
        """
        degrees = np.asarray(degrees, float)
        # Variances that differ only by chance have a prior of infinite degrees.
        prior_degrees = min(self.degrees, self.total_degrees)
        total = prior_degrees + degrees
        # The mean of both, weighted by degrees of freedom (limma: Smyth, 2004,
        # doi:10.2202/1544-6115.1027, section 3): a variance of 4 with 2 degrees and a prior of 1
        # with 4 give (2·4 + 4·1) / 6 = 2 with 6 degrees. Samples of losses between two sizes have
        # less noise already, so it scales only the prior.
        weighted = prior_degrees * self.variance * noise + degrees * variances
        mean = weighted / np.maximum(total, 1e-9)
        capped = np.minimum(total, self.total_degrees)
        has_sample = degrees > 0
        if has_sample.any():  # of what has none, the least favorable is assumed
            mean = np.where(has_sample, mean, mean[has_sample].max())
            capped = np.where(has_sample, capped, capped[has_sample].min())
        return np.maximum(mean, np.maximum(self.least * noise, ROUNDING**2)), capped


def fit_variance_prior(
    variances: Sequence[float], degrees: Sequence[float], total_degrees: float | None = None
) -> VariancePrior:
    """Returns the prior that explains how much sample variances with these degrees of freedom differ
    (Smyth, 2004, section 6.2). `total_degrees` is their sum, if all are independent.
    """
    variances = np.maximum(np.asarray(variances, float), ROUNDING**2)  # above 0, for the logarithm
    degrees = np.asarray(degrees, float)
    total_degrees = float(degrees.sum()) if total_degrees is None else total_degrees
    if len(variances) < 2:  # nothing to compare: that variance, or 0, without weight
        return VariancePrior(float(variances.sum()), 0.0, total_degrees)
    # The logarithm of a sample variance with d degrees of freedom has the variance trigamma(d/2) if
    # all true variances are equal. What the logarithms vary more than that is how much the true
    # variances differ: trigamma(d₀/2), where d₀ are the degrees of the prior.
    half = degrees / 2
    logs = np.log(variances) - special.digamma(half) + np.log(half)
    excess = logs.var(ddof=1) - special.polygamma(1, half).mean()
    if excess <= 0:  # no more than by chance: all have one variance
        pooled = float((variances * degrees).sum() / degrees.sum())
        return VariancePrior(pooled, math.inf, total_degrees)
    half_of_prior = _inverse_trigamma(excess)
    typical = math.exp(logs.mean() + special.digamma(half_of_prior) - math.log(half_of_prior))
    return VariancePrior(typical, 2 * half_of_prior, total_degrees)


def _inverse_trigamma(value: float) -> float:
    """Returns x with trigamma(x) = value > 0, by Newton's method for the nearly linear 1/trigamma."""
    x = 0.5 + 1 / value
    for _ in range(8):  # the error is below 1e-8 after four
        trigamma = special.polygamma(1, x)
        x += trigamma * (1 - trigamma / value) / special.polygamma(2, x)
    return float(x)


# ------------------------------------------------------------------ losses of several models
def matrix(losses: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Returns {order of batches: loss} of each model as (models, orders); NaN without a run."""
    orders = sorted(set().union(*losses))
    array = np.full((len(losses), len(orders)), math.nan)
    for row, of_model in zip(array, losses):
        row[:] = [of_model.get(order, math.nan) for order in orders]
    return array


def sample_variances(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns variances over the last axis, without NaN, and their degrees of freedom; 0 of single
    values.
    """
    known = ~np.isnan(losses)
    counts = known.sum(-1)
    means = np.where(known, losses, 0).sum(-1) / np.maximum(counts, 1)
    squares = np.where(known, losses - means[..., None], 0) ** 2
    return squares.sum(-1) / np.maximum(counts - 1, 1), np.maximum(counts - 1, 0)


def variance_prior_of(all_losses: Sequence[np.ndarray], total_degrees: float) -> VariancePrior:
    """Returns the prior of the differences of all pairs of models, in one array of losses (models,
    orders) per size and length. `total_degrees` count the lengths of one run once.
    """
    variances, degrees = [np.empty(0)], [np.empty(0)]
    for losses in all_losses:
        one, other = np.triu_indices(len(losses), 1)
        of_pairs, degrees_of_pairs = sample_variances(losses[one] - losses[other])
        variances.append(of_pairs[degrees_of_pairs > 0])
        degrees.append(degrees_of_pairs[degrees_of_pairs > 0])
    all_variances, all_degrees = np.concatenate(variances), np.concatenate(degrees)
    prior = fit_variance_prior(all_variances, all_degrees, total_degrees)
    if not len(all_degrees):  # no pair has two common seeds
        return prior
    has_three_seeds = all_degrees.max() > 1
    if has_three_seeds and not _more_split_than_by_chance(list(itertools.chain(*all_losses))):
        return prior
    # A small variance may be luck: where losses split into modes, all seeds of a model may be in
    # one, and two seeds cannot tell. There, no variance is taken to be below the mean one.
    mean = float((all_variances * all_degrees).sum() / all_degrees.sum())
    return dataclasses.replace(prior, least=mean)


def correlation(losses: np.ndarray) -> float:
    """Returns the mean correlation of two models in losses (models, orders), 0 to 0.99; 0.99 if no two
    models have three common orders.
    """
    known = ~np.isnan(losses)
    common = (known.astype(int) @ known.T)[np.triu_indices(len(losses), 1)]  # orders of each pair
    # In two orders, any two models agree or disagree fully, so nothing is known. Then only common
    # orders tell how far two models are apart, as `Estimate.squared_errors` assumes.
    if (common < 3).all():
        return 0.99
    means = np.nanmean(losses, axis=1, keepdims=True)
    deviations = np.sqrt(np.maximum(sample_variances(losses)[0], ROUNDING**2))
    residuals = np.where(known, (losses - means) / deviations[:, None], 0)
    # Of each order: the sum over all pairs of models, from (a + b + c)² = a² + b² + c² + 2(ab + …).
    products = (residuals.sum(0) ** 2 - (residuals**2).sum(0)).sum() / 2
    return float(np.clip(products / np.maximum(common - 1, 0).sum(), 0, 0.99))


def expected_losses(losses: np.ndarray, rho: float) -> np.ndarray:
    """Returns the mean loss of each model, as if all had read the same orders of batches, from losses
    (models, orders) and their `correlation` ρ.
    """
    # If not all have, it is the mean without the effects of the orders: a model that has read only
    # two bad ones of ten is not worse for it.
    # The effect of an order is the mean residual of the k models that have read it, drawn to zero
    # by its reliability kρ / (1 − ρ + kρ), with the correlation ρ (best linear prediction: Robinson,
    # 1991, doi:10.1214/ss/1177011926): with ρ = 0, orders have no effect. Effects and means are
    # computed in turn until they agree.
    known = ~np.isnan(losses)
    readers = known.sum(0)  # k of each order
    reliability = readers * rho / (1 - rho + readers * rho)
    effects = np.zeros(losses.shape[1])
    means = np.nanmean(losses, axis=1)
    for _ in range(0 if known.all() or rho == 0 else 50):
        residuals = np.where(known, losses - means[:, None], 0)
        effects = reliability * residuals.sum(0) / np.maximum(readers, 1)
        means = np.nanmean(losses - effects, axis=1)
    return means


@dataclasses.dataclass(frozen=True)
class Difference:
    """The expected loss of a model minus that of another; its error has Student's t-distribution."""

    mean: float
    error: float  # standard error of the mean
    degrees: float  # 0 if the spread is unknown
    common_orders: int  # that both models have read
    variance: float  # of the difference of two runs of one order
    paired: float = math.nan  # mean over the orders that both have read

    def half_width(self, probability: float) -> float:
        """Returns half the interval around `mean` with this probability; inf if unknown."""
        if self.degrees == 0:
            return math.inf
        return float(special.stdtrit(self.degrees, (1 + probability) / 2)) * self.error

    def half_width_at_all_looks(self, level: float) -> float:
        """Returns half the interval around `paired` that holds at every look."""
        return sequential.half_width(self.common_orders, self.variance, self.degrees, level)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Expected losses, (models,), and how well differences are known, (models, models)."""

    means: np.ndarray
    counts: np.ndarray  # (models,) of runs
    deviations: np.ndarray  # (models,) of runs, with the effect of their order
    variances: np.ndarray  # of the difference of two runs of one order; 0 on the diagonal
    degrees: np.ndarray  # of freedom of `variances`; 0 if the spread is unknown
    common_orders: np.ndarray  # that both have read
    paired: np.ndarray  # mean difference over these; NaN without any

    def take(self, models: Sequence[int]) -> Self:
        """Returns the estimate of these models, indices of the present ones."""
        arrays = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return type(self)(*(array[np.ix_(*[models] * array.ndim)] for array in arrays))

    def difference(self, one: int, other: int) -> Difference:
        """Returns the expected loss of `one` minus that of `other`."""
        return Difference(
            mean=float(self.means[one] - self.means[other]),
            error=math.sqrt(self.squared_errors[one, other]),
            degrees=float(self.degrees[one, other]),
            common_orders=int(self.common_orders[one, other]),
            variance=float(self.variances[one, other]),
            paired=float(self.paired[one, other]),
        )

    @property
    def squared_errors(self) -> np.ndarray:
        """The error variances of the expected differences, (models, models)."""
        # Without a common order, the effects of orders do not cancel: both errors add. They are at
        # least those of runs whose order has no effect.
        alone = self.deviations**2 / self.counts
        without_effect = self.variances / 2 * (1 / self.counts[:, None] + 1 / self.counts)
        apart = np.maximum(alone[:, None] + alone, without_effect)
        return np.where(
            self.common_orders > 0, self.variances / np.maximum(self.common_orders, 1), apart
        )

    @functools.cached_property
    def own_variances(self) -> np.ndarray:
        """(models,): each model's part of `variances`; of a single model, that of its losses."""
        return self.deviations**2 if len(self.means) == 1 else split_variances(self.variances)

    @functools.cached_property
    def own_errors(self) -> np.ndarray:
        """(models,): each model's part of `squared_errors`; of a single model, that of its mean."""
        if len(self.means) == 1:
            return self.deviations**2 / self.counts
        return split_variances(self.squared_errors)

    @property
    def own_degrees(self) -> np.ndarray:
        """(models,): degrees of freedom of each model's part; 0 of a single model."""
        if len(self.means) == 1:
            return np.zeros(1)
        return np.median(_of_others(self.degrees), axis=1)


def _of_others(pairs: np.ndarray) -> np.ndarray:
    """Returns a value per pair, (models, models), without the diagonal: (models, models − 1)."""
    models = len(pairs)
    return pairs[~np.eye(models, dtype=bool)].reshape(models, models - 1)


def split_variances(variances: np.ndarray) -> np.ndarray:
    """Returns each model's own part v of the variances V of differences, (models, models), so that
    V(a, b) = v(a) + v(b): of V = 2, 5, 5 for a − b, a − c, b − c, the parts are 1, 1, 4.

    In general, they are found by least squares of the relative errors (V − v(a) − v(b)) /
    (v(a) + v(b)), repeated with the last parts in the denominator. A part is at least a quarter of
    the model's smallest V.
    """
    of_others = _of_others(variances)
    own, least = np.median(of_others, axis=1) / 2, of_others.min(axis=1) / 4
    is_pair = ~np.eye(len(own), dtype=bool)
    for _ in range(10):
        weights = np.where(is_pair, 1 / (own[:, None] + own) ** 2, 0)
        # For each a: the sum over b of weight(a, b) · (v(a) + v(b) − V(a, b)) is 0.
        equations = np.diag(weights.sum(1)) + weights
        right = (weights * variances).sum(1)
        # In units of the last parts, because these may differ by orders of magnitude.
        scaled = np.linalg.lstsq(own[:, None] * equations * own, own * right, rcond=1e-9)[0]
        own = np.maximum(own * scaled, least)
    return own


def estimate(
    losses: np.ndarray, prior: VariancePrior, noise: Sequence[float] | float = 1.0
) -> Estimate:
    """Returns expected losses, and how well their differences are known.

    `losses`: (models, orders), NaN where a model has no run. `noise`, by model: the variance of its
    losses as a multiple of a trained run's (`Contender.noise`).
    """
    known = ~np.isnan(losses)
    common_orders = known.astype(int) @ known.T
    differences = losses[:, None] - losses  # (models, models, orders)
    variances, degrees = sample_variances(differences)
    # Only pairs are shrunk: a model's difference to itself is no sample.
    pairs = np.nonzero(~np.eye(len(losses), dtype=bool))
    noises = np.broadcast_to(noise, len(losses))
    noise_of_pairs = ((noises[:, None] + noises) / 2)[pairs]
    shrunk, shrunk_degrees = np.zeros(variances.shape), np.zeros(variances.shape)
    shrunk[pairs], shrunk_degrees[pairs] = prior.shrink(
        variances[pairs], degrees[pairs], noise_of_pairs
    )
    # A run varies half as much as a difference, if orders have no effect. The least variance of
    # differences says nothing of single runs.
    half = dataclasses.replace(prior, variance=prior.variance / 2, least=0.0)
    deviations = np.sqrt(half.shrink(*sample_variances(losses), noises)[0])
    sums = np.nansum(differences, axis=-1)
    return Estimate(
        means=expected_losses(losses, correlation(losses)),
        counts=known.sum(1),
        deviations=deviations,
        variances=shrunk,
        degrees=shrunk_degrees,
        common_orders=common_orders,
        paired=np.where(common_orders > 0, sums / np.maximum(common_orders, 1), math.nan),
    )


def estimate_alone(losses: np.ndarray) -> Estimate:
    """Returns the estimate of losses (models, orders) that are their own prior."""
    _, degrees = sample_variances(losses)
    # The model with the most orders is the one that the others are compared with.
    return estimate(losses, variance_prior_of([losses], float(degrees.sum() - degrees.max())))


# ------------------------------------------------------------------ two groups of losses
# Losses that split over seeds, for example into those that have learned to copy and others, are
# described badly by a mean and a t-interval: three seeds of which one has learned say little about
# how often the next one will. So the share and the loss of each group are given instead.
def modes(losses: Sequence[float], repeats: Sequence[float | None]) -> tuple[Mode, ...]:
    """Returns the two modes of one model's losses, lowest first; () if they do not split visibly.
    `repeats` are the same runs' losses on repeated tokens; None where they were not logged.
    """
    if len(losses) < 3 or not all(map(math.isfinite, losses)):
        return ()
    # The loss of repeats tells which runs have learned to copy.
    are_repeats_known = None not in repeats
    ascending = sorted(zip(repeats if are_repeats_known else losses, losses))
    values = [value for value, _ in ascending]
    first_above = int(np.diff(values).argmax()) + 1  # index of the value after the largest gap
    if are_repeats_known:
        is_split = values[first_above] - values[first_above - 1] > _COPYING
    else:
        # They split if the largest gap is wider than normally distributed losses have it, in
        # deviations within the two groups: of 3.21, 3.22, 3.93 the gap 0.71 is 100 times the
        # deviation 0.007 within. With three seeds, only such a gap tells.
        is_split = _gap_ratio(np.array([values]))[0] > _critical_ratio(len(values), _SPLIT_LEVEL)
    if not is_split:
        return ()
    in_order = [loss for _, loss in ascending]
    groups = []
    for group in (in_order[:first_above], in_order[first_above:]):
        groups.append(Mode(len(group) / len(losses), statistics.fmean(group), len(group)))
    # Who copies has the lower loss of repeats, but not always the lower loss.
    return tuple(sorted(groups, key=lambda mode: mode.loss))


def _gap_ratio(samples: np.ndarray) -> np.ndarray:
    """Returns the largest gap of ascending samples, (samples, n ≥ 3), in deviations within groups."""
    samples = samples - samples.mean(1, keepdims=True)
    gaps = np.diff(samples, axis=1)
    first_above = gaps.argmax(1)[:, None] + 1
    is_low = np.arange(samples.shape[1]) < first_above
    squares = np.zeros(len(samples))
    for group in (is_low, ~is_low):
        means = np.where(group, samples, 0).sum(1) / group.sum(1)
        squares += (np.where(group, samples - means[:, None], 0) ** 2).sum(1)
    within = np.sqrt(squares / (samples.shape[1] - 2))  # two means are estimated
    return gaps.max(1) / np.maximum(within, ROUNDING)


@functools.cache
def _critical_ratio(count: int, level: float) -> float:
    """Returns the `_gap_ratio` that normal losses exceed with a probability, by simulation."""
    samples = np.sort(np.random.default_rng(0).standard_normal((_SAMPLES, count)), axis=1)
    return float(np.quantile(_gap_ratio(samples), 1 - level))


def _more_split_than_by_chance(losses: Sequence[np.ndarray]) -> bool:
    """Whether the losses of too many models split into two modes over the seeds."""
    # If losses are normal, each model splits with a probability of one in twenty. Too many: so many
    # or more have a probability below _SEVERAL; 4 of 20 have 1.6%. One model with three seeds is
    # never enough.
    models = split = 0
    for of_model in losses:
        sample = np.sort(of_model[~np.isnan(of_model)])
        if len(sample) >= 3:
            models += 1
            split += _gap_ratio(sample[None])[0] > _critical_ratio(len(sample), _ONE_OF_TWENTY)
    # The probability of so many or more is binomial.
    return split > 0 and bool(special.bdtrc(split - 1, models, _ONE_OF_TWENTY) < _SEVERAL)
