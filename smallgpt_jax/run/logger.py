"""The log of updates and evaluations."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from smallgpt_jax.formatting import duration
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.metrics import ANSWER_BITS, EXACT_MATCH, LOSS_OF_REPEATS, MetricsWriter
from smallgpt_jax.run.progress import RunProgress


class StepMetrics(NamedTuple):
    step: int
    arrays: dict  # on the devices
    is_finite: bool  # whether the loss, the gradient and the updated weights are finite
    loss: float

    def read(self) -> dict[str, float | dict[str, list]]:
        """Returns numbers, and per-layer metrics as {path of the module: nested lists}."""
        return {
            name: jax.tree.map(_to_json, value) if isinstance(value, dict) else float(value)
            for name, value in jax.device_get(self.arrays).items()
        }


class Units(NamedTuple):
    """Converts steps and losses to the units of the log."""

    tokens_per_step: float  # without padding
    bytes_per_token: float  # of the validation text; NaN if the loss is not one of whole texts
    peak_tokens_per_second: float | None  # at the peak FLOP/s of all devices; None if unknown
    epochs_per_step: float | None = None  # None for probes, whose examples are made


@dataclasses.dataclass
class Logger:
    """Reads the metrics of an update after dispatching the next: no device waits for the host."""

    writer: MetricsWriter
    progress: RunProgress
    clock: RunClock
    units: Units
    log_every: int
    unlogged_losses: Sequence[float] = ()  # of the checkpoint: of steps after the last logged one

    def __post_init__(self):
        self._first_step = self._logged_step = self.writer.first_step
        self._logged_seconds = 0.0
        self.losses = list(self.unlogged_losses)
        self._pending: tuple[int, dict] | None = None

    def exchange(self, step: int, metrics: dict) -> StepMetrics | None:
        """Stores metrics without waiting for them, and returns those of the step before, if any."""
        previous = self.take() if self._pending else None
        self._pending = (step, metrics)
        return previous

    def take(self) -> StepMetrics:
        (step, metrics), self._pending = self._pending, None
        # Of most updates, nothing else is read, because each read takes host time.
        loss, is_finite = jax.device_get((metrics["loss"], metrics["is_finite"]))
        self.losses.append(float(loss))
        self.clock.progress += 1
        others = {name: array for name, array in metrics.items() if name != "is_finite"}
        return StepMetrics(step, others, bool(is_finite), self.losses[-1])

    def log(self, metrics: StepMetrics) -> None:
        step = metrics.step
        last_step = self.progress.steps
        if step % self.log_every and step < last_step:
            return
        # Without the time of saves and evaluations, on which the speed would depend otherwise.
        seconds = self.clock.training_seconds()
        tokens = (step - self._logged_step) * self.units.tokens_per_step
        speed = tokens / (seconds - self._logged_seconds)
        self._logged_step, self._logged_seconds = step, seconds

        values = metrics.read()
        values["loss_mean"] = statistics.fmean(self.losses)
        values["tokens"] = round(step * self.units.tokens_per_step)
        if self.units.epochs_per_step:
            values["epochs"] = step * self.units.epochs_per_step
        values["tokens_per_second"] = speed
        message = f"loss {values['loss']:.4f}   {speed:,.0f} tokens/s"
        peak = self.units.peak_tokens_per_second
        if peak:
            values["mfu"] = speed / peak
            message += f"   MFU {values['mfu']:.1%}"
        values |= self.clock.lap()
        self.losses.clear()
        self.writer.write(step, "train", values)

        steps_of_session = step - self._first_step
        seconds_left = (last_step - step) * seconds / steps_of_session
        self.progress.update(step, f"{message}   {duration(seconds_left)} left")

    def log_evaluation(
        self, step: int, nats: float, targets: int, measures: Mapping[str, float] | None = None
    ) -> None:
        """Writes and prints an evaluation. `nats`: mean loss over `targets` tokens. `measures`: of
        a probe's answers or repeats.
        """
        measures = measures or {}
        bits_per_byte = nats / math.log(2) / self.units.bytes_per_token
        values = {
            "loss": nats,
            "bits_per_byte": bits_per_byte,
            "targets": targets,
            "tokens": round(step * self.units.tokens_per_step),
            **measures,
        }
        self.writer.write(step, "eval", values)
        self.progress.print_line(step, evaluation_message(nats, bits_per_byte, measures))

    def close(self) -> None:
        self.writer.close()


def evaluation_message(nats: float, bits_per_byte: float, measures: Mapping[str, float]) -> str:
    """Returns the text of a log line. `bits_per_byte` is NaN if the loss is that of answers or of
    masked tokens.
    """
    answers = [
        f"{name.replace('_', ' ')} {value:.2%}"
        for name, value in measures.items()
        if name.startswith(EXACT_MATCH)
    ]
    texts = [f"validation loss {nats:.4f}", *answers]
    if not answers and not math.isnan(bits_per_byte):
        texts.append(f"{bits_per_byte:.4f} bits per byte")
    if ANSWER_BITS in measures:
        texts.append(f"answers {measures[ANSWER_BITS]:.4f} bits per byte")
    if LOSS_OF_REPEATS in measures:
        texts.append(f"loss of repeats {measures[LOSS_OF_REPEATS]:.4f}")
    return ", ".join(texts)


def _to_json(value):
    """Non-finite numbers become None: JSON has no NaN."""
    numbers = np.float64(value)
    if numbers.ndim:
        numbers = np.round(numbers, 4)
    return np.where(np.isfinite(numbers), numbers, None).tolist()
