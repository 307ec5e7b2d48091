"""Whether a loss that was recorded elsewhere is one that this machine could have computed.

The same run has other losses on another processor or with another version of a library, because sums
are rounded in another order, and training amplifies this, in some models a thousand times. So the
run is trained here in several ways that only round differently. Their losses are a sample of what
rounding makes, and the recorded loss has to be one more draw of it: within a 99% prediction interval
of Student's t distribution.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from scipy import special

LEVEL = 0.99  # of the interval, for all evaluations of a run together
# Another processor or library changes all sums, and the variants only some: the interval is wider by
# this factor. Runs of docs/results/scaling.json, recorded on an AMD EPYC and trained on an Intel
# Xeon, were off by up to 3.8 times what the variants alone explain (docs/records.md); twice that.
OTHER_MACHINE = 8.0
RESOLUTION = 1e-6  # of a loss, relatively: float32, with room
MIN_SEEDS = 3  # whose spread is known well enough to compare a run as a seed
# From this part of the standard deviation over seeds on, a seed tells no more than another one.
AS_WIDE = 0.5

BITS, BAND, SEED, OUTSIDE, NO_BAND = "bits", "band", "seed", "outside", "no band"
Curve = Mapping[int, float]  # {step: loss}


@dataclasses.dataclass(frozen=True)
class ComparedLoss:
    """The recorded loss of a step, beside those that were trained here."""

    step: int
    recorded: float
    trained: float  # in the same way as the record
    allowed: float | None  # largest difference to the mean of the variants; None: not measured
    seeds: float | None  # standard deviation over the seeds of the record
    how: str  # BITS, BAND, SEED, OUTSIDE or NO_BAND


def compare_curves(
    recorded: Curve,
    trained: Curve,
    variants: Sequence[Curve],
    seeds: Sequence[Curve],
    is_other_machine: bool,
) -> list[ComparedLoss]:
    """Returns each recorded loss beside the one that was trained here, with what explains the
    difference. `variants` are trained here as well, with other rounding; `seeds` are the curves of
    all seeds in the record. `is_other_machine`: another processor, or other versions.
    """
    widening = OTHER_MACHINE if is_other_machine else 1.0
    steps = sorted(recorded.keys() & trained.keys())
    comparisons = []
    rounding = 0.0  # standard deviation; differences grow with the steps, so the largest so far
    for step in steps:
        # A variant lacks the losses that were not finite.
        values = [curve[step] for curve in (trained, *variants) if step in curve]
        if len(values) > 1:
            rounding = max(rounding, widening * statistics.stdev(values))
        of_seeds = [curve[step] for curve in seeds if step in curve]
        spread = statistics.stdev(of_seeds) if len(of_seeds) >= MIN_SEEDS else None
        allowed, how = _allowed(values, rounding, of_seeds, spread, len(steps))
        if recorded[step] == trained[step]:  # even where nothing was measured
            how = BITS
        elif allowed is not None and abs(recorded[step] - statistics.fmean(values)) > allowed:
            how = OUTSIDE
        comparisons.append(ComparedLoss(step, recorded[step], trained[step], allowed, spread, how))
    return comparisons


def _allowed(
    values: Sequence[float],
    rounding: float,
    of_seeds: Sequence[float],
    spread: float | None,
    num_steps: int,
) -> tuple[float | None, str]:
    """Returns the largest difference to the mean of `values` that rounding explains, and whether as
    BAND or, if rounding changes as much as another seed, as SEED; (None, NO_BAND) if it was not
    measured. `rounding` and `spread` are standard deviations over `values` and `of_seeds`.
    """
    if len(values) < 2:
        return None, NO_BAND
    degrees, how = len(values) - 1, BAND
    if spread is not None and rounding >= AS_WIDE * spread:
        # Rounding makes another seed of the run, so both are samples of one spread. Their variances
        # are averaged, each with the weight of its degrees of freedom.
        degrees_of_seeds = len(of_seeds) - 1
        squares = degrees * rounding**2 + degrees_of_seeds * spread**2
        degrees, how = degrees + degrees_of_seeds, SEED
        rounding = math.sqrt(squares / degrees)
    # A prediction interval: two-sided, at LEVEL for all steps together (Bonferroni). The recorded
    # loss varies as one value does, and the mean of n values by 1/n of this variance.
    quantile = special.stdtrit(degrees, 1 - (1 - LEVEL) / 2 / num_steps)
    allowed = quantile * rounding * math.sqrt(1 + 1 / len(values))
    return float(allowed) + RESOLUTION * abs(values[0]), how
