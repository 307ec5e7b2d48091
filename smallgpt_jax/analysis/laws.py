"""Laws of the last loss over size and training length: small, and judged by the largest size.

A law is fitted to the logarithms of one model's mean losses by least squares. Which of FORMS is
used, and how wide its intervals are, is decided by leaving out the largest size: the error there is
the error to expect one size further on.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from smallgpt_jax.analysis.findings import (
    INTERVAL,
    Contest,
    Decisions,
    HeldOut,
    Laws,
    Outcome,
    Range,
)
from smallgpt_jax.analysis.record import Prediction, Predictions, Record, Run, grouped

MIN_SIZES, MIN_LENGTHS = 3, 3
# Terms of log(loss), from n = log(parameters) and d = log(tokens).
_TERMS: dict[str, Callable] = {
    "1": lambda n, d: np.ones_like(n),
    "log N": lambda n, d: n,
    "log D": lambda n, d: d,
    "log N·D": lambda n, d: n + d,
    "log N · log D": lambda n, d: n * d,
}
FORMS = {  # of laws
    "compute": ("1", "log N·D"),
    "size and tokens": ("1", "log N", "log D"),
    "size times tokens": ("1", "log N", "log D", "log N · log D"),
}
ContestAt = Callable[[str], Contest | None]  # size → contest of its longest runs


class LawPoint(NamedTuple):
    """The mean loss of a model's runs of one size and length, or those to predict."""

    model: str
    size: str
    parameters: float
    tokens: float
    loss: float = math.nan
    seeds: int = 0


def law_points(runs: Sequence[Run]) -> list[LawPoint]:
    """Returns the mean losses of the finished runs, without those that have a diverged seed."""
    points = []
    for group in grouped(runs, lambda run: (run.name, run.horizon)).values():
        losses = [run.loss for run in group]
        if not all(map(math.isfinite, losses)):
            continue
        run, mean = group[0], math.fsum(losses) / len(losses)
        point = LawPoint(run.model, run.size, run.parameters, run.tokens, mean, len(losses))
        points.append(point)
    return points


def missing_for_law(points: Sequence[LawPoint]) -> str:
    """Returns what one model lacks for a law: "sizes", "lengths" or ""."""
    if len({point.parameters for point in points}) < MIN_SIZES:
        return "sizes"
    return "lengths" if len({point.tokens for point in points}) < MIN_LENGTHS else ""


# ------------------------------------------------------------------ fits
def fit(form: str, points: Sequence[LawPoint]) -> dict[str, float]:
    """Returns {term: coefficient} of one model; the solution with the least norm, if the losses do
    not determine it.
    """
    terms = _terms(form, points)
    losses = np.log([point.loss for point in points])
    coefficients, *_ = np.linalg.lstsq(terms, losses, rcond=None)
    return dict(zip(FORMS[form], map(float, coefficients)))


def predicted_loss(form: str, law: Mapping[str, float], point: LawPoint) -> float:
    terms = _terms(form, [point])[0]
    return float(np.exp(terms @ list(law.values())))


def _terms(form: str, points: Sequence[LawPoint]) -> np.ndarray:
    """Returns the values of the terms, shape (points, terms)."""
    n = np.log([point.parameters for point in points])
    d = np.log([point.tokens for point in points])
    return np.stack([_TERMS[term](n, d) for term in FORMS[form]], axis=1)


class _LeftOut(NamedTuple):
    size: str
    form: str  # with the least error
    error: float  # mean absolute one
    half_width: float  # at which the intervals of this form contain INTERVAL of the losses


def _leave_out_largest(points: Sequence[LawPoint]) -> _LeftOut:
    """Returns the best form of law at the largest size of models that have enough for a law."""
    size = _largest_size(points)
    smaller = [point for point in points if point.size != size]
    largest = [point for point in points if point.size == size]
    misses = {form: _misses(form, smaller, largest) for form in FORMS}
    form = min(FORMS, key=lambda form: np.mean(misses[form]))
    error, half_width = np.mean(misses[form]), np.quantile(misses[form], INTERVAL)
    return _LeftOut(size, form, float(error), float(half_width))


def _misses(form: str, fitted: Sequence[LawPoint], left_out: Sequence[LawPoint]) -> list[float]:
    """Returns how far the law of the fitted losses is from each loss that was left out."""
    fits = _fits(form, fitted)
    return [abs(predicted_loss(form, fits[point.model], point) - point.loss) for point in left_out]


def _fits(form: str, points: Sequence[LawPoint]) -> dict[str, dict[str, float]]:
    """Returns {model: law}."""
    return {model: fit(form, group) for model, group in grouped(points, _model).items()}


def _largest_size(points: Sequence[LawPoint]) -> str:
    """Returns the largest size that all models have."""
    models = {point.model for point in points}
    common = []
    for size, group in grouped(points, lambda point: point.size).items():
        if {point.model for point in group} == models:
            common.append((np.mean([point.parameters for point in group]), size))
    return max(common)[1] if common else ""


