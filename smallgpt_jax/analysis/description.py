"""Describes a record without comparing its models: the setup, learning rates and curves."""

import math
import statistics
from collections.abc import Sequence

from smallgpt_jax.analysis.findings import (
    Corpus,
    Curve,
    CurvePoint,
    Range,
    Rates,
    Setup,
    Spread,
)
from smallgpt_jax.analysis.record import Grid, Record, Run, grouped

_LIBRARIES = ("jax", "python")  # in `Setup.software`
PLAUSIBLE = 2.0  # standard deviations of the difference of two runs within which a rate may be best


# ------------------------------------------------------------------ setup
def describe_setup(record: Record) -> Setup | None:
    """Returns the ranges of what was trained, on what and when; None without runs."""
    runs = record.runs
    if not runs:
        return None
    sessions = [session for run in runs for session in run.sessions]
    days = sorted(session.time[:10] for session in sessions)
    devices = dict.fromkeys(f"{session.devices} × {session.device}" for session in sessions)
    versions: dict[str, None] = {}  # a set with an order
    for name in _LIBRARIES:
        versions |= {
            f"{name} {one.versions[name]}": None for one in sessions if name in one.versions
        }
    return Setup(
        corpus=_corpus(runs),
        models=tuple(dict.fromkeys(run.model for run in runs)),
        sizes=_sizes(runs),
        seeds=tuple(sorted({run.seed for run in runs})),
        parameters=_range([run.parameters for run in runs]),
        tokens=_range([run.tokens for run in runs]),
        steps=_range([run.steps for run in runs]),
        context_lengths=tuple(sorted({run.config["model.context_length"] for run in runs})),
        batch_tokens=_range([run.tokens_per_step for run in runs]),
        runs=sum(run.is_finished for run in runs),
        unfinished=sum(not run.is_finished and not run.diverged for run in runs),
        hours=_hours(runs),
        devices=tuple(devices),
        software=tuple(versions),
        dates=(days[0], days[-1]) if days else None,
        validation_tokens=max((run.last.targets for run in runs if run.last), default=0),
        seeds_as_needed=record.seeds_as_needed,
    )


def _range(values: Sequence[float]) -> Range:
    return Range(min(values), max(values))


def _sizes(runs: Sequence[Run]) -> tuple[str, ...]:
    """Returns the sizes in ascending order of their mean parameters."""
    runs_of = grouped(runs, lambda run: run.size)
    parameters = {}
    for size, of_size in runs_of.items():
        parameters[size] = statistics.fmean(run.active_parameters for run in of_size)
    return tuple(sorted(parameters, key=parameters.get))


def _corpus(runs: Sequence[Run]) -> Corpus:
    """Returns the text of the first run, of which all have the same, and how often it was read."""
    first = runs[0]
    description = first.text.description if first.text else {}
    stores = description.get("mixture", [description])
    most_tokens = max(run.tokens for run in runs)
    tokens, times_read = 0, [0.0]
    if "probe" not in description:  # the rows of a probe are made when they are read
        for store in stores:
            size = store.get("splits", {}).get("train", {}).get("tokens", 0)
            tokens += size
            times_read.append(store.get("weight", 1.0) * most_tokens / size if size else 0.0)
    config = first.config
    return Corpus(
        source=config.get("data.mixture") or config.get("data.source", ""),
        tokens=tokens or None,
        tokenizer=config.get("data.tokenizer", ""),
        vocabulary=stores[0].get("vocab_size"),
        most_read=max(times_read),
    )


def _hours(runs: Sequence[Run]) -> float | None:
    """Returns the hours of training, without copied steps; None if a speed was not logged."""
    seconds = 0.0
    for run in runs:
        if not run.last or run.last.seconds is None:
            return None
        fraction = 1 - run.copied_steps / run.last.step if run.last.step else 0.0
        seconds += fraction * run.last.seconds
    return seconds / 3600


# ------------------------------------------------------------------ learning rates
def describe_rates(record: Record) -> tuple[Rates, ...]:
    """Returns the learning rates of each name of a grid."""
    deviations = _deviations_over_seeds(record.runs)
    # of a name with one seed, that of the others; unknown if each has one
    typical = statistics.median(deviations.values()) if deviations else math.inf
    return tuple(
        _rates(name, grid, deviations.get(name, typical))
        for name, grid in record.learning_rates.items()
    )


def _deviations_over_seeds(runs: Sequence[Run]) -> dict[str, float]:
    """Returns {name: standard deviation of the losses of its longest runs}, of those with two seeds."""
    deviations = {}
    longest = [run for run in runs if run.horizon == 1 and math.isfinite(run.loss)]
    for name, of_name in grouped(longest, lambda run: run.name).items():
        if len(of_name) > 1:
            deviations[name] = statistics.stdev(run.loss for run in of_name)
    return deviations


def _rates(name: str, grid: Grid, deviation: float) -> Rates:
    """Returns the learning rates of a name, as multiples of its own one, and which may be the best, by
    the standard deviation of its losses over seeds.
    """
    finite = {
        multiple: loss
        for multiple, loss in grid.losses.items()
        if loss is not None and math.isfinite(loss)
    }
    # Two runs differ by √2 standard deviations, if the rate makes no difference.
    bound = min(finite.values(), default=math.nan) + PLAUSIBLE * math.sqrt(2) * deviation
    plausible = tuple(multiple for multiple, loss in finite.items() if loss <= bound)
    return Rates(name, grid, plausible, minimum_of(grid))


def minimum_of(grid: Grid) -> float | None:
    """Returns the multiple of the learning rate at the minimum of the parabola loss(ln rate) through
    the best one and its neighbors; None at an edge, beside a diverged one, and without a minimum.
    """
    if grid.best is None or grid.edge:
        return None
    multiples = list(grid.losses)
    middle = multiples.index(grid.best)
    near = multiples[middle - 1 : middle + 2]
    x0, x1, x2 = map(math.log, near)
    y0, y1, y2 = (grid.losses[multiple] for multiple in near)
    if math.inf in (y0, y2):
        return None
    slope, next_slope = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    # The parabola has the slope `slope` in the middle of x0 and x1, and rises by its curvature.
    curvature = 2 * (next_slope - slope) / (x2 - x0)
    if curvature <= 0:
        return None
    return math.exp((x0 + x1) / 2 - slope / curvature)


# ------------------------------------------------------------------ curves
def describe_curves(runs: Sequence[Run]) -> tuple[Curve, ...]:
    """Returns the mean losses over the seeds of each name, at the steps of which all have one."""
    curves = [_curve(name, group) for name, group in grouped(runs, lambda run: run.name).items()]
    return tuple(curve for curve in curves if curve.points)


def _curve(name: str, runs: Sequence[Run]) -> Curve:
    """Returns means over seeds by step; no points if seeds end on different validation rows."""
    targets = {run.last.targets if run.last else None for run in runs}
    if len(targets) != 1 or None in targets:
        return Curve(name, ())
    curves_by_step = []  # {step: point} of each run, without evaluations on other rows
    for run in runs:
        curves_by_step.append({one.step: one for one in run.curve if one.targets in targets})
    means = []
    for step in sorted(set.intersection(*map(set, curves_by_step))):
        points = [curve[step] for curve in curves_by_step]
        losses = [point.loss for point in points]
        if None not in losses:
            tokens = _mean([point.tokens for point in points])
            flops = _mean([point.flops for point in points])
            means.append(CurvePoint(tokens, flops, Spread.of(losses)))
    return Curve(name, tuple(means))


def _mean(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else statistics.fmean(values)
