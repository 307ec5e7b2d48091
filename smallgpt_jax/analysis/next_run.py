"""The run that lowers the expected loss at stake most per FLOP.

At stake is what it costs, on average, to train the model with the lowest measured loss, because
another one may be better. One more seed of a model changes what is expected of it, and thereby
sometimes which model is taken (knowledge gradient: Frazier, Powell & Dayanik, 2009,
doi:10.1287/ijoc.1080.0314).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from smallgpt_jax.analysis import spreads
from smallgpt_jax.analysis.candidates import Candidate, Evidence, are_comparable, longest
from smallgpt_jax.analysis.contest import draw_losses
from smallgpt_jax.analysis.record import Run, grouped

_OUTCOMES = 200  # possible losses of a run, equally probable


@dataclasses.dataclass(frozen=True)
class NextRun:
    name: str
    seed: int
    at_stake: float  # nats, at the size of this name
    gain: float  # nats by which the run is expected to lower it
    runs: int  # this one and its shorter ones
    flops: float  # of all of them
    seconds: float | None  # at the speed of the name's first seed; None if it was not logged


def next_runs(evidence: Evidence) -> list[NextRun]:
    """Returns one run per name of each size, the one with the largest gain per FLOP first.

    Leaves out names whose FLOPs are unknown, that diverged, and sizes at which nobody can tell how
    much losses vary or which losses cannot be compared.
    """
    runs = []
    for candidates in grouped(longest(evidence.candidates), lambda one: one.first.size).values():
        finite = [one for one in candidates if math.isfinite(one.loss)]
        is_comparable = are_comparable([run for one in finite for run in one.runs])
        if len(finite) > 1 and is_comparable and evidence.prior_at(finite[0]).is_known:
            runs += _of_size(finite, evidence)
    return sorted(runs, key=lambda run: -run.gain / run.flops)


def _of_size(candidates: Sequence[Candidate], evidence: Evidence) -> list[NextRun]:
    losses = spreads.matrix([one.losses for one in candidates])
    estimate = spreads.estimate(losses, evidence.prior_at(candidates[0]))
    draws = draw_losses(estimate)
    means, covariance = draws.mean(0), np.cov(draws.T)
    at_stake = means.min() - draws.min(1).mean()
    own_variances, _ = estimate.own_variances
    runs = []
    for index, one in enumerate(candidates):
        costs = _costs_of_seed(one.first.name, evidence.record.runs)
        if costs is None:
            continue
        seed = max(run.seed for run in one.runs) + 1
        # The effect of an order of batches is known if other models have read it.
        is_read = any(seed in other.losses for other in candidates)
        variance = own_variances[index] if is_read else estimate.deviations[index] ** 2
        gain = expected_gain(means, covariance, index, float(variance))
        runs.append(NextRun(one.first.name, seed, float(at_stake), gain, *costs))
    return runs


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


def _costs_of_seed(name: str, runs: Sequence[Run]) -> tuple[int, float, float | None] | None:
    """Returns the number of runs of one seed of a name, with the shorter ones, their FLOPs and their
    seconds; None without FLOPs.
    """
    of_name = [run for run in runs if run.name == name and run.last]
    of_seed = [run for run in of_name if run.seed == of_name[0].seed]
    flops, seconds = [], []
    for run in of_seed:
        share = 1 - run.copied_steps / run.steps
        flops.append(run.last.flops and share * run.last.flops)
        seconds.append(run.last.seconds and share * run.last.seconds)
    if None in flops or not sum(flops):
        return None
    return len(of_seed), sum(flops), None if None in seconds else sum(seconds)
