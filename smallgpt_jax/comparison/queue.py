"""Decides which run of a comparison is trained next, and trains and measures it, until all are done.

Several processes with the same comparison divide the runs among themselves.
"""

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from smallgpt_jax.comparison import held_out
from smallgpt_jax.comparison.outcomes import Outcomes
from smallgpt_jax.comparison.runs import PlannedRun, format_multiple
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.errors import DivergenceError, UserError, WorkdirBusyError
from smallgpt_jax.models import ModelConfig
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, LOCK_FILE
from smallgpt_jax.run.training_text import check_same_text
from smallgpt_jax.run.workdir import check_workdir
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.training import trainer
from smallgpt_jax.training.build import RECENT_PROGRAMS

# Models whose other seeds do not compile again. On CPUs, the programs that measure inference take
# 0.2 GB per model.
MAX_COMPILED = 4


@dataclasses.dataclass
class Queue:
    """The runs of a comparison, as this process knows them."""

    outcomes: Outcomes
    measure_run: Callable[[PlannedRun], None]  # takes further measurements of a finished run
    after_run: Callable[[], None]  # is called after each trained run
    losses: dict[Path, float] = dataclasses.field(default_factory=dict)  # inf: diverged
    failures: dict[Path, str] = dataclasses.field(default_factory=dict)
    busy: set[Path] = dataclasses.field(default_factory=set)  # other processes train these
    compiled: set[ModelConfig] = dataclasses.field(default_factory=set)

    def train(self, command: str = "") -> None:
        """Trains all runs. `command` repeats the comparison. Raises UserError at the end if a run could
        not be trained.
        """
        comparison = self.outcomes.comparison
        held_out.require_enough_runs(comparison)
        # The seeds of a model are not trained one after another, so its program is kept until then.
        RECENT_PROGRAMS.limit = max(RECENT_PROGRAMS.limit, len(comparison.models))
        self._train_runs(is_held_out=False)
        if comparison.held_out and not self.failures:
            held_out.write_predictions(self.outcomes, self.losses, command)
            self._train_runs(is_held_out=True)
        if self.failures:
            (folder, why), *others = self.failures.items()
            more = f" ({len(others)} more above)" if others else ""
            raise UserError(f"{folder}: could not be trained: {why}{more}")

    def _train_runs(self, is_held_out: bool) -> None:
        """Trains the held-out runs, or the others: always the first missing one that is ready."""
        while True:
            # Planned anew after each run, because the losses of grids determine further runs.
            planned = self.outcomes.comparison.runs(self.losses)
            ended = self.losses.keys() | self.failures.keys()
            missing = [
                run for run in planned if run.is_held_out == is_held_out and run.folder not in ended
            ]
            next_run = next(filter(self._is_ready, missing), None)
            awaited = self._awaited(missing)
            if next_run:
                self._train_or_read(next_run, planned)
            elif awaited:  # other runs that another process is training are skipped
                print(f"waiting for {awaited}, which another process is training", flush=True)
                with file_lock(awaited / LOCK_FILE, wait=True):
                    # The run or its process has ended; the next round reads its loss or goes on.
                    self.busy.remove(awaited)
            else:
                return

    def _is_ready(self, run: PlannedRun) -> bool:
        has_start = run.trunk is None or run.trunk in self.losses
        return has_start and run.folder not in self.busy

    def _awaited(self, missing: Sequence[PlannedRun]) -> Path | None:
        """Returns the folder of a run that another process is training and others depend on."""
        comparison = self.outcomes.comparison
        trunks = {run.trunk for run in missing if run.folder not in self.busy}
        for run in missing:
            for_predictions = comparison.held_out and not run.is_held_out
            for_next_round = comparison.rounds and run.trunk is None  # not of shorter horizons
            others_depend = run.in_grid or run.folder in trunks or for_predictions or for_next_round
            if run.folder in self.busy and others_depend:
                return run.folder
        return None

    def _train_or_read(self, run: PlannedRun, planned: Sequence[PlannedRun]) -> None:
        """Trains and measures a run, or reads its results if it is finished or in a record."""
        try:
            # Again: another process may have started the run since the comparison began.
            check_existing(run, self.outcomes.comparison.output, self.outcomes.text)
            loss = self.outcomes.loss(run)
            is_new = loss is None
            if is_new:
                free_programs(run.config.model, self.compiled)
                number = [one.folder for one in planned].index(run.folder) + 1
                total = len(self.outcomes.comparison.expected_runs(self.losses))
                print(f"\n[{number}/{total}] {describe(run)}", flush=True)
                loss = self._train(run)
            elif loss == math.inf:
                advice = "skipped (smallgpt_jax.main can continue the run)"
                print(f"{run.folder}: diverged in an earlier session; {advice}", flush=True)
            # Reports show measurements of the longest runs only, which have no trunk.
            if loss < math.inf and not run.in_grid and run.trunk is None:
                self.measure_run(run)
        except WorkdirBusyError as error:
            print(f"{run.folder}: skipped: {error.by} is training it", flush=True)
            self.busy.add(run.folder)
            return
        except UserError as error:
            print(f"{run.folder}: {error}\nThe comparison continues without it", flush=True)
            self.failures[run.folder] = str(error)
            return
        self.losses[run.folder] = loss
        if is_new:
            self.after_run()

    def _train(self, run: PlannedRun) -> float:
        """Returns the loss, inf if the run has diverged."""
        try:
            trainer.train_and_evaluate(
                with_available_trunk(run), str(run.folder), self.outcomes.text
            )
        except DivergenceError as error:
            print(f"{error}\nThe run is kept; the comparison continues without it", flush=True)
            return math.inf
        finally:
            gc.collect()  # frees the run's arrays; this process rarely collects by itself (cli.py)
        return self.outcomes.run(run).loss


def describe(run: PlannedRun) -> str:
    text = f"{run.name}, seed {run.config.train.seed}"
    if run.in_grid or run.multiple != 1:
        text += f", learning rate × {format_multiple(run.multiple)}"
    if run.trunk:
        text += f", horizon × {format_multiple(run.horizon)}"
    return text


def free_programs(model: ModelConfig, compiled: set[ModelConfig]) -> None:
    """Adds a model to `compiled`, those whose programs JAX may still have. If it would be one too
    many, frees all programs before, except those that `shared_program` keeps.
    """
    if model not in compiled and len(compiled) == MAX_COMPILED:
        jax.clear_caches()
        compiled.clear()
    compiled.add(model)


def with_available_trunk(run: PlannedRun) -> Config:
    """Returns the run's config, without its trunk if a new run cannot start from it."""
    if run.trunk is None or saved_steps(run.folder / CHECKPOINT_FOLDER):  # or has started already
        return run.config
    # A trunk that was finished before the horizon was added, or that has diverged, may lack the
    # checkpoint. The run then starts from step 0, with the same results.
    has_start = decay_start(run.config.optimizer) in saved_steps(run.trunk / CHECKPOINT_FOLDER)
    return run.config if has_start else run.config.replace(train={"trunk": ""})


def check_existing(run: PlannedRun, output: Path, text: Corpus) -> None:
    """Raises UserError if the run's workdir belongs to another config or text."""
    try:
        check_workdir(run.folder, run.config)
        check_same_text(run.folder, text)
    except UserError as error:
        message = str(error).removeprefix("--workdir=")
        message = message.replace("another --workdir", "another --output")
        raise UserError(f"--output={output}: {message}") from None
