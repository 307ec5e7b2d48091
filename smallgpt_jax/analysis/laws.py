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
from smallgpt_jax.analysis.scaling_curves import LEAST_LOSS

# Without the largest of three sizes, two are left, the least that have a slope.
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
ContestAt = Callable[[str], Contest | None]  # size → ranking of its longest runs


class LawPoint(NamedTuple):
    """The mean loss of a model's runs of one size and length; NaN if it is to be predicted."""

    model: str
    size: str
    parameters: float
    tokens: float
    loss: float = math.nan
    seeds: int = 0


def law_points(runs: Sequence[Run]) -> list[LawPoint]:
    """Returns mean losses over seeds, without those of which a seed diverged or is unfinished."""
    points = []
    for group in grouped(runs, lambda run: (run.name, run.horizon)).values():
        losses = [run.loss for run in group]
        if all(map(math.isfinite, losses)):
            run, mean = group[0], math.fsum(losses) / len(losses)
            where = (run.model, run.size, run.parameters, run.tokens)
            points.append(LawPoint(*where, mean, len(losses)))
    return points


def missing_for_law(points: Sequence[LawPoint]) -> str:
    """Returns of what one model has too few for a law: "sizes", "lengths" or ""."""
    if len({point.size for point in points}) < MIN_SIZES:
        return "sizes"
    return "lengths" if len({point.tokens for point in points}) < MIN_LENGTHS else ""


# ------------------------------------------------------------------ fits
def fit(form: str, points: Sequence[LawPoint]) -> dict[str, float]:
    """Returns the law of one model, {term: coefficient}; of several, that with the least norm."""
    terms = _terms(form, points)
    losses = np.log(np.maximum([point.loss for point in points], LEAST_LOSS))
    coefficients, *_ = np.linalg.lstsq(terms, losses, rcond=None)
    return dict(zip(FORMS[form], map(float, coefficients)))


def predicted_loss(form: str, law: Mapping[str, float], point: LawPoint) -> float:
    terms = _terms(form, [point])[0]
    return float(np.exp(terms @ list(law.values())))


def _terms(form: str, points: Sequence[LawPoint]) -> np.ndarray:
    """Returns the values of a form's terms, (points, terms)."""
    n = np.log([point.parameters for point in points])
    d = np.log([point.tokens for point in points])
    return np.stack([_TERMS[term](n, d) for term in FORMS[form]], axis=1)


class _LeftOut(NamedTuple):
    size: str
    form: str  # with the least error
    error: float  # mean absolute one
    half_width: float  # at which the intervals of this form contain INTERVAL of the losses


def _leave_out_largest(points: Sequence[LawPoint]) -> _LeftOut:
    """Returns the form whose laws of the smaller sizes predict `_largest_above_two` best."""
    size = _largest_above_two(points)
    smaller = _smaller(points, size)
    largest = [point for point in points if point.size == size]
    misses: dict[str, list[float]] = {}  # {form: |prediction − loss| of each point}
    for form in FORMS:
        fits = _fits(form, smaller)
        misses[form] = [
            abs(predicted_loss(form, fits[point.model], point) - point.loss) for point in largest
        ]
    form = min(FORMS, key=lambda form: np.mean(misses[form]))
    error, half_width = np.mean(misses[form]), np.quantile(misses[form], INTERVAL)
    return _LeftOut(size, form, float(error), float(half_width))


def _fits(form: str, points: Sequence[LawPoint]) -> dict[str, dict[str, float]]:
    """Returns {model: law}."""
    by_model = grouped(points, lambda point: point.model)
    return {model: fit(form, group) for model, group in by_model.items()}


def _common_sizes(points: Sequence[LawPoint]) -> list[str]:
    """Returns the sizes that all models of the points have, largest first."""
    models = {point.model for point in points}
    common = []
    for size, group in grouped(points, lambda point: point.size).items():
        if {point.model for point in group} == models:
            common.append((_mean_parameters(group), size))
    return [size for _, size in sorted(common, reverse=True)]


def _largest_above_two(points: Sequence[LawPoint]) -> str:
    """Returns the largest common size above two sizes of each model, which have a law; "" without."""
    by_model = grouped(points, lambda point: point.model).values()
    for size in _common_sizes(points):
        numbers = [
            len(grouped(_smaller(group, size), lambda point: point.size)) for group in by_model
        ]
        if min(numbers) > 1:
            return size
    return ""


def _smaller(points: Sequence[LawPoint], size: str) -> list[LawPoint]:
    """Returns the points of sizes with fewer parameters."""
    by_size = grouped(points, lambda point: point.size)
    parameters = _mean_parameters(by_size[size])
    groups = [group for group in by_size.values() if _mean_parameters(group) < parameters]
    return list(itertools.chain(*groups))


def _mean_parameters(points: Sequence[LawPoint]) -> float:
    return float(np.mean([point.parameters for point in points]))


# ------------------------------------------------------------------ predictions
class Predicted(NamedTuple):
    form: str  # of the laws
    losses: tuple[Prediction, ...]
    not_predicted: dict[str, str]  # {model: what it lacked}


