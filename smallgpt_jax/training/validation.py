"""Validation loss, and the answers of probes."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from smallgpt_jax.run.metrics import ACCURACY, EXACT_MATCH


class Evaluation(NamedTuple):
    loss: float  # mean, in nats
    targets: int  # number of targets in the loss mask
    answers: dict[str, float]  # measures of a probe's answers; {} for text


def evaluate(eval_step: Callable, batches: Iterable, is_stopped=lambda: False) -> Evaluation | None:
    """Returns None if stopped."""
    sums = []
    for batch in batches:
        if is_stopped():
            return None
        sums.append(eval_step(batch))
    loss, targets, *counts = (sum(values) for values in zip(*jax.device_get(sums)))
    answers = {}
    if counts:
        right, exact, examples = counts
        answers = {EXACT_MATCH: float(exact / examples), ACCURACY: float(right / int(targets))}
    return Evaluation(float(loss / targets) if targets else math.nan, int(targets), answers)
