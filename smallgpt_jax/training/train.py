"""A training run: locks the workdir, restores the newest checkpoint, runs the training loop, saves."""

import functools
import json
import time
from pathlib import Path

import jax
from ml_collections import ConfigDict

from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.output import best_effort
from smallgpt_jax.run import trackers
from smallgpt_jax.run import workdir as run_folder
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.curves import save_curves
from smallgpt_jax.run.metrics import METRICS_FILE, Logger, NonFiniteGuard, Progress
from smallgpt_jax.run.profiler import Profiler
from smallgpt_jax.run.spool import Spool, open_spool
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.storage.files import as_path
from smallgpt_jax.training import messages, preemption
from smallgpt_jax.training.kernel_check import check_attention_kernels
from smallgpt_jax.training.loop import TrainingRun, train_loop
from smallgpt_jax.training.program import Program, build_program, is_out_of_memory, out_of_memory_message
from smallgpt_jax.training.teacher import with_teacher_step
from smallgpt_jax.training.validation import evaluate
from smallgpt_jax.training.watchdog import Watchdog


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
    Config.of(config)  # imports a custom architecture before the saved config names it
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
    config, folder = program.config.train, spool.workdir
    checkpoints = Checkpoints(folder / run_folder.CHECKPOINT_FOLDER, config.keep_checkpoints, progress.message,
                              before_save=spool.upload)
    started, newest_step = time.monotonic(), max(checkpoints.steps(), default=0)
    compiling = program.start_compilation() if newest_step < config.steps else ()
    state = program.restore_or_initialize(checkpoints)
    first_step = int(state.step)
    is_evaluated, = distributed.broadcast_from_primary((first_step in evaluated,))
    print(messages.startup_message(program, pipeline, first_step), flush=True)
    if first_step >= config.steps and is_evaluated:
        return
    train_step, eval_step = (step.result() for step in compiling or program.start_compilation())
    memory_stats = train_step.memory_analysis()
    print(messages.compilation_message(memory_stats, time.monotonic() - started), flush=True)
    run_folder.append_session(folder, messages.session_facts(program, pipeline, memory_stats, first_step))

    logger = open_logger(program, pipeline, spool.folder, first_step, checkpoints, progress, clock)
    training = TrainingRun(
        config, map(pipeline.to_devices, read_ahead(pipeline.train_batches, first_step, program.config.data.workers)),
        program.with_constants(program.runnable(train_step)),
        functools.partial(evaluate, eval_step=program.runnable(eval_step), pipeline=pipeline, logger=logger,
                          clock=clock, is_stopped=stop.is_requested_anywhere),
        checkpoints, logger,
        NonFiniteGuard(config.on_nonfinite, config.max_nonfinite, pipeline.row_numbers_at,
                       checkpoints.latest_finished, log=progress.message),
        stop, clock, Profiler(spool, config.profile_from, config.profile_steps, progress.message))
    state, step, stopped = train_from(training, state, first_step, is_evaluated)

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


def train_from(run: TrainingRun, state: TrainState, first_step: int,
               is_evaluated: bool) -> tuple[TrainState, int, bool]:
    """Evaluates `first_step` if this is due, then trains. Returns the state, its step, and whether it was stopped."""
    run.clock.start_training()
    # It is due if the previous session was stopped between saving and evaluating, or if train.eval_steps has changed.
    is_due = first_step and run.config.evaluates(first_step) and not is_evaluated
    if is_due and not run.evaluate(first_step, state):
        return state, first_step, True
    run.profiler.after_step(first_step, state)
    with Watchdog(run.clock, run.config.stall_seconds):
        result = train_loop(run, state, first_step)
    run.profiler.close()
    return result


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
        peak_tokens_per_second=messages.peak_tokens_per_second(program),
        unlogged_losses=checkpoints.unlogged_losses(first_step) if first_step else [], start_tracker=start_tracker)
