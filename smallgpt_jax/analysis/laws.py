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


class Target(NamedTuple):
    """The mean loss of a model's runs of one size and length, or those to predict."""

    model: str
    size: str
    parameters: float
    tokens: float
    loss: float = math.nan
    seeds: int = 0


def targets_of(runs: Sequence[Run]) -> list[Target]:
    """Returns the mean losses of the finished runs, without those that have a diverged seed."""
    targets = []
    for group in grouped(runs, lambda run: (run.name, run.horizon)).values():
        losses = [run.loss for run in group]
        if not all(map(math.isfinite, losses)):
            continue
        run, mean = group[0], math.fsum(losses) / len(losses)
        target = Target(run.model, run.size, run.parameters, run.tokens, mean, len(losses))
        targets.append(target)
    return targets


def missing(targets: Sequence[Target]) -> str:
    """Returns what one model lacks for a law: "sizes", "lengths" or ""."""
    if len({target.parameters for target in targets}) < MIN_SIZES:
        return "sizes"
    return "lengths" if len({target.tokens for target in targets}) < MIN_LENGTHS else ""


# ------------------------------------------------------------------ fits
def fit(form: str, targets: Sequence[Target]) -> dict[str, float]:
    """Returns {term: coefficient} of one model; the solution with the least norm, if the losses do
    not determine it.
    """
    terms = _terms(form, targets)
    losses = np.log([target.loss for target in targets])
    coefficients, *_ = np.linalg.lstsq(terms, losses, rcond=None)
    return dict(zip(FORMS[form], map(float, coefficients)))


def predicted_loss(form: str, law: Mapping[str, float], target: Target) -> float:
    terms = _terms(form, [target])[0]
    return float(np.exp(terms @ list(law.values())))


def _terms(form: str, targets: Sequence[Target]) -> np.ndarray:
    """Returns the values of the terms, shape (targets, terms)."""
    n = np.log([target.parameters for target in targets])
    d = np.log([target.tokens for target in targets])
    return np.stack([_TERMS[term](n, d) for term in FORMS[form]], axis=1)


class _LeftOut(NamedTuple):
    size: str
    form: str  # with the least error
    error: float  # mean absolute one
    half_width: float  # at which the intervals of this form contain INTERVAL of the losses


def _leave_out_largest(targets: Sequence[Target]) -> _LeftOut:
    """Returns the best form of law at the largest size of models that have enough for a law."""
    size = _largest_size(targets)
    smaller = [target for target in targets if target.size != size]
    largest = [target for target in targets if target.size == size]
    misses = {form: _misses(form, smaller, largest) for form in FORMS}
    form = min(FORMS, key=lambda form: np.mean(misses[form]))
    error, half_width = np.mean(misses[form]), np.quantile(misses[form], INTERVAL)
    return _LeftOut(size, form, float(error), float(half_width))


def _misses(form: str, fitted: Sequence[Target], left_out: Sequence[Target]) -> list[float]:
    """Returns how far the law of the fitted losses is from each loss that was left out."""
    fits = _fits(form, fitted)
    return [
        abs(predicted_loss(form, fits[target.model], target) - target.loss) for target in left_out
    ]


def _fits(form: str, targets: Sequence[Target]) -> dict[str, dict[str, float]]:
    """Returns {model: law}."""
    return {model: fit(form, group) for model, group in grouped(targets, _model).items()}


def _largest_size(targets: Sequence[Target]) -> str:
    """Returns the largest size that all models have."""
    models = {target.model for target in targets}
    common = []
    for size, group in grouped(targets, lambda target: target.size).items():
        if {target.model for target in group} == models:
            common.append((np.mean([target.parameters for target in group]), size))
    return max(common)[1] if common else ""


