"""Validation loss, the answers of probes, and the loss of repeats."""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from smallgpt_jax.run.metrics import ACCURACY, EXACT_MATCH, LOSS_OF_REPEATS


class Evaluation(NamedTuple):
    loss: float  # mean over the targets in the loss, in nats
    targets: int  # number of targets in the batches' masks; see `EvaluationSums`
    measures: dict[str, float]  # of a probe's answers, or of repeats; {} if none are asked for


def evaluate(eval_step: Callable, batches: Iterable, is_stopped=lambda: False) -> Evaluation | None:
    """Returns None if stopped. `eval_step` returns the `EvaluationSums` of a batch."""
    sums = []
    for batch in batches:
        if is_stopped():
            return None
        sums.append(eval_step(batch))
    of_batches = (jax.tree.map(to_python, of_batch) for of_batch in jax.device_get(sums))
    total = functools.reduce(functools.partial(jax.tree.map, operator.add), of_batches)
    measures = {}
    if total.answers:
        measures[EXACT_MATCH] = total.answers.exact / total.answers.rows
        measures[ACCURACY] = total.answers.right / total.counted
    if total.repeats and total.repeats.counted:
        measures[LOSS_OF_REPEATS] = float(total.repeats.loss) / total.repeats.counted
    loss = float(total.loss) / total.counted if total.counted else math.nan
    return Evaluation(loss, total.targets, measures)


def to_python(number):
    """Counts become Python's integers, because all batches together may have 2³¹ targets or more.
    Losses stay float32, in which those of earlier runs were summed.
    """
    return int(number) if np.issubdtype(number.dtype, np.integer) else number
