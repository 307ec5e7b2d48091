"""Which further runs of a comparison are worth training, and what runs cost.

Two questions, each asked of the losses so far: which models need another seed (rounds of seeds, with
config.compare.most_seeds), and which single run lowers the expected loss at stake most per FLOP
(`choose --next`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from smallgpt_jax.analysis import sequential, spreads
from smallgpt_jax.analysis.candidates import Candidate, Evidence, are_comparable, longest_trained
from smallgpt_jax.analysis.contest import compare_pairs, draw_losses
from smallgpt_jax.analysis.record import Run, grouped
from smallgpt_jax.analysis.spreads import Difference

_OUTCOMES = 200  # possible losses of a run, equally probable


# ------------------------------------------------------------------ costs
@dataclasses.dataclass(frozen=True)
class Cost:
    """The price of runs; a field is None if one of them has not logged it."""

    runs: int
    flops: float | None
    seconds: float | None  # at the speed of the record's runs


def cost_of(runs: Sequence[Run], fractions: Sequence[float] | None = None) -> Cost:
    """Returns the cost of training the given fraction of each run; by default, of its steps that were
    not copied from a longer run of its model and seed.
    """
    fractions = [run.trained_fraction for run in runs] if fractions is None else fractions

    def total(field: str) -> float | None:
        costs = [getattr(run.last, field, None) for run in runs]
        if None in costs:
            return None
        return sum(cost * fraction for cost, fraction in zip(costs, fractions, strict=True))

    return Cost(len(runs), total("flops"), total("seconds"))


# ------------------------------------------------------------------ rounds of seeds
@dataclasses.dataclass(frozen=True)
class Rounds:
    """When seeds are added: after each round, where pairs of models are undecided."""

    first: int  # seeds of each model in the first round
    most: int  # seeds of a model
    stake: float  # nats of expected regret, below which a pair gets no further seeds
    pair_level: float  # see `Evidence.pair_level`


def next_seeds(losses: Mapping[str, Sequence[float]], rounds: Rounds) -> dict[str, int]:
    """Returns {model: number of seeds} after the next round; the present ones if no pair needs more.
    `losses` by model are those of its seeds in order, inf if one diverged.
    """
    hashable = tuple((model, tuple(of_seeds)) for model, of_seeds in losses.items())
    return dict(_next_seeds(hashable, rounds))


@functools.lru_cache(maxsize=1024)  # plans are made again after each run
def _next_seeds(
    losses: tuple[tuple[str, tuple[float, ...]], ...], rounds: Rounds
) -> tuple[tuple[str, int], ...]:
    """`next_seeds` of items instead of mappings, which can be cached."""
    counts = {model: len(of_seeds) for model, of_seeds in losses}
    by_seed = {}  # {model: {seed: loss}}
    for model, of_seeds in losses:
        # A model that diverged is worse than all others, whatever further seeds say.
        if all(map(math.isfinite, of_seeds)):
            by_seed[model] = dict(enumerate(of_seeds))
    if len(by_seed) < 2:
        return tuple(counts.items())
    models = list(by_seed)
    estimate = spreads.estimate_alone(spreads.matrix(list(by_seed.values())))
    draws = draw_losses(estimate)
    for pair in compare_pairs(models, estimate, draws, rounds.pair_level):
        if pair.is_decided:
            continue
        one, other = models.index(pair.model), models.index(pair.other)
        regret = _expected_regret(draws[:, one] - draws[:, other])
        # Both get a seed if a wrong choice would cost much, or if a verdict is near: of two models
        # that differ by much, the regret is low long before a verdict is certain.
        if regret > rounds.stake or _is_in_reach(estimate.difference(one, other), rounds):
            for model in (pair.model, pair.other):
                counts[model] = max(counts[model], min(pair.seeds + 1, rounds.most))
    return tuple(counts.items())


def _expected_regret(differences: np.ndarray) -> float:
    """Returns the mean of (loss of the model that is better on average − lower loss)."""
    return float(min(np.maximum(differences, 0).mean(), np.maximum(-differences, 0).mean()))


def _is_in_reach(difference: Difference, rounds: Rounds) -> bool:
    """Whether a difference is above `rounds.stake`, and may be decided with the seeds allowed."""
    squared_effect = difference.paired**2 / difference.variance
    seeds = sequential.seeds_of_effects(np.array(squared_effect), rounds.pair_level)
    return abs(difference.paired) > rounds.stake and seeds <= rounds.most


# ------------------------------------------------------------------ the run that is worth most
@dataclasses.dataclass(frozen=True)
class NextRun:
    """One more seed of a name, MODEL or MODEL@SIZE.

    At stake is what it costs, on average, to take the model with the lowest expected loss, because
    another one may be better. One more seed of a model changes what is expected of it, and thereby
    sometimes which model is taken (knowledge gradient: Frazier, Powell & Dayanik, 2009,
    doi:10.1287/ijoc.1080.0314).
    """

    name: str
    seed: int
    at_stake: float  # nats, at the size of this name
    gain: float  # nats by which the run is expected to lower it
    runs: int  # this one and its shorter ones
    flops: float  # of all of them
    seconds: float | None  # at the speed of the name's first seed; None if it was not logged


def next_runs(evidence: Evidence) -> list[NextRun]:
    """Returns one run per name of each size, the one with the largest gain per FLOP first."""
    runs = []
    sizes = grouped(longest_trained(evidence.candidates), lambda one: one.first.size)
    for candidates in sizes.values():
        finite = [one for one in candidates if math.isfinite(one.loss)]
        # Without two seeds of two models, nothing tells how much losses vary.
        is_known = bool(finite) and evidence.variance_prior_at(finite[0]).is_known
        if len(finite) > 1 and is_known and are_comparable(finite):
            runs += _runs_of_size(finite, evidence)
    return sorted(runs, key=lambda run: -run.gain / run.flops)


def _runs_of_size(candidates: Sequence[Candidate], evidence: Evidence) -> list[NextRun]:
    """Returns one further seed of each candidate, all of one size, with its expected gain."""
    losses = spreads.matrix([one.losses for one in candidates])
    estimate = spreads.estimate(losses, evidence.variance_prior_at(candidates[0]))
    draws = draw_losses(estimate)
    means, covariance = draws.mean(0), np.cov(draws.T)
    at_stake = means.min() - draws.min(1).mean()  # the best on average minus the best of each draw
    runs = []
    for index, one in enumerate(candidates):
        of_name = [run for run in evidence.record.runs if run.name == one.first.name]
        cost = cost_of(runs_of_a_seed(of_name))
        if not cost.flops:  # no gain per FLOP
            continue
        seed = _first_missing({run.seed for run in one.runs})
        # The effect of an order of batches is known if other models have read it: the loss then varies
        # only by the model's own part.
        is_read = any(seed in other.losses for other in candidates)
        variance = estimate.own_variances[index] if is_read else estimate.deviations[index] ** 2
        gain = expected_gain(means, covariance, index, float(variance))
        runs.append(NextRun(one.first.name, seed, float(at_stake), gain, **vars(cost)))
    return runs


def _first_missing(seeds: set[int]) -> int:
    """Returns the seed that a comparison trains next, which has all seeds from its first one on."""
    return next(seed for seed in itertools.count(min(seeds)) if seed not in seeds)


def runs_of_a_seed(of_name: Sequence[Run]) -> list[Run]:
    """Returns the runs of all lengths of one seed of a name: the first seed whose runs are finished."""
    finished = [run for run in of_name if run.is_finished and run.last]
    return [run for run in finished if run.seed == finished[0].seed]


def expected_gain(means: np.ndarray, covariance: np.ndarray, model: int, variance: float) -> float:
    """Returns by how much one more loss of a model, with this variance, is expected to lower the
    expected loss of the model that is then taken.

    A loss moves the expected losses by covariance[model] / √(variance + covariance[model, model])
    times a standard normal number.
    """
    moves = covariance[model] / math.sqrt(variance + covariance[model, model])
    normal = special.ndtri((np.arange(_OUTCOMES) + 0.5) / _OUTCOMES)
    after = means + moves * normal[:, None]
    return float(means.min() - after.min(1).mean())
