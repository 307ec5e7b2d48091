"""Answers `choose`: the model for a budget, how to train it, and how to learn more.

Imports neither JAX nor matplotlib, so that `choose` starts fast.
"""

import dataclasses
import math
import operator
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.analysis import choice as choices
from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.budgets import BUDGETS
from smallgpt_jax.analysis.findings import Choice, Range, Standing
from smallgpt_jax.analysis.record import Record, Run, model_of
from smallgpt_jax.errors import UserError, command_line, suggestion
from smallgpt_jax.formatting import finite
from smallgpt_jax.report import tables, words
from smallgpt_jax.report.rendering import render
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.storage.paths import as_path

MAX_FIELDS = 10  # of the config that are printed
MAX_SEEDS = 20  # per model, for which a command is given
SAME_BUDGET = 1.01  # ratio of costs up to which a run is trained again with its own steps


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a command trains; None where a run has not counted or logged it."""

    runs: int
    flops: float | None
    seconds: float | None  # at the speed of the record's runs


@dataclasses.dataclass(frozen=True)
class Answer:
    choice: Choice
    run: str = ""  # the trained run that is nearest to the first model that may be the best
    run_cost: float | None = None  # of this run, in the unit of the budget
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # of this run
    differences: tuple[str, ...] = ()  # its fields of `model` in which others of the contest differ
    command: str = ""  # that trains this model with the budget
    cost: Cost | None = None  # of `command`
    seeds_needed: Range | None = None  # per model, to tell the first two that may be the best apart
    seeds_command: str = ""  # that trains such seeds, if they are few
    seeds: int = 0  # per model, after `seeds_command`
    seeds_cost: Cost | None = None  # of `seeds_command`

    def __str__(self) -> str:
        return text(self)


def choose(results: str | Path, budget: str, limit: float, batch: int = 1) -> Answer:
    """Returns the model of a comparison's results.json for at most `limit` of `budget`; print()
    shows the answer.

    `budget` is a key of `analysis.budgets.BUDGETS`, such as "flops"; `batch` is the batch size of
    decoding. Raises UserError for an unknown budget, a damaged file, one without finished runs, and a
    budget below one training step.
    """
    if budget not in BUDGETS:
        raise UserError(
            f"budget={budget!r}: must be one of {', '.join(BUDGETS)}{suggestion(budget, BUDGETS)}"
        )
    record = records.read(as_path("--results", str(results)))
    return _with_commands(choices.choose(record, budget, limit, batch), record, str(results))


def _with_commands(choice: Choice, record: Record, results: str) -> Answer:
    # Beyond the validated range, neither more seeds nor a trained model would answer.
    if choice.contest is None or choice.refusal == "beyond":
        return Answer(choice)
    run = _run_of(choice.contest.possible[0], record)
    if run is None:
        return Answer(choice)
    answer = Answer(
        choice,
        run=run.label,
        run_cost=BUDGETS[choice.budget].cost(run, choice.batch),
        config=run.config,
        differences=_distinguishing_fields(run, choice, record),
    )
    return _with_seeds(_with_training(answer, run, record), record, results)


def _run_of(standing: Standing, record: Record) -> Run | None:
    """Returns a run behind a standing; the nearest one of an interpolated loss."""
    runs = [run for run in record.runs if run.name == standing.name]
    return min(runs, key=lambda run: abs(run.steps - standing.steps), default=None)


def _distinguishing_fields(run: Run, choice: Choice, record: Record) -> tuple[str, ...]:
    others = [_run_of(standing, record) for standing in choice.contest.standings]
    fields = ["model.architecture", "model.d_model"]
    for field, value in run.config.items():
        if field.startswith("model.") and any(
            other.config.get(field) != value for other in others if other
        ):
            fields.append(field)
    return tuple(field for field in dict.fromkeys(fields) if field in run.config)


# ------------------------------------------------------------------ commands
def _with_training(answer: Answer, run: Run, record: Record) -> Answer:
    """Adds a command that trains the run's model again, with the limit of a training budget.

    If its workdir is not on this machine: the comparison's command, restricted to the name, if any.
    """
    if not (as_path("--results", run.workdir) / CONFIG_FILE).is_file():
        flags = ("--config.compare.seeds=1", f"--config.compare.names={run.name}")
        command = rerun(record.command, *flags, without=("--results",))
        return dataclasses.replace(answer, command=command, cost=_cost_of_name(run.name, record))
    choice = answer.choice
    overrides = ["--config.train.trunk="] if run.config.get("train.trunk") else []
    is_training = BUDGETS[choice.budget].is_training and answer.run_cost
    ratio = choice.compared_at / answer.run_cost if is_training else 1.0
    if 1 / SAME_BUDGET <= ratio <= SAME_BUDGET:
        ratio = 1.0
    for field in ("train.steps", "optimizer.warmup_steps", "optimizer.decay_steps"):
        count = run.config.get(field)
        if ratio != 1 and type(count) is int and count > 0:
            overrides.append(f"--config.{field}={round(count * ratio)}")
    command = command_line(
        "main", f"--config=run:{run.workdir}", *overrides, "--workdir=runs/chosen"
    )
    return dataclasses.replace(answer, command=command, cost=_cost([run], [ratio]))


def _with_seeds(answer: Answer, record: Record, results: str) -> Answer:
    """Adds the number of seeds that would tell the first two models apart, and the command that
    trains them, if they are few.
    """
    first, *others = answer.choice.contest.possible
    if not others:
        return answer
    needed = answer.choice.contest.pair(others[0].model, first.model).seeds_needed
    answer = dataclasses.replace(answer, seeds_needed=needed)
    if needed is None:
        return answer
    # The middle of a range such as 5 to 80, in which each factor is equally likely.
    middle = math.ceil(math.sqrt(needed.low * needed.high))
    if middle > 2 * MAX_SEEDS:  # then MAX_SEEDS would hardly decide
        return answer
    seeds = min(middle, MAX_SEEDS)
    # All sizes of the models: the first one of each has the grid of learning rates.
    models = [first.model, *(one.model for one in others)]
    runs = [run for run in record.runs if run.model in models]
    present = len({run.seed for run in runs})
    if seeds <= present:
        return answer
    command = rerun(
        record.command,
        "--output=runs/more-seeds",
        f"--results={results}",
        f"--config.compare.names={','.join(dict.fromkeys(run.name for run in runs))}",
        f"--config.compare.seeds={seeds}",
    )
    cost = _cost(runs, [_own_share(run) * (seeds - present) / present for run in runs])
    count = round(len(runs) * (seeds - present) / present)
    return dataclasses.replace(
        answer, seeds_command=command, seeds=seeds, seeds_cost=dataclasses.replace(cost, runs=count)
    )


def _cost_of_name(name: str, record: Record) -> Cost:
    """Returns the cost of the runs of one seed, after a grid of learning rates where there is one."""
    runs = [run for run in record.runs if run.name == name]
    runs = [run for run in runs if run.seed == runs[0].seed]
    shares = [_own_share(run) for run in runs]
    for grid_name, grid in record.learning_rates.items():
        if model_of(grid_name) == model_of(name):
            longest = [run for run in runs if run.horizon == 1] * len(grid.rates)
            runs, shares = runs + longest, shares + [1.0] * len(longest)
    return _cost(runs, shares)


def _own_share(run: Run) -> float:
    """Returns the share of a run's steps that it has not copied from a longer one."""
    return 1 - run.copied_steps / run.steps


