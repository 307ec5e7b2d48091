"""Training: lock the workdir, restore the newest checkpoint, the loop, the end.

The loop has no state of its own: what it calls holds it (metrics.Logger the metrics of the step before, checkpoint.py
what is being written, preemption.py whether to stop), so that tests drive it with stand-ins.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from smallgpt_jax import distributed, preemption, summary
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.checkpoint import Checkpoints
from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.errors import Diverged, UserError
from smallgpt_jax.files import local_path
from smallgpt_jax.metrics import Logger, NonFiniteGuard, Progress
from smallgpt_jax.output import best_effort
from smallgpt_jax.program import Program, build_program, is_out_of_memory, out_of_memory_message
from smallgpt_jax.step import TrainState


@best_effort("stdout")
def train(config: ConfigDict, workdir: str) -> None:
    """Trains the model of `config` in `workdir`, from where the workdir left off.

    Raises UserError, before it writes anything, for what cannot be trained; Diverged; Stopped when the run was asked to
    stop (see preemption.py).
    """
    distributed.check_same("a config", config.to_json_best_effort(sort_keys=True))
    folder = local_path("--workdir", workdir)
    distributed.first(lambda: run_folder.check(folder, config))
    program = build_program(config)
    with preemption.listening() as stop:
        pipeline = program.open_pipeline()
        with run_folder.taken(folder):
            distributed.first(lambda: run_folder.check(folder, config))  # another run may have begun meanwhile
            # Before the config there is replaced.
            evaluated = run_folder.evaluated_steps(folder, config, pipeline.corpus)
            distributed.first(lambda: run_folder.begin(folder, config, pipeline.corpus))
            try:
                run(program, pipeline, folder, evaluated, stop)
            except Diverged as diverged:
                run_folder.record(folder, {"diverged": str(diverged)})
                raise
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(out_of_memory_message(config, error)) from None


def run(program: Program, pipeline: DataPipeline, folder: Path, evaluated: set[int], stop: preemption.Stop) -> None:
    """Trains in a workdir that this process has locked: restores, compiles, loops, ends."""
    config = program.config
    progress = Progress(config.train.steps)
    checkpoints = Checkpoints(
        folder / run_folder.CHECKPOINT_FOLDER, config.train.keep_checkpoints, say=progress.note)
    state = restore_or_initialize(checkpoints, program)
    first_step = int(state.step)
    is_evaluated, = distributed.from_first((first_step in evaluated,))
    print(summary.opening(program, pipeline, first_step), flush=True)
    if first_step >= config.train.steps and is_evaluated:
        return

    started = time.monotonic()
    train_step, eval_step = program.compile_train_step(), program.compile_eval_step()
    needs = train_step.memory_analysis()
    print(summary.compiled(needs, time.monotonic() - started), flush=True)
    run_folder.record(folder, summary.session(program, pipeline, needs, first_step))

    logger = Logger(
        folder, first_step, progress, log_every=config.train.log_every, tokens_per_step=pipeline.tokens_per_step,
        bytes_per_token=pipeline.corpus.bytes_per_token("validation"),
        peak_tokens_per_second=summary.peak_tokens_per_second(program),
        unlogged_losses=checkpoints.unlogged_losses(first_step) if first_step else [])
    guard = NonFiniteGuard(
        config.train.on_nonfinite, config.train.max_nonfinite, pipeline.row_numbers_of, checkpoints.newest_finished,
        say=progress.note)
    schedule = Schedule(config.train.steps, config.train.eval_every, config.train.checkpoint_every)
    evaluate_now = functools.partial(evaluate, eval_step=program.runnable(eval_step), pipeline=pipeline, logger=logger,
                                     is_stopped=stop.is_agreed)

    stopped = False
    if first_step and schedule.evaluates(first_step) and not is_evaluated:
        # The run was stopped after saving, before evaluating, or is now to be evaluated on other rows.
        stopped = not evaluate_now(first_step, state)
    step = first_step
    if not stopped:
        train_batches = map(pipeline.to_devices, read_ahead(pipeline.train_batches, first_step, config.data.workers))
        state, step, stopped = train_loop(
            state, first_step, train_batches, program.runnable(train_step), evaluate_now, checkpoints, logger, guard,
            stop, schedule)

    checkpoints.finish()
    if step > first_step and step not in checkpoints.steps():
        # Stopped while evaluating between two checkpoints, or a second try.
        checkpoints.save(step, state, logger.losses)
    checkpoints.close()
    logger.close()
    if step > first_step and step not in checkpoints.steps():
        raise UserError(f"--workdir={folder}: step {step}, the last one, could not be saved. Make room "
                        "there; the same command then goes on from the newest checkpoint")
    if stopped:
        stop.end(step)


def restore_or_initialize(checkpoints: Checkpoints, program: Program) -> TrainState:
    """Returns the newest good checkpoint's state, or, if there is none, the initial one.

    An imported model has no optimizer state: it begins anew.
    """
    state = checkpoints.restore_newest(program.abstract_state()) or program.initial_state()
    if state.opt_state is None:
        state = state._replace(opt_state=program.initial_opt_state(state.params))
    return state


class Schedule(NamedTuple):
    """The steps after which a run saves and evaluates; after the last one it does both."""

    steps: int
    eval_every: int
    checkpoint_every: int

    def saves(self, step: int) -> bool:
        return step >= self.steps or step % self.checkpoint_every == 0

    def evaluates(self, step: int) -> bool:
        return step >= self.steps or step % self.eval_every == 0


def train_loop(state: TrainState, first_step: int, batches: Iterable, train_step: Callable, evaluate: Callable,
               checkpoints, logger, guard, stop, schedule: Schedule) -> tuple[TrainState, int, bool]:
    """Runs updates from `first_step` to the last one; returns the state, its step, and whether the run was stopped.

    The order within a step: the update is dispatched; while it runs, the previous one's metrics are read, checked and
    logged; the processes agree whether to stop. Before saving or evaluating, this update's metrics are read too:
    nothing that is not finite is saved. Saving comes before evaluating, which may fail or be stopped.
    """
    step, stopped = first_step, False
    for step, batch in zip(range(first_step + 1, schedule.steps + 1), batches):
        with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
            state, metrics = train_step(state, batch)
        stop.has_something_to_save = True
        if (previous := logger.exchange(step, metrics)) is not None:
            guard.check(previous)
            logger.log(previous)

        stopped = stop.is_agreed()
        saves = stopped or schedule.saves(step)
        evaluates = not stopped and schedule.evaluates(step)
        if saves or evaluates:
            current = logger.take()
            guard.check(current)
            logger.log(current)
        if saves:
            with logger.paused():
                checkpoints.save(step, state, logger.losses)
        if evaluates:
            stopped = not evaluate(step, state)
        if stopped:
            break
    return state, step, stopped


def evaluate(step: int, state: TrainState, *, eval_step: Callable, pipeline: DataPipeline, logger: Logger,
             is_stopped: Callable[[], bool]) -> bool:
    """Logs the loss on the validation split; returns False, having logged nothing, if the run is to stop meanwhile."""
    with logger.paused():
        batches = map(pipeline.to_devices, pipeline.validation_batches)
        found = mean_loss(functools.partial(eval_step, state.params, state.model_state), batches, is_stopped)
    if found is None:
        return False
    logger.log_evaluation(step, *found)
    return True


def mean_loss(eval_step: Callable, batches: Iterable, is_stopped: Callable[[], bool] = lambda: False,
              ) -> tuple[float, int] | None:
    """Returns the mean loss in nats over all targets of the batches that count, and their number; None if stopped
    before the last batch."""
    sums = []
    for batch in batches:
        if is_stopped():
            return None
        sums.append(eval_step(batch))
    loss, targets = (sum(values) for values in zip(*jax.device_get(sums)))
    return float(loss / targets) if targets else math.nan, int(targets)
