"""The loss to expect of a training, by the law of one of a record's models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.analysis import laws, record
from smallgpt_jax.analysis.laws import LawPoint
from smallgpt_jax.analysis.record import Run, grouped
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.planning.plan import Plan
from smallgpt_jax.run.config import Config

_TEXT_AND_TRAINING = (
    "data.source",
    "data.tokenizer",
    "data.mixture",
    "data.packing",
    "data.separate_documents",
    "train.objective",
    "optimizer.name",
)
# The interval of a law is its error one size beyond the sizes that it was fitted to.
_FARTHEST = 3.0  # ratio of parameters or tokens to those of the runs


def expected_loss_message(results: str | None, planned: Plan) -> str:
    """Returns the loss with an interval, or why it is not known. `results` is the path of a record."""
    if results is None:
        return "expected loss: not known; --results=results.json of a comparison of sizes may tell"
    runs = record.read(Path(results)).runs
    if not runs:
        return f"expected loss: not known; {results} has no runs"
    model, differences = _closest_model(runs, planned.config)
    if differences:
        field, value = next(iter(differences.items()))
        return (
            f"expected loss: not known; {model} of {results} has config.{field}="
            f"{short_repr(value)}, not {short_repr(_flat(planned.config)[field])}"
        )
    train, context_length = planned.config.train, planned.config.model.context_length
    tokens = train.steps * train.batch_size * context_length
    point = LawPoint(model, "", planned.estimate.parameters, tokens)
    points = laws.law_points(runs)
    reason = _out_of_reach([one for one in points if one.model == model], point)
    if reason:
        return f"expected loss: not known; {results} {reason}"
    (predicted,) = laws.predict(points, [point]).losses
    return (
        f"expected loss: {predicted.loss:.3f}, {laws.INTERVAL:.0%} interval {predicted.low:.3f} to "
        f"{predicted.high:.3f} (law of {model} in {results})"
    )


def _closest_model(runs: Sequence[Run], config: Config) -> tuple[str, dict[str, Any]]:
    """Returns the model of a record with the fewest differences, and these, {field: its value}."""
    # Fields that differ between the runs of a model, such as its width, belong to its sizes.
    wanted = _flat(config)
    model_fields = [f"model.{name}" for name in config.model.field_names(fixed_by="model")]
    differences = {}
    for model, of_model in grouped(runs, lambda run: run.model).items():
        common = _common_fields(of_model)
        compared = [field for field in (*model_fields, *_TEXT_AND_TRAINING) if field in common]
        differences[model] = {
            field: common[field] for field in compared if common[field] != wanted[field]
        }
    return min(differences.items(), key=lambda item: len(item[1]))


def _common_fields(runs: list[Run]) -> dict[str, Any]:
    """Returns the fields that have the same value in all runs."""
    common = {}
    for field, value in runs[0].config.items():
        if all(run.config.get(field) == value for run in runs):
            common[field] = value
    return common


def _flat(config: Config) -> dict[str, Any]:
    """Returns {"group.field": value}, with lists as in a record."""
    flat = config.flat().items()
    return {field: list(value) if isinstance(value, tuple) else value for field, value in flat}


def _out_of_reach(points: Sequence[LawPoint], point: LawPoint) -> str:
    """Returns why a law of one model's points tells nothing of another point; "" if it does."""
    lack = laws.missing_for_law(points)
    if lack:
        return f"has too few {lack} of {point.model}"
    for name in ("parameters", "tokens"):
        wanted = getattr(point, name)
        known = [getattr(one, name) for one in points]
        if not min(known) / _FARTHEST <= wanted <= max(known) * _FARTHEST:
            return (
                f"has runs of {point.model} with {min(known):,.0f} to {max(known):,.0f} {name}, too "
                f"far from {wanted:,.0f}"
            )
    return ""
