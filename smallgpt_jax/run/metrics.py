"""Logging of a run to the terminal, to `metrics.jsonl`, to TensorBoard event files and to an experiment tracker."""

import contextlib
import json
import math
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import DivergenceError
from smallgpt_jax.formatting import duration
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.tensorboard import EventFile
from smallgpt_jax.run.trackers import Tracker
from smallgpt_jax.storage.files import write_atomically
from smallgpt_jax.storage.json_files import NULL, NUMBER, Each, Kind, Optional, integer, one_of, read_json_lines

METRICS_FILE = "metrics.jsonl"
LOGGED = (NULL, NUMBER)  # null: not finite
SPEED = Kind("a speed", lambda value: NUMBER.accepts(value) and value > 1e-9)


def is_table(value) -> bool:
    """Whether `value` is an array of numbers, or arrays of equally many numbers. Null counts as NaN."""
    try:
        return np.size(np.asarray(value, float)) > 0 < np.ndim(value)
    except (ValueError, TypeError, OverflowError):
        return False


# What the readers of metrics.jsonl rely on.
TRAIN_LINE = {
    "step": integer(0), "split": one_of("train"), "loss": LOGGED, "loss_mean": Optional(LOGGED),
    "tokens_per_second": Optional((NULL, SPEED)), "learning_rate": Optional(LOGGED),
    "expert_load": Optional(Each(Kind("arrays of numbers", is_table)))}
EVAL_LINE = {"step": integer(0), "split": one_of("eval"), "loss": LOGGED, "bits_per_byte": Optional(LOGGED),
             "targets": Optional(integer(1))}


class StepMetrics(NamedTuple):
    """The metrics of one update, on the host."""

    step: int
    values: dict[str, float | dict[str, list]]  # numbers, and per-layer metrics as {path of the module: nested lists}
    is_finite: bool  # whether the loss, the gradient and the updated weights are finite


class Logger:
    """Logs a run's metrics to files in the workdir and to the terminal.

    The host reads the metrics of an update only after it has dispatched the next update, so that no device waits for
    the host. Write errors do not end a run.
    """

    def __init__(self, workdir: Path, first_step: int, progress: "Progress", clock: RunClock, *, log_every: int,
                 tokens_per_step: float, bytes_per_token: float, peak_tokens_per_second: float | None,
                 unlogged_losses: Sequence[float] = (), start_tracker: Callable[[list[dict]], Tracker] | None = None):
        """Starts logging. `first_step` is the number of steps that are already done.

        `unlogged_losses` are the losses of the steps after the last logged step, restored from the checkpoint.
        """
        self._writer = MetricsWriter(workdir, first_step, log=progress.message, start_tracker=start_tracker)
        self._progress, self._clock = progress, clock
        self._log_every, self._tokens_per_step = log_every, tokens_per_step
        self._bytes_per_token, self._peak = bytes_per_token, peak_tokens_per_second
        self._first_step = self._logged_step = first_step
        self._logged_seconds = 0.0
        self.losses = list(unlogged_losses)
        self._pending: tuple[int, dict] | None = None

    def exchange(self, step: int, metrics: dict) -> StepMetrics | None:
        """Stores the metrics of a step without waiting for them.

        Returns the metrics that were stored before this call, or None if there were none.
        """
        previous = self.take() if self._pending else None
        self._pending = (step, metrics)
        return previous

    def take(self) -> StepMetrics:
        """Waits for the stored metrics and returns them."""
        (step, metrics), self._pending = self._pending, None
        values = jax.tree.map(to_json, jax.device_get(metrics))
        self.losses.append(values["loss"])
        self._clock.progress += 1
        return StepMetrics(step, values, bool(values.pop("is_finite")))

    def log(self, metrics: StepMetrics) -> None:
        """Writes the metrics if the step is a multiple of `log_every`, or the last step of the run."""
        step, steps = metrics.step, self._progress.steps
        if step % self._log_every and step < steps:
            return
        seconds = self._clock.training_seconds()
        speed = (step - self._logged_step) * self._tokens_per_step / (seconds - self._logged_seconds)
        self._logged_step, self._logged_seconds = step, seconds
        values = metrics.values | {
            "loss_mean": statistics.fmean(self.losses), "tokens": round(step * self._tokens_per_step),
            "tokens_per_second": speed} | ({"mfu": speed / self._peak} if self._peak else {}) | self._clock.lap()
        self.losses.clear()
        self._writer.write(step, "train", values)
        left = (steps - step) * seconds / (step - self._first_step)
        self._progress.update(step, f"loss {values['loss']:.4f}   {speed:,.0f} tokens/s"
                              + (f"   MFU {values['mfu']:.1%}" if self._peak else "")
                              + f"   {duration(left)} left")

    def log_evaluation(self, step: int, nats: float, targets: int) -> None:
        """Writes the validation loss. `nats` is the mean loss per token, in nats, over `targets` tokens."""
        bits_per_byte = nats / math.log(2) / self._bytes_per_token
        self._writer.write(step, "eval", {"loss": nats, "bits_per_byte": bits_per_byte, "targets": targets,
                                          "tokens": round(step * self._tokens_per_step)})
        self._progress.print_line(step, f"validation loss {nats:.4f}, {bits_per_byte:.4f} bits per byte")

    def close(self) -> None:
        self._writer.close()


