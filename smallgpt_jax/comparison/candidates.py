"""The finished runs of a results.json, grouped by config, and models at training budgets between
those of the runs.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from smallgpt_jax.comparison.costs import Budget
from smallgpt_jax.comparison.names import RESULTS_FORMAT, grouped, model_of
from smallgpt_jax.storage.json_files import (
    BOOLEAN,
    LOSS,
    NULL,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    Each,
    Optional,
    integer,
    one_of,
)

WITHIN = 1.01  # a cost up to this multiple of the budget is within it
# a training budget up to this multiple of a run's is the run's; a limit up to it is in the measured
# range
NEAR = 1.25
MAX_GAP = 8  # ratio of the training budgets of two runs between which losses are interpolated
SAME_RATIO = 1.1  # tokens per parameter up to this multiple are about the same
MEASURED = Optional((NULL, POSITIVE))
# The parts of results.json that are read.
INFERENCE = {
    "device": TEXT,
    "cache_bytes": integer(0),
    "decoding": [{"batch": integer(1), "cache": TEXT, "step_ms": {"median": POSITIVE}}],
}
RESULTS = {
    "format": one_of(RESULTS_FORMAT),
    "command": Optional(TEXT),
    "runs": [
        {
            "name": TEXT,
            "workdir": TEXT,
            "seed": integer(0),
            "config": OBJECT,
            "is_finished": BOOLEAN,
            "diverged": BOOLEAN,
            "parameters": integer(1),
            "active_parameters": integer(1),
            "components": Each(integer(0)),
            "memory_bytes": MEASURED,
            "averaged": Optional(integer(1)),
            "weight_bytes": MEASURED,
            "inference": Optional((NULL, INFERENCE)),
            "horizon": Optional(POSITIVE),
            "run": Optional(TEXT),
            "curve": [
                {
                    "step": integer(0),
                    "tokens": integer(0),
                    "flops": (NULL, NUMBER),
                    "seconds": (NULL, NUMBER),
                    "loss": (NULL, LOSS),
                    "targets": Optional(integer(1)),
                }
            ],
        }
    ],
}


def final_loss(run: dict) -> float:
    """Returns the mean over the run's last evaluations on the same rows, as in
    `results.Run.final`.
    """
    points = [
        point for point in run["curve"] if point.get("targets") == run["curve"][-1].get("targets")
    ]
    return float(
        np.mean(
            [
                point["loss"]
                for point in points[-run.get("averaged", 1) :]
                if point["loss"] is not None
            ]
        )
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The finished runs of one config, which differ in their seeds. A shorter horizon is a part of
    the name.
    """

    name: str
    runs: tuple[dict, ...]
    cost: float | None  # median over the runs that have it
    losses: dict[int, float]  # by seed
    parameters: int
    active_parameters: int
    tokens: float

    @property
    def model(self) -> str:
        return model_of(self.runs[0]["name"])

    @property
    def loss(self) -> float:
        return float(np.mean(list(self.losses.values())))


def read_candidates(runs: Sequence[dict], budget: Budget) -> tuple[list[Candidate], list[str]]:
    """Returns the finished runs by name and horizon, and notes about the others.

    Shorter horizons are left out if the budget is not one of training, because they cost as much as
    the longest.
    """
    runs = [run for run in runs if budget.is_training or run.get("horizon", 1) == 1]
    groups = grouped(filter(is_trained, runs), lambda run: (run["name"], run.get("horizon", 1)))
    found = []
    for (name, horizon), group in groups.items():
        costs = [cost for run in group if (cost := budget.cost(run))]
        found.append(
            Candidate(
                name + f" × {horizon:g}" * (horizon != 1),
                tuple(group),
                float(np.median(costs)) if costs else None,
                {run["seed"]: final_loss(run) for run in group},
                group[0]["parameters"],
                group[0]["active_parameters"],
                group[0]["curve"][-1]["tokens"],
            )
        )
    left_out = len(runs) - sum(map(len, groups.values()))
    return found, [
        f"{left_out} of {len(runs)} runs are unfinished or have diverged."
    ] if left_out else []


def is_trained(run: dict) -> bool:
    if not run["curve"] or not run["is_finished"] or run["diverged"]:
        return False
    last = run["curve"][-1]
    return last["loss"] is not None and np.isfinite(final_loss(run)) and last["tokens"] > 0


def by_model(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Returns the candidates with a known cost, by model."""
    return grouped((one for one in candidates if one.cost is not None), lambda one: one.model)


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates, cheapest first, whose loss is below that of all that cost no more."""
    front: list[Candidate] = []
    for candidate in sorted(
        (one for one in candidates if one.cost is not None), key=lambda one: (one.cost, one.loss)
    ):
        if not front or candidate.loss < front[-1].loss:
            front.append(candidate)
    return front


# ------------------------------------------------------------------ training budgets
def at_training_budget(
    candidates: Sequence[Candidate], limit: float
) -> tuple[Candidate, Candidate] | None:
    """Returns (one model at the training budget `limit`, the trained candidate nearest to it), or
    None if too far.

    The model was trained with about this budget, or its losses are interpolated, linearly in the
    logarithm of the budget, between two candidates; of several such losses, the lowest is returned.
    """
    name = candidates[0].model
    found = [
        (dataclasses.replace(one, name=name), one)
        for one in candidates
        if one.cost <= WITHIN * limit and limit <= NEAR * one.cost
    ]
    for first, second in neighbors(candidates):
        seeds = first.losses.keys() & second.losses.keys()
        if seeds and first.cost < limit < second.cost <= MAX_GAP * first.cost:
            share = np.log(limit / first.cost) / np.log(second.cost / first.cost)
            nearest = second if share > 0.5 else first
            size, active, tokens = (
                float(getattr(first, field) ** (1 - share) * getattr(second, field) ** share)
                for field in ("parameters", "active_parameters", "tokens")
            )
            losses = {
                seed: float((1 - share) * first.losses[seed] + share * second.losses[seed])
                for seed in sorted(seeds)
            }
            found.append(
                (
                    Candidate(
                        name, nearest.runs, limit, losses, round(size), round(active), tokens
                    ),
                    nearest,
                )
            )
    return min(found, key=lambda pair: pair[0].loss, default=None)


def neighbors(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """Yields the pairs with no cost between theirs, of one size or of about the same tokens per
    active parameter.
    """
    groups: dict[tuple[str, float], list[Candidate]] = {}
    lowest = 0.0  # tokens per parameter of the group
    for one in sorted(candidates, key=tokens_per_parameter):
        lowest = (
            lowest if tokens_per_parameter(one) < SAME_RATIO * lowest else tokens_per_parameter(one)
        )
        groups.setdefault(("tokens per parameter", lowest), []).append(one)
        groups.setdefault(("parameters", one.parameters), []).append(one)
    for group in groups.values():
        yield from itertools.pairwise(sorted(group, key=lambda one: one.cost))


def tokens_per_parameter(candidate: Candidate) -> float:
    return candidate.tokens / candidate.active_parameters
