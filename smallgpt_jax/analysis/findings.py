"""What `analyse` and `choose` find in a record. Data only: report/ puts it into words and figures.

Losses are nats per token, costs are in the units of their budget (`budgets.BUDGETS`).
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Literal, Self

from smallgpt_jax.analysis.record import Grid

INTERVAL = 0.8  # probability of the intervals of losses, multipliers, laws and numbers of seeds
LEVEL = 0.05  # probability of a false verdict
CERTAIN = 1 - LEVEL / 2  # probability of being better from which a model is chosen
POSSIBLE = 0.05  # probability of being best from which a model is listed as a possible best
STAKE = 0.9  # probability with which the loss at stake is not exceeded


@dataclasses.dataclass(frozen=True)
class Range:
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Spread:
    """A measure over the runs of one name."""

    mean: float
    low: float  # the least value
    high: float  # the largest value

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.fmean(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Mode:
    """A cluster of losses, for example of the seeds that have learned to copy."""

    share: float  # of the runs
    loss: float  # their mean
    runs: int


# ------------------------------------------------------------------ contests
@dataclasses.dataclass(frozen=True)
class Standing:
    """A row of a ranking: a model at its best size, length and learning rate within the budget."""

    model: str
    name: str  # of its runs, MODEL@SIZE; of interpolated losses, of the nearer runs
    loss: float  # expected over seeds; inf if a seed has diverged or nothing was trained within
    interval: Range | None  # of the expected loss; None with modes, or if the spread is unknown
    modes: tuple[Mode, ...]  # two, lowest first, if the losses of the seeds split; else ()
    probability: float  # of having the lowest expected loss of the contest
    seeds: int
    diverged: int  # of these seeds
    cost: float | None  # None if it was not measured
    parameters: int
    active_parameters: int  # that one token uses
    tokens: float  # of training
    steps: int  # of the named runs
    learning_rate: float  # of the named runs
    equal_to: tuple[str, ...]  # further names of the same function, such as cgpt with kernel 1
    # How the loss at the budget is known.
    # "trained": by runs of this cost, within 1%
    # "interpolated": between cheaper and dearer runs
    # "cheaper": from runs with less; the loss is an upper bound, more training was not tried
    # "dearer": only from runs above the budget; `loss` is inf
    known: Literal["trained", "interpolated", "cheaper", "dearer"]
    # Lowest loss that is plausible at the budget, with lengths and sizes that were not tried for
    # this model, but for the first one.
    potential: float


@dataclasses.dataclass(frozen=True)
class Pair:
    """The verdict on two models. Tables, text and figures all show this one."""

    model: str
    other: str
    seeds: int  # runs of both with the same order of batches
    difference: float  # measured loss of `model` minus that of `other`
    interval: Range | None  # 95% interval of the expected difference; None if the spread is unknown
    probability: float  # that `model` has the lower expected loss
    verdict: Literal["lower", "higher", "cannot tell"]  # of `model`, from CERTAIN on
    seeds_needed: Range | None  # INTERVAL of the seeds per model that would decide; None if decided

    @property
    def is_decided(self) -> bool:
        return self.verdict != "cannot tell"


# Why no model is chosen.
Refusal = Literal[
    "uncertain",  # several models may be the best
    "few seeds",  # too few seeds to know the spread of the losses
    "diverged",  # every model has a diverged seed
    "dearer",  # a model that was trained only with more may be the best at the budget
    "more training",  # a model that was trained with less may be the best with the whole budget
    "not measured",  # a model without a measured cost may be the best
    "nothing within",  # the cheapest model costs more than the budget
    "beyond",  # the budget is larger than the validated range
    "no cost",  # no run has measured the cost
]


@dataclasses.dataclass(frozen=True)
class Contest:
    """A ranking of models within one budget, or as they were trained."""

    standings: tuple[Standing, ...]  # lowest loss first; of equal losses, the cheapest
    pairs: tuple[Pair, ...]  # all pairs, `model` after `other` in `standings`
    chosen: str | None
    refusal: Refusal | None  # why none is chosen; None for a chosen model
    blockers: tuple[str, ...]  # models that may be better than the first, most probable first
    at_stake: float  # the first one's loss is at most this above the lowest, with probability STAKE
    # Of "more training": those that may be the best of the models trained with about all of the budget,
    # with the probabilities among these.
    trained: tuple[Standing, ...] = ()

    def pair(self, model: str, other: str) -> Pair | None:
        """Returns the verdict, seen from `model`; None if one of the two is not in the contest."""
        for pair in self.pairs:
            if (pair.model, pair.other) == (model, other):
                return pair
            if (pair.model, pair.other) == (other, model):
                return _reversed(pair)
        return None

    @property
    def possible(self) -> tuple[Standing, ...]:
        """The chosen model, or the first one and those that may be better."""
        first = self.standings[:1]
        if self.chosen:
            return first
        return (*first, *(one for one in self.standings[1:] if one.model in self.blockers))

    @property
    def seeds_needed(self) -> Range | None:
        """`Pair.seeds_needed` of the first two models that may be the best; None if only one may."""
        if len(self.possible) < 2:
            return None
        first, second, *_ = self.possible
        return self.pair(second.model, first.model).seeds_needed


def _reversed(pair: Pair) -> Pair:
    """Returns the same verdict, seen from `other`."""
    opposite = {"lower": "higher", "higher": "lower", "cannot tell": "cannot tell"}
    interval = pair.interval and Range(-pair.interval.high, -pair.interval.low)
    return dataclasses.replace(
        pair,
        model=pair.other,
        other=pair.model,
        difference=-pair.difference,
        interval=interval,
        probability=1 - pair.probability,
        verdict=opposite[pair.verdict],
    )


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """A trained candidate that has a lower loss than all that cost no more."""

    model: str
    name: str
    cost: float
    loss: float
    parameters: int
    active_parameters: int
    tokens: float


@dataclasses.dataclass(frozen=True)
class Choice:
    """The answer to a budget."""

    budget: str  # key of `budgets.BUDGETS`
    limit: float
    batch: int  # of decoding
    chosen: str | None = None
    refusal: Refusal | None = None
    # At `limit`; if nothing is comparable there, at `compared_at`, the nearest budget with one.
    contest: Contest | None = None
    compared_at: float | None = None
    factor: float | None = None  # limit / nearest measured cost, of "nothing within" and "beyond"
    front: tuple[FrontPoint, ...] = ()  # over all candidates, cheapest first
    devices: tuple[str, ...] = ()  # of the measurements of this cost, if several

    @property
    def is_direct(self) -> bool:
        """Whether models were compared at the limit itself, not at the nearest cost."""
        return self.contest is not None and self.compared_at == self.limit


# ------------------------------------------------------------------ over budgets
@dataclasses.dataclass(frozen=True)
class Segment:
    low: float
    high: float
    better: str | None  # None: it cannot be told


@dataclasses.dataclass(frozen=True)
class EqualFlops:
    """The better of two models over the training FLOPs that both were trained near."""

    model: str
    other: str  # the reference
    # These hold over all budgets together: with a probability of 95%, none names the worse. ()
    # without common budgets or seeds
    segments: tuple[Segment, ...]
    budgets: tuple[float, ...]  # of the following three, for a plot
    differences: tuple[float, ...]  # expected loss of `model` minus that of `other`
    low: tuple[float, ...]  # band that holds the differences at all these budgets, probability 95%
    high: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """FLOPs of `other` divided by those of `model` at the loss that `other` reaches with `budget`:
    above 1, `model` needs less.
    """

    model: str
    other: str  # the reference
    budget: float
    value: float | None
    interval: Range | None
    # Why it is refused; None if it is not.
    # "not reached": `model` does not reach the loss with its largest budget
    # "from the start": `model` has a lower loss with its least budget already
    # "few seeds": the spread is unknown
    # "one budget": a model was trained with one budget only
    # "gap": the runs next to the loss are too far apart to interpolate
    # "solved": the loss is 0
    # "flat": the loss falls so little there that the seeds tell nothing of the budget
    refusal: (
        Literal["not reached", "from the start", "few seeds", "one budget", "gap", "solved", "flat"]
        | None
    )


# ------------------------------------------------------------------ laws
@dataclasses.dataclass(frozen=True)
class Decisions:
    """How many of the pairs that are decided at the largest size were predicted rightly."""

    right: int  # of `pairs`, how many a prediction has ordered rightly
    pairs: int  # with a verdict


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A held-out loss beside its prediction."""

    model: str
    tokens: float
    predicted: float
    interval: Range
    loss: float | None  # mean over seeds; None until it is trained
    seeds: int

    @property
    def is_inside(self) -> bool:
        return self.interval.low <= self.loss <= self.interval.high


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Predictions that were written before the runs of the held-out size were trained."""

    size: str
    time: str  # of the prediction
    sha256: str  # of the losses that were fitted
    outcomes: tuple[Outcome, ...]
    # None until a predicted run is finished.
    error: float | None = None  # mean absolute one
    coverage: float | None = None  # share of the losses inside their intervals
    by_law: Decisions | None = None
    by_largest_size: Decisions | None = None  # the order at the largest size that was fitted


@dataclasses.dataclass(frozen=True)
class Laws:
    """How well laws of the smaller sizes predict the largest one."""

    form: str  # key of `laws.FORMS`, the one with the least error
    size: str  # the largest size, which was left out
    error: float  # mean absolute one over models and lengths
    by_law: Decisions  # of the left-out size
    by_largest_size: Decisions  # the order at the largest of the other sizes


# ------------------------------------------------------------------ learning rates and setup
@dataclasses.dataclass(frozen=True)
class Rates:
    """The learning rates that were tried for one name, as multiples of its own."""

    name: str
    grid: Grid
    plausible: tuple[float, ...]  # multiples that may be the best, given the spread over seeds
    minimum: float | None  # multiple at the minimum of the parabola in ln(rate)

    @property
    def best(self) -> float | None:
        """The multiple with the lowest loss; None if unfinished or if all have diverged."""
        return None if self.grid.has_diverged else self.grid.best

    @property
    def edge(self) -> str:
        """`Grid.edge` of the best multiple."""
        return "" if self.grid.has_diverged else self.grid.edge


@dataclasses.dataclass(frozen=True)
class Corpus:
    source: str
    tokens: int | None  # of the training split; None for a probe, whose rows are generated
    tokenizer: str
    vocabulary: int | None
    most_read: float  # tokens of the longest run / tokens of the corpus; above 1, it was repeated


@dataclasses.dataclass(frozen=True)
class Setup:
    corpus: Corpus
    models: tuple[str, ...]
    sizes: tuple[str, ...]  # in ascending order of parameters; ("",) for names without a size
    seeds: tuple[int, ...]
    parameters: Range
    tokens: Range  # per run
    steps: Range
    context_lengths: tuple[int, ...]
    batch_tokens: Range  # tokens per step
    runs: int  # that are finished
    unfinished: int
    hours: float | None  # of training, over all runs; None if a speed is missing
    devices: tuple[str, ...]
    software: tuple[str, ...]  # "jax 0.10.2", …
    dates: tuple[str, str] | None  # first and last start of a run
    validation_tokens: int
    seeds_as_needed: bool = False  # seeds were added where verdicts needed them


# ------------------------------------------------------------------ measurements
@dataclasses.dataclass(frozen=True)
class Measure:
    """A further measure of the longest runs, beside the loss."""

    kind: Literal["text", "benchmark", "answers", "inside", "speed", "memory", "inference"]
    measure: str  # such as "hellaswag acc_norm", "own × 2", "tokens_per_second"
    spreads: dict[str, Spread]  # {name: …}
    pairs: tuple[Pair, ...]  # each other name against the reference; () with single seeds


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    tokens: float
    flops: float | None
    loss: Spread


@dataclasses.dataclass(frozen=True)
class Curve:
    """Validation loss of a name's longest runs over training, where all seeds were evaluated."""

    name: str
    points: tuple[CurvePoint, ...]


@dataclasses.dataclass(frozen=True)
class Findings:
    setup: Setup
    reference: str  # model that the others are compared with
    # The models as they were trained: the longest runs of the largest size that all have. None if
    # fewer than one is finished, or if their losses are not of the same validation rows.
    ranking: Contest | None
    ranked_size: str
    choices: tuple[Choice, ...]  # by budget, in ascending order of the limit
    equal_flops: tuple[EqualFlops, ...]  # of each other model and the reference
    multipliers: tuple[Multiplier, ...]  # of each other model, at the budgets of `choices`
    laws: Laws | None  # of several sizes
    held_out: HeldOut | None
    rates: tuple[Rates, ...]
    # {name whose longest training is the best of its model at its FLOPs: tokens per parameter}
    untried: dict[str, float]
    measures: tuple[Measure, ...]
    curves: tuple[Curve, ...]
