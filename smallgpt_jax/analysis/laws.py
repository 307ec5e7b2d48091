"""Laws of the last loss over size and training length: small, and judged by the largest size.

A law is fitted to the logarithms of one model's mean losses by least squares. Which of FORMS is
used, and how wide its intervals are, is decided by leaving out the largest size: the error there is
the error to expect one size further on.
"""

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
    FormError,
    HeldOut,
    Law,
    Laws,
    Outcome,
    Range,
)
from smallgpt_jax.analysis.record import Prediction, Predictions, Record, Run, grouped

MIN_SIZES, MIN_LENGTHS = 3, 3
# {form: terms of log(loss), from log(parameters) and log(tokens)}
FORMS: dict[str, dict[str, Callable]] = {
    "compute": {"1": lambda n, d: np.ones_like(n), "log N·D": lambda n, d: n + d},
    "size and tokens": {
        "1": lambda n, d: np.ones_like(n),
        "log N": lambda n, d: n,
        "log D": lambda n, d: d,
    },
    "size times tokens": {
        "1": lambda n, d: np.ones_like(n),
        "log N": lambda n, d: n,
        "log D": lambda n, d: d,
        "log N · log D": lambda n, d: n * d,
    },
}
ContestAt = Callable[[str], Contest | None]  # the longest runs of a size


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
        if all(map(math.isfinite, losses)):
            first = group[0]
            mean = math.fsum(losses) / len(losses)
            targets.append(
                Target(first.model, first.size, first.parameters, first.tokens, mean, len(losses))
            )
    return targets


def missing(targets: Sequence[Target]) -> str:
    """Returns what one model lacks for a law: "sizes", "lengths" or ""."""
    if len({target.parameters for target in targets}) < MIN_SIZES:
        return "sizes"
    return "lengths" if len({target.tokens for target in targets}) < MIN_LENGTHS else ""


# ------------------------------------------------------------------ fits
def fit(form: str, targets: Sequence[Target]) -> dict[str, float]:
    """Returns {term: coefficient} of one model; the shortest vector, if they do not determine it."""
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
    return np.stack([term(n, d) for term in FORMS[form].values()], axis=1)


class _LeftOut(NamedTuple):
    size: str
    forms: tuple[FormError, ...]  # best first
    half_width: float  # of the first form, at which its intervals contain INTERVAL of the losses


def leave_out_largest(targets: Sequence[Target]) -> _LeftOut:
    """Returns the errors of the forms at the largest size of models that have enough for a law."""
    size = _largest_size(targets)
    rest = [target for target in targets if target.size != size]
    errors = []
    for form in FORMS:
        misses = _misses(form, rest, [target for target in targets if target.size == size])
        errors.append((FormError(form, float(np.mean(misses))), misses))
    errors.sort(key=lambda pair: pair[0].error)
    return _LeftOut(
        size, tuple(error for error, _ in errors), float(np.quantile(errors[0][1], INTERVAL))
    )


def _misses(form: str, fitted: Sequence[Target], left_out: Sequence[Target]) -> list[float]:
    by_model = grouped(fitted, lambda target: target.model)
    misses = []
    for target in left_out:
        law = fit(form, by_model[target.model])
        misses.append(abs(predicted_loss(form, law, target) - target.loss))
    return misses


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
    by_model = grouped(targets, lambda target: target.model)
    lacking = {model: missing(by_model.get(model, ())) for model in _models(planned)}
    usable = [target for target in targets if not lacking.get(target.model, "not planned")]
    rows = []
    form = next(iter(FORMS))
    if usable:
        left_out = leave_out_largest(usable)
        form = left_out.forms[0].form
        laws = {model: fit(form, group) for model, group in grouped(usable, _model).items()}
        for target in dict.fromkeys(planned):
            if target.model in laws:
                loss = predicted_loss(form, laws[target.model], target)
                rows.append(
                    Prediction(
                        target.model,
                        target.parameters,
                        target.tokens,
                        loss,
                        loss - left_out.half_width,
                        loss + left_out.half_width,
                    )
                )
    return Predictions(
        time=time,
        command=command,
        held_out=held_out,
        interval=INTERVAL,
        records_sha256=hashlib.sha256(json.dumps(targets).encode()).hexdigest(),
        predictions={"parameters": tuple(rows)},
        not_predicted={model: lack for model, lack in lacking.items() if lack},
        form=form,
    )


