"""Answers `choose`: the model for a budget, how to train it, and how to learn more.

Imports neither JAX nor matplotlib, so that `choose` starts fast.
"""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

from smallgpt_jax.analysis import choice as choices
from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.budgets import BUDGETS
from smallgpt_jax.analysis.findings import Choice, Standing
from smallgpt_jax.analysis.record import Record, Run
from smallgpt_jax.errors import UserError, command_line, suggestion
from smallgpt_jax.report import tables, words
from smallgpt_jax.report.rendering import render
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.storage.paths import as_path

MAX_FIELDS = 10  # of the config that are printed
MAX_SEEDS = 20  # for which a command is given
SAME_BUDGET = 1.01  # ratio of costs up to which a run is trained again with its own steps


@dataclasses.dataclass(frozen=True)
class Answer:
    choice: Choice
    run: str = ""  # the trained run that is nearest to the first model that may be the best
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # of this run
    differences: tuple[str, ...] = ()  # its fields of `model` in which others of the contest differ
    command: str = ""  # that trains this model with the budget
    seeds_command: str = ""  # that trains the seeds that would decide

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
    return _with_commands(choices.choose(record, budget, limit, batch), record)


def _with_commands(choice: Choice, record: Record) -> Answer:
    # Beyond the validated range, neither more seeds nor a trained model would answer.
    if choice.contest is None or choice.refusal == "beyond":
        return Answer(choice)
    first, *others = choice.contest.possible
    run = _run_of(first, record)
    if run is None:
        return Answer(choice)
    return Answer(
        choice,
        run.label,
        run.config,
        _distinguishing_fields(run, choice, record),
        _training_command(run, first, choice, record),
        _seeds_command(choice, others, record),
    )


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


def _training_command(run: Run, standing: Standing, choice: Choice, record: Record) -> str:
    """Returns a command that trains the run's model again, with the limit of a training budget.

    If its workdir is not on this machine: the comparison's command, restricted to the name, or "".
    """
    if not (as_path("--results", run.workdir) / CONFIG_FILE).is_file():
        flag = f"--config.compare.names={run.name}"
        return rerun(record.command, flag, without=("--results",))
    overrides = ["--config.train.trunk="] if run.config.get("train.trunk") else []
    cost = run.last.flops if choice.budget == "flops" else run.last.seconds
    is_training = choice.budget in ("flops", "seconds") and cost
    ratio = choice.compared_at / cost if is_training else 1.0
    if not 1 / SAME_BUDGET <= ratio <= SAME_BUDGET:
        for field in ("train.steps", "optimizer.warmup_steps", "optimizer.decay_steps"):
            count = run.config.get(field)
            if type(count) is int and count > 0:
                overrides.append(f"--config.{field}={round(count * ratio)}")
    return command_line("main", f"--config=run:{run.workdir}", *overrides, "--workdir=runs/chosen")


def _seeds_command(choice: Choice, others: list[Standing], record: Record) -> str:
    """Returns a command that trains the seeds that would probably decide, or ""."""
    if not others:
        return ""
    pair = choice.contest.pair(others[0].model, choice.contest.possible[0].model)
    if pair.seeds_needed is None or pair.seeds_needed.low > MAX_SEEDS:
        return ""
    seeds = min(MAX_SEEDS, math.ceil(pair.seeds_needed.high))
    return rerun(record.command, f"--config.compare.seeds={seeds}")


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
        run=answer.run,
        fields=", ".join(fields),
        train=answer.command,
        more_seeds=answer.seeds_command,
    )


def json_content(answer: Answer) -> dict[str, Any]:
    """Returns the answer as JSON has it: no infinity, which a diverged loss has."""
    return _finite(dataclasses.asdict(answer))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
