"""Losses that split into two groups over seeds, for example those that have learned to copy.

A mean and a t-interval describe such losses badly: three seeds of which one has learned say little
about how often the next one will. So their share and their loss are given instead.
"""

import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import special

from smallgpt_jax.analysis.findings import Mode

LEVEL = 0.01  # probability that normally distributed losses are called two modes
COPYING = 0.5  # nats; gap in the loss of repeats between seeds that copy and those that do not
ONE_OF_TWENTY, SEVERAL = 0.05, 0.02
SAMPLES = 20_000


def modes(losses: Sequence[float], repeats: Sequence[float | None]) -> tuple[Mode, ...]:
    """Returns the two modes of one model's losses, lowest first; () if they are not seen to split.

    `repeats` are the losses of repeats of the same runs, which tell who has learned to copy. Where
    they were not logged, the losses split if the largest gap between them is wider than normally
    distributed ones have it, in deviations within the two groups: of 3.21, 3.22, 3.93 the gap 0.71
    is 100 times the deviation 0.007 within. With three seeds, only such a gap tells.
    """
    if len(losses) < 3 or not all(map(math.isfinite, losses)):
        return ()
    if None in repeats:
        order = sorted(losses)
        split = _largest_gap(order)
        is_split = _ratio(np.array([order]))[0] > _critical_ratio(len(order), LEVEL)
    else:
        order = [loss for _, loss in sorted(zip(repeats, losses))]
        split = _largest_gap(sorted(repeats))
        is_split = sorted(repeats)[split] - sorted(repeats)[split - 1] > COPYING
    if not is_split:
        return ()
    groups = (order[:split], order[split:])
    found = [Mode(len(group) / len(order), statistics.fmean(group), len(group)) for group in groups]
    return tuple(sorted(found, key=lambda mode: mode.loss))


def _largest_gap(ascending: Sequence[float]) -> int:
    """Returns the index of the value after the largest gap."""
    return int(np.diff(ascending).argmax()) + 1


def _ratio(samples: np.ndarray) -> np.ndarray:
    """Returns the largest gap of each ascending sample, (samples, n), in standard deviations within
    the two groups that it separates.
    """
    samples = samples - samples.mean(1, keepdims=True)
    gaps = np.diff(samples, axis=1)
    split = gaps.argmax(1)[:, None] + 1
    is_low = np.arange(samples.shape[1]) < split
    squares = np.zeros(len(samples))
    for group in (is_low, ~is_low):
        means = np.where(group, samples, 0).sum(1) / group.sum(1)
        squares += (np.where(group, samples - means[:, None], 0) ** 2).sum(1)
    within = np.sqrt(squares / (samples.shape[1] - 2))
    return gaps.max(1) / np.maximum(within, 1e-12)


@functools.cache
def _critical_ratio(count: int, level: float) -> float:
    """Returns the ratio that normally distributed losses exceed with a probability."""
    samples = np.sort(np.random.default_rng(0).standard_normal((SAMPLES, count)), axis=1)
    return float(np.quantile(_ratio(samples), 1 - level))


def split(losses: Sequence[np.ndarray]) -> bool:
    """Whether more of several models' losses over seeds are split than normally distributed ones.

    Of the models of one size, a split that happens by chance in one of twenty is seen in so many
    that this is less probable than SEVERAL. One model with three seeds does not show it.
    """
    enough = [sample[~np.isnan(sample)] for sample in losses]
    enough = [np.sort(sample) for sample in enough if np.isfinite(sample).sum() >= 3]
    seen = sum(_ratio(one[None])[0] > _critical_ratio(len(one), ONE_OF_TWENTY) for one in enough)
    return bool(special.bdtrc(seen - 1, len(enough), ONE_OF_TWENTY) < SEVERAL) if seen else False
