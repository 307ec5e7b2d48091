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

from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.candidates import Candidate
from smallgpt_jax.analysis.findings import (
    CERTAIN,
    INTERVAL,
    LEVEL,
    POSSIBLE,
    STAKE,
    Contest,
    Pair,
    Range,
    Standing,
)
from smallgpt_jax.analysis.modes import modes
from smallgpt_jax.analysis.spreads import Difference, Estimate, Prior

DRAWS = 4000
QUANTILES = 32  # values at which the uncertain variance of a mean is represented
# Spreads of the models' expected losses that are considered, in typical errors of a mean.
MODEL_SPREADS = (0.5, 1, 2, 4, 8, 16, 64)
MIN_DEGREES = 4  # degrees of freedom of a record's losses from which a model can be chosen
POWER = 0.8  # probability that the seeds that are needed reveal the difference
MAX_SEEDS = 10_000


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model in a contest."""

    candidate: Candidate  # the trained one, or the nearer of two between which it is interpolated
    losses: dict[int, float]  # by order of batches, at the budget as far as they are known
    cost: float | None
    known: str = "trained"  # see `Standing.known`
    untried: float = 0.0  # nats that the loss may be lower, with what was not tried
    parameters: float = 0.0  # 0: those of the candidate
    tokens: float = 0.0
    equal_to: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return self.candidate.model

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


def compete(entries: Sequence[Entry], prior: Prior) -> Contest:
    """Returns the contest of the entries, one or more, one per model."""
    finite = [entry for entry in entries if math.isfinite(entry.loss)]
    diverged = [entry for entry in entries if not math.isfinite(entry.loss)]
    if not finite:
        standings = [_standing(entry, math.inf, None, 0.0) for entry in diverged]
        return Contest(tuple(standings), (), None, "diverged", (), math.nan)
    estimate = spreads.estimate(spreads.matrix([entry.losses for entry in finite]), prior)
    order = sorted(range(len(finite)), key=lambda index: _rank(finite[index], estimate, index))
    untried = np.array([entry.untried for entry in finite])
    # "dearer": nothing was trained within the budget, so the first of the contest is another one.
    first = order[0]
    draws = draw_losses(estimate.means - untried, estimate.errors, estimate.degrees)
    draws[:, first] += untried[first]  # what was trained counts for the first one
    shares = np.bincount(draws.argmin(1), minlength=len(finite)) / len(draws)
    chosen, refusal, blockers = _decide(finite, order, shares, prior)
    pairs = _pairs(estimate, order, [entry.model for entry in finite], chosen)
    standings = [
        _standing(finite[index], estimate.means[index], _interval(estimate, index), shares[index])
        for index in order
    ]
    standings += [_standing(entry, math.inf, None, 0.0) for entry in diverged]
    pairs += [
        Pair(worse.model, better.model, 0, math.inf, None, None, "higher", None)
        for worse, better in itertools.product(diverged, finite)
    ]
    stake = float(np.quantile(draws[:, first] - draws.min(1), STAKE))
    stake = stake if prior.pooled or len(finite) == 1 else math.inf
    return Contest(tuple(standings), tuple(pairs), chosen, refusal, blockers, stake)


def _rank(entry: Entry, estimate: Estimate, index: int) -> tuple:
    """Models that were trained within the budget come first, by loss; of equal ones, the cheaper."""
    return entry.known == "dearer", estimate.means[index], entry.cost or 0.0


def _decide(
    entries: Sequence[Entry], order: Sequence[int], shares: np.ndarray, prior: Prior
) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Returns the chosen model, or None; why none is chosen; and the models that may be better."""
    first, *others = order
    model = entries[first].model
    if not others:
        return (None, "dearer", (model,)) if entries[first].known == "dearer" else (model, None, ())
    others.sort(key=lambda index: -shares[index])
    rivals = [index for index in others if shares[index] >= POSSIBLE] or others[:1]
    blockers = tuple(entries[index].model for index in rivals)
    if prior.pooled < MIN_DEGREES:
        return None, "few seeds", blockers
    if shares[first] >= CERTAIN and entries[first].known != "dearer":
        return model, None, ()
    why = {"cheaper": "more training", "dearer": "dearer"}
    return None, why.get(entries[rivals[0]].known, "uncertain"), blockers


