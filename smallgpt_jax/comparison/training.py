"""Trains the runs of a comparison. Several processes divide the runs among themselves."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

import jax

from smallgpt_jax.comparison import held_out
from smallgpt_jax.comparison.learning_rates import format_multiple
from smallgpt_jax.comparison.runs import Comparison, PlannedRun
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.errors import DivergenceError, UserError, WorkdirBusyError
from smallgpt_jax.models import ModelConfig
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.checkpoint import saved_steps
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, LOCK_FILE
from smallgpt_jax.run.sessions import has_diverged
from smallgpt_jax.run.training_text import check_same_text
from smallgpt_jax.run.workdir import check_workdir
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.training import trainer
from smallgpt_jax.training.build import RECENT_PROGRAMS

# Models whose other seeds do not compile again. On CPUs, the programs that measure inference take
# 0.2 GB per model.
MAX_COMPILED = 4


def train_comparison(
    comparison: Comparison,
    text: Corpus,
    measure_run: Callable[[PlannedRun], None],
    command: str = "",
) -> dict[Path, float]:
    """Trains the runs of a comparison. Returns {folder: loss} of the finished runs.

    Skips runs that another process is training, but waits for those of grids, whose losses
    determine which runs follow, for the trunks of shorter runs, and for all other runs before the
    first held-out one, whose losses are then predicted. `command` repeats the comparison.
    """
    held_out.require_enough_runs(comparison)
    # The seeds of a model are not trained one after another.
    RECENT_PROGRAMS.limit = max(RECENT_PROGRAMS.limit, len(comparison.models))
    losses: dict[Path, float] = {}
    measured, busy, is_predicted, compiled = set(), set(), not comparison.held_out, set()
    while True:
        planned = comparison.runs(losses)
        ready = [
            run
            for run in planned
            if run.folder not in busy
            and run.folder not in (losses if run.in_grid else measured)
            and (run.trunk is None or run.trunk in losses)
        ]
        run = ready[0] if ready else None
        if run is None or (run.is_held_out and not is_predicted):
            if awaited := next(
                awaited_folders(planned, busy, before_held_out=not is_predicted), None
            ):
                print(f"waiting for {awaited}, which another process is training", flush=True)
                with file_lock(awaited / LOCK_FILE, wait=True):
                    busy.remove(awaited)
                continue
            if not is_predicted:
                held_out.write_predictions(comparison, losses, command)
                is_predicted = True
        if run is None:
            return losses
        if run.folder not in losses:
            free_programs(run.config.model, compiled)
            check_existing(run, comparison.output, text)
            loss = known_loss(run, comparison, text)
            if loss is None:
                folders = list(dict.fromkeys(other.folder for other in planned))
                number = folders.index(run.folder) + 1
                print_headline(run, f"[{number}/{comparison.num_runs(losses)}]")
                loss = train_run(run, comparison, text)
            if loss is None:
                busy.add(run.folder)
            else:
                losses[run.folder] = loss
            continue
        if not run.in_grid:
            measured.add(run.folder)
            if losses[run.folder] < math.inf and run.trunk is None:
                measure_run(run)


def free_programs(model: ModelConfig, compiled: set[ModelConfig]) -> None:
    """Frees compiled programs, except those that `shared_program` keeps, if `model` is one more
    than MAX_COMPILED.

    `compiled` are the models whose programs JAX may still have.
    """
    if model not in compiled and len(compiled) == MAX_COMPILED:
        jax.clear_caches()
        compiled.clear()
    compiled.add(model)


def awaited_folders(
    planned: Sequence[PlannedRun], busy: Set[Path], before_held_out: bool
) -> Iterator[Path]:
    """Returns the busy runs that others depend on: those of grids, and trunks of runs that no
    process is training.

    With `before_held_out`, also all runs that are not held out.
    """
    trunks = {run.trunk for run in planned if run.folder not in busy}
    return (
        run.folder
        for run in planned
        if run.folder in busy
        and (run.in_grid or run.folder in trunks or (before_held_out and not run.is_held_out))
    )


def print_headline(run: PlannedRun, number: str) -> None:
    rate = (
        f", learning rate × {format_multiple(run.multiple)}"
        if run.in_grid or run.multiple != 1
        else ""
    )
    horizon = f", horizon × {format_multiple(run.horizon)}" if run.trunk else ""
    print(f"\n{number} {run.name}, seed {run.config.train.seed}{rate}{horizon}", flush=True)


def train_run(run: PlannedRun, comparison: Comparison, text: Corpus) -> float | None:
    """Returns the loss of the run: inf if it has diverged, None if another process trains it."""
    try:
        trainer.train(with_available_trunk(run), str(run.folder), text)
    except WorkdirBusyError as error:
        print(f"{run.folder}: skipped: {error.by} is training it", flush=True)
        return None
    except DivergenceError as error:
        print(f"{error}\nThe run is kept; the comparison continues without it", flush=True)
        return math.inf
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from None
    finally:
        gc.collect()  # frees the run's arrays; this process rarely collects by itself (cli.py)
    return comparison.result(run).score


def known_loss(run: PlannedRun, comparison: Comparison, text: Corpus) -> float | None:
    """Returns the loss of a run that is finished or in a record, inf if it diverged, else None."""
    if (loss := comparison.recorded_loss(run)) is not None:
        return loss
    if has_diverged(run.folder):
        print(
            f"{run.folder}: diverged in an earlier session; skipped (smallgpt_jax.main can "
            "continue the run)",
            flush=True,
        )
        return math.inf
    return comparison.result(run).score if is_finished(run.folder, run.config, text) else None


def known_losses(comparison: Comparison, text: Corpus) -> dict[Path, float]:
    """Returns {folder: loss} as `train_comparison` does, without training."""
    losses: dict[Path, float] = {}
    while found := {
        run.folder: loss
        for run in comparison.runs(losses)
        if run.folder not in losses and (loss := known_loss(run, comparison, text)) is not None
    }:
        losses |= found  # the losses of a grid determine further runs
    return losses


def with_available_trunk(run: PlannedRun) -> Config:
    """Returns the run's config, without its trunk if a new run cannot start from it.

    A trunk that was finished before the horizon was added, or that has diverged, may lack the
    checkpoint. The run then starts from step 0, with the same results.
    """
    if (
        run.trunk is None
        or saved_steps(run.folder / CHECKPOINT_FOLDER)
        or decay_start(run.config.optimizer) in saved_steps(run.trunk / CHECKPOINT_FOLDER)
    ):
        return run.config
    return run.config.replace(train={"trunk": ""})


def check_existing(run: PlannedRun, output: Path, text: Corpus) -> None:
    try:
        check_workdir(run.folder, run.config)
        check_same_text(run.folder, text)
    except UserError as error:
        message = (
            str(error).removeprefix("--workdir=").replace("another --workdir", "another --output")
        )
        raise UserError(f"--output={output}: {message}") from None
