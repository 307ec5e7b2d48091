"""Scaling laws of several models: fits with a bootstrap over runs, predictions with intervals, and
their check.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from smallgpt_jax.comparison import power_law
from smallgpt_jax.comparison.names import grouped
from smallgpt_jax.comparison.power_law import Law
from smallgpt_jax.errors import UserError

DRAWS = 4000
INTERVAL = 0.8
MIN_RUNS, MIN_SIZES, MIN_HORIZONS = 6, 3, 3  # of a fit, which has five parameters
# between the most and the fewest tokens per parameter; at an equal ratio, α and β are one exponent
MIN_RATIO = 1.5
GRID = 32  # sizes at which a law is evaluated


@dataclasses.dataclass(frozen=True)
class Record:
    """One loss of a run after its schedule has ended. A trunk with several decays has several
    records of one `run`.
    """

    name: str  # of the model, at all sizes
    run: str
    seed: int
    parameters: int
    non_embedding_parameters: int
    active_parameters: int  # that one token uses
    tokens: float
    flops: float  # of all training steps, with the head and the optimizer
    loss: float  # nats per token


@dataclasses.dataclass(frozen=True)
class Fit:
    """A model's law, the same law fitted to bootstrap samples of its runs, and the records that
    were fitted.
    """

    name: str
    size: str  # the field of `Record` that is N
    law: Law
    draws: Law
    records: tuple[Record, ...]
    noise: np.ndarray  # residuals of the records, scaled up by the degrees of freedom

    def values(self, field: str) -> np.ndarray:
        return np.array([getattr(record, field) for record in self.records], float)


def missing_for_fit(records: Sequence[Record], size: str = "parameters") -> str:
    """Returns the runs that one model lacks for a fit, such as "2 more runs, 1 more size", or "".

    Reads all fields of `records` except the losses and costs.
    """
    needs = {
        ("run", "runs"): MIN_RUNS - len({record.run for record in records}),
        ("size", "sizes"): MIN_SIZES - len({getattr(record, size) for record in records}),
        ("number of tokens", "numbers of tokens"): MIN_HORIZONS
        - len({record.tokens for record in records}),
    }
    missing = [f"{count} more {nouns[count > 1]}" for nouns, count in needs.items() if count > 0]
    ratios = [record.tokens / getattr(record, size) for record in records]
    if not missing and max(ratios) < MIN_RATIO * min(ratios):
        missing = [f"runs whose tokens per parameter differ by a factor of {MIN_RATIO:g} or more"]
    return ", ".join(missing)


def fit(
    records: Sequence[Record], size: str = "parameters", draws: int = DRAWS, seed: int = 0
) -> Fit:
    """Returns the law of one model, with `draws` bootstrap samples of its runs; `size` is the field
    that is N.
    """
    name = records[0].name
    if missing := missing_for_fit(records, size):
        raise UserError(f"{name}: too few runs for a scaling law; train {missing}")
    data = [
        np.array([getattr(record, field) for record in records], float)
        for field in (size, "tokens", "loss")
    ]
    law = power_law.fit(*data)
    rng = np.random.default_rng([seed, *name.encode()])  # of another name: independent samples
    found = power_law.bootstrap(law, *data, _sample_runs(records, size, draws, rng))
    degrees = max(1, len(records) - len(law))
    noise = (data[2] - law.loss(*data[:2])) * np.sqrt(len(records) / degrees)
    return Fit(name, size, law, found, tuple(records), noise)


def intervals(fitted: Fit, interval: float = INTERVAL) -> dict[str, tuple[float, float]]:
    """Returns {constant of the law: (low, high)}."""
    return {
        name: tuple(_bounds(values, interval)) for name, values in fitted.draws._asdict().items()
    }


def _sample_runs(
    records: Sequence[Record], size: str, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns how often each record is in each bootstrap sample, shape (draws, records).

    A sample has one run fewer than the data, because the spread of samples of the same size is too
    narrow for few runs (Rao and Wu, 1988). Samples that determine no law are drawn again.
    """
    kept, left = [], draws
    runs = np.unique([record.run for record in records], return_inverse=True)[1]
    count = runs.max() + 1
    while left > 0:
        counts = rng.multinomial(count - 1, np.full(count, 1 / count), size=2 * left)[:, runs]
        usable = np.ones(len(counts), bool)
        for field, least in ((size, MIN_SIZES), ("tokens", MIN_HORIZONS)):
            values = np.array([getattr(record, field) for record in records])
            usable &= (
                sum((counts[:, values == value] > 0).any(-1) for value in np.unique(values))
                >= least
            )
        kept.append(counts[usable][:left])
        left -= len(kept[-1])
    return np.concatenate(kept)


# ------------------------------------------------------------------ predictions
@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted loss of one run, with an interval that includes the noise of a run."""

    name: str
    size: float
    tokens: float
    loss: float
    low: float
    high: float


def predict(
    fitted: Fit,
    sizes: Sequence[float],
    tokens: Sequence[float],
    interval: float = INTERVAL,
    seed: int = 0,
) -> list[Prediction]:
    draws = fitted.draws.loss(sizes, tokens)
    draws = draws + np.random.default_rng(seed).choice(fitted.noise, size=draws.shape)
    low, high = _bounds(draws, interval)
    losses = np.broadcast_to(fitted.law.loss(sizes, tokens), low.shape)
    return [
        Prediction(fitted.name, *map(float, row)) for row in zip(sizes, tokens, losses, low, high)
    ]


def _bounds(draws: np.ndarray, interval: float) -> np.ndarray:
    return np.quantile(draws, [(1 - interval) / 2, (1 + interval) / 2], axis=0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A held-out loss (mean over seeds) beside its prediction."""

    prediction: Prediction
    loss: float
    seeds: int

    @property
    def error(self) -> float:
        return self.loss - self.prediction.loss

    @property
    def is_covered(self) -> bool:
        return self.prediction.low <= self.loss <= self.prediction.high


