"""The record of a comparison, results.json: what a report is made of, without the workdirs of the
runs.

docs/comparison.md documents the fields. A change of their meaning increases RESULTS_FORMAT.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallgpt_jax import models
from smallgpt_jax.comparison import aggregation, prediction, results
from smallgpt_jax.comparison.learning_rates import Grid
from smallgpt_jax.comparison.names import RESULTS_FORMAT, grouped, model_of, size_of
from smallgpt_jax.comparison.results import Point, Run
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.corpus import DESCRIPTION
from smallgpt_jax.diagnosis.summary import SUMMARY
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.sessions import SESSION
from smallgpt_jax.run.training_text import text_changes
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import (
    ARRAY,
    BOOLEAN,
    NULL,
    NUMBER,
    POSITIVE,
    TEXT,
    Each,
    Optional,
    integer,
    one_of,
    printable_values,
    read_json,
)

POINT = {
    "step": integer(0),
    "tokens": integer(0),
    "flops": (NULL, NUMBER),
    "seconds": (NULL, NUMBER),
    "loss": (NULL, NUMBER),
    "bits_per_byte": (NULL, NUMBER),
    "targets": integer(1),
    "answers": Optional(Each(NUMBER)),
}
RUN = {
    "name": TEXT,
    "workdir": TEXT,
    "seed": integer(0),
    "config": {"train.steps": integer(1), "model.context_length": integer(1)},
    "text": {"description": DESCRIPTION, "tokenizer": TEXT},
    "is_finished": BOOLEAN,
    "diverged": BOOLEAN,
    "is_imported": BOOLEAN,
    "steps_done": integer(0),
    "parameters": integer(1),
    "active_parameters": integer(1),
    "components": Each(integer(0)),
    "flops_per_token": (NULL, NUMBER),
    "tokens_per_step": POSITIVE,
    "curve": [POINT],
    "averaged": integer(1),
    "tokens_per_second": (NULL, POSITIVE),
    "memory_bytes": (NULL, integer(0)),
    "sessions": [SESSION],
    "expert_load": (NULL, Each(ARRAY)),
    "texts": results.TEXTS,
    "benchmarks": Each(NUMBER),
    "uncounted": (NULL, NUMBER),
    "flops_problem": TEXT,
    "weight_bytes": Optional((NULL, integer(0))),
    "inference": Optional((NULL, results.INFERENCE)),
    "inside": Optional((NULL, SUMMARY)),
    "horizon": Optional(POSITIVE),
    "run": Optional(TEXT),
}
GRID = {
    "seed": integer(0),
    "learning_rate": POSITIVE,
    "rates": [{"multiple": POSITIVE, "loss": (NULL, NUMBER), "diverged": BOOLEAN}],
}
RECORD = {
    "format": one_of(RESULTS_FORMAT),
    "title": TEXT,
    "budget": TEXT,
    "command": TEXT,
    "reference": TEXT,
    "learning_rates": Optional(Each(GRID)),
    "held_out": Optional(TEXT),
    "predictions": Optional(prediction.PREDICTIONS),
    "runs": [RUN],
}


@dataclasses.dataclass(frozen=True)
class Record:
    title: str
    budget: str  # a sentence about the budget of the runs
    command: str  # the command that repeats the comparison
    reference: str  # name of the run that the others are compared with
    runs: tuple[Run, ...]  # with grids, the runs at the best learning rates
    grids: dict[str, Grid] = dataclasses.field(default_factory=dict)
    held_out: str = ""  # SIZE of the held-out runs, which are named MODEL@SIZE
    predictions: dict[str, Any] | None = (
        None  # of these runs, before they were trained: predictions.json
    )

    @property
    def full_runs(self) -> tuple[Run, ...]:
        """The runs of horizon 1, which are ranked."""
        return tuple(run for run in self.runs if run.horizon == 1)


def write(record: Record, path: Path) -> None:
    write_atomically(path, json.dumps(content(record), indent=1) + "\n")


def content(record: Record) -> dict[str, Any]:
    ranked = at_one_size(record)
    groups = aggregation.group_by_name(ranked.full_runs)
    return {
        "format": RESULTS_FORMAT,
        "title": record.title,
        "budget": record.budget,
        "command": record.command,
        "reference": record.reference,
        **(
            {"learning_rates": {name: grid_facts(grid) for name, grid in record.grids.items()}}
            if record.grids
            else {}
        ),
        **({"held_out": record.held_out} if record.held_out else {}),
        **({"predictions": record.predictions} if record.predictions else {}),
        "ranking": aggregation.ranking_facts(aggregation.rank(groups, ranked.reference)),
        "runs": [dataclasses.asdict(run) for run in record.runs],
    }


def at_one_size(record: Record) -> Record:
    """Returns the record of the runs to rank: of several sizes, those of the largest one that all
    models have.
    """
    if not is_scaling(record.runs):
        return record
    size = largest_common_size(record.runs)
    return dataclasses.replace(
        record,
        reference=f"{model_of(record.reference)}@{size}",
        runs=tuple(run for run in record.runs if size_of(run.name) == size),
    )


def is_scaling(runs: Sequence[Run]) -> bool:
    """Whether a model was trained at several sizes: its runs are named MODEL@SIZE."""
    names = {run.name for run in runs}
    return len(set(map(model_of, names))) < len(names)


def largest_common_size(runs: Sequence[Run]) -> str:
    """Returns the largest SIZE at which all models have finished runs; if there is none, the one
    with most models.
    """
    groups = grouped((run for run in runs if run.is_finished), lambda run: size_of(run.name))
    return max(
        groups,
        default=size_of(runs[0].name),
        key=lambda size: (
            len({run.name for run in groups[size]}),
            np.mean([run.active_parameters for run in groups[size]]),
        ),
    )


def grid_facts(grid: Grid) -> dict[str, Any]:
    """Returns the content of a grid. The loss of a diverged run is None, which JSON writes as
    null.
    """
    return {
        "seed": grid.seed,
        "learning_rate": grid.learning_rate,
        "best": None if grid.has_diverged else grid.best,
        "edge": grid.edge,
        "minimum": grid.minimum and {**grid.minimum._asdict(), "rise": grid.minimum.rise},
        "rates": [
            {
                "multiple": multiple,
                "learning_rate": multiple * grid.learning_rate,
                "loss": None if loss == math.inf else loss,
                "diverged": loss == math.inf,
            }
            for multiple, loss in grid.losses.items()
        ],
    }


def read(path: Path) -> Record:
    content = read_json(
        path,
        RECORD,
        f"expected a results.json of format {RESULTS_FORMAT}; repeat the comparison's "
        "command where its runs are",
    )
    # Values of configs and texts stay as they are, because they are compared.
    runs = [
        {**printable_values(run), "config": run["config"], "text": run["text"]}
        for run in content["runs"]
    ]
    content = printable_values({**content, "runs": []})
    return Record(
        content["title"],
        content["budget"],
        content["command"],
        content["reference"],
        tuple(map(read_recorded_run, runs)),
        {
            name: Grid(
                grid["seed"],
                grid["learning_rate"],
                {
                    float(rate["multiple"]): math.inf if rate["diverged"] else rate["loss"]
                    for rate in sorted(grid["rates"], key=lambda rate: rate["multiple"])
                },
            )
            for name, grid in content.get("learning_rates", {}).items()
            if grid["rates"]
        },
        content.get("held_out", ""),
        content.get("predictions"),
    )


def read_recorded_run(fields: dict[str, Any]) -> Run:
    values = {
        field.name: fields[field.name] for field in dataclasses.fields(Run) if field.name in fields
    }
    points = tuple(
        Point(**{name: point[name] for name in POINT if name in point}) for point in fields["curve"]
    )
    return Run(
        **{
            **values,
            "curve": points,
            "sessions": tuple(fields["sessions"]),
            "texts": tuple(fields["texts"]),
        }
    )


def merge(records: Sequence[tuple[Path, Record]], command: str) -> Record:
    """Returns one record of the runs of several.

    Raises UserError if runs of different records cannot be compared: other texts, evaluation rows
    or averages, or different runs with the same name. A run that is in several records counts once.
    """
    merged: dict[tuple[str, int, float], tuple[Path, Run]] = {}
    for path, record in records:
        for run in record.runs:
            for other_path, other in merged.values():
                if other_path != path:
                    require_mergeable(f"{other_path} and {path}", other, run)
            merged.setdefault((run.name, run.seed, run.horizon), (path, run))
    runs = tuple(
        sorted((run for _, run in merged.values()), key=lambda run: run.seed)
    )  # as `compare` trains them
    results.require_comparable(runs)
    grids: dict[str, Grid] = {}
    for _, record in records:
        for (
            name,
            grid,
        ) in record.grids.items():  # keeps a name's first grid, or one that the report must warn of
            if name not in grids or (name, grid.seed, 1.0) in merged:
                grids[name] = grid
    names, (_, first) = dict.fromkeys(run.name for run in runs), records[0]
    budgets = dict.fromkeys(record.budget for _, record in records)
    title = (
        first.title if len(records) == 1 else f"{len(names)} models, from {len(records)} records"
    )
    return Record(
        title,
        " ".join(budgets),
        command,
        first.reference,
        runs,
        {name: grids[name] for name in (*names, *grids) if name in grids},
        next((record.held_out for _, record in records if record.held_out), ""),
        min(
            (record.predictions for _, record in records if record.predictions),
            key=lambda predictions: predictions["time"],
            default=None,
        ),
    )


def require_mergeable(where: str, one: Run, other: Run) -> None:
    if changes := text_changes(one.text, other.text):
        raise UserError(
            f"{where}: cannot be compared, since their texts differ ({changes}); report on them "
            "separately"
        )
    if (
        one.last
        and other.last
        and (differences := different(one.evaluation_rows, other.evaluation_rows))
    ):
        raise UserError(
            f"{where}: the losses are means over different rows ({differences}); evaluate the "
            "runs on the same rows"
        )
    if one.averaged != other.averaged:
        raise UserError(
            f"{where}: the losses are means over {one.averaged} and {other.averaged} evaluations; "
            "use the same config.compare.averaged_evaluations"
        )
    if (one.name, one.horizon) != (other.name, other.horizon):
        return
    if differences := different(fixed_fields(one.config), fixed_fields(other.config)):
        raise UserError(
            f"{where}: both contain {one.name!r}, with different configs ({differences}); give "
            "the runs different names"
        )
    if one.seed == other.seed and [(point.step, point.loss) for point in one.curve] != [
        (point.step, point.loss) for point in other.curve
    ]:
        raise UserError(
            f"{where}: both contain {one.name!r} with seed {one.seed}, with different losses; "
            "train each seed on one machine"
        )


def fixed_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config fields that determine the results of a run, except the seed and its text's
    source.

    Fields that are newer than the run have their defaults. Values are as JSON stores them.
    """
    others = {
        f"{name}.{field}" for name, group in GROUPS.items() for field in group.names(fixed_by=None)
    }
    others |= {
        f"data.{name}" for name in (*DataConfig.names(in_store=True), "store", "mixture")
    } | {"train.seed"}
    return {
        field: value
        for field, value in sorted(completed(config).items())
        if field == "train.steps" or not (field in others or field.startswith("mesh."))
    }


def completed(config: dict[str, Any]) -> dict[str, Any]:
    groups: dict[str, dict] = {}
    for path, value in config.items():
        group, _, field = path.partition(".")
        groups.setdefault(group, {})[field] = value
    try:
        models.refuse_custom_code(groups["model"], Path(), trust=False)
        config = Config.of(groups).flat()
    except (
        UserError
    ):  # code that is not imported, or a field that no longer exists: the defaults are unknown
        pass
    return json.loads(json.dumps(config))


def different(one: dict[str, Any], other: dict[str, Any]) -> str:
    found = [
        f"{name} {one.get(name)!r} and {other.get(name)!r}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
