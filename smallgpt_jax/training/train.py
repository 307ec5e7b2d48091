"""Training: checks the config and the workdir, locks the workdir, runs a session in it."""

import json
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import DivergenceError
from smallgpt_jax.output import best_effort
from smallgpt_jax.run import trackers
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.curves import save_curves
from smallgpt_jax.run.names import METRICS_FILE, TRACKER_FILE
from smallgpt_jax.run.progress import RunProgress
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.spool import open_spool
from smallgpt_jax.run.workdir import check_workdir, config_in_workdir, open_workdir
from smallgpt_jax.storage.paths import as_path
from smallgpt_jax.training import preemption
from smallgpt_jax.training.branch import Branch, open_branch
from smallgpt_jax.training.kernel_check import check_attention_kernels, check_recurrence_kernels
from smallgpt_jax.training.preemption import StopRequest
from smallgpt_jax.training.program import Program, memory_errors_explained, shared_program
from smallgpt_jax.training.session import Session
from smallgpt_jax.training.watchdog import Watchdog


@best_effort("stdout")
def train(config: ConfigDict, workdir: str, corpus: Corpus | None = None) -> None:
    """Trains the model of `config` in `workdir`; resumes from the newest checkpoint, if any.
    `corpus` is that of the config's group `data`; None opens it.

    Raises UserError, DivergenceError, or StoppedError after a stop request. If the config or
    workdir is invalid, or an attention kernel gives wrong results, nothing is written.
    """
    clock = RunClock()
    training = open_training(config, as_path("--workdir", workdir))
    with preemption.handle_signals() as stop:
        training.run(corpus, stop, clock)


def open_training(config: ConfigDict | Config, folder: Path) -> "Training":
    """Checks the config, the workdir and the devices. Writes nothing."""
    config = config_in_workdir(config, folder)

    def check() -> Branch | None:
        check_workdir(folder, config)
        return open_branch(folder, config)

    branch = distributed.run_on_primary(check)
    distributed.require_equal("config", json.dumps(config.to_dict(), sort_keys=True))
    program = shared_program(config)
    train_config = program.config.train
    distributed.require_equal("config.train.teacher_step", f"{train_config.teacher_step}")
    trackers.require_installed(train_config.tracker)
    check_attention_kernels(program)
    check_recurrence_kernels(program)
    return Training(folder, program, branch)


class Training(NamedTuple):
    folder: Path
    program: Program
    branch: Branch | None

    def run(self, corpus: Corpus | None, stop: StopRequest, clock: RunClock) -> None:
        folder, program, branch, config = *self, self.program.config
        pipeline, progress = program.open_pipeline(corpus), RunProgress(config.train.steps)
        distributed.run_on_primary(lambda: branch and branch.check_text(pipeline.corpus))
        with open_workdir(folder, config, pipeline.corpus):
            distributed.run_on_primary(lambda: branch and branch.copy_to(folder))
            try:
                with (
                    memory_errors_explained(config.train),
                    open_spool(folder, (METRICS_FILE, TRACKER_FILE), progress.message) as spool,
                    Watchdog(clock, config.train.stall_seconds),
                ):
                    Session(program, pipeline, spool, stop, clock, progress).run()
            except DivergenceError as diverged:
                append_session(folder, {"diverged": str(diverged)})
                raise
            finally:
                save_curves(folder)