def _model(target: Target) -> str:
    return target.model


def _models(targets: Sequence[Target]) -> list[str]:
    return list(dict.fromkeys(target.model for target in targets))


# ------------------------------------------------------------------ findings
def find_laws(record: Record, contest_at: ContestAt) -> tuple[Laws | None, dict[str, str]]:
    """Returns the laws of all runs, and {model: what it lacks for one}. None without a law."""
    by_model = grouped(targets_of(record.runs), _model)
    lacking = {model: missing(targets) for model, targets in by_model.items()}
    lacking = {model: lack for model, lack in lacking.items() if lack}
    usable = [
        target for model, group in by_model.items() if model not in lacking for target in group
    ]
    if not usable or not _largest_size(usable):
        return None, lacking
    left_out = leave_out_largest(usable)
    form, error = left_out.forms[0].form, left_out.forms[0].error
    rest = [target for target in usable if target.size != left_out.size]
    by_law = {}
    for model, group in grouped(rest, _model).items():
        longest = _longest([one for one in usable if one.model == model], left_out.size)
        by_law[model] = predicted_loss(form, fit(form, group), longest)
    contest = contest_at(left_out.size)
    laws = [Law(model, fit(form, group)) for model, group in grouped(usable, _model).items()]
    return (
        Laws(
            forms=left_out.forms,
            size=left_out.size,
            error=error,
            laws=tuple(laws),
            by_law=_decisions(by_law, contest),
            by_largest_size=_decisions(_losses_at(rest, _largest_size(rest)), contest),
        ),
        lacking,
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
        verdict = _verdict(contest, model, other)
        if verdict in ("lower", "higher"):
            pairs += 1
            right += (losses[model] < losses[other]) == (verdict == "lower")
    return Decisions(right, pairs)


def _verdict(contest: Contest | None, model: str, other: str) -> str:
    try:
        return contest.pair(model, other).verdict if contest else ""
    except KeyError:  # one of them was not trained there
        return ""


def check_predictions(record: Record, contest_at: ContestAt) -> HeldOut | None:
    """Returns the predictions of the held-out size beside the trained losses; None without any."""
    content = record.predictions
    if content is None:
        return None
    trained = [one for one in targets_of(record.runs) if one.size == content.held_out]
    losses = {(one.model, one.tokens): one for one in trained}
    outcomes = []
    for row in content.predictions.get("parameters", ()):
        target = losses.get((row.name, row.tokens))
        outcomes.append(
            Outcome(
                row.name,
                row.tokens,
                row.loss,
                Range(row.low, row.high),
                target.loss if target else None,
                target.seeds if target else 0,
            )
        )
    known = [one for one in outcomes if one.loss is not None]
    misses = [abs(one.loss - one.predicted) for one in known]
    inside = [one.interval.low <= one.loss <= one.interval.high for one in known]
    longest = {one.model: one.predicted for one in sorted(outcomes, key=lambda one: one.tokens)}
    fitted = [one for one in targets_of(record.runs) if one.size != content.held_out]
    fitted = [one for one in fitted if one.model in longest]
    contest = contest_at(content.held_out) if known else None
    return HeldOut(
        size=content.held_out,
        time=content.time,
        form=content.form,
        sha256=content.records_sha256,
        outcomes=tuple(outcomes),
        error=float(np.mean(misses)) if known else None,
        coverage=float(np.mean(inside)) if known else None,
        by_law=_decisions(longest, contest) if known else None,
        by_largest_size=_decisions(_losses_at(fitted, _largest_size(fitted)), contest)
        if known
        else None,
    )
