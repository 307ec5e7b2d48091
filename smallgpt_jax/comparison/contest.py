"""The models within a budget: their losses, and their probabilities of having the lowest one.

Runs of one seed share their batches, so each model is compared with the one of the lowest loss seed
by seed, as in `statistics`: the expected difference of their losses has Student's t-distribution
around the mean difference.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from smallgpt_jax.comparison import statistics
from smallgpt_jax.comparison.candidates import NEAR, WITHIN, Candidate, at_training_budget, by_model
from smallgpt_jax.comparison.costs import Budget

DRAWS = 10_000
# models whose losses differ by less, in nats and for each seed, compute the same function up to
# rounding
EQUAL = 1e-3
POSSIBLE = 0.05  # probability of being best from which a model is listed as a possible best
CERTAIN = 0.975  # probability of being best from which a model is chosen: a two-sided error of 5%
STAKE = 0.9  # probability with which the loss at stake is not exceeded
INTERVAL = 0.8  # of losses


class CannotTellError(Exception):
    """The records do not answer the question; the message says why."""

    def __init__(self, reason: str, nearest: float | None = None):
        super().__init__(reason)
        self.nearest = nearest  # the nearest budget that was measured


@dataclasses.dataclass(frozen=True)
class Contender:
    model: Candidate  # at the budget; its losses may be interpolated
    trained: Candidate  # the nearest to it
    probability: float = 1.0  # of having the lowest loss of all contenders

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """The interval of the expected loss, from the spread over the model's own seeds; unknown
        for a single seed.
        """
        losses = np.array(list(self.model.losses.values()))
        if len(losses) < 2:
            return None, None
        half = statistics.half_width(losses, 1 - INTERVAL)
        return self.model.loss - half, self.model.loss + half


@dataclasses.dataclass(frozen=True)
class Contest:
    limit: float
    contenders: tuple[Contender, ...]  # by loss; of equal losses, by cost
    # nats; the first one's loss minus the lowest is at most this, with a probability of STAKE
    at_stake: float
    notes: tuple[str, ...]

    @property
    def winners(self) -> list[Contender]:
        """The contender of the lowest loss, and those of equal losses."""
        return [
            one
            for one in self.contenders
            if are_equal(one.model.losses, self.contenders[0].model.losses)
        ]

    @property
    def probability(self) -> float:
        """The probability that the winners are the best."""
        return sum(one.probability for one in self.winners)

    @property
    def possible(self) -> list[Contender]:
        """The contenders that may be the best, by loss: one if it is certain, else two or more."""
        first, others = (
            self.contenders[0],
            [one for one in self.contenders if one not in self.winners],
        )
        if self.probability >= CERTAIN or not others:
            return [first]
        second = max(others, key=lambda one: one.probability)
        return [first, *(one for one in others if one is second or one.probability >= POSSIBLE)]


def compete(candidates: Sequence[Candidate], budget: Budget, limit: float) -> Contest:
    """Returns the contest of the models within the limit.

    Raises CannotTellError if the limit is outside the measured range, if the losses have no known
    spread, or if a candidate without a measured cost may be the best.
    """
    measured = [candidate for candidate in candidates if candidate.cost is not None]
    if not measured:
        raise CannotTellError(f"no run has measured {budget.label}; to measure: {budget.advice}")
    if limit * WITHIN < (least := min(one.cost for one in measured)):
        raise CannotTellError(
            f"no model is within the budget; the cheapest takes {least:.3g} {budget.label}, "
            f"{least / limit:.3g} times as much",
            least,
        )
    notes: list[str] = []
    pairs = (models_at if budget.is_training else models_within)(measured, limit, notes)
    if any(model.cost > limit for model, _ in pairs):
        notes.append(f"Costs up to {WITHIN - 1:.0%} above the budget are within it.")
    pairs += [(one, one) for one in candidates if one.cost is None]
    seeds = set.intersection(
        *(set(model.losses) for model, _ in pairs)
    )  # else, a missing seed decides the order
    pairs.sort(
        key=lambda pair: (
            np.mean([pair[0].losses[seed] for seed in seeds or pair[0].losses]),
            pair[0].cost or 0,
        )
    )
    draws = difference_draws([model for model, _ in pairs])
    contenders = [Contender(*pair, float(share)) for pair, share in zip(pairs, best_shares(draws))]
    if risky := [
        one.model.name
        for one in contenders
        if one.model.cost is None and one.probability >= POSSIBLE
    ]:
        raise CannotTellError(
            f"{risky[0]} may be the best, but its {budget.label} were not measured; to "
            f"measure: {budget.advice}"
        )
    return Contest(
        limit,
        tuple(one for one in contenders if one.model.cost is not None),
        float(np.quantile(-draws.min(0), STAKE)),
        tuple(notes),
    )


def models_at(
    measured: Sequence[Candidate], limit: float, notes: list[str]
) -> list[tuple[Candidate, Candidate]]:
    """Returns the models at a training budget, each with its nearest trained candidate."""
    groups = by_model(measured)
    found = {
        model: pair for model, group in groups.items() if (pair := at_training_budget(group, limit))
    }
    if not found:
        largest = sorted(max(one.cost for one in group) for group in groups.values())[-2:]
        refuse_range([one.cost for one in measured], limit, largest[0])
    if absent := sorted(groups.keys() - found.keys()):
        if len(found) == 1:
            raise CannotTellError(
                f"of {len(groups)} models, only {next(iter(found))} was trained near the budget"
            )
        notes.append(f"Not trained near this budget: {', '.join(absent)}.")
    if any(one.losses != trained.losses for one, trained in found.values()):
        notes.append(
            "Losses, sizes and tokens are interpolated between the runs with the next smaller and "
            "larger budgets."
        )
    return list(found.values())


def models_within(
    measured: Sequence[Candidate], limit: float, notes: list[str]
) -> list[tuple[Candidate, Candidate]]:
    """Returns the trained candidates that cost no more than the limit, twice each: they are their
    own nearest.
    """
    costs = [one.cost for one in measured]
    if limit > NEAR * max(costs):
        refuse_range(costs, limit, max(costs))
    within = [one for one in measured if one.cost <= WITHIN * limit]
    flops = [one.runs[0]["curve"][-1]["flops"] for one in within]
    if None not in flops and max(flops) > WITHIN * min(flops):
        notes.append(f"Losses after unequal training, {min(flops):.3g} to {max(flops):.3g} FLOPs.")
    return [(one, one) for one in within]


def refuse_range(costs: Sequence[float], limit: float, largest: float) -> None:
    """Raises CannotTellError: the limit is beyond the costs, or too far from the next lower one.

    `largest` is the largest cost at which models can be compared.
    """
    low, high, nearest = (
        min(costs),
        max(costs),
        max(cost for cost in costs if cost <= WITHIN * limit),
    )
    if limit <= high:
        raise CannotTellError(
            f"no run was trained near the budget; the nearest budget below it is {nearest:.3g}, "
            f"by a factor of {limit / nearest:.3g}",
            nearest,
        )
    raise CannotTellError(
        f"the budget is beyond the validated range, {low:.3g} to {high:.3g}, by a factor of "
        f"{limit / high:.3g}",
        largest,
    )


# ------------------------------------------------------------------ probabilities
def difference_draws(models: Sequence[Candidate], draws: int = DRAWS) -> np.ndarray:
    """Returns draws of the expected loss of each model minus that of the first, shape (models,
    draws).

    A few seeds determine no spread, so that of each difference is drawn towards those of the
    others, as far as these are alike. A model with fewer than two seeds in common with the first
    gets the widest one. Models of equal losses have equal draws: as several, they would have more
    chances to be the best.

    Raises CannotTellError if no difference has a known spread.
    """
    originals = [
        next(other for other in range(len(models)) if are_equal(models[other].losses, one.losses))
        for one in models
    ]
    samples = {
        index: statistics.paired_differences(models[index].losses, models[0].losses)
        for index in sorted(set(originals) - {0})
    }
    known = known_variances(samples)
    unknown = known or next(
        filter(
            None,
            (
                known_variances(
                    {
                        index: statistics.paired_differences(one.losses, other.losses)
                        for index, one in enumerate(models)
                        if not are_equal(one.losses, other.losses)
                    }
                )
                for other in models
            ),
        ),
        {},
    )
    if samples and not unknown:
        raise CannotTellError(
            "the models have fewer than two seeds in common, so the spread of their losses is "
            "unknown; train with config.compare.seeds=3 or more"
        )
    prior = statistics.variance_prior(*zip(*known.values())) if known else None
    rng, found = np.random.default_rng(0), np.zeros((len(models), draws))
    for index, sample in samples.items():
        mean = sample.mean() if len(sample) else models[index].loss - models[0].loss
        variance, degrees = prior.shrink(*known[index]) if index in known else max(unknown.values())
        noise = (
            rng.standard_normal(draws) if math.isinf(degrees) else rng.standard_t(degrees, draws)
        )
        found[index] = mean + math.sqrt(variance / max(1, len(sample))) * noise
    return found[originals]


def known_variances(samples: dict[int, np.ndarray]) -> dict[int, tuple[float, int]]:
    """Returns {index: (variance, degrees of freedom)} of the samples with two values or more."""
    return {
        index: (float(sample.var(ddof=1)), len(sample) - 1)
        for index, sample in samples.items()
        if len(sample) > 1
    }


def best_shares(draws: np.ndarray) -> np.ndarray:
    """Returns each row's share of the draws, (rows, draws), in which it is the lowest. Equal rows
    divide a draw.
    """
    is_lowest = draws == draws.min(0)
    return (is_lowest / is_lowest.sum(0)).mean(-1)


def are_equal(losses: dict[int, float], others: dict[int, float]) -> bool:
    return losses.keys() == others.keys() and all(
        abs(losses[seed] - others[seed]) < EQUAL for seed in losses
    )
