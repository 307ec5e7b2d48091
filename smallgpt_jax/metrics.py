"""What a run logs: a line on the terminal, `metrics.jsonl`, TensorBoard files."""

import contextlib
import json
import math
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from smallgpt_jax import distributed
from smallgpt_jax.errors import Diverged
from smallgpt_jax.files import write_atomically
from smallgpt_jax.formatting import duration

METRICS_FILE = "metrics.jsonl"


class StepMetrics(NamedTuple):
    """The metrics of one update, read from the devices."""

    step: int
    values: dict[str, float]
    is_finite: bool  # loss, gradient and updated weights


class Logger:
    """Logs a run's metrics to its files and to the terminal.

    It holds the metrics of the newest update while the devices compute them: they are read only when the next update is
    under way, so that no device waits for the host. What cannot be written does not end a run.
    """

    def __init__(self, workdir: Path, first_step: int, progress: "Progress", *, log_every: int, tokens_per_step: float,
                 bytes_per_token: float, peak_tokens_per_second: float | None, unlogged_losses: Sequence[float] = ()):
        """`unlogged_losses` are those of the steps since the last logged one, as `losses` was when it was saved."""
        self._writer, self._progress = MetricsWriter(workdir, first_step, say=progress.note), progress
        self._log_every, self._tokens_per_step = log_every, tokens_per_step
        self._bytes_per_token, self._peak = bytes_per_token, peak_tokens_per_second
        self._first_step, self._watch = first_step, Stopwatch()
        self._logged_step, self._logged_seconds = first_step, 0.0
        self.losses = list(unlogged_losses)
        self._pending: tuple[int, dict] | None = None

    def exchange(self, step: int, metrics: dict) -> StepMetrics | None:
        """Takes the metrics of a step, which are still being computed; returns those of the step before, read."""
        previous = self.take() if self._pending else None
        self._pending = (step, metrics)
        return previous

    def take(self) -> StepMetrics:
        """Waits for the metrics that it holds, and returns them."""
        (step, metrics), self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.losses.append(values["loss"])
        return StepMetrics(step, values, bool(values.pop("is_finite")))

    def log(self, metrics: StepMetrics) -> None:
        """Writes the metrics of a step, if it is one that is logged."""
        step, steps = metrics.step, self._progress.steps
        if step % self._log_every and step < steps:
            return
        seconds = self._watch.seconds()
        speed = (step - self._logged_step) * self._tokens_per_step / (seconds - self._logged_seconds)
        self._logged_step, self._logged_seconds = step, seconds
        values = metrics.values | {
            "loss_mean": statistics.fmean(self.losses), "tokens": round(step * self._tokens_per_step),
            "tokens_per_second": speed} | ({"mfu": speed / self._peak} if self._peak else {})
        self.losses.clear()
        self._writer.write(step, "train", values)
        left = (steps - step) * seconds / (step - self._first_step)
        self._progress.update(step, f"loss {values['loss']:.4f}   {speed:,.0f} tokens/s"
                              + (f"   MFU {values['mfu']:.1%}" if self._peak else "")
                              + f"   {duration(left)} left")

    def log_evaluation(self, step: int, nats: float, targets: int) -> None:
        """Writes the validation loss in nats per token, the mean over so many targets."""
        bits_per_byte = nats / math.log(2) / self._bytes_per_token
        self._writer.write(step, "eval", {"loss": nats, "bits_per_byte": bits_per_byte, "targets": targets,
                                          "tokens": round(step * self._tokens_per_step)})
        self._progress.stay(step, f"validation loss {nats:.4f}, {bits_per_byte:.4f} bits per byte")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time inside out of tokens per second."""
        with self._watch.paused():
            yield

    def close(self) -> None:
        self._writer.close()


class NonFiniteGuard:
    """Decides what follows an update whose loss or gradient is not finite: `train.on_nonfinite`. One that was applied
    and has left weights that are not finite is always the last."""

    def __init__(self, on_nonfinite: str, max_nonfinite: int, row_numbers_of: Callable[[int], Sequence[int]],
                 newest_checkpoint: Callable[[], int | None], say: Callable[[str], None] = print):
        self._skips, self._max = on_nonfinite == "skip", max_nonfinite
        self._row_numbers_of, self._newest_checkpoint, self._say = row_numbers_of, newest_checkpoint, say
        self._in_a_row = 0

    def check(self, metrics: StepMetrics) -> None:
        """Reports an update that is not finite. Raises Diverged if the run is to end."""
        if metrics.is_finite:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        values = metrics.values
        was_applied = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        rows = ", ".join(map(str, self._row_numbers_of(metrics.step)))
        trouble = (f"step {metrics.step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
                   + (", the updated weights are not finite" if was_applied else "")
                   + f"; its batch: rows {textwrap.shorten(rows, 60, placeholder=' …')} of the training text")
        skips = self._skips and not was_applied
        if skips and self._in_a_row < self._max:
            self._say(f"{trouble}. This update is skipped ({values['skipped']:.0f} so far)")
            return
        newest = self._newest_checkpoint()
        why = (f"{self._in_a_row} updates in a row (config.train.max_nonfinite) were not finite" if skips
               else "training has diverged")
        good = ("There is no checkpoint" if newest is None else
                f"The newest checkpoint, of step {newest}, is good")
        remedy = "" if skips or was_applied else ", or --config.train.on_nonfinite=skip"
        raise Diverged(f"{why}: {trouble}.\n{good}. Try a lower config.optimizer.learning_rate{remedy}")


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard files, in which each step then stands once; process 0 does.

    Lines of steps after `first_step`, from a run that went on after its last checkpoint, are
    removed: those steps are made again. Nothing that then happens to these files ends the run: a line that
    cannot be written is written with the next one; TensorBoard's file is then given up. `say` is called when
    that begins, and at the end if lines are lost.
    """

    def __init__(self, workdir: Path, first_step: int, say: Callable[[str], None] = print):
        self._writes = distributed.is_first()
        if not self._writes:
            return
        self._path, self._say, self._waiting = workdir / METRICS_FILE, say, ""
        kept = [line for line in read_lines(self._path) if line["step"] <= first_step]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = EventsWriter(str(workdir / "events"))
        # What older files say of later steps does not count.
        self._write_event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Adds a line, with the time in Unix seconds."""
        if not self._writes:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "split": split, "time": round(time.time(), 3), **finite}
        was_waiting, self._waiting = bool(self._waiting), self._waiting + json.dumps(line) + "\n"
        trouble = self._append()
        if trouble and not was_waiting:
            self._say(f"{self._path}: {trouble.strerror}. Training goes on; what is to be written waits")
        summary = Summary(value=[Summary.Value(tag=f"{split}/{name}", simple_value=value)
                                 for name, value in values.items()])
        self._write_event(step=step, summary=summary)

    def _append(self) -> OSError | None:
        """Writes the lines that wait; returns what kept it from that."""
        length = None
        try:
            with self._path.open("a") as file:
                length = file.tell()
                file.write(self._waiting)
                file.flush()
                os.fsync(file.fileno())  # a checkpoint outlives a loss of power, so do the lines before it
        except OSError as error:
            if length is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, length)  # not half a line
            return error
        self._waiting = ""
        return None

    def _write_event(self, **fields) -> None:
        """Directly, not through tensorboardX's thread, which waits for ever once a write has failed."""
        if not self._events:
            return
        try:
            self._events.write_event(Event(wall_time=time.time(), **fields))
            self._events.flush()
        except OSError as error:
            self._events = None
            self._say(f"TensorBoard's file cannot be written: {error.strerror}. Training goes on without it")

    def close(self) -> None:
        if not self._writes:
            return
        if self._waiting and (trouble := self._append()):
            self._say(f"{self._path}: {trouble.strerror}. Its last {len(self._waiting.splitlines())} lines are lost")
        if self._events:
            with contextlib.suppress(OSError):
                self._events.close()


def read_lines(path: Path, keys: set[str] = frozenset({"step", "split"})) -> list[dict]:
    """The objects in a metrics.jsonl, or such a file; none if it is not there. Lines cut short or damaged, which have
    not all the `keys`, are left out."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and keys <= line.keys():
                lines.append(line)
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
        self.steps = steps
        self._in_place = sys.stdout.isatty()
        self._open = False

    def update(self, step: int, text: str) -> None:
        self._print(step, text, end="" if self._in_place else "\n")
        self._open = self._in_place

    def stay(self, step: int, text: str) -> None:
        """Prints a line that later ones do not overwrite."""
        self._print(step, text, end="\n")
        self._open = False

    def note(self, text: str) -> None:
        """Prints a line about something other than a step."""
        print(f"{self._clear()}{text}", flush=True)
        self._open = False

    def _print(self, step: int, text: str, end: str) -> None:
        counter = f"step {step:>{len(str(self.steps))}}/{self.steps}"
        print(f"{self._clear()}{counter}   {text}", end=end, flush=True)

    def _clear(self) -> str:
        return "\r\x1b[K" if self._open else ""