@dataclasses.dataclass(frozen=True)
class Decisions:
    ranking: tuple[str, ...]  # lowest loss first
    accuracy: float  # share of the pairs of models in the held-out order
    regret: float  # held-out loss of the first model, minus the lowest one


@dataclasses.dataclass(frozen=True)
class HeldOutCheck:
    outcomes: tuple[Outcome, ...]
    error: float  # mean absolute one
    coverage: float  # share of the outcomes inside their interval
    by_law: Decisions | None  # None with fewer than two models
    at_one_size: (
        Decisions | None
    )  # the baseline: the ranking of the most expensive runs that were fitted


def predict_runs(fitted: Fit, records: Sequence[Record]) -> list[Prediction]:
    """Returns a prediction for each size and number of tokens in `records`, in this order. Reads no
    losses.
    """
    points = {(getattr(record, fitted.size), record.tokens) for record in records}
    return predict(fitted, *zip(*sorted(points)))


def check_predictions(
    predictions: Sequence[Prediction],
    baseline: Mapping[str, float],
    held_out: Sequence[Record],
    size: str = "parameters",
) -> HeldOutCheck:
    """`baseline` are the losses that rank the models at one size. Predictions without a held-out
    run do not count.
    """
    trained = grouped(held_out, lambda record: (record.name, getattr(record, size), record.tokens))
    outcomes = [
        Outcome(prediction, float(np.mean([record.loss for record in records])), len(records))
        for prediction in predictions
        if (records := trained.get((prediction.name, prediction.size, prediction.tokens)))
    ]
    by_tokens = sorted(outcomes, key=lambda outcome: outcome.prediction.tokens)
    longest = {
        outcome.prediction.name: outcome for outcome in by_tokens
    }  # models are chosen for their final losses
    actual, predicted = (
        {name: value(outcome) for name, outcome in longest.items()}
        for value in (lambda outcome: outcome.loss, lambda outcome: outcome.prediction.loss)
    )
    error, coverage = (
        float(np.mean(values)) if values else math.nan
        for values in (
            [abs(outcome.error) for outcome in outcomes],
            [outcome.is_covered for outcome in outcomes],
        )
    )
    return HeldOutCheck(
        tuple(outcomes),
        error,
        coverage,
        *(
            decisions(scores, actual) if len(actual) > 1 else None
            for scores in (predicted, {name: baseline[name] for name in actual})
        ),
    )


def loss_of_largest(records: Sequence[Record]) -> float:
    """Returns the mean loss of the most expensive runs."""
    largest = max(record.flops for record in records)
    return float(np.mean([record.loss for record in records if record.flops > 0.99 * largest]))


def decisions(scores: Mapping[str, float], actual: Mapping[str, float]) -> Decisions:
    """Returns how well the order of `scores` agrees with that of the `actual` losses. Lower is
    better in both.
    """
    ranking = tuple(sorted(scores, key=scores.__getitem__))
    pairs = list(itertools.combinations(ranking, 2))
    return Decisions(
        ranking,
        sum(actual[a] <= actual[b] for a, b in pairs) / len(pairs),
        actual[ranking[0]] - min(actual.values()),
    )


# ------------------------------------------------------------------ compute
def flops_per_token(fitted: Fit, sizes: np.ndarray) -> np.ndarray:
    """Returns the training FLOPs per token at each size: the trained ones' mean, interpolated in
    logarithms.
    """
    trained, per_token = (
        fitted.values(fitted.size),
        np.log(fitted.values("flops") / fitted.values("tokens")),
    )
    known = np.unique(trained)
    return np.exp(
        np.interp(
            np.log(sizes), np.log(known), [per_token[trained == size].mean() for size in known]
        )
    )


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The lowest loss of a model at each budget, over the trained range of sizes, tokens, and
    tokens per parameter.
    """

    budgets: np.ndarray  # (budgets,)
    losses: np.ndarray  # (budgets,)
    sizes: np.ndarray  # (budgets,) of the lowest loss
    tokens: np.ndarray  # (budgets,)


def frontier(fitted: Fit, budgets: np.ndarray) -> Frontier:
    trained, horizons = fitted.values(fitted.size), fitted.values("tokens")
    sizes = np.union1d(np.geomspace(trained.min(), trained.max(), GRID), trained)
    tokens = np.asarray(budgets, float)[:, None] / flops_per_token(
        fitted, sizes
    )  # (budgets, sizes)
    is_trained = (tokens > 0.99 * horizons.min()) & (tokens < 1.01 * horizons.max())
    ratios = horizons / trained  # a small size was not trained on as many tokens as a large one
    is_trained &= (tokens > 0.99 * ratios.min() * sizes) & (tokens < 1.01 * ratios.max() * sizes)
    is_trained |= ~is_trained.any(-1, keepdims=True)  # beyond the trained range: all sizes
    losses = np.where(is_trained, fitted.law.loss(sizes, tokens), np.inf)
    best = losses.argmin(-1)
    rows = np.arange(len(tokens))
    return Frontier(np.asarray(budgets, float), losses[rows, best], sizes[best], tokens[rows, best])
