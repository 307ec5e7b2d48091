"""Writes predictions.json once: after all other runs are finished, and before the first held-out
run starts.
"""

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path

from smallgpt_jax.comparison import budget, prediction, scaling
from smallgpt_jax.comparison.names import grouped, model_of
from smallgpt_jax.comparison.parameters import num_active_parameters, num_parameters
from smallgpt_jax.comparison.prediction import PREDICTIONS_FILE
from smallgpt_jax.comparison.runs import RUNS_FOLDER, Comparison, PlannedRun
from smallgpt_jax.comparison.scaling import Record
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.run.names import CONFIG_FILE, LOCK_FILE
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.locks import file_lock


def write_predictions(comparison: Comparison, losses: Mapping[Path, float], command: str) -> None:
    """Writes predictions.json from the finished runs, unless it exists or a held-out run has
    started.

    Predictions in a record are kept. Of several processes that call this, one writes.
    """
    path = comparison.output / PREDICTIONS_FILE
    comparison.output.mkdir(
        parents=True, exist_ok=True
    )  # missing if all other runs are in a record
    with file_lock(comparison.output / LOCK_FILE, wait=True):
        if path.exists():
            return
        planned = comparison.runs_at_best(losses)
        if comparison.recorded and comparison.recorded.predictions:
            write_atomically(path, json.dumps(comparison.recorded.predictions, indent=1) + "\n")
        elif started := started_held_out(comparison):
            print(
                f"{started}: has started without {PREDICTIONS_FILE}; no predictions are made",
                flush=True,
            )
        elif held_out := [run for run in planned if run.is_held_out]:
            records = prediction.records_of(
                [comparison.result(run) for run in planned if not run.is_held_out]
            )
            content = prediction.predict(records, list(map(planned_record, held_out)))
            content |= {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "command": command,
                "held_out": comparison.held_out,
            }
            write_atomically(path, json.dumps(content, indent=1) + "\n")
            print(f"{path}: predictions of {len(held_out)} held-out runs", flush=True)


def started_held_out(comparison: Comparison) -> str | Path | None:
    """Returns a held-out run that has started here, at any learning rate and seed, or that is in a
    record.
    """
    for run in comparison.recorded.runs if comparison.recorded else ():
        if run.name in comparison.held_out_names:
            return f"{run.name}, seed {run.seed}"
    folders = (
        folder
        for name in comparison.held_out_names
        for folder in sorted((comparison.output / RUNS_FOLDER).glob(f"{safe_name(name)}-*"))
    )
    return next((folder for folder in folders if (folder / CONFIG_FILE).exists()), None)


def planned_record(run: PlannedRun) -> Record:
    """Returns the record of a run before it is trained: without a loss, and without FLOPs, which
    are not needed.
    """
    parameters, active = num_parameters(run.config), num_active_parameters(run.config)
    tokens = round(run.config.train.steps * budget.tokens_per_step(run.config))
    return Record(
        model_of(run.name),
        f"{run.name} {run.config.train.seed}",
        run.config.train.seed,
        parameters,
        parameters,
        active,
        tokens,
        0.0,
        0.0,
    )


def require_enough_runs(comparison: Comparison) -> None:
    """Raises UserError if the planned runs cannot determine a law and nothing has been predicted
    yet.
    """
    if (
        not comparison.held_out_names
        or (comparison.output / PREDICTIONS_FILE).exists()
        or started_held_out(comparison)
    ):
        return
    rates = dataclasses.replace(comparison, multiples=())  # the learning rates do not matter here
    planned = grouped(
        map(planned_record, (run for run in rates.runs({}) if not run.is_held_out)),
        lambda record: record.name,
    )
    for name in dict.fromkeys(map(model_of, comparison.held_out_names)):
        if missing := scaling.missing_for_fit(planned.get(name, [])):
            raise UserError(
                f"config.compare.held_out={comparison.held_out!r}: {name} has too few other runs "
                f"for a scaling law; add {missing}, or set the field to ''"
            )
