"""Aggregates of runs: means and quartiles over seeds, the ranking, and the config fields that runs
share.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smallgpt_jax.comparison import statistics
from smallgpt_jax.comparison.names import grouped
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.comparison.statistics import Difference
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.run.config import TrainConfig


def group_by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Returns {name: runs}; runs with the same name train the same model with different seeds."""
    return grouped(runs, lambda run: run.name)


@dataclasses.dataclass(frozen=True)
class Spread:
    mean: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float | None]) -> Spread | None:
    if not values or None in values:
        return None
    return Spread(float(np.mean(values)), min(values), max(values), len(values))


def quartiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """Returns the keys of `results.QUARTILES`; None if there is no value, or one is missing."""
    if not values or None in values:
        return None
    low, median, high = map(float, np.percentile(values, (25, 50, 75)))
    return {"median": median, "low": low, "high": high, "count": len(values)}


def final_spread(runs: Sequence[Run], field: str) -> Spread | None:
    """Returns the spread over the ends of the runs; None if their last steps differ or a value is
    missing.
    """
    if len({run.last and run.last.step for run in runs}) != 1 or not runs[0].last:
        return None
    return spread([run.final(field) for run in runs])


def last_losses(groups: Mapping[str, list[Run]]) -> dict[str, dict[int, float]]:
    """Returns {name: {seed: loss at the end}} of the models whose runs are all finished."""
    return {
        name: {run.seed: run.final("loss") for run in group}
        for name, group in groups.items()
        if all(run.is_finished for run in group) and final_spread(group, "loss")
    }


def common_seeds(losses: Mapping[str, Mapping[int, float]]) -> set[int]:
    return set.intersection(*map(set, losses.values())) if losses else set()


def mean_losses(groups: Mapping[str, list[Run]]) -> dict[str, float]:
    """Returns {name: mean loss at the end} in ascending order of the loss, or {} if the losses are
    not comparable.

    Runs with the same seed read the same batches, so the means are over the common seeds, if there
    are any.
    """
    losses = last_losses(groups)
    runs = [run for name in losses for run in groups[name]]
    if differ_in_targets(runs) or len(objectives_of(runs)) > 1:
        return {}
    seeds = common_seeds(losses)
    means = {
        name: float(np.mean([own[seed] for seed in seeds or own])) for name, own in losses.items()
    }
    return {name: means[name] for name in sorted(means, key=means.get)}


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The finished models in ascending order of their mean loss, with paired differences over
    seeds.

    The losses choose `neighbors` and `not_distinguishable`, so their p-values are corrected for all
    pairs of models.
    """

    means: dict[str, float]
    reference: str | None  # None if the reference is not finished
    against_reference: tuple[Difference, ...]  # each other model minus the reference
    neighbors: tuple[Difference, ...]  # each model minus the one before it in the ranking
    not_distinguishable: tuple[str, ...]  # from the first model; excludes it

    def verdict(self, name: str) -> Difference | None:
        return next((row for row in self.against_reference if row.name == name), None)


def rank(groups: Mapping[str, list[Run]], reference: str | None) -> Ranking:
    """Returns the ranking of the models whose runs are all finished; empty if their losses are not
    comparable.
    """
    losses, means = last_losses(groups), mean_losses(groups)
    if not means:
        return Ranking({}, None, (), (), ())
    order = list(means)
    reference = reference if reference in means else None
    to_reference = [(name, reference) for name in order if reference and name != reference]
    pairs = [(second, first) for first, second in itertools.combinations(order, 2)]
    by_pair = dict(zip(pairs, statistics.compare_pairs(losses, pairs)))
    return Ranking(
        means,
        reference,
        tuple(statistics.compare_pairs(losses, to_reference)),
        tuple(by_pair[second, first] for first, second in itertools.pairwise(order)),
        tuple(name for name in order[1:] if by_pair[name, order[0]].verdict != "higher"),
    )


def ranking_facts(ranking: Ranking) -> dict[str, Any]:
    def facts(differences: tuple[Difference, ...]) -> list[dict]:
        return [
            {**dataclasses.asdict(row), "verdict": row.verdict, "seeds_needed": row.seeds_needed}
            for row in differences
        ]

    return {
        "means": ranking.means,
        "not_distinguishable": list(ranking.not_distinguishable),
        "against_reference": facts(ranking.against_reference),
        "neighbors": facts(ranking.neighbors),
    }


def mean_curve(runs: Sequence[Run], axis: str) -> list[tuple[float, Spread]]:
    """Returns [(mean of `axis`, spread of the loss)] over seeds, with one pair per step.

    The steps are those at which all seeds were evaluated. Ignores evaluations with another number
    of targets than the run's last evaluation.
    """
    at = [
        {point.step: point for point in run.curve if point.targets == run.last.targets}
        for run in runs
    ]
    curve = []
    for step in sorted(set.intersection(*map(set, at))):
        losses, places = (
            spread([getattr(points[step], field) for points in at]) for field in ("loss", axis)
        )
        if losses and places:
            curve.append((places.mean, losses))
    return curve


def differ_in_targets(runs: Sequence[Run]) -> bool:
    """Whether the last losses are means over different rows: over numbers of targets that differ by
    over 1%.
    """
    targets = [run.last.targets for run in runs if run.last]
    return bool(targets) and max(targets) > 1.01 * min(targets)


def objectives_of(runs: Sequence[Run]) -> list[str]:
    """Returns the objectives, and "answers" for runs on prompts, whose targets are the answers in
    all objectives.
    """

    def objective(config: dict) -> str:
        is_text = config.get("data.format", DataConfig.format) == "text"
        return config.get("train.objective", TrainConfig.objective) if is_text else "answers"

    return sorted({objective(run.config) for run in runs})


def bits_by_context(runs: Sequence[Run], text: str) -> dict[int, Spread]:
    measured = grouped(
        (row for run in runs for row in run.texts if row["text"] == text),
        lambda row: row["context_length"],
    )
    return {
        length: bits
        for length, rows in sorted(measured.items())
        if (bits := spread([row["bits_per_byte"] for row in rows]))
    }


def answers(runs: Sequence[Run]) -> dict[str, Spread]:
    """Returns {measure of a probe's answers: its spread over the finished runs}."""
    last = [run.last.answers for run in runs if run.is_finished]
    return {
        measure: spread([found[measure] for found in last if measure in found])
        for measure in dict.fromkeys(measure for found in last for measure in found)
    }


def shared_fields(runs: Sequence[Run], fields: Sequence[str]) -> dict[str, Any]:
    first, *others = (run.config for run in runs)
    return {
        field: first.get(field)
        for field in fields
        if all(repr(other.get(field)) == repr(first.get(field)) for other in others)
    }


def different_fields(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Returns {field: {run name: value}} for the fields in which the runs differ, except the
    seed.
    """
    groups = group_by_name(runs)
    fields = dict.fromkeys(field for run in runs for field in run.config)
    table = {
        field: {name: group[0].config.get(field) for name, group in groups.items()}
        for field in fields
    }
    return {
        field: values
        for field, values in table.items()
        if field != "train.seed" and len(set(map(repr, values.values()))) > 1
    }