def _cost(runs: Sequence[Run], shares: Sequence[float]) -> Cost:
    """Returns the cost of shares of runs."""

    def total(field: str) -> float | None:
        costs = [getattr(run.last, field, None) for run in runs]
        return None if None in costs else sum(map(operator.mul, costs, shares))

    return Cost(len(runs), total("flops"), total("seconds"))


def rerun(command: str, *flags: str, without: tuple[str, ...] = ()) -> str:
    """Returns the command of a comparison with further flags, or "" if it is unknown or trains no
    runs.

    `without` are the names of flags to leave out.
    """
    try:
        arguments = shlex.split(command)
    except ValueError:  # an open quote
        return ""
    is_comparison = arguments[1:3] == ["-m", "smallgpt_jax.compare"]
    if not is_comparison or not any(word.startswith("--config") for word in arguments):
        return ""
    replaced = {*without, *(flag.partition("=")[0] for flag in flags)}
    kept = [word for word in arguments[3:] if word.partition("=")[0] not in replaced]
    return command_line("compare", *kept, *flags)


# ------------------------------------------------------------------ output
def text(answer: Answer) -> str:
    """Returns the answer for a terminal."""
    fields = []
    for field in answer.differences[:MAX_FIELDS]:
        fields.append(f"{field.partition('.')[2]}={answer.config[field]}")
    return render(
        "choice",
        "text",
        choice=answer.choice,
        label=words.LIMITED[answer.choice.budget],
        tables=tables,
        fields=", ".join(fields),
        answer=answer,
    )


def json_content(answer: Answer) -> dict[str, Any]:
    """Returns the answer as JSON has it: no infinity, which a diverged loss has."""
    return finite(dataclasses.asdict(answer))