def _standing(entry: Entry, loss: float, interval: Range | None, probability: float) -> Standing:
    run, losses = entry.candidate.first, list(entry.losses.values())
    is_trained = entry.losses == entry.candidate.losses
    repeats = [run.final("loss_of_repeats") for run in entry.candidate.runs]
    split = modes(losses, repeats if is_trained and len(repeats) == len(losses) else [None])
    is_unknown = entry.known == "dearer"
    return Standing(
        model=entry.model,
        name=run.name,
        loss=math.inf if is_unknown else float(loss),
        interval=None if split or is_unknown else interval,
        modes=split,
        probability=float(probability),
        seeds=len(entry.candidate.runs),
        diverged=entry.candidate.diverged,
        cost=entry.cost,
        parameters=round(entry.parameters or run.parameters),
        active_parameters=run.active_parameters,
        tokens=entry.tokens or run.tokens,
        steps=run.steps,
        learning_rate=run.learning_rate,
        equal_to=entry.equal_to,
        known=entry.known,
        potential=float(loss) - entry.untried,
    )


# ------------------------------------------------------------------ probabilities
def draw_losses(means: np.ndarray, errors: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Returns possible expected losses of models, shape (DRAWS, models).

    `means` are measured, with the error variances `errors`, which are known with `degrees` degrees
    of freedom.

    The lowest of several measured losses is lower than its expectation: it had luck, too. So the
    expected losses are drawn towards their common mean, as far as errors explain the differences
    (hierarchical normal model: Gelman et al., Bayesian Data Analysis, 5.4). With the spread τ of the
    models and the error variance v, the expected loss of one is around

        mean of all + τ² / (τ² + v) · (its measured loss − mean of all)

    τ and v are not known: each world has its own, drawn by how well they explain what was measured.
    """
    rng = np.random.default_rng(0)
    models = np.arange(len(means))
    probabilities = (np.arange(QUANTILES) + 0.5) / QUANTILES
    # If s² is an estimate with d degrees of freedom, the variance is d·s² / χ²(d). (models, Q)
    degrees = np.maximum(degrees, 1e-3)  # 0 if the spread is unknown: then any is possible
    chi_squared = 2 * special.gammaincinv(degrees[:, None] / 2, probabilities)
    variances = errors[:, None] * degrees[:, None] / np.maximum(chi_squared, 1e-12)
    taus = np.array(MODEL_SPREADS) * math.sqrt(np.median(errors))
    # Mean of all models, for each τ, weighted by how well each loss determines it. (τ, models)
    weights = 1 / (taus[:, None] ** 2 + errors)
    centers = (weights * means).sum(1) / weights.sum(1)
    # Probability density of each measured loss, for each τ and variance. (τ, models, Q)
    total = taus[:, None, None] ** 2 + variances
    squares = (means[:, None] - centers[:, None, None]) ** 2
    logs = -0.5 * (squares / total + np.log(total))
    tops = logs.max(2, keepdims=True)
    densities = np.exp(logs - tops)
    evidence = (np.log(densities.mean(2)) + tops[..., 0]).sum(1) - 0.5 * np.log(weights.sum(1))
    evidence = np.exp(evidence - evidence.max())
    tau = rng.choice(len(taus), size=DRAWS, p=evidence / evidence.sum())
    cumulative = densities.cumsum(2)
    thresholds = rng.random((DRAWS, len(means), 1)) * cumulative[tau, :, -1:]
    picked = (thresholds > cumulative[tau]).sum(2)
    variance = variances[models, picked]
    center = centers[tau] + rng.standard_normal(DRAWS) / np.sqrt(weights.sum(1)[tau])
    share = taus[tau][:, None] ** 2 / (taus[tau][:, None] ** 2 + variance)
    noise = np.sqrt(share * variance) * rng.standard_normal(variance.shape)
    return center[:, None] + share * (means - center[:, None]) + noise


# ------------------------------------------------------------------ pairs
def _pairs(
    estimate: Estimate, order: Sequence[int], models: Sequence[str], chosen: str | None
) -> list[Pair]:
    pairs = [(second, first) for first, second in itertools.combinations(order, 2)]
    differences = [estimate.difference(*pair) for pair in pairs]
    corrected = holm([difference.p_value for difference in differences])
    return [
        pair_of(
            (models[one], models[other]),
            difference,
            p_value,
            estimate.variances[[one, other]].sum(),
            is_chosen=models[other] == chosen,
        )
        for (one, other), difference, p_value in zip(pairs, differences, corrected)
    ]


def pair_of(
    models: tuple[str, str],
    difference: Difference,
    p_value: float,
    variance: float,
    is_chosen: bool = False,
) -> Pair:
    """Returns the verdict. `variance` is that of the difference of two runs of one order.

    If `is_chosen`, the second model is the chosen one: this is decided first, with the same error,
    and then the other pairs (Wiens, 2003, doi:10.1002/pst.64), so it is better than the first.
    """
    half = difference.half_width(1 - LEVEL)
    if math.isinf(half):  # no model has two seeds
        return Pair(*models, difference.orders, difference.mean, None, None, "cannot tell", None)
    is_decided = is_chosen or p_value < LEVEL
    verdict = "cannot tell"
    if is_decided:
        verdict = "higher" if is_chosen or difference.mean > 0 else "lower"
    return Pair(
        *models,
        seeds=difference.orders,
        difference=difference.mean,
        interval=Range(difference.mean - half, difference.mean + half),
        p_value=p_value,
        verdict=verdict,
        seeds_needed=None if is_decided else seeds_needed(difference, variance),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values with Holm's correction. All that are below a level have a joint error rate
    below it.
    """
    order = np.argsort(p_values, kind="stable")
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = float(largest)
    return adjusted


def seeds_needed(difference: Difference, variance: float) -> Range:
    """Returns how many seeds per model would decide, with 80% power at a level of 5%.

    A difference δ of two models whose runs of one order differ with the variance σ² needs

        n = (1.96 + 0.84)² · σ²/δ² + 1.96²/2

    seeds: 7.85 · (0.02/0.02)² + 1.9 = 10 (Student's t for the normal distribution costs the second
    term: Guenther, 1981, doi:10.2307/2683297). A few seeds determine neither σ nor δ, so n is a
    range: INTERVAL of its values over the σ and δ that agree with the losses.
    """
    rng = np.random.default_rng(0)
    ratios = difference.degrees / np.maximum(rng.chisquare(difference.degrees, DRAWS), 1e-12)
    errors = difference.error * np.sqrt(ratios)
    deltas = difference.mean + errors * rng.standard_normal(DRAWS)
    level, power = special.ndtri(1 - LEVEL / 2), special.ndtri(POWER)
    needed = (level + power) ** 2 * variance * ratios / np.maximum(deltas**2, 1e-300)
    needed = np.clip(needed + level**2 / 2, 2, MAX_SEEDS)
    low, high = np.quantile(needed, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return Range(float(low), float(high))


def _interval(estimate: Estimate, index: int) -> Range | None:
    """Returns the interval of an expected loss, from the spread of the model's own runs."""
    if estimate.degrees[index] == 0:
        return None
    error = float(estimate.deviations[index]) / math.sqrt(estimate.counts[index])
    half = float(special.stdtrit(estimate.degrees[index], (1 + INTERVAL) / 2) * error)
    mean = float(estimate.means[index])
    return Range(mean - half, mean + half)
