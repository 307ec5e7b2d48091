"""Whether the first losses of a run are like those of other runs of its recipe.

loss_bands.json has a band for some recipes, made by experiments/normal_runs.py from runs with other
seeds and with the standard library of several versions of Python.
"""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.logger import StepMetrics

BANDS_FILE = Path(__file__).with_name("loss_bands.json")
LEVEL = 0.99  # of the intervals of all points of a band together
# Texts of other versions of Python differ by less.
SIMILAR_BYTES_PER_TOKEN = 0.03
_IRRELEVANT = {"train.seed", "data.seed"}  # beside fields that may change when a run is resumed


def log_scatter(losses: Sequence[float]) -> float:
    """Returns the logarithm of the standard deviation around a slow trend, estimated from the
    differences of successive losses (von Neumann et al., 1941, doi:10.1214/aoms/1177731746).
    """
    squares = [(after - before) ** 2 for before, after in itertools.pairwise(losses)]
    # Half, because a difference varies twice as much as one loss; 1e-12, for losses that are equal.
    return 0.5 * math.log(statistics.fmean(squares) / 2 + 1e-12)


# Name of the measure → function, and its value as text
MEASURES = {
    "mean": (statistics.fmean, lambda value: f"{value:.3f}"),
    "log_scatter": (log_scatter, lambda value: f"{math.exp(value):.4f}"),
}
_WORDS = {
    "mean": "the mean training loss of steps {first} to {last}",
    "log_scatter": "the variation of the training loss from step to step, in steps {first} to {last},",
}


@dataclasses.dataclass(frozen=True)
class BandPoint:
    # A span of steps, because the loss of one step varies more than most mistakes change it. Of a
    # span, the band has the mean loss, and how much the loss varies from step to step, which tells
    # the size and the order of the batches.
    first: int  # step
    last: int
    measure: str  # of the losses of these steps; a key of MEASURES
    mean: float
    deviation: float  # over the runs
    runs: int

    def value(self, losses: Mapping[int, float]) -> float:
        """Returns the measure of `losses`, which are by step; NaN if one of them is missing."""
        steps = range(self.first, self.last + 1)
        if not all(step in losses for step in steps):
            return math.nan
        return MEASURES[self.measure][0]([losses[step] for step in steps])


@dataclasses.dataclass(frozen=True)
class LossBand:
    recipe: str
    points: tuple[BandPoint, ...]

    def interval(self, point: BandPoint) -> tuple[float, float]:
        """Returns the prediction interval of a further run, simultaneous over all points."""
        # Here, because most runs have no band, and the import takes 0.2 s of each command's start.
        from scipy import special

        # Of all points together (Bonferroni), and two-sided. The further run varies as one of the
        # runs does, and their mean by 1/runs of this variance.
        level = (1 - LEVEL) / len(self.points)
        quantile = special.stdtrit(point.runs - 1, 1 - level / 2)
        width = float(quantile) * point.deviation * math.sqrt(1 + 1 / point.runs)
        return point.mean - width, point.mean + width

    def problem(self, losses: Mapping[int, float], step: int) -> str:
        """Returns which point that ends at `step` is outside of the band, or ""."""
        for point in self.points:
            if point.last != step:
                continue
            value, (low, high) = point.value(losses), self.interval(point)
            if value < low or value > high:  # not if it is NaN
                in_words = MEASURES[point.measure][1]
                what = _WORDS[point.measure].format(first=point.first, last=point.last)
                return (
                    f"{what} is {in_words(value)}; that of other seeds of {self.recipe} is "
                    f"between {in_words(low)} and {in_words(high)} ({point.runs} runs)"
                )
        return ""


class LossWatch:
    """Says once if the losses leave the band of the recipe, in spans of this session alone."""

    def __init__(self, band: LossBand | None, log: Callable[[str], None]):
        self._band, self._log = band, log
        self._losses: dict[int, float] = {}

    def check(self, metrics: StepMetrics) -> None:
        if not self._band:
            return
        self._losses[metrics.step] = metrics.loss
        problem = self._band.problem(self._losses, metrics.step)
        if problem:
            self._log(
                f"step {metrics.step}: {problem}. Without a reason for it, look for a mistake "
                "(config.train.check_loss=false: no check)"
            )
        if problem or metrics.step >= max(point.last for point in self._band.points):
            self._band = None


def find_band(config: Config, text: Mapping[str, Any]) -> LossBand | None:
    """Returns the band of the recipe that a config has, up to its seeds and what only rounds
    differently. `text` is the description of the run's corpus.
    """
    for recipe, content in json.loads(BANDS_FILE.read_text("utf-8")).items():
        is_same = relevant_fields(Config.of(content["config"])) == relevant_fields(config)
        difference = abs(bytes_per_token(text) / content["bytes_per_token"] - 1)  # may be NaN
        if is_same and difference <= SIMILAR_BYTES_PER_TOKEN:
            return LossBand(recipe, tuple(BandPoint(**point) for point in content["points"]))
    return None


def relevant_fields(config: Config) -> dict[str, Any]:
    """Returns the fields on which the losses depend by more than rounding, except seeds."""
    irrelevant = set(_IRRELEVANT)
    for name in GROUPS:
        free = getattr(config, name).field_names(fixed_by=None)
        irrelevant |= {f"{name}.{field}" for field in free}
    return {name: value for name, value in config.flat().items() if name not in irrelevant}


def bytes_per_token(text: Mapping[str, Any]) -> float:
    """Returns NaN for mixtures and probes."""
    train = text.get("splits", {}).get("train", {})
    return train.get("text_bytes", math.nan) / train.get("tokens", math.nan)
