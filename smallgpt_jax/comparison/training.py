"""Trains the runs of a comparison. Several processes divide the runs among themselves."""

import gc
import math
from collections.abc import Callable
from pathlib import Path

import jax

from smallgpt_jax.comparison import results
from smallgpt_jax.comparison.learning_rates import format_multiple
from smallgpt_jax.comparison.runs import Comparison, PlannedRun
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.errors import DivergenceError, UserError, WorkdirBusyError
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.run.sessions import has_diverged
from smallgpt_jax.run.training_text import check_same_text
from smallgpt_jax.run.workdir import check_workdir
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.training import train


def train_comparison(comparison: Comparison, text: Corpus,
                     measure_run: Callable[[PlannedRun], None]) -> dict[Path, float]:
    """Trains the runs of a comparison. Returns {folder: loss} of the finished runs.

    Skips runs that another process is training, but waits for those of grids: their losses determine which runs follow.
    """
    losses: dict[Path, float] = {}
    measured, busy = set(), set()
    while True:
        planned = comparison.runs(losses)
        ready = (run for run in planned
                 if run.folder not in busy and run.folder not in (losses if run.in_grid else measured))
        if run := next(ready, None):
            if run.folder not in losses:
                folders = list(dict.fromkeys(other.folder for other in planned))
                number = f"[{folders.index(run.folder) + 1}/{comparison.num_runs(losses)}]"
                loss = train_run(run, comparison, text, number)
                if loss is None:
                    busy.add(run.folder)
                    continue
                losses[run.folder] = loss
            if not run.in_grid:
                measured.add(run.folder)
                if losses[run.folder] < math.inf:
                    measure_run(run)
        elif awaited := next((run for run in planned if run.in_grid and run.folder in busy), None):
            print(f"waiting for {awaited.folder}, which another process is training", flush=True)
            with file_lock(awaited.folder / LOCK_FILE, wait=True):
                busy.remove(awaited.folder)
        else:
            return losses


def train_run(run: PlannedRun, comparison: Comparison, text: Corpus, number: str) -> float | None:
    """Trains a run unless it is finished. Returns its loss, inf if it diverged, None if another process trains it."""
    check_existing(run, comparison.output, text)
    if has_diverged(run.folder):
        print(f"{run.folder}: diverged in an earlier session; skipped (smallgpt_jax.main can continue the run)",
              flush=True)
        return math.inf
    if is_finished(run.folder, run.config, text):
        return last_loss(run, comparison.averaged)
    rate = f", learning rate × {format_multiple(run.multiple)}" if run.in_grid or run.multiple != 1 else ""
    print(f"\n{number} {run.name}, seed {run.config.train.seed}{rate}", flush=True)
    try:
        train.train(run.config, str(run.folder))
    except WorkdirBusyError as busy:
        print(f"skipped: {busy.by} is training it", flush=True)
        return None
    except DivergenceError as diverged:
        print(f"{diverged}\nThe run is kept; the comparison continues without it", flush=True)
        return math.inf
    except UserError as error:
        raise UserError(f"{run.name}: {error}") from None
    finally:
        gc.collect()  # frees the run's arrays; this process rarely collects by itself (cli.py)
        jax.clear_caches()  # frees the run's compiled programs
    return last_loss(run, comparison.averaged)


def last_loss(run: PlannedRun, averaged: int) -> float:
    loss = results.read_run(run.name, run.folder, averaged=averaged).final("loss")
    return math.inf if loss is None else loss


def check_existing(run: PlannedRun, output: Path, text: Corpus) -> None:
    try:
        check_workdir(run.folder, run.config)
        check_same_text(run.folder, text)
    except UserError as error:
        message = str(error).removeprefix("--workdir=").replace("another --workdir", "another --output")
        raise UserError(f"--output={output}: {message}") from None
