"""A session of a run: from a start or resumption to the last save."""

import dataclasses
import functools
import math
import time

from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.memory import format_bytes
from smallgpt_jax.run import trackers
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.completion import evaluated_steps
from smallgpt_jax.run.logger import Logger, RunProgress, Units
from smallgpt_jax.run.metrics import MetricsWriter
from smallgpt_jax.run.names import CHECKPOINT_FOLDER
from smallgpt_jax.run.profiler import Profiler
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.spool import Spool
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training import messages
from smallgpt_jax.training.loop import TrainingRun, train_loop
from smallgpt_jax.training.nonfinite import NonFiniteGuard
from smallgpt_jax.training.preemption import StopRequest
from smallgpt_jax.training.program import Program
from smallgpt_jax.training.validation import Evaluation, evaluate
from smallgpt_jax.training.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Session:
    """The workdir is locked."""

    program: Program
    pipeline: DataPipeline
    spool: Spool
    stop: StopRequest
    clock: RunClock
    progress: RunProgress

    def run(self) -> None:
        program, steps = self.program, self.program.config.train.steps
        checkpoints = Checkpoints(
            self.spool.workdir / CHECKPOINT_FOLDER, program.config.train.keep_checkpoints, self.progress.message,
            before_save=self.spool.upload, kept_steps=program.config.train.kept_steps)
        started, newest_step = time.monotonic(), max(checkpoints.steps(), default=0)
        compiling = program.start_compilation() if newest_step < steps else ()
        state = program.restore_or_initialize(checkpoints)
        first_step = int(state.step)
        evaluated = evaluated_steps(self.spool.workdir, program.config, self.pipeline.corpus)
        is_evaluated = bool(distributed.broadcast_from_primary((first_step in evaluated,))[0])
        self.progress.message(messages.startup_message(program, self.pipeline, first_step))
        if first_step >= steps and is_evaluated:
            return
        train_step, eval_step = (step.result() for step in compiling or program.start_compilation())
        memory_stats = train_step.memory_analysis()
        state_size, temporary_size = map(
            format_bytes, (memory_stats.argument_size_in_bytes, memory_stats.temp_size_in_bytes))
        self.progress.message(f"compiled and ready in {time.monotonic() - started:.0f} s; memory per device: "
                              f"{state_size} for state and batch, {temporary_size} temporary")
        append_session(self.spool.workdir, messages.session_facts(program, self.pipeline, memory_stats, first_step))
        training = self.wire(checkpoints, train_step, eval_step, first_step)
        self.finish(training, *train_from(training, state, first_step, is_evaluated))

    def wire(self, checkpoints: Checkpoints, train_step, eval_step, first_step: int) -> TrainingRun:
        program, pipeline, config = self.program, self.pipeline, self.program.config.train
        start_tracker = config.tracker and functools.partial(
            trackers.Tracker, config.tracker, self.spool.folder, program.config.to_dict(), log=self.progress.message)
        units = Units(pipeline.tokens_per_step,
                      math.nan if config.objective == "masked" else pipeline.corpus.bytes_per_token("validation"),
                      messages.peak_tokens_per_second(program))
        writer = MetricsWriter(self.spool.folder, first_step, self.progress.message, start_tracker)
        logger = Logger(writer, self.progress, self.clock, units, config.log_every,
                        checkpoints.unlogged_losses(first_step) if first_step else [])
        return TrainingRun(
            config=config,
            batches=map(pipeline.to_devices,
                        read_ahead(pipeline.train_batches, first_step, program.config.data.workers)),
            update=program.bind(train_step),
            log_validation_loss=functools.partial(self.log_validation_loss, program.runnable(eval_step), logger),
            checkpoints=checkpoints,
            logger=logger,
            guard=NonFiniteGuard(config.on_nonfinite, config.max_nonfinite, pipeline.row_numbers_at,
                                 checkpoints.latest_finished, self.progress.message),
            stop=self.stop,
            clock=self.clock,
            profiler=Profiler(self.spool, config.profile_from, config.profile_steps, self.progress.message))

    def log_validation_loss(self, eval_step, logger: Logger, step: int, state: TrainState) -> bool:
        """Also measures the answers at the further lengths of a probe. Returns False, without logging, if stopped."""
        def measure(batches) -> Evaluation | None:
            return evaluate(functools.partial(eval_step, state.evaluated, state.model_state),
                            map(self.pipeline.to_devices, batches), self.stop.is_requested_anywhere)

        with self.clock.during("evaluate"):
            found = measure(self.pipeline.validation_batches)
            for length, batches in self.pipeline.test_batches.items():
                if not (found and (at_length := measure(batches))):
                    return False
                found.answers.update({f"{name}_at_{length}": value for name, value in at_length.answers.items()})
        if found:
            logger.log_evaluation(step, *found)
        return found is not None

    def finish(self, training: TrainingRun, state: TrainState, step: int, stopped: bool) -> None:
        """Raises UserError if the last save fails, and StoppedError if `stopped`."""
        checkpoints = training.checkpoints
        with self.clock.during("save"):
            checkpoints.wait_until_finished()
            if step not in checkpoints.steps():
                # An earlier attempt failed, or the run was stopped in an evaluation between two checkpoints.
                checkpoints.save(step, state, training.logger.losses)
                checkpoints.wait_until_finished()
            is_saved = step in checkpoints.steps()
            checkpoints.close()
        training.logger.close()
        self.progress.message(self.clock.goodput_message())
        if not is_saved:
            raise UserError(f"--workdir={self.spool.workdir}: the last step, {step}, could not be saved; free disk "
                            "space and rerun the same command to resume from the newest checkpoint")
        if stopped:
            self.stop.raise_stopped(step)


def train_from(run: TrainingRun, state: TrainState, first_step: int,
               is_evaluated: bool) -> tuple[TrainState, int, bool]:
    """Evaluates `first_step` if this is due. Returns the state, its step, and whether it was stopped."""
    run.clock.start_training()
    # It is due if the previous session was stopped between saving and evaluating, or if train.eval_steps has changed.
    is_due = first_step and run.config.evaluates(first_step) and not is_evaluated
    if is_due and not run.log_validation_loss(first_step, state):
        return state, first_step, True
    run.profiler.after_step(first_step, state)
    with Watchdog(run.clock, run.config.stall_seconds):
        result = train_loop(run, state, first_step)
    run.profiler.close()
    return result
