"""Changes the widths of the models of a comparison, so that all have the same number of
parameters.
"""

import bisect
import contextlib
import functools
import math
from collections.abc import Callable

from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config

PARAMETER_TOLERANCE = 0.02
MAX_PARAMETER_CHANGE = 0.1  # largest relative difference to the number of the reference run

_num_parameters = functools.cache(models.num_parameters)  # counting traces the model


def num_parameters(config: ConfigDict | Config) -> int:
    # Scanned layers trace faster, and have as many parameters.
    return _num_parameters(models.LanguageModel(Config.of(config).model.replace(scan_layers=True)))


def with_equal_parameters(runs: dict[str, ConfigDict], wanted: int) -> dict[str, ConfigDict]:
    """Returns the runs with new widths, so that their numbers of parameters are within 2%. Raises
    UserError if these would be more than 10% away from `wanted`.
    """
    # Each run gets the width that comes nearest to a target. If the runs then differ by more than 2%,
    # the next target is what the run that is farthest from the last one can reach.
    target = wanted
    for _ in range(len(runs) + 1):
        resized = {name: with_parameters(run, target) for name, run in runs.items()}
        counts = {name: num_parameters(run) for name, run in resized.items()}
        if max(counts.values()) / min(counts.values()) - 1 <= PARAMETER_TOLERANCE:
            return resized
        worst = max(counts, key=lambda name: abs(counts[name] / target - 1))
        missed = target
        target = counts[worst]
        if abs(target / wanted - 1) > MAX_PARAMETER_CHANGE:
            break
    model = resized[worst].model
    raise UserError(
        f"config.compare.budget='parameters': {worst} has no width that gives {missed:,} "
        f"parameters within {PARAMETER_TOLERANCE:.0%}; the nearest width gives {target:,} "
        f"({target / missed - 1:+.1%}), with model.d_model={model.d_model}, "
        f"model.num_heads={model.num_heads}. Change config.model.d_model of the reference, or "
        f"config.runs.{worst}.model"
    )


def with_parameters(config: ConfigDict, target: int) -> ConfigDict:
    """Returns `config` with the width that brings the number of parameters nearest to `target`."""
    start, num_heads_of = config.model.d_model, _num_heads_by_width(config, target)

    # Counting parameters takes seconds for deep models. The number of heads does not change the
    # count, so each width is counted only once. The count grows with the width, so one search over
    # the widths covers all numbers of heads.
    @functools.cache
    def count(width: int) -> int:
        return num_parameters(_resize(config, width, num_heads_of[width]))

    widths = sorted(num_heads_of)
    lowest, highest = (1 - PARAMETER_TOLERANCE) * target, (1 + PARAMETER_TOLERANCE) * target
    first = _first_at_least(widths, start, lowest, count)
    last = _first_at_least(widths, start, highest, count)
    if count(widths[last]) > highest:
        last -= 1
    near = widths[first : last + 1]  # within the tolerance, for any number of heads
    candidates = widths
    if near:  # those with the first of these numbers of heads
        num_heads = next(number for width, number in num_heads_of.items() if width in near)
        candidates = [width for width in near if num_heads_of[width] == num_heads]
    above = _first_at_least(candidates, start, target, count)
    around = candidates[max(0, above - 1) : above + 1]
    width = min(around, key=lambda width: abs(count(width) - target))
    return _resize(config, width, num_heads_of[width])


def _num_heads_by_width(config: ConfigDict, target: int) -> dict[int, int]:
    """Returns {width: number of heads} of the widths that may have `target` parameters, in the
    order in which the numbers of heads are tried: the config's own first, then the nearest.
    """
    heads = config.model.num_heads
    numbers = [heads]
    # With head_dim, the number of parameters depends on the number of heads, which is kept.
    if not config.model.get("head_dim"):
        numbers = sorted(range(1, 2 * heads + 1), key=lambda n: abs(n - heads))
    # The number of parameters grows at most quadratically and at least linearly with the width.
    widest = math.ceil(config.model.d_model * max(2, 2 * target / num_parameters(config)))
    num_heads_of: dict[int, int] = {}
    for num_heads in numbers:
        for width in _valid_widths(config, num_heads, widest):
            num_heads_of.setdefault(width, num_heads)
    return num_heads_of


def _valid_widths(config: ConfigDict, num_heads: int, widest: int) -> list[int]:
    """Returns the widths below `widest` that the heads divide; with another number of heads than the
    config's, those whose head width is more than half and less than twice its own.
    """
    head_width = config.model.d_model / config.model.num_heads
    fields = config.model.to_dict()
    widths = []
    for width in range(num_heads, widest, num_heads):
        is_similar = 1 / 2 < width / num_heads / head_width < 2
        if num_heads != config.model.num_heads and not is_similar:
            continue  # it would change the heads too much
        # A config refuses other widths, such as an odd width per head with rotary positions.
        with contextlib.suppress(UserError):
            models.build(**{**fields, "d_model": width, "num_heads": num_heads})
            widths.append(width)
    return widths


def _first_at_least(
    widths: list[int], start: int, target: float, count: Callable[[int], int]
) -> int:
    """Returns the index of the first width with at least `target` parameters, or the last one."""
    low, high, guess = 0, len(widths) - 1, bisect.bisect_left(widths, start)
    while low < high:
        i = min(max(guess, low), high - 1)
        low, high = (low, i) if count(widths[i]) >= target else (i + 1, high)
        # The number of parameters grows almost quadratically with the width, so this guess is
        # close.
        guess = bisect.bisect_left(widths, widths[i] * math.sqrt(target / count(widths[i])))
    return low


def _resize(config: ConfigDict, d_model: int, num_heads: int) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.model.update(d_model=d_model, num_heads=num_heads)
    return config
