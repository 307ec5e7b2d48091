"""Models compared within one budget: which is best, how sure that is, and what would make it surer.

The answer comes from DRAWS possible worlds that agree with the losses: in each, every model has an
expected loss, and one is the lowest. The share of the worlds in which a model is the lowest is its
probability of being best.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from smallgpt_jax.analysis import sequential, spreads
from smallgpt_jax.analysis.candidates import Contender, Evidence
from smallgpt_jax.analysis.findings import (
    CERTAIN,
    INTERVAL,
    LEVEL,
    POSSIBLE,
    STAKE,
    Contest,
    Pair,
    Range,
    Refusal,
    Standing,
)
from smallgpt_jax.analysis.spreads import Difference, Estimate, VariancePrior, modes

DRAWS = 16_000
_QUANTILES = 32  # values at which the uncertain variance of a mean is represented
# Spreads of the models' expected losses that are considered, in typical errors of a mean.
_MODEL_SPREADS = (1, 2, 4, 8, 16, 64)
_POWER = 0.8  # probability that the seeds that are needed reveal the difference
_MAX_SEEDS = 10_000


def compete(contenders: Sequence[Contender], evidence: Evidence) -> Contest:
    """Returns the ranking of the contenders, one or more, one per model."""
    diverged = [one for one in contenders if not math.isfinite(one.loss)]
    last = [_standing(one, math.inf, None, 0.0) for one in diverged]
    if len(diverged) == len(contenders):
        return Contest(
            standings=tuple(last),
            pairs=(),
            chosen=None,
            refusal="diverged",
            blockers=(),
            at_stake=math.nan,
        )
    finite = [one for one in contenders if math.isfinite(one.loss)]
    # Losses vary more at some sizes and lengths than at others: that of the best one stands for all.
    prior = evidence.variance_prior_at(min(finite, key=lambda one: one.loss).candidate)
    finite, estimate = _best_first(finite, prior)
    # Nats by which a loss may be lower with sizes or lengths that were not tried. The first one is to
    # be chosen as it was trained, so it gets none.
    untried = np.array([0.0, *(one.untried for one in finite[1:])])
    draws = draw_losses(estimate, untried)  # (draws, models)
    # in how many of the draws each model is the lowest
    probabilities = np.bincount(draws.argmin(1), minlength=len(finite)) / len(draws)
    models = [one.model for one in finite]
    # Verdicts on pairs allow for what was not tried, too.
    pairs = compare_pairs(models, _lowered(estimate, untried), draws, evidence.pair_level)
    sequential_pairs = pairs if evidence.pair_level else ()
    chosen, refusal, blockers = _decide(finite, probabilities, prior, sequential_pairs)
    standings = []
    for i, (one, probability) in enumerate(zip(finite, probabilities)):
        standings.append(_standing(one, estimate.means[i], _interval(estimate, i), probability))
    for worse, better in itertools.product(diverged, finite):  # worse by inf, whatever the seeds
        pairs.append(Pair(worse.model, better.model, 0, math.inf, None, 0.0, "higher", None))
    # Where no spread is known, the draws cannot tell what is at stake.
    is_known = prior.is_known or len(finite) == 1
    return Contest(
        standings=(*standings, *last),
        pairs=tuple(pairs),
        chosen=chosen,
        refusal=refusal,
        blockers=blockers,
        at_stake=_at_stake(draws) if is_known else math.inf,
    )


def _best_first(
    contenders: Sequence[Contender], prior: VariancePrior
) -> tuple[list[Contender], Estimate]:
    """Returns contenders with finite losses, best first, and the estimate of these losses."""
    losses = spreads.matrix([one.losses for one in contenders])
    estimate = spreads.estimate(losses, prior, [one.noise for one in contenders])
    order = _order(contenders, estimate.means)
    return [contenders[index] for index in order], estimate.take(order)


def _lowered(estimate: Estimate, nats: np.ndarray) -> Estimate:
    """Returns the estimate with the loss of each model lowered by its `nats`."""
    return dataclasses.replace(
        estimate,
        means=estimate.means - nats,
        paired=estimate.paired - nats[:, None] + nats,  # paired[a, b]: mean difference a − b
    )


def _at_stake(draws: np.ndarray) -> float:
    """Returns what taking the first model costs at most, with the probability STAKE."""
    above_lowest = draws[:, 0] - draws.min(1)
    return float(np.quantile(above_lowest, STAKE))


def _order(contenders: Sequence[Contender], means: np.ndarray) -> list[int]:
    """Returns the indices, best first: within the budget by expected loss, then the others."""
    are_measured = any(one.cost is not None for one in contenders)

    def rank(index: int) -> tuple[bool, float, float]:
        one = contenders[index]
        # Without any cost, as in a ranking of unknown FLOPs, all are taken to be within.
        is_within = one.known != "dearer" and (one.cost is not None or not are_measured)
        return not is_within, means[index], one.cost or 0.0

    return sorted(range(len(contenders)), key=rank)


def _decide(
    contenders: Sequence[Contender],
    probabilities: np.ndarray,
    prior: VariancePrior,
    sequential_pairs: Sequence[Pair],
) -> tuple[str | None, Refusal | None, tuple[str, ...]]:
    """Returns the chosen model, or None; why none is chosen; and the models that may be better than
    the first. The contenders come best first, with their probabilities of having the lowest loss.
    `sequential_pairs` have to agree.
    """
    if len(contenders) == 1:
        return contenders[0].model, None, ()
    others = sorted(range(1, len(contenders)), key=lambda index: -probabilities[index])
    # those that may be the best; if none alone may, but all together, the most probable one
    rivals = [index for index in others if probabilities[index] >= POSSIBLE] or others[:1]
    blockers = tuple(contenders[index].model for index in rivals)
    if not prior.is_enough:
        return None, "few seeds", blockers
    if probabilities[0] >= CERTAIN:
        first = contenders[0].model
        # In its pairs, the first one is `other`.
        of_first = [pair for pair in sequential_pairs if pair.other == first]
        undecided = tuple(pair.model for pair in of_first if pair.verdict != "higher")
        return (None, "uncertain", undecided) if undecided else (first, None, ())
    # The most probable rival decides what would help: more training of it, or runs at the budget.
    refusals = {"cheaper": "more training", "dearer": "dearer"}
    return None, refusals.get(contenders[rivals[0]].known, "uncertain"), blockers


def _standing(
    contender: Contender, loss: float, interval: Range | None, probability: float
) -> Standing:
    """Returns a row of the ranking, with the expected loss and P(lowest loss)."""
    candidate, run = contender.candidate, contender.candidate.first
    losses = list(contender.losses.values())
    repeats = [run.final("loss_of_repeats") for run in candidate.runs]
    if contender.losses != candidate.losses or len(repeats) != len(losses):
        repeats = [None]  # not logged, as far as `modes` knows: they are not of these losses
    split = modes(losses, repeats)
    is_unknown = contender.known == "dearer"
    # Interpolated between two sizes, the active parameters are so in the same proportion.
    parameters = contender.parameters or run.parameters
    return Standing(
        model=contender.model,
        name=run.name,
        loss=math.inf if is_unknown else float(loss),
        interval=None if split or is_unknown else interval,
        modes=split,
        probability=float(probability),
        seeds=len(candidate.runs),
        diverged=candidate.diverged,
        cost=contender.cost,
        parameters=round(parameters),
        active_parameters=round(parameters * run.active_parameters / run.parameters),
        tokens=contender.tokens or run.tokens,
        steps=run.steps,
        learning_rate=run.learning_rate,
        equal_to=contender.equal_to,
        known=contender.known,
        potential=float(loss) - contender.untried,
    )


def draw_losses(estimate: Estimate, untried: np.ndarray | float = 0.0) -> np.ndarray:
    """Returns possible expected losses of models, shape (DRAWS, models); each row is a world that
    agrees with the losses. `untried` is subtracted from the measured losses first.

    The lowest of several measured losses had luck, too. So the expected losses are drawn towards
    their common mean, as far as errors explain the differences (hierarchical normal model: Gelman
    et al., Bayesian Data Analysis, 5.4; that this keeps verdicts on many pairs right: Gelman, Hill
    and Yajima, 2012, doi:10.1080/19345747.2011.618213). With the spread τ of the models and the
    error variance v of a model, its expected loss is around

        mean of all + τ² / (τ² + v) · (its measured loss − mean of all)

    τ and v are not known: each world has its own, drawn by how well they explain what was measured.
    """
    rng = np.random.default_rng(0)
    means = estimate.means - untried
    taus = _possible_spreads(means, estimate.own_errors)
    centers, precisions = _common_means(means, estimate.own_errors, taus)
    variances = _possible_variances(estimate.own_errors, estimate.own_degrees)
    likelihoods, densities = _explain(means, centers, precisions, taus, variances)
    # τ of each world, then a variance v of each model, then the mean of all models
    tau_of = rng.choice(len(taus), size=DRAWS, p=likelihoods / likelihoods.sum())  # index of `taus`
    variance = _draw_variances(rng, variances, densities, tau_of)  # (DRAWS, models)
    center = centers[tau_of] + rng.standard_normal(DRAWS) / np.sqrt(precisions[tau_of])
    # then the expected losses
    tau_squared = taus[tau_of, None] ** 2
    reliability = tau_squared / (tau_squared + variance)
    noise = np.sqrt(reliability * variance) * rng.standard_normal(variance.shape)
    return center[:, None] + reliability * (means - center[:, None]) + noise


def _draw_variances(
    rng: np.random.Generator, variances: np.ndarray, densities: np.ndarray, tau_of: np.ndarray
) -> np.ndarray:
    """Returns one of each model's possible variances (models, _QUANTILES) in each world, (worlds,
    models), by densities (τ, models, _QUANTILES). `tau_of` is the index of each world's τ.
    """
    # The inverse of the cumulative density: worlds of one τ have the same one.
    cumulative = densities.cumsum(2)
    uniform = rng.random((len(tau_of), len(variances)))
    picked = np.empty(uniform.shape, int)
    for tau, model in np.ndindex(cumulative.shape[:2]):
        worlds, sums = tau_of == tau, cumulative[tau, model]
        picked[worlds, model] = np.searchsorted(sums, uniform[worlds, model] * sums[-1])
    return variances[np.arange(len(variances)), picked]


def _possible_spreads(means: np.ndarray, error_variances: np.ndarray) -> np.ndarray:
    """Returns the values of τ that are considered."""
    taus = np.array(_MODEL_SPREADS) * math.sqrt(np.median(error_variances))
    # Where losses of most models hardly vary, 64 errors are less than the models differ. No τ would
    # then explain a model that is far from the others, and all of its worlds would be near theirs.
    taus[-1] = max(taus[-1], np.ptp(means))
    return taus


def _common_means(
    means: np.ndarray, error_variances: np.ndarray, taus: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each τ, the mean of all models, weighted by how well each loss determines it, and
    its precision (1 / variance).
    """
    weights = 1 / (taus[:, None] ** 2 + error_variances)  # (τ, models)
    precisions = weights.sum(1)
    return (weights * means).sum(1) / precisions, precisions


