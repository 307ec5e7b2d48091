"""Validation loss."""

import math
from collections.abc import Callable, Iterable

import jax


def mean_loss(eval_step: Callable, batches: Iterable, is_stopped=lambda: False) -> tuple[float, int] | None:
    """Returns the mean loss in nats and the number of targets in the loss mask; None if stopped."""
    sums = []
    for batch in batches:
        if is_stopped():
            return None
        sums.append(eval_step(batch))
    loss, targets = (sum(values) for values in zip(*jax.device_get(sums)))
    return float(loss / targets) if targets else math.nan, int(targets)
