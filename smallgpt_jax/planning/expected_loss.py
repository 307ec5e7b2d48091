"""The loss to expect of a training, by the law of one of a record's models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
# {field that the rule of sizes sets: ratio up to which a law holds for another value of it}. Losses
# depend little on them at equal parameters (Kaplan et al., arXiv 2001.08361, figure 5).
_NEAR = {"model.num_heads": 2.0, "model.num_kv_heads": 2.0, "model.mlp_ratio": 1.3}


def expected_loss_message(results: str | None, planned: Plan) -> str:
    """Returns the loss with an interval, or why it is not known. `results` is the path of a record."""
    if results is None:
        return "expected loss: not known; --results=results.json of a comparison of sizes may tell"
    if planned.config.data.packing == "best_fit":
        return (
            "expected loss: not known; how much padding config.data.packing='best_fit' leaves in the "
            "batches is known only when the text is packed"
        )
    runs = record.read(Path(results)).runs
    if not runs:
        return f"expected loss: not known; {results} has no runs"
    model, near, far = _closest_model(runs, planned.config)
    if far:
        differences = "; ".join([*far, *near])
        return f"expected loss: not known; {model} of {results} has {differences}"
    tokens = planned.config.train.steps * planned.config.inputs_per_step
    point = LawPoint(model, "", planned.estimate.parameters, tokens)
    points = laws.law_points(runs)
    reason = _out_of_reach([one for one in points if one.model == model], point)
    if reason:
        return f"expected loss: not known; {results} {reason}"
    (predicted,) = laws.predict(points, [point]).losses
    message = (
        f"expected loss: {predicted.loss:.3f}, {laws.INTERVAL:.0%} interval {predicted.low:.3f} to "
        f"{predicted.high:.3f} (law of {model} in {results}"
    )
    if near:
        message += f", which has {'; '.join(near)}: the interval does not allow for that"
    return f"{message})"


class _Closest(NamedTuple):
    model: str
    # Differences, such as "config.model.num_heads=2, not 4": those for which its law holds, and others.
    near: list[str]
    far: list[str]


def _closest_model(runs: Sequence[Run], config: Config) -> _Closest:
    """Returns the model of a record's runs with the fewest differences. Fields that differ between
    the runs of a model, such as its width, belong to its sizes.
    """
    wanted = _flat(config)
    model_fields = [f"model.{name}" for name in config.model.field_names(fixed_by="model")]
    closest = []
    for model, of_model in grouped(runs, lambda run: run.model).items():
        common = _common_fields(of_model)
        near, far = [], []
        for field in (*model_fields, *_TEXT_AND_TRAINING):
            if field not in common or common[field] == wanted[field]:
                continue
            ours, theirs = _shown(wanted[field]), _shown(common[field])
            differences = near if _is_near(field, common, wanted) else far
            differences.append(f"config.{field}={theirs}, not {ours}")
        closest.append(_Closest(model, near, far))
    return min(closest, key=lambda one: (len(one.far), len(one.near)))


def _is_near(field: str, common: dict[str, Any], wanted: dict[str, Any]) -> bool:
    if field not in _NEAR:
        return False
    # num_kv_heads=0 stands for all heads.
    low, high = sorted(
        fields[field] or fields.get("model.num_heads", 0) for fields in (common, wanted)
    )
    return high <= _NEAR[field] * low


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else short_repr(value)


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
