"""Training: locks the workdir, restores the newest checkpoint, runs the training loop, saves.

The loop itself keeps only the train state. `metrics.py`, `checkpoint.py` and `preemption.py` keep all other state.
"""

import functools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
from ml_collections import ConfigDict

from smallgpt_jax import distributed, preemption, summary, trackers
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.checkpoint import Checkpoints
from smallgpt_jax.curves import save_curves
from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.files import as_path
from smallgpt_jax.kernel_check import check_attention_kernels
from smallgpt_jax.metrics import METRICS_FILE, Logger, NonFiniteGuard, Progress
from smallgpt_jax.output import best_effort
from smallgpt_jax.profiler import Profiler
from smallgpt_jax.program import Program, build_program, is_out_of_memory, out_of_memory_message
from smallgpt_jax.run.config import Config
from smallgpt_jax.run_clock import RunClock
from smallgpt_jax.schedule import Schedule
from smallgpt_jax.spool import Spool, open_spool
from smallgpt_jax.step import TrainState
from smallgpt_jax.teacher import with_teacher_step
from smallgpt_jax.validation import evaluate
from smallgpt_jax.watchdog import Watchdog


@best_effort("stdout")
def train(config: ConfigDict, workdir: str) -> None:
    """Trains the model of `config` in `workdir`; resumes from the newest checkpoint, if any.

    Raises:
      UserError: the config or workdir is invalid, an attention kernel gives wrong results, the run does not fit into
        device memory, or its last step cannot be saved. In the first two cases, nothing is written.
      DivergenceError: loss, gradient or weights are not finite.
      StoppedError: the run has ended on a stop request (see preemption.py).
    """
    clock, folder = RunClock(), as_path("--workdir", workdir)
    config = with_teacher_step(Config.of(config, run_folder.saved_config(folder)))
    distributed.require_equal("config", json.dumps(config.to_dict(), sort_keys=True))
    distributed.run_on_primary(lambda: run_folder.check_workdir(folder, config))
    program = build_program(config)
    trackers.require_installed(config.train.tracker)
    check_attention_kernels(program)
    with preemption.handle_signals() as stop:
        pipeline = program.open_pipeline()
        with run_folder.lock(folder):
            # Check again: another run may have started before the lock was acquired.
            distributed.run_on_primary(lambda: run_folder.check_workdir(folder, config))
            # `evaluated_steps` reads the workdir's config, so it must run before `initialize` replaces this config.
            evaluated = run_folder.evaluated_steps(folder, config, pipeline.corpus)
            distributed.run_on_primary(lambda: run_folder.initialize(folder, config, pipeline.corpus))
            try:
                progress = Progress(config.train.steps)
                with open_spool(folder, (METRICS_FILE, trackers.TRACKER_FILE), progress.message) as spool:
                    run(program, pipeline, spool, evaluated, stop, clock, progress)
            except DivergenceError as diverged:
                run_folder.append_session(folder, {"diverged": str(diverged)})
                raise
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(out_of_memory_message(config, error)) from None
            finally:
                save_curves(folder)


