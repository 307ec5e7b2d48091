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
from smallgpt_jax.analysis.findings import Choice, Contest, Range, Standing
from smallgpt_jax.analysis.record import Record, Run, model_of
from smallgpt_jax.errors import UserError, command_line, suggestion
from smallgpt_jax.formatting import finite
from smallgpt_jax.report import tables, words
from smallgpt_jax.report.rendering import render
from smallgpt_jax.report.sized_command import sized_command
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.storage.paths import as_path

MAX_FIELDS = 10  # of the config that are printed
MAX_SEEDS = 20  # per model, for which a command is given
CHOSEN = "runs/chosen"  # output of the command that trains the chosen model
CHOSEN_SIZE = "runs/chosen-size"  # workdir of `sized_command`
MORE_SEEDS = "runs/more-seeds"  # output of the command that trains them
SAME_BUDGET = 1.01  # ratio of costs up to which a run is trained again with its own steps


@dataclasses.dataclass(frozen=True)
class Cost:
    """The price of a command; None if a run has not counted its FLOPs or logged its speed."""

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
    sized_command: str = ""  # that trains its architecture at the size that suits a budget of FLOPs
    seeds_needed: Range | None = None  # per model, to tell the first two that may be the best apart
    seeds_command: str = ""  # that trains such seeds, if they are few
    seeds: int = 0  # per model, after `seeds_command`
    seeds_cost: Cost | None = None  # of `seeds_command`
    merge_command: str = ""  # that adds these seeds to the record, for another choice

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
        differences=_distinguishing_fields(run, choice.contest, record),
    )
    answer = _with_training(answer, run, record)
    if choice.budget == "flops" and choice.compared_at == choice.limit:
        command = sized_command(run, choice.limit, CHOSEN_SIZE)
        answer = dataclasses.replace(answer, sized_command=command)
    return _with_seeds(answer, choice.contest, record, results)


def _run_of(standing: Standing, record: Record) -> Run | None:
    """Returns a run behind a standing; the nearest one of an interpolated loss."""
    runs = [run for run in record.runs if run.name == standing.name]
    return min(runs, key=lambda run: abs(run.steps - standing.steps), default=None)


def _distinguishing_fields(run: Run, contest: Contest, record: Record) -> tuple[str, ...]:
    """Returns the fields of `model` in which the run differs from another model of the contest."""
    nearest = [_run_of(standing, record) for standing in contest.standings]
    others = [other.config for other in nearest if other]
    fields = ["model.architecture", "model.d_model"]
    for field, value in run.config.items():
        is_equal = all(other.get(field) == value for other in others)
        if field.startswith("model.") and not is_equal:
            fields.append(field)
    return tuple(field for field in dict.fromkeys(fields) if field in run.config)


# ------------------------------------------------------------------ commands
def _with_training(answer: Answer, run: Run, record: Record) -> Answer:
    """Adds a command that trains the run's model again.

    If its workdir is not on this machine: the comparison's command, restricted to the name, if any.
    """
    if (as_path("--results", run.workdir) / CONFIG_FILE).is_file():
        ratio = _step_ratio(answer)
        command = _run_command(run, ratio)
        return dataclasses.replace(answer, command=command, cost=_cost([run], [ratio]))
    # A folder of its own: that of the comparison may have a report on all models.
    flags = (
        f"--output={CHOSEN}",
        "--config.compare.seeds=1",
        f"--config.compare.names={run.name}",
        *without_rounds(record),
    )
    command = rerun(record.command, *flags, without=("--results",))
    return dataclasses.replace(answer, command=command, cost=_cost_of_name(run.name, record))


def _step_ratio(answer: Answer) -> float:
    """Returns the steps with which a training budget is used up, per step of the nearest run."""
    budget, limit = answer.choice.budget, answer.choice.compared_at
    if not BUDGETS[budget].is_training or limit is None or not answer.run_cost:
        return 1.0
    ratio = limit / answer.run_cost
    return 1.0 if 1 / SAME_BUDGET <= ratio <= SAME_BUDGET else ratio


def _run_command(run: Run, ratio: float) -> str:
    overrides = []
    if run.config.get("train.trunk"):  # a branch of a longer run is trained from its first step
        overrides.append("--config.train.trunk=")
    for field in ("train.steps", "optimizer.warmup_steps", "optimizer.decay_steps"):
        count = run.config.get(field)
        is_count = type(count) is int and count > 0  # -1: a fraction of another count
        if ratio != 1 and is_count:
            overrides.append(f"--config.{field}={round(count * ratio)}")
    return command_line("main", f"--config=run:{run.workdir}", *overrides, f"--workdir={CHOSEN}")


def _with_seeds(answer: Answer, contest: Contest, record: Record, results: str) -> Answer:
    """Adds the number of seeds that would tell the first two models apart, and the command that
    trains them, if they are few.
    """
    needed = contest.seeds_needed
    if needed is None:
        return answer
    answer = dataclasses.replace(answer, seeds_needed=needed)
    # All sizes of the models: the first one of each has the grid of learning rates.
    models = {one.model for one in contest.possible}
    runs = [run for run in record.runs if run.model in models]
    present = len({run.seed for run in runs})
    # The middle of a range such as 5 to 80, in which each factor is equally likely: 20.
    middle = math.ceil(math.sqrt(needed.low * needed.high))
    seeds = min(middle, MAX_SEEDS)
    if middle > 2 * MAX_SEEDS or seeds <= present:  # MAX_SEEDS would hardly decide
        return answer
    names = dict.fromkeys(run.name for run in runs)
    command = rerun(
        record.command,
        f"--output={MORE_SEEDS}",
        f"--results={results}",
        f"--config.compare.names={','.join(names)}",
        f"--config.compare.seeds={seeds}",
        *without_rounds(record),
    )
    added = (seeds - present) / present  # per seed in the record
    cost = _cost(runs, [_own_share(run) * added for run in runs])
    cost = dataclasses.replace(cost, runs=round(len(runs) * added))
    # A report on these models alone estimates their spread from fewer runs.
    merge_command = command_line(
        "compare",
        f"--results={results},{MORE_SEEDS}/{records.RESULTS_FILE}",
        "--output=runs/merged",
    )
    return dataclasses.replace(
        answer,
        seeds_command=command,
        seeds=seeds,
        seeds_cost=cost,
        merge_command=merge_command if command else "",
    )


def _cost_of_name(name: str, record: Record) -> Cost:
    """Returns the cost of the runs of one seed, after a grid of learning rates where there is one."""
    runs = [run for run in record.runs if run.name == name]
    runs = [run for run in runs if run.seed == runs[0].seed]
    shares = [_own_share(run) for run in runs]
    for grid_name, grid in record.learning_rates.items():
        if model_of(grid_name) == model_of(name):
            # The command trains a grid of its own, at this size.
            longest = [run for run in runs if run.horizon == 1]
            runs += longest * len(grid.rates)
            shares += [1.0] * (len(runs) - len(shares))
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


def without_rounds(record: Record) -> list[str]:
    """Returns the flag with which a comparison trains exactly compare.seeds seeds."""
    return ["--config.compare.most_seeds=0"] if record.seeds_as_needed else []


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