def _explain(
    means: np.ndarray,
    centers: np.ndarray,
    precisions: np.ndarray,
    taus: np.ndarray,
    variances: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns how well each τ explains all measured losses, up to a factor, and how well each of a
    model's possible variances explains its loss with this τ, (τ, models, _QUANTILES).
    """
    total = taus[:, None, None] ** 2 + variances
    logs = -0.5 * ((means[:, None] - centers[:, None, None]) ** 2 / total + np.log(total))
    tops = logs.max(2, keepdims=True)  # subtracted, because exp of very low ones is 0
    densities = np.exp(logs - tops)
    # The common mean is integrated out, which divides by the root of its precision.
    of_tau = (np.log(densities.mean(2)) + tops[..., 0]).sum(1) - 0.5 * np.log(precisions)
    return np.exp(of_tau - of_tau.max()), densities


def _possible_variances(estimates: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Returns equally probable σ² behind estimates s², (estimates, _QUANTILES): d·s² / χ²(d)."""
    probabilities = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    degrees = np.maximum(degrees, 1e-3)[:, None]  # 0 if the spread is unknown: then any is possible
    chi_squared = 2 * special.gammaincinv(degrees / 2, probabilities)
    return estimates[:, None] * degrees / np.maximum(chi_squared, 1e-12)


# ------------------------------------------------------------------ pairs
def compare_pairs(
    models: Sequence[str],
    estimate: Estimate,
    draws: np.ndarray,
    pair_level: float | None = None,
) -> list[Pair]:
    """Returns the verdicts on all pairs: by `draw_losses`, or with the level of a pair by sequential
    tests. In each, `other` comes first in `models`.
    """
    pairs = []
    for other, one in itertools.combinations(range(len(models)), 2):
        difference = estimate.difference(one, other)
        # Of both models in the same worlds: their errors are correlated.
        possible = draws[:, one] - draws[:, other]
        probability, interval, verdict = _verdict(difference, possible, pair_level)
        is_open = verdict == "cannot tell" and difference.degrees > 0
        pairs.append(
            Pair(
                model=models[one],
                other=models[other],
                seeds=difference.common_orders,
                difference=difference.mean,
                interval=interval,
                probability=probability,
                verdict=verdict,
                seeds_needed=seeds_needed(difference, pair_level) if is_open else None,
            )
        )
    return pairs


def _verdict(
    difference: Difference, possible: np.ndarray, pair_level: float | None
) -> tuple[float, Range | None, str]:
    """Returns the probability that a difference is below 0, its interval and `Pair.verdict`.
    `possible` are values that it may have, given the runs.
    """
    if difference.degrees == 0:  # no two models have two seeds
        return 0.5, None, "cannot tell"
    probability = float((possible < 0).mean())
    if pair_level:
        # Which seeds exist depends on earlier looks at the losses. The probability does not allow
        # for that, so the sequential test decides.
        half_width = difference.half_width_at_all_looks(pair_level)
        interval = None
        if math.isfinite(half_width):
            interval = Range(difference.paired - half_width, difference.paired + half_width)
        is_decided = abs(difference.paired) > half_width
        is_lower = difference.paired < 0
    else:
        low, high = np.quantile(possible, [LEVEL / 2, 1 - LEVEL / 2])
        interval = Range(float(low), float(high))
        is_decided = max(probability, 1 - probability) >= CERTAIN
        is_lower = probability > 0.5
    if not is_decided:
        return probability, interval, "cannot tell"
    return probability, interval, "lower" if is_lower else "higher"


def seeds_needed(difference: Difference, pair_level: float | None = None) -> Range:
    """Returns an interval of how many seeds per model would decide on which side of 0 a difference is:
    by one t-test at LEVEL after all, or with a pair's level by the sequential test after each.
    """
    # A difference δ of two models whose runs of the same seed differ with the variance σ² needs
    #     n = (1.96 + 0.84)² · σ²/δ² + 1.96²/2
    # seeds: 7.85 · (0.02/0.02)² + 1.9 = 10 (Student's t for the normal distribution costs the second
    # term: Guenther, 1981, doi:10.2307/2683297). A few seeds determine neither σ nor δ, so n is a
    # range: INTERVAL of its values over the σ and δ that agree with the losses.
    rng = np.random.default_rng(0)
    # σ²/s², because d·s²/σ² is χ²-distributed with d degrees of freedom
    chi_squared = np.maximum(rng.chisquare(difference.degrees, DRAWS), 1e-12)
    variance_ratios = difference.degrees / chi_squared
    errors = difference.error * np.sqrt(variance_ratios)
    deltas = difference.mean + errors * rng.standard_normal(DRAWS)
    variances = difference.variance * variance_ratios
    if pair_level:
        needed = sequential.seeds_of_effects(deltas**2 / variances, pair_level)
    else:
        z_level, z_power = special.ndtri(1 - LEVEL / 2), special.ndtri(_POWER)
        seeds_for_effect = (z_level + z_power) ** 2 * variances / np.maximum(deltas**2, 1e-300)
        needed = seeds_for_effect + z_level**2 / 2
    needed = np.clip(needed, 2, _MAX_SEEDS)
    low, high = np.quantile(needed, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return Range(float(low), float(high))


def _interval(estimate: Estimate, index: int) -> Range | None:
    """Returns the interval of a model's expected loss; None if no model has two seeds."""
    # The model's deviation is shrunk to that of all models, like the deviations of its differences,
    # so it is known as well as the best known of these.
    degrees = estimate.degrees[index].max()
    if degrees == 0:
        return None
    error = float(estimate.deviations[index]) / math.sqrt(estimate.counts[index])
    half_width = float(special.stdtrit(degrees, (1 + INTERVAL) / 2) * error)
    mean = float(estimate.means[index])
    return Range(mean - half_width, mean + half_width)
