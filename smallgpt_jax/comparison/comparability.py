"""Refuses runs that cannot be compared: of other texts, validation rows or configs."""

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax import models
from smallgpt_jax.analysis.record import Run, TextLoss, TrainingText
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.errors import UserError
from smallgpt_jax.run import training_text
from smallgpt_jax.run.config import GROUPS, Config, unflatten

# The config fields that determine the validation rows.
_ROWS = ("model.context_length", "data.packing", "data.separate_documents")


def require_comparable(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Returns the runs. Raises UserError if one is listed twice, or if their texts differ."""
    first_of: dict[tuple, Run] = {}
    first_row_of: dict[str, tuple[TextLoss, Run]] = {}  # {name of a measured text: …}
    for run in runs:
        other = first_of.setdefault((run.name, run.seed, run.horizon), run)
        if other is not run:
            raise UserError(
                f"{other.workdir} and {run.workdir}: same config and seed; list the run once"
            )
        _require_same_text(f"{runs[0].workdir} and {run.workdir}", runs[0], run)
        for row in run.texts:
            first_row, other = first_row_of.setdefault(row.text, (row, run))
            if row.fingerprint != first_row.fingerprint:
                raise UserError(
                    f"{other.workdir} and {run.workdir}: the texts named {row.text!r} differ "
                    f"({first_row.source!r} and {row.source!r}); measure both runs on the same "
                    "text, or use different names in config.compare.texts"
                )
    return runs


def _require_same_text(where: str, one: Run, other: Run) -> None:
    """Raises UserError, beginning with `where`, if the training texts differ."""
    changes = text_changes(one.text, other.text)
    if changes:
        raise UserError(
            f"{where}: cannot be compared, since their texts differ ({changes}); report on them "
            "separately"
        )


def text_changes(one: TrainingText | None, other: TrainingText | None) -> str:
    """Returns how two training texts differ, or "" if the tokens are the same."""
    if one is None or other is None:
        return "" if one is other else "one is unknown"
    return training_text.text_changes(vars(one), vars(other))


def require_mergeable(where: str, runs: Sequence[Run], others: Sequence[Run]) -> None:
    """Raises UserError, beginning with `where`, if runs of two records cannot be compared."""
    # Each with each, because those of one record may have different rows: a record of --workdirs may.
    for one, other in itertools.product(_differently_measured(runs), _differently_measured(others)):
        _require_same_measure(where, one, other)
    others_of: dict[tuple[str, float], list[Run]] = {}
    for other in others:
        others_of.setdefault((other.name, other.horizon), []).append(other)
    for one in runs:
        for other in others_of.get((one.name, one.horizon), ()):
            _require_same_run(where, one, other)


def _differently_measured(runs: Sequence[Run]) -> list[Run]:
    """Returns the first run of each text, set of evaluation rows, and number of averaged losses."""
    first_of: dict[str, Run] = {}
    for run in runs:
        rows = _evaluation_rows(run) if run.last else None
        first_of.setdefault(repr((run.text, rows, run.averaged)), run)
    return list(first_of.values())


def _require_same_measure(where: str, one: Run, other: Run) -> None:
    """Raises UserError, beginning with `where`, if the losses are not those of the same tokens."""
    _require_same_text(where, one, other)
    if one.last and other.last:
        differences = different(_evaluation_rows(one), _evaluation_rows(other))
        if differences:
            raise UserError(
                f"{where}: the losses are means over different rows ({differences}); evaluate the "
                "runs on the same rows"
            )
    if one.averaged != other.averaged:
        raise UserError(
            f"{where}: the losses are means over {one.averaged} and {other.averaged} evaluations; "
            "use the same config.compare.averaged_evaluations"
        )


def _require_same_run(where: str, one: Run, other: Run) -> None:
    """Raises UserError, beginning with `where`, if runs of one name differ in more than their seed."""
    differences = different(
        fixed_fields_with_defaults(one.config), fixed_fields_with_defaults(other.config)
    )
    if differences:
        raise UserError(
            f"{where}: both contain {one.name!r}, with different configs ({differences}); give "
            "the runs different names"
        )
    if one.seed == other.seed and _losses(one) != _losses(other):
        raise UserError(
            f"{where}: both contain {one.name!r} with seed {one.seed}, with different losses; "
            "train each seed on one machine"
        )


def _losses(run: Run) -> list[tuple]:
    return [(point.step, point.loss) for point in run.curve]


def _evaluation_rows(run: Run) -> dict[str, Any]:
    """Returns what fixes the rows of the last evaluation, beside the text."""
    fields = {f"config.{field}": run.config.get(field) for field in _ROWS}
    return {**fields, "targets": run.last.targets}


def fixed_fields_with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Returns `fixed_fields`, with defaults for fields that are newer than the run."""
    return fixed_fields(_completed(config))


def fixed_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config fields that determine the results of a run, except the seed and its text's
    source.
    """
    others = _other_fields()
    return {
        field: value
        for field, value in sorted(config.items())
        if field not in others and not field.startswith("mesh.")  # a mesh only changes rounding
    }


@functools.cache
def _other_fields() -> set[str]:
    """Returns the fields that may differ between seeds of a name, or change when a run is resumed."""
    # The content of the text is compared by its fingerprints, wherever it is.
    others = {"train.seed", "data.store", "data.mixture"}
    others |= {f"data.{name}" for name in DataConfig.field_names(in_store=True)}
    for name, group in GROUPS.items():
        others |= {f"{name}.{field}" for field in group.field_names(fixed_by=None)}
    others.discard("train.steps")  # may change on resumption, but then the run has other results
    return others


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields as JSON stores them, and defaults of others, if these are known."""
    groups = unflatten(config)
    try:
        models.refuse_custom_code(groups["model"], Path(), trust=False)
        config = Config.of(groups).flat()
    except UserError:
        pass  # code that is not imported, or a field that no longer exists: no defaults are known
    return json.loads(json.dumps(config))


def different(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns text about the first three fields that differ, or ""."""
    texts = []
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            texts.append(f"{name} {one.get(name)!r} and {other.get(name)!r}")
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more
