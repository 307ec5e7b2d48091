"""Predictions of held-out runs by the scaling laws of the other runs, and how they are stored."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.comparison import scaling
from smallgpt_jax.comparison.candidates import final_loss, read_candidates
from smallgpt_jax.comparison.costs import BUDGETS
from smallgpt_jax.comparison.names import grouped, model_of
from smallgpt_jax.comparison.results import Run
from smallgpt_jax.comparison.scaling import Prediction, Record
from smallgpt_jax.storage.json_files import (
    LOSS,
    OBJECT,
    POSITIVE,
    TEXT,
    Each,
    integer,
    one_of,
    read_json,
)

PREDICTIONS_FILE = "predictions.json"  # in a comparison's folder
FORMAT = 1
EMBEDDINGS = ("token embedding", "position embedding")
LAW = {"constants": Each(LOSS), "intervals": Each([LOSS])}
PREDICTION = {
    "name": TEXT,
    "size": POSITIVE,
    "tokens": POSITIVE,
    "loss": LOSS,
    "low": LOSS,
    "high": LOSS,
}
PREDICTIONS = {
    "format": one_of(FORMAT),
    "time": TEXT,
    "command": TEXT,
    "held_out": TEXT,
    "interval": POSITIVE,
    "draws": integer(1),
    "records_sha256": TEXT,
    "records": [OBJECT],
    "at_one_size": Each(LOSS),
    "laws": Each(Each(LAW)),
    "predictions": Each([PREDICTION]),
    "not_predicted": Each(TEXT),
}


def records_of(runs: Sequence[Run]) -> list[Record]:
    """Returns the last loss of each finished run whose FLOPs are known. Earlier ones follow no law:
    the rate decays.
    """
    found = []
    candidates, _ = read_candidates([dataclasses.asdict(run) for run in runs], BUDGETS["flops"])
    for run in itertools.chain.from_iterable(candidate.runs for candidate in candidates):
        last, embeddings = (
            run["curve"][-1],
            sum(run["components"].get(name, 0) for name in EMBEDDINGS),
        )
        if last["flops"] is not None:
            found.append(
                Record(
                    model_of(run["name"]),
                    f"{run['run'] or run['workdir']} {run['name']} {run['seed']}",
                    run["seed"],
                    run["parameters"],
                    run["parameters"] - embeddings,
                    run["active_parameters"],
                    last["tokens"],
                    last["flops"],
                    final_loss(run),
                )
            )
    return found


def read(path: Path) -> dict[str, Any] | None:
    """Returns the content of predictions.json, or None if there is none."""
    return (
        read_json(path, PREDICTIONS, "restore it; predictions are made only once")
        if path.exists()
        else None
    )


def predictions_of(content: Mapping[str, Any] | None, size: str = "parameters") -> list[Prediction]:
    rows = content["predictions"].get(size, ()) if content else ()
    return [Prediction(**{name: row[name] for name in PREDICTION}) for row in rows]


def predict(records: Sequence[Record], held_out: Sequence[Record]) -> dict[str, Any]:
    """Returns the laws of all models that have enough records, and their predictions of the
    held-out runs.
    """
    groups, planned = (grouped(rows, lambda row: row.name) for rows in (records, held_out))
    missing = {name: scaling.missing_for_fit(groups.get(name, [])) for name in planned}
    fields = [
        field
        for field in ("parameters", "active_parameters")
        if field == "parameters"
        or any(record.active_parameters != record.parameters for record in records)
    ]
    fits = {
        field: [scaling.fit(groups[name], field) for name in planned if not missing[name]]
        for field in fields
    }
    rows = [dataclasses.asdict(record) for record in records]
    return {
        "format": FORMAT,
        "interval": scaling.INTERVAL,
        "draws": scaling.DRAWS,
        "not_predicted": {name: f"needs {lack}" for name, lack in missing.items() if lack},
        "laws": {
            field: {fitted.name: law_facts(fitted) for fitted in found}
            for field, found in fits.items()
        },
        "predictions": {
            field: [
                dataclasses.asdict(row)
                for fitted in found
                for row in scaling.predict_runs(fitted, planned[fitted.name])
            ]
            for field, found in fits.items()
        },
        "at_one_size": {
            fitted.name: scaling.loss_of_largest(fitted.records) for fitted in fits["parameters"]
        },
        "records_sha256": hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest(),
        "records": rows,
    }


def law_facts(fitted: scaling.Fit) -> dict[str, Any]:
    return {
        "constants": {name: float(value) for name, value in fitted.law._asdict().items()},
        "intervals": {
            name: list(map(float, pair)) for name, pair in scaling.intervals(fitted).items()
        },
    }
