"""How many seeds the models of a comparison need: rounds of seeds, added where verdicts need them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from smallgpt_jax.analysis import sequential, spreads
from smallgpt_jax.analysis.contest import compare_pairs, draw_losses
from smallgpt_jax.analysis.spreads import Difference


@dataclasses.dataclass(frozen=True)
class Rounds:
    first: int  # seeds of each model in the first round
    most: int  # seeds of a model
    stake: float  # nats; a pair with less at stake gets no further seeds
    pair_level: float  # see `Evidence.pair_level`


def next_seeds(losses: Mapping[str, Sequence[float]], rounds: Rounds) -> dict[str, int]:
    """Returns {model: number of seeds} after the next round; the present ones if no pair needs more.

    `losses` by model are those of its first seeds, inf if one diverged. Each pair that is open gets
    one more seed that both have.
    """
    return dict(_next_seeds(tuple((name, tuple(row)) for name, row in losses.items()), rounds))


@functools.lru_cache(maxsize=1024)  # plans are made again after each run
def _next_seeds(
    losses: tuple[tuple[str, tuple[float, ...]], ...], rounds: Rounds
) -> tuple[tuple[str, int], ...]:
    counts = {name: len(row) for name, row in losses}
    # A model that diverged needs no further seeds: it is worse than all others.
    rivals = {name: dict(enumerate(row)) for name, row in losses if all(map(math.isfinite, row))}
    if len(rivals) > 1:
        names = list(rivals)
        estimate = spreads.estimate_alone(spreads.matrix(list(rivals.values())))
        draws = draw_losses(estimate)
        pairs = compare_pairs(names, estimate, draws, rounds.pair_level)
        # in the order of compare_pairs
        for pair, (other, one) in zip(pairs, itertools.combinations(range(len(names)), 2)):
            at_stake = stake(draws[:, one] - draws[:, other])
            is_worth_it = at_stake > rounds.stake or _is_in_reach(
                estimate.difference(one, other), rounds
            )
            if is_worth_it and not pair.is_told:
                needed = min(pair.seeds + 1, rounds.most)
                for name in (pair.model, pair.other):
                    counts[name] = max(counts[name], needed)
    return tuple(counts.items())


def _is_in_reach(difference: Difference, rounds: Rounds) -> bool:
    """Whether a difference of more than `rounds.stake` can be expected to be told with the seeds
    that are allowed.

    Such a pair gets seeds even if little is at stake: of two models that differ by much, little is
    at stake long before a verdict is certain, and they would otherwise stay untold.
    """
    effect = difference.paired**2 / difference.variance
    seeds = sequential.seeds_of_effects(np.array(effect), rounds.pair_level)
    return abs(difference.paired) > rounds.stake and seeds <= rounds.most


def stake(differences: np.ndarray) -> float:
    """Returns the expected loss of choosing the better of two models, from possible differences of
    their expected losses: what it costs if the other one is better.
    """
    return float(min(np.maximum(differences, 0).mean(), np.maximum(-differences, 0).mean()))
