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

_LEVEL = 0.01  # probability that normally distributed losses are called two modes
_COPYING = 0.5  # nats; gap in the loss of repeats between seeds that copy and those that do not
_ONE_OF_TWENTY, _SEVERAL = 0.05, 0.02  # probabilities, see `split`
_SAMPLES = 20_000


def modes(losses: Sequence[float], repeats: Sequence[float | None]) -> tuple[Mode, ...]:
    """Returns the two modes of one model's losses, lowest first; () if they do not split visibly.

    `repeats` are the losses of repeats of the same runs, which tell who has learned to copy; None
    where they were not logged.
    """
    if len(losses) < 3 or not all(map(math.isfinite, losses)):
        return ()
    if None in repeats:
        # The losses split if the largest gap between them is wider than normally distributed ones
        # have it, in deviations within the two groups: of 3.21, 3.22, 3.93 the gap 0.71 is 100
        # times the deviation 0.007 within. With three seeds, only such a gap tells.
        order = sorted(losses)
        first_above = _largest_gap(order)
        is_split = _ratio(np.array([order]))[0] > _critical_ratio(len(order), _LEVEL)
    else:
        order = [loss for _, loss in sorted(zip(repeats, losses))]
        repeats = sorted(repeats)
        first_above = _largest_gap(repeats)
        is_split = repeats[first_above] - repeats[first_above - 1] > _COPYING
    if not is_split:
        return ()
    groups = [order[:first_above], order[first_above:]]
    # Who copies has the lower loss of repeats, but not always the lower loss.
    groups.sort(key=statistics.fmean)
    return tuple(
        Mode(len(group) / len(order), statistics.fmean(group), len(group)) for group in groups
    )


def _largest_gap(ascending: Sequence[float]) -> int:
    """Returns the index of the value after the largest gap."""
    return int(np.diff(ascending).argmax()) + 1


def _ratio(samples: np.ndarray) -> np.ndarray:
    """Returns the largest gap of each ascending sample, (samples, n), in standard deviations within
    the two groups that it separates.
    """
    samples = samples - samples.mean(1, keepdims=True)
    gaps = np.diff(samples, axis=1)
    first_above = gaps.argmax(1)[:, None] + 1
    is_low = np.arange(samples.shape[1]) < first_above
    squares = np.zeros(len(samples))
    for group in (is_low, ~is_low):
        means = np.where(group, samples, 0).sum(1) / group.sum(1)
        squares += (np.where(group, samples - means[:, None], 0) ** 2).sum(1)
    within = np.sqrt(squares / (samples.shape[1] - 2))  # two means are estimated
    return gaps.max(1) / np.maximum(within, 1e-12)


@functools.cache
def _critical_ratio(count: int, level: float) -> float:
    """Returns the ratio that normally distributed losses exceed with a probability."""
    samples = np.sort(np.random.default_rng(0).standard_normal((_SAMPLES, count)), axis=1)
    return float(np.quantile(_ratio(samples), 1 - level))


def split(losses: Sequence[np.ndarray]) -> bool:
    """Whether more of several models' losses over seeds split than normally distributed ones do.

    Of these, one sample in twenty splits by chance (_ONE_OF_TWENTY). More are no chance if so many
    have a probability below _SEVERAL: 4 of 20 have 1.6%. One model with three seeds does not show it.
    """
    samples = [np.sort(of_model[~np.isnan(of_model)]) for of_model in losses]
    samples = [sample for sample in samples if len(sample) >= 3]
    count = 0
    for sample in samples:
        count += _ratio(sample[None])[0] > _critical_ratio(len(sample), _ONE_OF_TWENTY)
    if count == 0:
        return False
    return bool(special.bdtrc(count - 1, len(samples), _ONE_OF_TWENTY) < _SEVERAL)
