"""A session of a run: from a start or resumption to the last save."""

import dataclasses
import functools
import math
import time

from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import UserError
from smallgpt_jax.run import trackers
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.completion import evaluated_steps
from smallgpt_jax.run.logger import Logger, Units
from smallgpt_jax.run.metrics import MetricsWriter
from smallgpt_jax.run.names import CHECKPOINT_FOLDER
from smallgpt_jax.run.profiler import Profiler
from smallgpt_jax.run.progress import RunProgress
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.spool import Spool
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training import messages
from smallgpt_jax.training.loop import TrainingRun, train_loop
from smallgpt_jax.training.nonfinite import NonFiniteGuard
from smallgpt_jax.training.preemption import StopRequest
from smallgpt_jax.training.program import Program
from smallgpt_jax.training.validation import Evaluation, evaluate


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
            self.spool.workdir / CHECKPOINT_FOLDER,
            program.config.train.keep_checkpoints,
            self.progress.message,
            before_save=self.spool.upload,
            kept_steps=program.config.train.kept_steps,
        )
        started, newest_step = time.monotonic(), max(checkpoints.steps(), default=0)
        compiling = program.start_compilation() if newest_step < steps else ()
        state = program.restore_or_initialize(checkpoints)
        first_step = int(state.step)
        is_evaluated = self.is_evaluated(first_step)
        self.progress.message(messages.startup_message(program, self.pipeline, first_step))
        if first_step >= steps and is_evaluated:
            return
        train_step, eval_step = (step.result() for step in compiling or program.start_compilation())
        memory_stats = train_step.memory_analysis()
        self.progress.message(
            messages.compilation_message(memory_stats, time.monotonic() - started)
        )
        append_session(
            self.spool.workdir,
            messages.session_facts(program, self.pipeline, memory_stats, first_step),
        )
        training = self.wire(checkpoints, train_step, eval_step, first_step)
        self.finish(training, *train_from(training, state, first_step, is_evaluated))

    def is_evaluated(self, step: int) -> bool:
        evaluated = evaluated_steps(self.spool.workdir, self.program.config, self.pipeline.corpus)
        return bool(distributed.broadcast_from_primary((step in evaluated,))[0])

    def wire(self, checkpoints: Checkpoints, train_step, eval_step, first_step: int) -> TrainingRun:
        program, pipeline, config = self.program, self.pipeline, self.program.config.train
        logger = self.open_logger(checkpoints, first_step)
        return TrainingRun(
            config=config,
            batches=map(
                pipeline.to_devices,
                read_ahead(pipeline.train_batches, first_step, program.config.data.workers),
            ),
            update=program.bind(train_step),
            log_validation_loss=functools.partial(
                self.log_validation_loss, program.runnable(eval_step), logger
            ),
            checkpoints=checkpoints,
            logger=logger,
            guard=NonFiniteGuard(
                config.on_nonfinite,
                config.max_nonfinite,
                pipeline.row_numbers_at,
                checkpoints.latest_finished,
                self.progress.message,
            ),
            stop=self.stop,
            clock=self.clock,
            profiler=Profiler(
                self.spool, config.profile_from, config.profile_steps, self.progress.message
            ),
        )

    def open_logger(self, checkpoints: Checkpoints, first_step: int) -> Logger:
        config = self.program.config
        start_tracker = config.train.tracker and functools.partial(
            trackers.Tracker,
            config.train.tracker,
            self.spool.folder,
            config.to_dict(),
            log=self.progress.message,
        )
        is_masked = config.train.objective == "masked"
        units = Units(
            self.pipeline.tokens_per_step,
            math.nan if is_masked else self.pipeline.corpus.bytes_per_token("validation"),
            messages.peak_tokens_per_second(self.program),
        )
        writer = MetricsWriter(self.spool.folder, first_step, self.progress.message, start_tracker)
        return Logger(
            writer,
            self.progress,
            self.clock,
            units,
            config.train.log_every,
            checkpoints.unlogged_losses,
        )

    def log_validation_loss(self, eval_step, logger: Logger, step: int, state: TrainState) -> bool:
        """On a stop request, returns False without logging."""
        with self.clock.during("evaluate"):
            found = self.evaluate(functools.partial(eval_step, state.evaluated, state.model_state))
        if found is None:
            return False
        logger.log_evaluation(step, *found)
        return True

    def evaluate(self, eval_step) -> Evaluation | None:
        """Also measures the answers at the further lengths of a probe. Returns None if stopped."""
        pipeline, is_stopped = self.pipeline, self.stop.is_requested_anywhere
        found = evaluate(
            eval_step, map(pipeline.to_devices, pipeline.validation_batches), is_stopped
        )
        for length, batches in pipeline.test_batches.items():
            at_length = found and evaluate(eval_step, map(pipeline.to_devices, batches), is_stopped)
            if not at_length:
                return None
            found.measures.update(
                {f"{name}_at_{length}": value for name, value in at_length.measures.items()}
            )
        return found

    def finish(self, training: TrainingRun, state: TrainState, step: int, stopped: bool) -> None:
        """Raises UserError if the last save fails, and StoppedError if `stopped`."""
        with self.clock.during("save"):
            is_saved = save_last(training.checkpoints, step, state, training.logger.losses)
            training.checkpoints.close()
        training.logger.close()
        self.progress.message(self.clock.goodput_message())
        if not is_saved:
            raise UserError(
                f"--workdir={self.spool.workdir}: the last step, {step}, could not be saved; free "
                "disk space and rerun the same command to resume from the newest checkpoint"
            )
        if stopped:
            self.stop.raise_stopped(step)


def train_from(
    run: TrainingRun, state: TrainState, first_step: int, is_evaluated: bool
) -> tuple[TrainState, int, bool]:
    """Evaluates `first_step` if this is due. Returns the state, its step, and whether it was
    stopped.
    """
    run.clock.start_training()
    # It is due if the previous session was stopped between saving and evaluating, or if
    # train.eval_steps has changed.
    is_due = first_step and run.config.evaluates(first_step) and not is_evaluated
    if is_due and not run.log_validation_loss(first_step, state):
        return state, first_step, True
    run.profiler.after_step(first_step, state)
    result = train_loop(run, state, first_step)
    run.profiler.close()
    return result


def save_last(checkpoints: Checkpoints, step: int, state: TrainState, losses: list[float]) -> bool:
    """Returns whether the last step has a checkpoint."""
    checkpoints.wait_until_finished()
    if step not in checkpoints.steps():
        # An earlier attempt failed, or the run was stopped in an evaluation between two
        # checkpoints.
        checkpoints.save(step, state, losses)
        checkpoints.wait_until_finished()
    return step in checkpoints.steps()
