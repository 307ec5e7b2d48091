"""Training: a run in a workdir."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ml_collections import ConfigDict

from smallgpt_jax.data.batches import read_ahead
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.data.probe_corpus import ProbeCorpus
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.output import best_effort
from smallgpt_jax.run import trackers
from smallgpt_jax.run.checkpoint import Checkpoints, LoopMemory
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.completion import is_evaluated
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.curves import save_curves
from smallgpt_jax.run.logger import Logger, StepMetrics
from smallgpt_jax.run.metrics import MetricsWriter
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE, ORIGIN_FILE, TRACKER_FILE
from smallgpt_jax.run.profiler import Profiler
from smallgpt_jax.run.progress import RunProgress
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.spool import Spool, open_spool
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.run.workdir import open_workdir
from smallgpt_jax.storage.paths import as_path
from smallgpt_jax.training import messages, preemption
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.eval_examples import EvalExamples, open_examples
from smallgpt_jax.training.initial_state import restore_or_initialize
from smallgpt_jax.training.loop import train_loop
from smallgpt_jax.training.loss_band import LossBand, LossWatch, find_band
from smallgpt_jax.training.memory_errors import memory_errors_explained
from smallgpt_jax.training.microbatches import with_microbatches
from smallgpt_jax.training.nonfinite import NonFiniteGuard
from smallgpt_jax.training.opening import check_run, open_pipeline
from smallgpt_jax.training.preemption import StopRequest
from smallgpt_jax.training.program import Program, preparation_shown
from smallgpt_jax.training.validation import evaluate_all
from smallgpt_jax.training.watchdog import Watchdog


def train_and_evaluate(
    config: ConfigDict | Config,
    workdir: str | Path,
    corpus: Corpus | ProbeCorpus | None = None,
) -> None:
    """Trains the model of `config` in `workdir`. See `open_trainer`."""
    with open_trainer(config, workdir, corpus) as trainer:
        trainer.run()


@contextlib.contextmanager
def open_trainer(
    config: ConfigDict | Config,
    workdir: str | Path,
    corpus: Corpus | ProbeCorpus | None = None,
) -> Iterator["Trainer"]:
    """Yields the trainer of a new or existing run, whose workdir is locked until the exit. `corpus`
    is that of the config's group `data`; None opens it.

    Raises UserError, DivergenceError, or StoppedError after a stop request. If the config or
    workdir is invalid, a kernel gives wrong results, or a custom module sees later tokens, nothing
    is written.
    """
    clock = RunClock()
    folder = as_path("--workdir", workdir)
    # Checks and the text come before the lock: a refused run leaves the workdir as it is.
    with best_effort("stdout"), preemption.handle_signals() as stop:
        config, branch, program = check_run(config, folder)
        progress = RunProgress(config.train.steps)
        pipeline = open_pipeline(config, program, corpus)
        if not config.train.microbatches:  # last, because it may compile for minutes
            config = with_microbatches(config)
            program = shared_program(config)
        examples = open_examples(config, program, pipeline.corpus)
        if branch:
            distributed.run_on_primary(lambda: branch.check_text(pipeline.corpus))
        with open_workdir(folder, config, pipeline.corpus):
            if branch:
                distributed.run_on_primary(lambda: branch.copy_to(folder))
            with (
                _end_recorded(folder),
                memory_errors_explained(config.train),
                open_spool(folder, (METRICS_FILE, TRACKER_FILE), progress.message) as spool,
                Watchdog(clock, config.train.stall_seconds),
            ):
                yield Trainer(config, program, pipeline, spool, progress, stop, clock, examples)


@contextlib.contextmanager
def _end_recorded(folder: Path) -> Iterator[None]:
    """However the run ends, draws its curves; records that it has diverged."""
    try:
        yield
    except DivergenceError as diverged:
        append_session(folder, {"diverged": str(diverged)})  # a comparison does not try again
        raise
    finally:
        save_curves(folder)


@dataclasses.dataclass
class Trainer:
    """A run in its workdir, which is locked."""

    config: Config
    program: Program
    pipeline: DataPipeline
    spool: Spool
    progress: RunProgress
    stop: StopRequest
    clock: RunClock
    examples: EvalExamples | None = None
    # Made when the first step is known; the loop reads them.
    logger: Logger = dataclasses.field(init=False)
    batches: Iterator[Batch] = dataclasses.field(init=False)  # on the devices, one per update
    update: Callable = dataclasses.field(init=False)  # (state, batch) → state, metrics

    def __post_init__(self):
        train, log = self.config.train, self.progress.message
        self.checkpoints = Checkpoints(
            self.spool.workdir / CHECKPOINT_FOLDER,
            train.keep_checkpoints,
            log,
            before_save=self.spool.upload,
            kept_steps=train.kept_steps,
        )
        self.guard = NonFiniteGuard(
            train.on_nonfinite,
            train.max_nonfinite,
            self.pipeline.row_numbers_at,
            self.checkpoints.latest_finished,
            log,
        )
        self.loss_watch = LossWatch(self._find_loss_band(), log)
        self.profiler = Profiler(self.spool, train.profile_from, train.profile_steps, log)

    def run(self) -> None:
        """Trains from the newest checkpoint to the last step. Raises UserError if the last save
        fails, and StoppedError after a stop request.
        """
        began, steps = time.monotonic(), self.config.train.steps
        # The steps are compiled while the state is restored, unless all seem to be done.
        is_trained = max(self.checkpoints.steps(), default=0) >= steps
        with preparation_shown():
            compilations = [] if is_trained else self.program.start_compilation()
            state = restore_or_initialize(self.program, self.checkpoints, self.config.train.seed)
        step = int(state.step)
        # All processes must agree; a network file system may show them different files.
        has_evaluation = distributed.from_primary(
            is_evaluated(self.spool.workdir, self.config, self.pipeline.corpus, step)
        )
        self.progress.message(
            messages.startup_message(self.config, self.program, self.pipeline, step)
        )
        if step >= steps and has_evaluation:
            return
        with preparation_shown():
            for compilation in compilations or self.program.start_compilation():
                compilation.result()  # raises what the compiler raised
        self._log_session(step, time.monotonic() - began)
        self.logger = self.make_logger(step)
        self.guard.consecutive = self.checkpoints.memory.nonfinite
        self.update = self.program.bind(self.config)
        batches = read_ahead(self.pipeline.train_batches, step, self.config.data.workers)
        self.batches = map(self.pipeline.to_devices, batches)

        self.clock.start_training()
        stopped = False
        # The previous session was stopped between saving and evaluating, or train.eval_steps has
        # changed.
        if step and self.config.train.evaluates(step) and not has_evaluation:
            stopped = not self.log_validation_loss(step, state)
        if not stopped:
            self.profiler.after_step(step, state)  # the trace may begin with the first update
            state, step, stopped = train_loop(self, state, step)
            self.profiler.close()
        self.finish(state, step)
        if stopped:
            self.stop.raise_stopped(step)

    def make_logger(self, first_step: int) -> Logger:
        config, log = self.config, self.progress.message
        # The writer starts it, with the lines of earlier sessions, which the tracker may lack.
        start_tracker = config.train.tracker and functools.partial(
            trackers.Tracker,
            config.train.tracker,
            self.spool.folder,
            config.to_dict(),
            log=log,
        )
        writer = MetricsWriter(self.spool.folder, first_step, log, start_tracker)
        return Logger(
            writer,
            self.progress,
            self.clock,
            messages.log_units(self.program, self.pipeline),
            config.train.log_every,
            self.checkpoints.memory.unlogged_losses,
        )

    def check(self, metrics: StepMetrics) -> None:
        """Raises DivergenceError if the run must end."""
        self.guard.check(metrics)
        self.loss_watch.check(metrics)

    def save(self, step: int, state: TrainState) -> None:
        memory = LoopMemory(tuple(self.logger.losses), self.guard.consecutive)
        self.checkpoints.save(step, state, memory)

    def log_validation_loss(self, step: int, state: TrainState) -> bool:
        """Evaluates the state. On a stop request, returns False without logging."""
        eval_step = functools.partial(self.program.evaluate, state.evaluated, state.model_state)
        with self.clock.during("evaluate"):
            evaluation = evaluate_all(eval_step, self.pipeline, self.stop.is_requested_anywhere)
            if evaluation is None:
                return False
            if self.examples:
                measures = self.examples.measure(state, self.stop.is_requested_anywhere)
                if measures is None:
                    return False
                evaluation.measures.update(measures)
        self.logger.log_evaluation(step, *evaluation)
        return True

    def finish(self, state: TrainState, step: int) -> None:
        """Saves the last step and closes the log. Raises UserError if it cannot be saved."""
        with self.clock.during("save"):
            is_saved = self._save_last(state, step)
            self.checkpoints.close()
        self.logger.close()
        self.progress.message(self.clock.goodput_message())
        if not is_saved:
            raise UserError(
                f"--workdir={self.spool.workdir}: the last step, {step}, could not be saved; free "
                "disk space and rerun the same command to resume from the newest checkpoint"
            )

    def _find_loss_band(self) -> LossBand | None:
        is_imported = (self.spool.workdir / ORIGIN_FILE).exists()
        if not self.config.train.check_loss or is_imported or not distributed.is_primary():
            return None
        return find_band(self.config, self.pipeline.corpus.description)

    def _log_session(self, first_step: int, seconds: float) -> None:
        memory_stats = self.program.compiled_train_step.memory_analysis()
        self.progress.message(messages.compilation_message(memory_stats, seconds))
        facts = messages.session_facts(self.program, self.pipeline, memory_stats, first_step)
        append_session(self.spool.workdir, facts)

    def _save_last(self, state: TrainState, step: int) -> bool:
        """Returns whether the last step has a checkpoint."""
        self.checkpoints.wait_until_finished()
        if step not in self.checkpoints.steps():
            # An earlier attempt failed, or the run was stopped in an evaluation between two
            # checkpoints.
            self.save(step, state)
            self.checkpoints.wait_until_finished()
        return step in self.checkpoints.steps()
