"""What is known of planned runs: from their workdirs, or from records of runs that were trained
elsewhere.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.record import Record, Run
from smallgpt_jax.comparison import comparability, merging, run_reader
from smallgpt_jax.comparison.runs import Comparison, PlannedRun, shortened
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.names import STORE_FILE
from smallgpt_jax.run.sessions import has_diverged
from smallgpt_jax.run.training_text import identity_of

_RATES = ("optimizer.learning_rate", "optimizer.final_learning_rate")


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """The results of a comparison's runs as far as known: from their workdirs, or, for runs without
    one, from `record` ("recorded" runs).
    """

    comparison: Comparison
    text: Corpus
    record: Record | None = None  # of runs that were trained elsewhere

    def loss(self, planned: PlannedRun) -> float | None:
        """Returns the loss of a finished or recorded run, inf if it diverged; else None."""
        loss = self._recorded_loss(planned)
        if loss is not None:
            return loss
        if has_diverged(planned.folder):
            return math.inf
        if is_finished(planned.folder, planned.config, self.text):
            return self.run(planned).loss
        return None

    def losses(self) -> dict[Path, float]:
        """Returns {folder: loss} of all finished runs."""
        losses: dict[Path, float] = {}
        while True:
            before = len(losses)
            for planned in self.comparison.runs(losses):
                loss = None if planned.folder in losses else self.loss(planned)
                if loss is not None:
                    losses[planned.folder] = loss
            # Again with the new losses, because those of a grid determine further runs.
            if len(losses) == before:
                return losses

    def run(self, planned: PlannedRun) -> Run:
        """Returns a finished or recorded run."""
        return self.recorded(planned) or run_reader.read_run(
            planned.name,
            planned.folder,
            averaged=self.comparison.averaged,
            horizon=planned.horizon,
            trunk=planned.trunk,
        )

    def runs(self, losses: Mapping[Path, float]) -> tuple[Run, ...]:
        """Returns the runs that have started or are in a record, without those of grids."""
        return tuple(
            self.run(planned)
            for planned in self.comparison.runs(losses)
            if not planned.in_grid and (_has_started(planned) or self.recorded(planned))
        )

    def recorded(self, planned: PlannedRun) -> Run | None:
        """Returns the recorded run in place of `planned`; None if the record lacks it, or if it has a
        workdir here, which takes precedence.
        """
        if self.record is None or _has_started(planned):
            return None
        config = planned.config
        wanted = (planned.name, config.train.seed, planned.horizon, config.optimizer.learning_rate)
        for run in self.record.runs:
            rate = run.config["optimizer.learning_rate"]
            if (run.name, run.seed, run.horizon, rate) == wanted:
                return run
        return None

    def _recorded_loss(self, planned: PlannedRun) -> float | None:
        """Returns the loss of a recorded run, or of one of the record's grids; else None."""
        if not planned.in_grid:
            run = self.recorded(planned)
            return run.loss if run else None
        if self.record is None or _has_started(planned):
            return None
        grid = self.record.learning_rates.get(planned.name)
        own_rate = self.comparison.models[planned.name].optimizer.learning_rate
        # Records have no configs of the runs in grids. The name's other runs vouch for them.
        has_runs = any(run.name == planned.name for run in self.record.runs)
        if grid is None or not has_runs:
            return None
        if (grid.seed, grid.learning_rate) != (planned.config.train.seed, own_rate):
            return None
        return grid.losses.get(planned.multiple)


def _has_started(planned: PlannedRun) -> bool:
    return (planned.folder / STORE_FILE).exists()


# ------------------------------------------------------------------ records
def read_recorded(comparison: Comparison, paths: Sequence[Path], text: Corpus) -> Record:
    """Returns the finished runs of the records that belong to the comparison. Raises UserError if
    one of them has another text, config or validation rows.
    """
    record = merging.merge([(path, records.read(path)) for path in paths], "")
    others = [run.name for run in record.runs if run.name not in comparison.models]
    for name in dict.fromkeys(others):
        print(f"--results: {name} is not in this comparison; left out", flush=True)
    runs = []
    for run in record.runs:
        is_planned = run.name in comparison.models and run.horizon in comparison.horizons
        if is_planned and (run.is_finished or run.diverged):
            _require_same(run, comparison, text)
            # The record has all evaluations, so the mean can be over another number of them.
            runs.append(dataclasses.replace(run, averaged=comparison.averaged))
    return dataclasses.replace(record, runs=tuple(runs))


def _require_same(run: Run, comparison: Comparison, text: Corpus) -> None:
    """Raises UserError unless a recorded run is what this comparison would train."""
    where = f"--results: {run.name}, seed {run.seed}"
    changes = comparability.text_changes(run.text, records.TrainingText(**identity_of(text)))
    if changes:
        raise UserError(
            f"{where}: was trained on another text than this comparison ({changes}); use the same "
            "text, or leave out its record"
        )
    config = shortened(comparison.models[run.name], run.horizon)
    recorded = comparability.fixed_fields_with_defaults(run.config)
    planned = comparability.fixed_fields_with_defaults(config.flat())
    if comparison.multiples:  # then the grid determines the learning rates
        for field in _RATES:
            recorded.pop(field, None)
            planned.pop(field, None)
    differences = comparability.different(recorded, planned)
    if differences:
        raise UserError(
            f"{where}: has another config than this comparison ({differences}); leave out its "
            "record, or give the run another name"
        )
    targets = num_validation_targets(text, config.data, config.model, config.train)
    if run.last and run.last.targets != targets:
        raise UserError(
            f"{where}: its loss is a mean over {run.last.targets:,} tokens, those of this "
            f"comparison over {targets:,}; set "
            f"config.train.eval_steps={run.config['train.eval_steps']}"
        )
