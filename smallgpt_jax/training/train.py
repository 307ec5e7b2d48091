"""Training: checks the config and the workdir, locks the workdir, and runs a session from a start or resumption on."""

import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.models.memory import format_bytes
from smallgpt_jax.output import best_effort
from smallgpt_jax.run import trackers
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.completion import evaluated_steps
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.curves import save_curves
from smallgpt_jax.run.logger import Logger, Units
from smallgpt_jax.run.metrics import MetricsWriter
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE, TRACKER_FILE
from smallgpt_jax.run.profiler import Profiler
from smallgpt_jax.run.progress import RunProgress
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.spool import Spool, open_spool
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.run.workdir import check_workdir, config_in_workdir, open_workdir
from smallgpt_jax.storage.paths import as_path
from smallgpt_jax.training import messages, preemption
from smallgpt_jax.training.kernel_check import check_attention_kernels, check_recurrence_kernels
from smallgpt_jax.training.loop import TrainingRun, train_loop
from smallgpt_jax.training.nonfinite import NonFiniteGuard
from smallgpt_jax.training.preemption import StopRequest
from smallgpt_jax.training.program import Program, memory_errors_explained, shared_program
from smallgpt_jax.training.trunk import Trunk, open_trunk
from smallgpt_jax.training.validation import Evaluation, evaluate
from smallgpt_jax.training.watchdog import Watchdog


@best_effort("stdout")
def train(config: ConfigDict, workdir: str, corpus: Corpus | None = None) -> None:
    """Trains the model of `config` in `workdir`; resumes from the newest checkpoint, if any. `corpus` is that of the
    config's group `data`; None opens it. If config, workdir or an attention kernel is not right, nothing is written.

    Raises UserError, DivergenceError, or StoppedError after a stop request.
    """
    clock = RunClock()
    training = open_training(config, as_path("--workdir", workdir))
    with preemption.handle_signals() as stop:
        training.run(corpus, stop, clock)


def open_training(config: ConfigDict | Config, folder: Path) -> "Training":
    """Checks the config, the workdir and the devices. Writes nothing."""
    config = config_in_workdir(config, folder)

    def check() -> Trunk | None:
        check_workdir(folder, config)
        return open_trunk(folder, config)

    trunk = distributed.run_on_primary(check)
    distributed.require_equal("config", json.dumps(config.to_dict(), sort_keys=True))
    program = shared_program(config)
    train_config = program.config.train
    distributed.require_equal("config.train.teacher_step", f"{train_config.teacher_step}")
    trackers.require_installed(train_config.tracker)
    check_attention_kernels(program)
    check_recurrence_kernels(program)
    return Training(folder, program, trunk)


class Training(NamedTuple):
    folder: Path
    program: Program
    trunk: Trunk | None

    def run(self, corpus: Corpus | None, stop: StopRequest, clock: RunClock, label: str = "") -> None:
        """Each line of the progress begins with `label`."""
        folder, program, trunk, config = *self, self.program.config
        pipeline, progress = program.open_pipeline(corpus), RunProgress(config.train.steps, label)
        distributed.run_on_primary(lambda: trunk and trunk.check_text(pipeline.corpus))
        with open_workdir(folder, config, pipeline.corpus):
            distributed.run_on_primary(lambda: trunk and trunk.copy_to(folder))
            try:
                with (memory_errors_explained(config.train, program.stack),
                      open_spool(folder, (METRICS_FILE, TRACKER_FILE), progress.message) as spool):
                    Session(program, pipeline, spool, stop, clock, progress).run()
            except DivergenceError as diverged:
                append_session(folder, {"diverged": str(diverged)})
                raise
            finally:
                save_curves(folder)


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
                at_length = found and measure(batches)
                if not at_length:
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