class NonFiniteGuard:
    """Decides whether a run continues after a non-finite update.

    The training step skips updates with a non-finite loss or gradient. The first skipped update ends the run. However,
    if `config.train.on_nonfinite` is "skip", skipped updates are logged, and only `max_nonfinite` of them in a row end
    the run. An applied update that makes the weights non-finite always ends the run.
    """

    def __init__(self, on_nonfinite: str, max_nonfinite: int, row_numbers_at: Callable[[int], Sequence[int]],
                 newest_checkpoint: Callable[[], int | None], log: Callable[[str], None] = print):
        self._skips, self._max = on_nonfinite == "skip", max_nonfinite
        self._row_numbers_at, self._newest_checkpoint, self._log = row_numbers_at, newest_checkpoint, log
        self._consecutive = 0

    def check(self, metrics: StepMetrics) -> None:
        """Does nothing after a finite update. Otherwise logs the skipped update or raises DivergenceError."""
        if metrics.is_finite:
            self._consecutive = 0
            return
        self._consecutive += 1
        values = metrics.values
        was_applied = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
        rows = ", ".join(map(str, self._row_numbers_at(metrics.step)))
        description = (f"step {metrics.step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
                       + (", the updated weights are not finite" if was_applied else "")
                       + f"; its batch: rows {textwrap.shorten(rows, 60, placeholder=' …')} of the training text")
        skips = self._skips and not was_applied
        if skips and self._consecutive < self._max:
            self._log(f"{description}. Update skipped ({values['skipped']:.0f} so far)")
            return
        newest = self._newest_checkpoint()
        reason = (f"{self._consecutive} non-finite updates in a row (config.train.max_nonfinite)" if skips
                  else "training has diverged")
        checkpoint_note = ("There is no checkpoint" if newest is None else
                           f"The newest checkpoint, of step {newest}, is not affected")
        skip_hint = "" if skips or was_applied else ", or --config.train.on_nonfinite=skip"
        raise DivergenceError(f"{reason}: {description}.\n{checkpoint_note}. Try a lower "
                              f"config.optimizer.learning_rate{skip_hint}")


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard files on process 0, and sends the lines of metrics.jsonl to a tracker.

    `first_step` is the number of steps that are already done. Lines of later steps are removed from metrics.jsonl,
    because the run repeats these steps. `start_tracker` is called with all lines, including the removed ones.

    After the start, write errors do not end the run. A line that cannot be written to metrics.jsonl is kept and written
    with the next line. After an error in the event file, no more events are written. `log` is called with a message
    when writing starts to fail, and by `close` if lines are lost.
    """

    def __init__(self, workdir: Path, first_step: int, log: Callable[[str], None] = print,
                 start_tracker: Callable[[list[dict]], Tracker] | None = None):
        self._writes = distributed.is_primary()
        if not self._writes:
            return
        self._path, self._log, self._pending_lines = workdir / METRICS_FILE, log, ""
        lines = read_lines(self._path)
        self._tracker = start_tracker and start_tracker(lines)
        kept = [line for line in lines if line["step"] <= first_step]
        if not self._path.is_dir():  # a folder in its place is an error of writing like any other
            write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = None
        with self._stop_events_on_error():
            self._events = EventFile(workdir, first_step)

    def write(self, step: int, split: str, values: dict[str, float | dict[str, list]]) -> None:
        """Appends the values and the Unix time in seconds to metrics.jsonl.

        The event file gets all values that are numbers.
        """
        if not self._writes:
            return
        scalars = {name: value for name, value in values.items() if not isinstance(value, dict)}
        finite = values | {name: None for name, value in scalars.items() if not math.isfinite(value)}
        line = {"step": step, "split": split, "time": round(time.time(), 3), **finite}
        was_failing, self._pending_lines = bool(self._pending_lines), self._pending_lines + json.dumps(line) + "\n"
        error = self._append()
        if error and not was_failing:
            self._log(f"{self._path}: {error.strerror}. Training continues; lines are kept until they can be written")
        if self._events:
            with self._stop_events_on_error():
                self._events.write(step, split, scalars)
        if self._tracker:
            self._tracker.write(line)

    def _append(self) -> OSError | None:
        """Writes the pending lines to metrics.jsonl. Returns the error, or None if the lines were written."""
        length = None
        try:
            with self._path.open("a") as file:
                length = file.tell()
                file.write(self._pending_lines)
                file.flush()
                # Without fsync, a power loss could remove lines of steps before the newest checkpoint. The resumed run
                # would not write these lines again.
                os.fsync(file.fileno())
        except OSError as error:
            if length is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, length)  # removes a partially written line
            return error
        self._pending_lines = ""
        return None

    @contextlib.contextmanager
    def _stop_events_on_error(self):
        """If the `with` block raises OSError, logs the error and stops writing the event file."""
        try:
            yield
        except OSError as error:
            self._events = None
            self._log(f"TensorBoard event file: {error.strerror}. Training continues without it")

    def close(self) -> None:
        if not self._writes:
            return
        if self._pending_lines and (error := self._append()):
            lost = len(self._pending_lines.splitlines())
            self._log(f"{self._path}: {error.strerror}. The last {lost} lines are lost")
        if self._events:
            with contextlib.suppress(OSError):
                self._events.close()
        if self._tracker:
            self._tracker.close()


def to_json(value):
    """Returns a number as a float, and an array as nested lists of numbers with four decimals.

    Non-finite elements of an array become None.
    """
    if not np.ndim(value):
        return float(value)
    rounded = np.round(np.float64(value), 4)
    return np.where(np.isfinite(rounded), rounded, None).tolist()


def read_lines(path: Path) -> list[dict]:
    """Returns the lines of a metrics.jsonl, or [] if the file does not exist. Skips all other lines."""
    return read_json_lines(path, (TRAIN_LINE, EVAL_LINE))


class Progress:
    """Prints the progress of a run. On a terminal, one line is updated in place; elsewhere, each update adds a line."""

    def __init__(self, steps: int):
        self.steps = steps
        self._in_place = sys.stdout.isatty()
        self._open = False

    def update(self, step: int, text: str) -> None:
        self._print(step, text, end="" if self._in_place else "\n")
        self._open = self._in_place

    def print_line(self, step: int, text: str) -> None:
        """Prints a line that later updates do not overwrite."""
        self._print(step, text, end="\n")
        self._open = False

    def message(self, text: str) -> None:
        """Prints text without the step number."""
        print(f"{self._clear()}{text}", flush=True)
        self._open = False

    def _print(self, step: int, text: str, end: str) -> None:
        counter = f"step {step:>{len(str(self.steps))}}/{self.steps}"
        print(f"{self._clear()}{counter}   {text}", end=end, flush=True)

    def _clear(self) -> str:
        return "\r\x1b[K" if self._open else ""
