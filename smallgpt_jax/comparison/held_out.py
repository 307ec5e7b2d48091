"""Writes predictions.json once: after all other runs are finished, and before the first held-out
run starts.
"""

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path

from smallgpt_jax.analysis import laws
from smallgpt_jax.analysis.laws import LawPoint
from smallgpt_jax.analysis.record import PREDICTIONS_FILE, Predictions, model_of, size_of
from smallgpt_jax.comparison import budget
from smallgpt_jax.comparison.outcomes import Outcomes
from smallgpt_jax.comparison.parameters import num_parameters
from smallgpt_jax.comparison.runs import RUNS_FOLDER, Comparison, PlannedRun
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.run.names import CONFIG_FILE, LOCK_FILE
from smallgpt_jax.storage import typed_json
from smallgpt_jax.storage.locks import file_lock


def read_predictions(output: Path) -> Predictions | None:
    path = output / PREDICTIONS_FILE
    if not path.exists():
        return None
    advice = "restore it; predictions are made only once"
    return typed_json.read(Predictions, path, advice)


def write_predictions(outcomes: Outcomes, losses: Mapping[Path, float], command: str) -> None:
    """Writes predictions.json, unless it exists: those of the record or, if no held-out run has
    started, predictions from the finished runs. Of several processes that call this, one writes.
    """
    output = outcomes.comparison.output
    output.mkdir(parents=True, exist_ok=True)  # it is missing if all other runs are in a record
    with file_lock(output / LOCK_FILE, wait=True):
        path = output / PREDICTIONS_FILE
        if path.exists():
            return
        if outcomes.record and outcomes.record.predictions:
            typed_json.write(outcomes.record.predictions, path)
            return
        started = _started_held_out(outcomes)
        if started:
            why = f"has started without {PREDICTIONS_FILE}"
            print(f"{started}: {why}; no predictions are made", flush=True)
            return
        planned = outcomes.comparison.runs_at_best(losses)
        points = [_law_point(run) for run in planned if run.is_held_out]
        finished = [outcomes.run(run) for run in planned if not run.is_held_out]
        if points:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            held_out = outcomes.comparison.held_out
            predictions = laws.predictions_of(finished, points, held_out, now, command)
            typed_json.write(predictions, path)
            print(f"{path}: predictions of {len(points)} held-out runs", flush=True)


def _started_held_out(outcomes: Outcomes) -> str | Path | None:
    """Returns a held-out run that is in a record, or has started here, at any rate and seed."""
    names = outcomes.comparison.held_out_names
    for run in outcomes.record.runs if outcomes.record else ():
        if run.name in names:
            return f"{run.name}, seed {run.seed}"
    folder = outcomes.comparison.output / RUNS_FOLDER
    for name in names:
        for path in sorted(folder.glob(f"{safe_name(name)}-*")):
            if (path / CONFIG_FILE).exists():
                return path
    return None


def _law_point(run: PlannedRun) -> LawPoint:
    """Returns a planned run as a point, without a loss."""
    tokens = round(run.config.train.steps * budget.tokens_per_step(run.config))
    return LawPoint(model_of(run.name), size_of(run.name), num_parameters(run.config), tokens)


def require_enough_runs(comparison: Comparison) -> None:
    """Raises UserError if the planned runs determine no law and nothing has been predicted."""
    names = comparison.held_out_names
    if not names or (comparison.output / PREDICTIONS_FILE).exists():
        return  # there is nothing to predict, or it is predicted already
    # With a grid of learning rates, `runs` would end with it, because the best are not known yet.
    without_grid = dataclasses.replace(comparison, multiples=())
    planned = [_law_point(run) for run in without_grid.runs({}) if not run.is_held_out]
    for model in dict.fromkeys(map(model_of, names)):
        lack = laws.missing_for_law([point for point in planned if point.model == model])
        if lack:
            least = laws.MIN_SIZES if lack == "sizes" else laws.MIN_LENGTHS
            raise UserError(
                f"config.compare.held_out={comparison.held_out!r}: {model} has too few other "
                f"{lack} for a law; train {least} or more, or set the field to ''"
            )