def predict(points: Sequence[LawPoint], planned: Sequence[LawPoint]) -> Predicted:
    """Returns the losses of `planned` points by laws of `points`."""
    by_model = grouped(points, lambda point: point.model)
    missing_of = {point.model: missing_for_law(by_model.get(point.model, ())) for point in planned}
    not_predicted = {model: what for model, what in missing_of.items() if what}
    can_be_predicted = missing_of.keys() - not_predicted
    usable = [point for point in points if point.model in can_be_predicted]
    if not _largest_above_two(usable):
        not_predicted |= dict.fromkeys(can_be_predicted, "common sizes")
        return Predicted(next(iter(FORMS)), (), not_predicted)
    left_out = _leave_out_largest(usable)
    fits, half_width = _fits(left_out.form, usable), left_out.half_width
    losses = []
    for point in dict.fromkeys(planned):  # the seeds of a run have equal predictions
        if point.model in fits:
            loss = predicted_loss(left_out.form, fits[point.model], point)
            where = (point.model, point.parameters, point.tokens)
            losses.append(Prediction(*where, loss, loss - half_width, loss + half_width))
    return Predicted(left_out.form, tuple(losses), not_predicted)


def predictions_of(
    runs: Sequence[Run], planned: Sequence[LawPoint], held_out: str, time: str, command: str
) -> Predictions:
    """Returns the predictions of `planned` runs of a held-out size, by runs of the others."""
    points = law_points(runs)
    predicted = predict(points, planned)
    return Predictions(
        time=time,
        command=command,
        held_out=held_out,
        interval=INTERVAL,
        records_sha256=hashlib.sha256(json.dumps(points).encode()).hexdigest(),
        predictions={"parameters": predicted.losses},
        not_predicted=predicted.not_predicted,
        form=predicted.form,
    )


# ------------------------------------------------------------------ findings
def find_laws(record: Record, contest_at: ContestAt) -> Laws | None:
    """Returns how well laws of the smaller sizes predict the largest; None without a law."""
    by_model = grouped(law_points(record.runs), lambda point: point.model)
    usable: list[LawPoint] = []
    for points in by_model.values():
        if not missing_for_law(points):
            usable += points
    if not _largest_above_two(usable):
        return None
    left_out = _leave_out_largest(usable)
    form, size = left_out.form, left_out.size
    smaller = _smaller(usable, size)
    laws = _fits(form, smaller)
    predicted = {}
    for model, point in _longest_by_model(usable, size).items():
        predicted[model] = predicted_loss(form, laws[model], point)
    contest = contest_at(size)
    return Laws(
        form=form,
        size=size,
        error=left_out.error,
        by_law=_decisions(predicted, contest),
        by_largest_size=_decisions(_losses_of_largest_size(smaller), contest),
    )


def _longest_by_model(points: Sequence[LawPoint], size: str) -> dict[str, LawPoint]:
    of_size = [point for point in points if point.size == size]
    return {point.model: point for point in sorted(of_size, key=lambda point: point.tokens)}


def _losses_of_largest_size(points: Sequence[LawPoint]) -> dict[str, float]:
    """Returns {model: loss of its longest training} at the largest size that all models have."""
    longest = _longest_by_model(points, next(iter(_common_sizes(points)), ""))
    return {model: point.loss for model, point in longest.items()}


def _decisions(losses: Mapping[str, float], contest: Contest | None) -> Decisions:
    """Returns how many decided pairs of the contest are ordered rightly by {model: loss}."""
    right = pairs = 0
    for model, other in itertools.combinations(losses, 2):
        pair = contest and contest.pair(model, other)
        if pair and pair.is_decided:
            pairs += 1
            right += (losses[model] < losses[other]) == (pair.verdict == "lower")
    return Decisions(right, pairs)


def check_predictions(record: Record, contest_at: ContestAt) -> HeldOut | None:
    """Returns the record's predictions beside the trained losses; None without any."""
    predictions = record.predictions
    if predictions is None:
        return None
    size, points = predictions.held_out, law_points(record.runs)
    trained = {(one.model, one.tokens): one for one in points if one.size == size}
    outcomes: list[Outcome] = []
    for one in predictions.predictions.get("parameters", ()):
        point = trained.get((one.name, one.tokens))
        loss, seeds = (point.loss, point.seeds) if point else (None, 0)
        interval = Range(one.low, one.high)
        outcomes.append(Outcome(one.name, one.tokens, one.loss, interval, loss, seeds))
    held_out = HeldOut(size, predictions.time, predictions.records_sha256, tuple(outcomes))
    finished = [one for one in outcomes if one.loss is not None]
    if not finished:
        return held_out
    misses = [abs(one.loss - one.predicted) for one in finished]
    # Of each model, the prediction for its longest training.
    predicted = {one.model: one.predicted for one in sorted(outcomes, key=lambda one: one.tokens)}
    fitted = [one for one in points if one.size != size and one.model in predicted]
    contest = contest_at(size)
    return dataclasses.replace(
        held_out,
        error=float(np.mean(misses)),
        coverage=float(np.mean([one.is_inside for one in finished])),
        by_law=_decisions(predicted, contest),
        by_largest_size=_decisions(_losses_of_largest_size(fitted), contest),
    )