# ------------------------------------------------------------------ predictions
def predict(
    runs: Sequence[Run], planned: Sequence[Target], held_out: str, time: str, command: str
) -> Predictions:
    """Returns the predictions of planned runs of a held-out size, from the runs of other sizes."""
    targets = targets_of(runs)
    by_model = grouped(targets, _model)
    missing_of = {target.model: missing(by_model.get(target.model, ())) for target in planned}
    not_predicted = {model: what for model, what in missing_of.items() if what}
    can_be_predicted = missing_of.keys() - not_predicted
    usable = [target for target in targets if target.model in can_be_predicted]
    form, rows = next(iter(FORMS)), []
    if usable:
        left_out = _leave_out_largest(usable)
        form = left_out.form
        fits, half = _fits(form, usable), left_out.half_width
        for target in dict.fromkeys(planned):
            if target.model in fits:
                loss = predicted_loss(form, fits[target.model], target)
                where = (target.model, target.parameters, target.tokens)
                rows.append(Prediction(*where, loss, loss - half, loss + half))
    return Predictions(
        time=time,
        command=command,
        held_out=held_out,
        interval=INTERVAL,
        records_sha256=hashlib.sha256(json.dumps(targets).encode()).hexdigest(),
        predictions={"parameters": tuple(rows)},
        not_predicted=not_predicted,
        form=form,
    )


def _model(target: Target) -> str:
    return target.model


# ------------------------------------------------------------------ findings
def find_laws(record: Record, contest_at: ContestAt) -> Laws | None:
    """Returns how well laws predict the models that have enough runs; None without any."""
    by_model = grouped(targets_of(record.runs), _model)
    usable: list[Target] = []
    for targets in by_model.values():
        usable += [] if missing(targets) else targets
    if not usable or not _largest_size(usable):
        return None
    left_out = _leave_out_largest(usable)
    form, size = left_out.form, left_out.size
    smaller = [target for target in usable if target.size != size]
    predicted = {}
    for model, law in _fits(form, smaller).items():
        longest = _longest([target for target in usable if target.model == model], size)
        predicted[model] = predicted_loss(form, law, longest)
    contest = contest_at(size)
    return Laws(
        form=form,
        size=size,
        error=left_out.error,
        by_law=_decisions(predicted, contest),
        by_largest_size=_decisions(_losses_at(smaller, _largest_size(smaller)), contest),
    )


def _longest(targets: Sequence[Target], size: str) -> Target:
    return max((one for one in targets if one.size == size), key=lambda one: one.tokens)


def _losses_at(targets: Sequence[Target], size: str) -> dict[str, float]:
    """Returns {model: loss of its longest runs of a size}."""
    by_model = grouped([one for one in targets if one.size == size], _model)
    return {model: _longest(group, size).loss for model, group in by_model.items()}


def _decisions(losses: Mapping[str, float], contest: Contest | None) -> Decisions:
    """Counts the decided pairs of a contest that an order of losses has right."""
    right = pairs = 0
    for model, other in itertools.combinations(losses, 2):
        pair = contest and contest.pair(model, other)
        if pair and pair.is_told:
            pairs += 1
            right += (losses[model] < losses[other]) == (pair.verdict == "lower")
    return Decisions(right, pairs)


def check_predictions(record: Record, contest_at: ContestAt) -> HeldOut | None:
    """Returns the predictions of the held-out size beside the trained losses; None without any."""
    predictions = record.predictions
    if predictions is None:
        return None
    targets = targets_of(record.runs)
    trained = {(one.model, one.tokens): one for one in targets if one.size == predictions.held_out}
    outcomes: list[Outcome] = []
    for row in predictions.by_parameters:
        target = trained.get((row.name, row.tokens))
        loss, seeds = (target.loss, target.seeds) if target else (None, 0)
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
    fitted = [one for one in targets if one.size != predictions.held_out and one.model in predicted]
    contest = contest_at(predictions.held_out)
    return dataclasses.replace(
        held_out,
        error=float(np.mean(misses)),
        coverage=float(np.mean([one.is_inside for one in known])),
        by_law=_decisions(predicted, contest),
        by_largest_size=_decisions(_losses_at(fitted, _largest_size(fitted)), contest),
    )
