"""The order of models by their last losses, and what it proves."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from smallgpt_jax.comparison import aggregation, statistics
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.comparison.statistics import MAX_SEEDS, Difference

COMPUTE_OPTIMAL = 20  # tokens per parameter (Hoffmann et al., arXiv 2203.15556)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The finished models in ascending order of their mean loss, with paired differences over seeds.

    The losses choose `neighbors` and `not_distinguishable`, so their p-values are corrected for all pairs of models.
    """

    means: dict[str, float]
    reference: str | None  # None if the reference is not finished
    against_reference: tuple[Difference, ...]  # each other model minus the reference
    neighbors: tuple[Difference, ...]  # each model minus the one before it in the ranking
    not_distinguishable: tuple[str, ...]  # from the first model; excludes it

    def verdict(self, name: str) -> Difference | None:
        return next((row for row in self.against_reference if row.name == name), None)


def rank(groups: Mapping[str, list[Run]], reference: str | None) -> Ranking:
    """Returns the ranking of the models whose runs are all finished; empty if their losses are not comparable."""
    losses, means = aggregation.last_losses(groups), aggregation.mean_losses(groups)
    if not means:
        return Ranking({}, None, (), (), ())
    order = list(means)
    reference = reference if reference in means else None
    to_reference = [(name, reference) for name in order if reference and name != reference]
    pairs = [(second, first) for first, second in itertools.combinations(order, 2)]
    by_pair = dict(zip(pairs, statistics.compare_pairs(losses, pairs)))
    return Ranking(
        means, reference, tuple(statistics.compare_pairs(losses, to_reference)),
        tuple(by_pair[second, first] for first, second in itertools.pairwise(order)),
        tuple(name for name in order[1:] if by_pair[name, order[0]].verdict != "higher"))


def conclusion(groups: Mapping[str, list[Run]], ranking: Ranking) -> str:
    if len(aggregation.last_losses(groups)) < 2:
        return "Fewer than two runs are finished: no ranking."
    if not ranking.means:
        return "The losses of the finished runs are means over different rows, or of different objectives: no ranking."
    first, second, *others = ranking.means
    text = (f"Lowest validation loss: {first}, {ranking.means[first]:.4f}; then {second}, "
            f"{ranking.means[second]:.4f}. ")
    difference = ranking.neighbors[0]
    if difference.p_value is None:
        count = "one common seed" if difference.seeds == 1 else "no common seed"
        return text + f"With {count}, there is no interval: the order may be chance."
    text += (f"{second} minus {first}: {format_difference(difference)} (95% interval over {difference.seeds} seeds), "
             f"{difference.verdict}" + needed_text(difference) + ".")
    if not others:
        return text
    if not ranking.not_distinguishable:
        return text + f" {first} is lower than every other run."
    higher = [name for name in (second, *others) if name not in ranking.not_distinguishable]
    return (text + f" Not distinguishable from {first}: {', '.join(ranking.not_distinguishable)}."
            + (f" Higher: {', '.join(higher)}." if higher else ""))


def evidence(groups: Mapping[str, list[Run]]) -> str:
    """Returns text about the tokens per run and per parameter: the order of short runs proves little."""
    trained = [(run.last.tokens, run.active_parameters) for group in groups.values() for run in group if run.last]
    if not trained:
        return "No evidence: no run was evaluated."
    tokens, per_parameter = min(tokens for tokens, _ in trained), min(tokens / size for tokens, size in trained)
    text = f"vidence: at least {tokens:,} tokens per run and {per_parameter:.2g} tokens per parameter."
    if is_short := per_parameter < COMPUTE_OPTIMAL:
        text += (f" About {COMPUTE_OPTIMAL} per parameter are compute-optimal (Hoffmann et al., arXiv 2203.15556); "
                 "after longer training, the order may be different.")
    losses = aggregation.last_losses(groups)
    is_single = len(losses) > 1 and len(aggregation.common_seeds(losses)) < 2
    return ("Little e" if is_short or is_single else "E") + text


def format_difference(difference: Difference) -> str:
    return f"{difference.mean:+.4f} ± {difference.half_width:.4f}"


def needed_text(difference: Difference) -> str:
    """Returns a suffix about the seeds that would decide, or "" if the verdict is lower or higher."""
    if difference.verdict != "not distinguishable":
        return ""
    if difference.seeds_needed is None:
        return f"; more than {MAX_SEEDS:,} seeds would be needed to decide"
    return f"; about {difference.seeds_needed:,} seeds would decide"


def ranking_facts(ranking: Ranking) -> dict[str, Any]:
    def facts(differences: tuple[Difference, ...]) -> list[dict]:
        return [{**dataclasses.asdict(row), "verdict": row.verdict, "seeds_needed": row.seeds_needed}
                for row in differences]

    return {"means": ranking.means, "not_distinguishable": list(ranking.not_distinguishable),
            "against_reference": facts(ranking.against_reference), "neighbors": facts(ranking.neighbors)}
