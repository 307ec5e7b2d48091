"""Checks of a record as a whole, without training: runs against each other."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from smallgpt_jax import models
from smallgpt_jax.analysis.record import Record, Run, grouped
from smallgpt_jax.comparison import comparability
from smallgpt_jax.data.corpus import DESCRIPTION
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config, unflatten
from smallgpt_jax.run.custom_code import refuse_training_code
from smallgpt_jax.storage.json_files import find_mismatch
from smallgpt_jax.verification.problems import (
    CONTRADICTION,
    SUSPICION,
    UNKNOWN,
    Problem,
    contradiction,
    label_of,
)
from smallgpt_jax.verification.run_checks import CountOf, problems_of

# A seed's curve that is nearer to another's than this fraction of the usual distance may be a copy
# with noise. The nearest of 201 honest pairs of docs/results/{scaling,mixers}.json had 0.063.
COPY_RATIO = 0.03
MAX_SEEDS = 64  # of a name whose curves are compared with each other
MIN_POINTS = 3  # of two curves that are compared
# What a record says of its budget → the field of the last point that is then equal in all runs
_BUDGETS = {
    "All runs are trained on as many tokens": "tokens",
    "All runs are trained for as many FLOPs": "flops",
}
_BUDGET_TOLERANCE = 0.02
_OF_LENGTH = ("train.steps", "optimizer.decay_steps")  # differ between horizons


def check_record(record: Record, count: CountOf, trust_custom_code: bool = False) -> list[Problem]:
    """Returns all problems that the record shows without training."""
    problems = []
    configs: list[Config | None] = []  # of each run; None: it cannot be used here
    for run in record.runs:
        try:
            config = config_of(run, trust_custom_code)
        except UserError as error:
            config = None
            # Of the model: all its seeds and sizes usually have one and the same problem.
            text = str(error).removeprefix(f"{label_of(run)}: ")
            problems.append(Problem(UNKNOWN, "config", run.model, text))
        problems += problems_of(run, config, count)
        configs.append(config)
    problems += _comparable(record)
    problems += _same_configs(record, configs)
    for check in (_branches, _copies, _seeds, _grids, _budget, _predictions):
        problems += check(record)
    return list(dict.fromkeys(problems))  # each once, in this order


def config_of(run: Run, trust_custom_code: bool) -> Config:
    """Returns the config of a run. Raises UserError if it cannot be used here."""
    groups = unflatten(run.config)
    models.refuse_custom_code(groups.get("model", {}), label_of(run), trust_custom_code)
    refuse_training_code(groups, label_of(run), trust_custom_code)
    return Config.of(groups)


def _comparable(record: Record) -> Iterator[Problem]:
    """All runs have one training text, and their last losses are means over the same tokens."""
    for run in record.runs:
        mismatch = run.text and find_mismatch(run.text.description, DESCRIPTION, "text.description")
        if mismatch:
            yield Problem(UNKNOWN, "text", label_of(run), mismatch)
            return  # texts that cannot be read cannot be compared either
    try:
        comparability.require_comparable(record.runs)
    except UserError as error:
        yield contradiction("text", None, str(error))
    if len({run.averaged for run in record.runs}) > 1:
        text = "its losses are means over different evaluations"
        yield contradiction("evaluation rows", None, text)
    # A row of another context length has another number of targets.
    for runs in grouped(record.runs, lambda run: run.config["model.context_length"]).values():
        targets = {run.last.targets for run in runs if run.last and run.is_finished}
        if len(targets) > 1:
            counts = " and ".join(f"{count:,}" for count in sorted(targets))
            text = f"losses are means over {counts} targets in runs of one context length"
            yield contradiction("evaluation rows", None, text)


def _same_configs(record: Record, configs: Sequence[Config | None]) -> Iterator[Problem]:
    """Runs of one name and horizon differ in their seeds only; horizons differ in their length."""
    readable = [(run, config) for run, config in zip(record.runs, configs) if config is not None]
    for runs in grouped(readable, lambda pair: pair[0].name).values():
        by_horizon: dict[float, tuple[Run, dict]] = {}  # the first run of each, and its fields
        for run, config in runs:
            fields = comparability.fixed_fields(config.flat())
            other, fields_before = by_horizon.setdefault(run.horizon, (run, fields))
            differences = comparability.different(fields_before, fields)
            if differences:
                text = f"its config is not that of seed {other.seed} ({differences})"
                yield contradiction("configs", run, text)
        yield from _lengths(by_horizon)


def _lengths(by_horizon: dict[float, tuple[Run, dict]]) -> Iterator[Problem]:
    """Steps and decay are the horizon times those of the longest run, whose horizon is 1."""
    if 1.0 not in by_horizon:
        return  # the longest run is not in the record
    _, longest = by_horizon[1.0]
    for horizon, (run, fields) in by_horizon.items():
        for name in _OF_LENGTH:
            if abs(fields[name] - horizon * longest[name]) > 0.5:  # both are whole steps
                expected = f"{horizon:g} × {longest[name]} by its horizon"
                yield contradiction("schedule", run, f"{name} is {fields[name]}, but {expected}")


def _branches(record: Record) -> Iterator[Problem]:
    """The steps that a shorter run has copied from a longer one have the same losses in both."""
    longest = {(run.name, run.seed): run for run in record.runs if run.horizon == 1}
    for run in record.runs:
        trunk = longest.get((run.name, run.seed))
        if trunk is None or run is trunk or not run.copied_steps:
            continue  # copied nothing, or its longest run is not in the record
        losses = {point.step: point.loss for point in trunk.curve}
        for point in run.curve:
            is_copied = point.step <= run.copied_steps and point.step in losses
            if is_copied and point.loss != losses[point.step]:
                text = (
                    f"has another loss at step {point.step} than its longest run, whose steps it "
                    "has copied"
                )
                yield contradiction("horizons", run, text)


def _copies(record: Record) -> Iterator[Problem]:
    """Curves of different seeds that are equal, or nearer to each other than seeds are."""
    distances: list[tuple[str, int, int, float]] = []  # (name, seed, other seed, distance)
    for name, runs in grouped(record.runs, lambda run: run.name).items():
        for one, other, deviations in _pairs_of_seeds(runs):
            if not any(deviations):
                text = f"its losses are those of seed {one}"
                yield Problem(CONTRADICTION, "copied curve", f"{name}, seed {other}", text)
            elif len(deviations) >= MIN_POINTS:
                distance = math.sqrt(statistics.fmean(x * x for x in deviations))
                distances.append((name, one, other, distance))
    if len(distances) < 3:
        return  # too few to know the usual one
    # Honest seeds of one name are about equally far apart; of few, those of all names tell.
    usual = statistics.median(distance for *_, distance in distances)
    for name, one, other, distance in distances:
        of_name = [value for other_name, *_, value in distances if other_name == name]
        reference = statistics.median(of_name) if len(of_name) >= 3 else usual
        if distance < COPY_RATIO * reference:
            text = (
                f"its losses are within {distance:.2g} of those of seed {one}; others differ by "
                f"{reference:.2g}"
            )
            yield Problem(SUSPICION, "copied curve", f"{name}, seed {other}", text)


def _pairs_of_seeds(runs: Sequence[Run]) -> Iterator[tuple[int, int, list[float]]]:
    """Yields (seed, other seed, differences of their losses at common steps) for the runs of one
    name; of many seeds, for the first MAX_SEEDS, because the pairs grow with their square.
    """
    # {seed: {(horizon, step): loss}}: the runs of a seed are compared together, as one curve.
    losses: dict[int, dict] = defaultdict(dict)
    for run in runs:
        losses[run.seed].update({(run.horizon, p.step): p.loss for p in run.curve if p.loss})
    for one, other in itertools.combinations(list(losses)[:MAX_SEEDS], 2):
        common = losses[one].keys() & losses[other].keys()
        if common:
            yield one, other, [losses[one][key] - losses[other][key] for key in common]


def _seeds(record: Record) -> Iterator[Problem]:
    """Seeds are consecutive and the same for all names: others may be chosen for their losses."""
    seeds_of = {}
    for name, runs in grouped(record.runs, lambda run: run.name).items():
        seeds_of[name] = sorted({run.seed for run in runs})
    for name, seeds in seeds_of.items():
        gaps = [before + 1 for before, after in itertools.pairwise(seeds) if after > before + 1]
        if gaps:
            text = f"seeds are left out, such as {', '.join(map(str, gaps[:5]))}; ask for them"
            yield Problem(SUSPICION, "seeds", name, text)
    if "smallgpt_jax.compare" not in record.command or "--results" in record.command:
        return  # merged records may start at different seeds
    firsts = {seeds[0] for seeds in seeds_of.values()}
    if len(firsts) > 1:
        listed = " and ".join(map(str, sorted(firsts)))
        yield Problem(SUSPICION, "seeds", "", f"the names start at different seeds ({listed})")


def _grids(record: Record) -> Iterator[Problem]:
    """The learning rate of a name is the best of its grid."""
    for name, grid in record.learning_rates.items():
        if grid.best is None:
            continue  # no learning rate was searched for this name
        best = grid.best * grid.learning_rate
        for run in record.runs:
            if run.name == name and not math.isclose(run.learning_rate, best, rel_tol=1e-9):
                text = (
                    f"was trained at {run.learning_rate:g}; the best rate of its grid is {best:g}"
                )
                yield contradiction("learning rate", run, text)


def _budget(record: Record) -> Iterator[Problem]:
    """Longest runs end with the same tokens or FLOPs, where the record says so."""
    for sentence, field in _BUDGETS.items():
        if not record.budget.startswith(sentence):
            continue  # another budget
        ends = {
            label_of(run): getattr(run.last, field)
            for run in record.runs
            if run.is_finished and run.horizon == 1 and getattr(run.last, field)
        }
        if ends and max(ends.values()) > (1 + _BUDGET_TOLERANCE) * min(ends.values()):
            most = max(ends, key=lambda label: ends[label])
            text = (
                f"has {ends[most]:,.6g} {field}, others {min(ends.values()):,.6g}, although "
                f"{sentence[0].lower()}{sentence[1:]}"
            )
            yield Problem(CONTRADICTION, "budget", most, text)


def _predictions(record: Record) -> Iterator[Problem]:
    """Predictions are made before the held-out runs start."""
    predictions = record.predictions
    if predictions is None:
        return
    for run in record.runs:
        # Later sessions of an interrupted run begin at a later step.
        starts = [session.time for session in run.sessions if session.first_step == 0]
        if run.size == predictions.held_out and starts and min(starts) < predictions.time:
            text = f"was started at {min(starts)}, before its loss was predicted"
            yield contradiction("predictions", run, text)
