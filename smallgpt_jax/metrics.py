"""What a run tells: a line on the terminal, `metrics.jsonl`, TensorBoard files."""

import contextlib
import json
import sys
import time
from pathlib import Path

import tensorboardX

from smallgpt_jax import processes
from smallgpt_jax.workdir import write_atomically

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard files, in which each step then stands once; process 0 does.

    Lines of steps after `first_step`, from a run that went on after its last checkpoint, are
    removed: those steps are made again.
    """

    def __init__(self, workdir: Path, first_step: int):
        self._writes = processes.is_first()
        if not self._writes:
            return
        self._path = workdir / METRICS_FILE
        kept = [line for line in read_lines(self._path) if line["step"] <= first_step]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._tensorboard = tensorboardX.SummaryWriter(str(workdir), purge_step=first_step + 1)

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        if not self._writes:
            return
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "split": split, **values}) + "\n")
        for name, value in values.items():
            self._tensorboard.add_scalar(f"{split}/{name}", value, step)

    def close(self) -> None:
        if self._writes:
            self._tensorboard.close()


def read_lines(path: Path) -> list[dict]:
    """The objects in a metrics.jsonl; none if it is not there. A last line cut short is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


class Stopwatch:
    """Counts the seconds of training: those inside `with paused():` are left out."""

    def __init__(self):
        self._started, self._paused = time.monotonic(), 0.0

    def seconds(self) -> float:
        return time.monotonic() - self._started - self._paused

    @contextlib.contextmanager
    def paused(self):
        started = time.monotonic()
        yield
        self._paused += time.monotonic() - started


class Progress:
    """The line that shows how a run goes: rewritten in place on a terminal, else one a call."""

    def __init__(self, steps: int):
        self._steps = steps
        self._in_place = sys.stdout.isatty()
        self._open = False

    def update(self, step: int, text: str) -> None:
        self._print(step, text, end="" if self._in_place else "\n")
        self._open = self._in_place

    def stay(self, step: int, text: str) -> None:
        """Prints a line that later ones do not overwrite."""
        self._print(step, text, end="\n")
        self._open = False

    def _print(self, step: int, text: str, end: str) -> None:
        clear = "\r\x1b[K" if self._open else ""
        print(f"{clear}step {step:>{len(str(self._steps))}}/{self._steps}   {text}", end=end, flush=True)


def duration(seconds: float) -> str:
    """3725 → '1h 2m'; 62 → '1m 2s'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
