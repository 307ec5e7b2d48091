"""Experiment trackers: Weights & Biases (wandb) and Trackio, which have almost the same interface.

Runs go to the project smallgpt_jax; the environment variable WANDB_PROJECT or TRACKIO_PROJECT sets
another.
"""

import contextlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.run.names import TRACKER_FILE
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import TEXT, read_json

TRACKERS = ("wandb", "trackio")


def require_installed(name: str) -> None:
    if name and importlib.util.find_spec(name) is None:
        raise UserError(
            f"config.train.tracker={name!r}: {name} is not installed; run {install_command(name)}"
        )


class Tracker:
    """Sends the lines of metrics.jsonl to a tracker: one row per step, in one run for all sessions.

    A row is complete, and sent, when a line of a later step is written. The next session sends the
    rows that a killed session lost. After an error, nothing more is sent.
    """

    def __init__(
        self,
        name: str,
        workdir: Path,
        config: dict,
        lines: Sequence[dict],
        log: Callable[[str], None] = print,
    ):
        """Starts or resumes the run. `lines` are those of earlier sessions."""
        self._name = name
        self._log = log
        self._run = None
        self._next_step = 0
        self._row, self._row_step = {}, 0  # the row that is not sent yet
        self._known = {(line["step"], line["split"]) for line in lines}
        start = {"wandb": _start_wandb, "trackio": _start_trackio}[name]
        with self._stop_on_error():
            self._run, self._next_step, self._finish = start(workdir, run_id(workdir), config)
        for line in lines:
            if line["step"] >= self._next_step:
                self._add(line)

    def write(self, line: dict) -> None:
        """Skips lines that the tracker has from an earlier session."""
        if (line["step"], line["split"]) not in self._known:
            self._add(line)

    def _add(self, line: dict) -> None:
        # Trackers ignore rows of earlier steps. If the row of step 100 is sent, and a resumed run
        # evaluates step 100 again, the evaluation goes into the row of step 101.
        step = max(line["step"], self._next_step)
        if self._row and step != self._row_step:
            self._send()
        self._row_step = step
        self._row |= {
            f"{line['split']}/{name}": value
            for name, value in line.items()
            if name not in ("step", "split", "time") and isinstance(value, (int, float))
        }

    def _send(self) -> None:
        if self._run is not None and self._row:
            with self._stop_on_error():
                self._run.log(self._row, step=self._row_step)
        self._row = {}
        self._next_step = self._row_step + 1

    def close(self) -> None:
        self._send()
        if self._run is not None:
            with self._stop_on_error():
                self._finish()

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a tracker can raise anything, for example without network
            self._run = None
            self._log(f"{self._name}: {short_reason(error)}. Training continues without it")


def run_id(workdir: Path) -> str:
    """Returns the tracker's id of the run, which its first session creates."""
    path = workdir / TRACKER_FILE
    if not path.exists():
        write_atomically(path, json.dumps({"id": uuid.uuid4().hex[:8]}) + "\n")
    return read_json(path, {"id": TEXT}, "remove it to start another run of the tracker")["id"]


def _project(tracker: str) -> str:
    return os.environ.get(f"{tracker.upper()}_PROJECT") or "smallgpt_jax"


def _start_wandb(workdir: Path, run_id: str, config: dict):
    """Returns the run, the first step that it lacks, and the function that ends it."""
    import wandb

    # With WANDB_MODE=offline, run.step is 0, so a session writes all earlier rows to its own folder.

    run = wandb.init(
        project=_project("wandb"),
        name=workdir.name,
        id=run_id,
        resume="allow",
        dir=workdir,
        config=config,
        reinit="finish_previous",
        settings=wandb.Settings(console="off", silent=True),
    )
    return run, run.step, run.finish


def _start_trackio(workdir: Path, run_id: str, config: dict):
    # `run.finish` would let Trackio end the run once more when the process exits.
    import trackio

    run = trackio.init(
        project=_project("trackio"),
        name=f"{workdir.name}-{run_id}",
        resume="allow",
        config=config,
        embed=False,
    )
    return run, run._next_step, trackio.finish  # no public attribute has the number of steps
