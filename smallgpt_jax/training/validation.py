"""Validation loss of a train state."""

import functools
import math
from collections.abc import Callable, Iterable

import jax

from smallgpt_jax.data.pipeline import DataPipeline
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.logger import Logger
from smallgpt_jax.run.state import TrainState


def log_validation_loss(step: int, state: TrainState, *, eval_step: Callable, pipeline: DataPipeline, logger: Logger,
                        clock: RunClock, is_stopped: Callable[[], bool]) -> bool:
    """Evaluates on the validation split and logs the loss; on a stop request, returns False without logging."""
    with clock.during("evaluate"):
        batches = map(pipeline.to_devices, pipeline.validation_batches)
        found = mean_loss(functools.partial(eval_step, state.params, state.model_state), batches, is_stopped)
    if found is None:
        return False
    logger.log_evaluation(step, *found)
    return True


def mean_loss(eval_step: Callable, batches: Iterable, is_stopped=lambda: False) -> tuple[float, int] | None:
    """Returns the mean loss in nats over the targets in the loss mask, and their number; None if stopped."""
    sums = []
    for batch in batches:
        if is_stopped():
            return None
        sums.append(eval_step(batch))
    loss, targets = (sum(values) for values in zip(*jax.device_get(sums)))
    return float(loss / targets) if targets else math.nan, int(targets)