def run(program: Program, pipeline: DataPipeline, spool: Spool, evaluated: set[int],
        stop: preemption.StopRequest, clock: RunClock, progress: Progress) -> None:
    """Trains in a locked workdir: restores, compiles, runs the loop, saves."""
    config, folder = program.config, spool.workdir
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINT_FOLDER, config.train.keep_checkpoints, progress.message,
                              before_save=spool.upload)
    started, newest_step = time.monotonic(), max(checkpoints.steps(), default=0)
    compiling = program.start_compilation() if newest_step < config.train.steps else ()
    state = program.restore_or_initialize(checkpoints)
    first_step = int(state.step)
    is_evaluated, = distributed.broadcast_from_primary((first_step in evaluated,))
    print(summary.startup_message(program, pipeline, first_step), flush=True)
    if first_step >= config.train.steps and is_evaluated:
        return
    train_step, eval_step = (step.result() for step in compiling or program.start_compilation())
    memory_stats = train_step.memory_analysis()
    print(summary.compilation_message(memory_stats, time.monotonic() - started), flush=True)
    run_folder.append_session(folder, summary.session_facts(program, pipeline, memory_stats, first_step))

    logger = open_logger(program, pipeline, spool.folder, first_step, checkpoints, progress, clock)
    guard = NonFiniteGuard(config.train.on_nonfinite, config.train.max_nonfinite, pipeline.row_numbers_at,
                           checkpoints.latest_finished, log=progress.message)
    schedule = Schedule(config.train.steps, config.train.eval_every, config.train.checkpoint_every)
    evaluate_now = functools.partial(evaluate, eval_step=program.runnable(eval_step), pipeline=pipeline, logger=logger,
                                     clock=clock, is_stopped=stop.is_requested_anywhere)

    clock.start_training()
    step, stopped = first_step, False
    if first_step and schedule.evaluates(first_step) and not is_evaluated:
        # The previous session was stopped between saving and evaluating, or train.eval_steps has changed.
        stopped = not evaluate_now(first_step, state)
    if not stopped:
        train_batches = map(pipeline.to_devices, read_ahead(pipeline.train_batches, first_step, config.data.workers))
        profiler = Profiler(spool, config.train.profile_from, config.train.profile_steps, progress.message)
        profiler.after_step(first_step, state)
        with Watchdog(clock, config.train.stall_seconds):
            state, step, stopped = train_loop(
                state, first_step, train_batches, program.with_teacher(program.runnable(train_step)), evaluate_now,
                checkpoints, logger, guard, stop, schedule, clock, profiler)
        profiler.close()

    with clock.during("save"):
        is_saved = step == first_step or save_last(checkpoints, step, state, logger.losses)
        checkpoints.close()
    logger.close()
    progress.message(clock.goodput_message())
    if not is_saved:
        raise UserError(f"--workdir={folder}: the last step, {step}, could not be saved; free disk space and rerun the "
                        "same command to resume from the newest checkpoint")
    if stopped:
        stop.raise_stopped(step)


def save_last(checkpoints: Checkpoints, step: int, state: TrainState, losses: list[float]) -> bool:
    """Saves the last step of a session, if it has no checkpoint yet. Returns whether it has one now."""
    checkpoints.wait_until_finished()
    if step not in checkpoints.steps():
        # An earlier attempt failed, or the run was stopped in an evaluation between two checkpoints.
        checkpoints.save(step, state, losses)
        checkpoints.wait_until_finished()
    return step in checkpoints.steps()


def open_logger(program: Program, pipeline: DataPipeline, folder: Path, first_step: int, checkpoints: Checkpoints,
                progress: Progress, clock: RunClock) -> Logger:
    """Returns the logger of a session, with the tracker of `config.train.tracker`, if any."""
    config = program.config.train
    start_tracker = config.tracker and functools.partial(
        trackers.Tracker, config.tracker, folder, program.config.to_dict(), log=progress.message)
    return Logger(
        folder, first_step, progress, clock, log_every=config.log_every, tokens_per_step=pipeline.tokens_per_step,
        bytes_per_token=pipeline.corpus.bytes_per_token("validation"),
        peak_tokens_per_second=summary.peak_tokens_per_second(program),
        unlogged_losses=checkpoints.unlogged_losses(first_step) if first_step else [], start_tracker=start_tracker)


def train_loop(state: TrainState, first_step: int, batches: Iterable, train_step: Callable, evaluate: Callable,
               checkpoints, logger, guard, stop, schedule: Schedule, clock: RunClock,
               profiler: Profiler) -> tuple[TrainState, int, bool]:
    """Runs the updates after `first_step`; returns the state, its step, and whether the run was stopped.

    Each iteration
    1. dispatches an update;
    2. while the update runs, checks and logs the metrics of the previous update;
    3. agrees with the other processes on whether to stop;
    4. before saving or evaluating, checks and logs the current metrics, so that no non-finite state is saved;
    5. saves, then evaluates, because evaluation can fail or be stopped.
    """
    step, stopped = first_step, False
    for step, batch in zip(range(first_step + 1, schedule.steps + 1), clock.wait_for(batches)):
        with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
            state, metrics = train_step(state, batch)
        profiler.after_step(step, state)
        stop.can_save = True
        if (previous := logger.exchange(step, metrics)) is not None:
            guard.check(previous)
            logger.log(previous)

        stopped = stop.is_requested_anywhere()
        saves = stopped or schedule.saves(step)
        evaluates = not stopped and schedule.evaluates(step)
        if saves or evaluates:
            current = logger.take()
            guard.check(current)
            logger.log(current)
        if saves:
            with clock.during("save"):
                checkpoints.save(step, state, logger.losses)
        if evaluates:
            stopped = not evaluate(step, state)
        if stopped:
            break
    return state, step, stopped


if __name__ == "__main__":
    from smallgpt_jax import cli
    cli.fail("smallgpt_jax.train is not a command; use python -m smallgpt_jax.main", status=2)