# ------------------------------------------------------------------ predictions
def predict(
    runs: Sequence[Run], planned: Sequence[LawPoint], held_out: str, time: str, command: str
) -> Predictions:
    """Returns the predictions of planned runs of a held-out size, from the runs of other sizes."""
    points = law_points(runs)
    by_model = grouped(points, _model)
    missing_of = {point.model: missing_for_law(by_model.get(point.model, ())) for point in planned}
    not_predicted = {model: what for model, what in missing_of.items() if what}
    can_be_predicted = missing_of.keys() - not_predicted
    usable = [point for point in points if point.model in can_be_predicted]
    form, rows = next(iter(FORMS)), []
    if usable:
        left_out = _leave_out_largest(usable)
        form = left_out.form
        fits, half = _fits(form, usable), left_out.half_width
        for point in dict.fromkeys(planned):
            if point.model in fits:
                loss = predicted_loss(form, fits[point.model], point)
                where = (point.model, point.parameters, point.tokens)
                rows.append(Prediction(*where, loss, loss - half, loss + half))
    return Predictions(
        time=time,
        command=command,
        held_out=held_out,
        interval=INTERVAL,
        records_sha256=hashlib.sha256(json.dumps(points).encode()).hexdigest(),
        predictions={"parameters": tuple(rows)},
        not_predicted=not_predicted,
        form=form,
    )


def _model(point: LawPoint) -> str:
    return point.model


# ------------------------------------------------------------------ findings
def find_laws(record: Record, contest_at: ContestAt) -> Laws | None:
    """Returns how well laws predict the models that have enough runs; None without any."""
    by_model = grouped(law_points(record.runs), _model)
    usable: list[LawPoint] = []
    for points in by_model.values():
        usable += [] if missing_for_law(points) else points
    if not usable or not _largest_size(usable):
        return None
    left_out = _leave_out_largest(usable)
    form, size = left_out.form, left_out.size
    smaller = [point for point in usable if point.size != size]
    predicted = {}
    for model, law in _fits(form, smaller).items():
        longest = _longest([point for point in usable if point.model == model], size)
        predicted[model] = predicted_loss(form, law, longest)
    contest = contest_at(size)
    return Laws(
        form=form,
        size=size,
        error=left_out.error,
        by_law=_decisions(predicted, contest),
        by_largest_size=_decisions(_losses_at(smaller, _largest_size(smaller)), contest),
    )


def _longest(points: Sequence[LawPoint], size: str) -> LawPoint:
    return max((one for one in points if one.size == size), key=lambda one: one.tokens)


def _losses_at(points: Sequence[LawPoint], size: str) -> dict[str, float]:
    """Returns {model: loss of its longest runs of a size}."""
    by_model = grouped([one for one in points if one.size == size], _model)
    return {model: _longest(group, size).loss for model, group in by_model.items()}


def _decisions(losses: Mapping[str, float], contest: Contest | None) -> Decisions:
    """Counts the decided pairs of a contest that an order of losses has right."""
    right = pairs = 0
    for model, other in itertools.combinations(losses, 2):
        pair = contest and contest.pair(model, other)
        if pair and pair.is_decided:
            pairs += 1
            right += (losses[model] < losses[other]) == (pair.verdict == "lower")
    return Decisions(right, pairs)


def check_predictions(record: Record, contest_at: ContestAt) -> HeldOut | None:
    """Returns the predictions of the held-out size beside the trained losses; None without any."""
    predictions = record.predictions
    if predictions is None:
        return None
    points = law_points(record.runs)
    trained = {(one.model, one.tokens): one for one in points if one.size == predictions.held_out}
    outcomes: list[Outcome] = []
    for row in predictions.by_parameters:
        point = trained.get((row.name, row.tokens))
        loss, seeds = (point.loss, point.seeds) if point else (None, 0)
        interval = Range(row.low, row.high)
        outcomes.append(Outcome(row.name, row.tokens, row.loss, interval, loss, seeds))
    held_out = HeldOut(
        predictions.held_out, predictions.time, predictions.records_sha256, tuple(outcomes)
    )
    known = [one for one in outcomes if one.loss is not None]
    if not known:
        return held_out
    misses = [abs(one.loss - one.predicted) for one in known]
    # Of each model, the prediction for its longest training.
    predicted = {one.model: one.predicted for one in sorted(outcomes, key=lambda one: one.tokens)}
    fitted = [one for one in points if one.size != predictions.held_out and one.model in predicted]
    contest = contest_at(predictions.held_out)
    return dataclasses.replace(
        held_out,
        error=float(np.mean(misses)),
        coverage=float(np.mean([one.is_inside for one in known])),
        by_law=_decisions(predicted, contest),
        by_largest_size=_decisions(_losses_at(fitted, _largest_size(fitted)), contest),
    )
