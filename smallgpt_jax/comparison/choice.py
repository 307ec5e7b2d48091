"""The model to choose for a budget, from the records of a comparison, or the reason why it cannot
be told.

A training budget (FLOPs, seconds) asks which model has the lowest loss after training with that
budget. The runs that were trained with it answer, or runs with less and more, between which losses
are interpolated. Any other budget (parameters, bytes, latency, memory) is a limit that the trained
models meet or not.

A comparison of several sizes names its runs MODEL@SIZE, such as gpt@1M.
"""

import dataclasses
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallgpt_jax.comparison import statistics
from smallgpt_jax.comparison.candidates import (
    RESULTS,
    WITHIN,
    Candidate,
    pareto_front,
    read_candidates,
)
from smallgpt_jax.comparison.contest import (
    CERTAIN,
    STAKE,
    CannotTellError,
    Contender,
    Contest,
    compete,
)
from smallgpt_jax.comparison.costs import Budget, budgets, rerun
from smallgpt_jax.errors import UserError, command_line
from smallgpt_jax.formatting import aligned_rows, parameter_count
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.storage.json_files import printable_values, read_json
from smallgpt_jax.storage.paths import as_path

MAX_ROWS = 6  # of a table
MAX_SEEDS = 20  # for which a command is given
WIDTH = 120  # of the text, in characters


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table."""

    name: str
    loss: float
    low: float | None  # 80% interval of the loss
    high: float | None
    cost: float | None
    parameters: int
    active_parameters: int
    tokens: float
    probability: float | None  # of having the lowest loss of all contenders


@dataclasses.dataclass(frozen=True)
class Answer:
    budget: str
    label: str  # of the budget
    limit: float
    chosen: str | None  # None: it cannot be told, because of `reason`
    reason: str
    compared_at: float | None = (
        None  # budget of the contenders: `limit`, or the nearest one that was measured
    )
    contenders: tuple[Row, ...] = ()  # by loss
    possible: tuple[str, ...] = ()  # that may be the best, by loss
    probability: float | None = (
        None  # of the first of them, and of models of equal losses, of being the best
    )
    at_stake: float | None = (
        None  # nats that the first is at most above the lowest loss, by `contest.STAKE`
    )
    front: tuple[Row, ...] = ()  # the Pareto front of loss against cost, over all runs
    notes: tuple[str, ...] = ()
    run: str = ""  # the trained run that is nearest to the first possible model
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # of this run
    command: str = ""  # that trains the first possible model
    differences: tuple[
        str, ...
    ] = ()  # config fields of `model` that tell `run` from the other contenders
    seeds_needed: int | None = None  # that would tell the first two possible models apart
    seeds_command: str = ""  # that trains them


def choose(path: Path, name: str, limit: float, batch: int = 1) -> Answer:
    """Returns the model for at most `limit` of the budget called `name`, from a results.json."""
    results = printable_values(read_json(path, RESULTS, "give the results.json of a comparison"))
    if found := answers(results, name, [limit], batch):
        return found[0]
    raise UserError(f"{path}: no finished run; finish the comparison")


def answers(results: dict, name: str, limits: Sequence[float], batch: int = 1) -> list[Answer]:
    """Returns an answer per limit, from the content of a results.json; [] without a finished run.

    Raises UserError if a limit is below the cost of one training step.
    """
    comparison = results.get("command", "")
    budget = budgets(batch, comparison)[name]
    candidates, notes = read_candidates(results["runs"], budget)
    if not candidates:
        return []
    if name == "decode_ms":
        notes += other_devices(candidates)
    if name == "seconds":
        notes.append(
            "Other programs beside a run make its seconds longer; trust them only if there were "
            "none."
        )
    if name == "parameters" and any(one.active_parameters != one.parameters for one in candidates):
        notes.append("All experts count, also those that a token does not use.")
    return [answer(candidates, name, budget, limit, notes, comparison) for limit in limits]


def answer(
    candidates: Sequence[Candidate],
    name: str,
    budget: Budget,
    limit: float,
    notes: Sequence[str],
    comparison: str,
) -> Answer:
    if budget.is_training:
        require_a_step(candidates, name, budget, limit)
    front = tuple(map(row_of, pareto_front(candidates)))
    try:
        contest = compete(candidates, budget, limit)
    except CannotTellError as error:
        near = error.nearest and answer(candidates, name, budget, error.nearest, notes, comparison)
        if not near or not near.contenders:
            return Answer(
                name, budget.label, limit, None, str(error), front=front, notes=tuple(notes)
            )
        choice = f"choose {near.chosen}: " if near.chosen else ""
        return dataclasses.replace(
            near,
            limit=limit,
            chosen=None,
            reason=(
                f"{error}. At {near.limit:.3g}, the nearest budget with an answer, "
                f"{choice}{near.reason}"
            ),
        )
    chosen, reason = decide(contest)
    first, *others = cheapest(contest.winners)[0], *contest.possible[1:]
    config = first.trained.runs[0]["config"]
    needed = seeds_needed(first.model, others[0].model) if others else None
    return Answer(
        name,
        budget.label,
        limit,
        chosen,
        reason,
        compared_at=contest.limit,
        contenders=tuple(row_of(one.model, one) for one in contest.contenders),
        possible=tuple(one.model.name for one in (first, *others)),
        probability=contest.probability,
        at_stake=contest.at_stake,
        front=front,
        notes=(*notes, *contest.notes),
        run=first.trained.name,
        config=config,
        command=training_command(
            first.trained, comparison, contest.limit if budget.is_training else None
        ),
        differences=distinguishing_fields(config, contest.contenders),
        seeds_needed=needed,
        seeds_command=rerun(comparison, f"--config.compare.seeds={needed}")
        if needed and needed <= MAX_SEEDS
        else "",
    )


def seeds_needed(one: Candidate, other: Candidate) -> int | None:
    """Returns the seeds that would tell two models apart at the observed difference and spread;
    None if unknown.
    """
    sample = statistics.paired_differences(one.losses, other.losses)
    if len(sample) < 2:
        return None
    found = statistics.seeds_needed(sample.mean(), sample.std(ddof=1))
    return found and max(found, len(sample) + 1)


def distinguishing_fields(
    config: dict[str, Any], contenders: Sequence[Contender]
) -> tuple[str, ...]:
    configs = [one.trained.runs[0]["config"] for one in contenders]
    return tuple(
        field
        for field, value in config.items()
        if field.startswith("model.") and any(other.get(field) != value for other in configs)
    )


def require_a_step(
    candidates: Sequence[Candidate], name: str, budget: Budget, limit: float
) -> None:
    costs = [
        cost / run["curve"][-1]["step"]
        for candidate in candidates
        for run in candidate.runs
        if (cost := budget.cost(run))
    ]
    if costs and limit < min(costs):
        raise UserError(
            f"--{name}={limit:g}: below one training step, which takes {min(costs):.3g} "
            f"{budget.label} or more; use a larger budget"
        )


def other_devices(candidates: Sequence[Candidate]) -> list[str]:
    devices = dict.fromkeys(
        run["inference"]["device"]
        for candidate in candidates
        for run in candidate.runs
        if run.get("inference")
    )
    return [f"Measured on different devices: {', '.join(devices)}."] if len(devices) > 1 else []


def row_of(model: Candidate, contender: Contender | None = None) -> Row:
    interval, probability = (
        (contender.interval, contender.probability) if contender else ((None, None), None)
    )
    return Row(
        model.name,
        model.loss,
        *interval,
        model.cost,
        model.parameters,
        model.active_parameters,
        model.tokens,
        probability,
    )


def decide(contest: Contest) -> tuple[str | None, str]:
    """Returns (the chosen name or None, the reason)."""
    winners, probability = cheapest(contest.winners), contest.probability
    name, *equal = [one.model.name for one in winners]
    if len(contest.contenders) == 1:
        return name, "it is the only model within the budget"
    if probability >= CERTAIN:
        others = f", as that of {enumeration(equal)}, which costs no less" if equal else ""
        return name, f"its loss is the lowest with a probability of {probability:.2f}{others}"
    name += f" (equal to {enumeration(equal)})" if equal else ""
    others = "".join(
        f", {one.model.name} with {one.probability:.2f}" for one in contest.possible[1:]
    )
    return None, (
        f"{name} has the lowest loss with a probability of {probability:.2f}{others}; to choose, "
        f"{CERTAIN} is needed"
    )


def cheapest(contenders: Iterable[Contender]) -> list[Contender]:
    return sorted(contenders, key=lambda one: one.model.cost)


def enumeration(names: Sequence[str], word: str = "and") -> str:
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


# ------------------------------------------------------------------ output
def training_command(candidate: Candidate, comparison: str, limit: float | None) -> str:
    """Returns a command that trains a candidate again, with the training budget `limit` if one is
    given.

    If its workdir is not on this machine: the comparison's command, restricted to the candidate, or
    "" if unknown.
    """
    run = candidate.runs[0]
    workdir, config = run["workdir"], run["config"]
    if not (as_path("--results", workdir) / CONFIG_FILE).is_file():
        return rerun(comparison, f"--config.compare.names={run['name']}", without=("--results",))
    overrides = ["--config.train.trunk="] if config.get("train.trunk") else []
    steps, ratio = run["curve"][-1]["step"], limit / candidate.cost if limit else 1.0
    if abs(ratio - 1) > WITHIN - 1:
        counts = {"train.steps": steps} | {
            field: config.get(field)
            for field in ("optimizer.warmup_steps", "optimizer.decay_steps")
        }
        overrides += [
            f"--config.{field}={round(count * ratio)}"
            for field, count in counts.items()
            if type(count) is int and count > 0
        ]
    return command_line("main", f"--config=run:{workdir}", *overrides, "--workdir=runs/chosen")


def format_answer(answer: Answer) -> str:
    verdict = f"Choose {answer.chosen}: " if answer.chosen else "Cannot tell, because "
    parts = [f"Budget: {answer.limit:.4g} {answer.label}", f"{verdict}{answer.reason}."]
    if len(answer.possible) > 1:
        parts.append(format_stake(answer))
    if answer.contenders:
        parts.append(
            format_rows(
                f"at most {answer.compared_at:.4g}", answer.budget, answer.contenders[:MAX_ROWS]
            )
        )
    if answer.front:
        near = sorted(answer.front, key=lambda row: abs(np.log(row.cost / answer.limit)))[:MAX_ROWS]
        parts.append(
            format_rows("Pareto front", answer.budget, sorted(near, key=lambda row: row.cost))
        )
    if answer.run:
        fields = dict.fromkeys(["model.architecture", "model.d_model", *answer.differences])
        values = [
            f"{field.partition('.')[2]}={answer.config[field]}"
            for field in fields
            if field in answer.config
        ]
        parts.append(
            textwrap.fill(f"Nearest trained run, {answer.run}: {', '.join(values)}", WIDTH)
            + "\nTrain: "
            + (
                answer.command
                or "the run's workdir is not on this machine; its config is in --json"
            )
        )
    return "\n\n".join(parts + ["\n".join(answer.notes)] * bool(answer.notes))


def format_stake(answer: Answer) -> str:
    """Returns what the first possible model may cost, and how to learn more."""
    first, second, *_ = answer.possible
    stake = f"is at most {answer.at_stake:.2g} nats above" if answer.at_stake else "has"
    text = f"With a probability of {STAKE:g}, {first} {stake} the lowest loss. "
    if answer.seeds_needed is None:
        return text + f"To tell {first} and {second} apart, train more seeds."
    return (
        text
        + f"About {answer.seeds_needed} seeds would tell {first} and {second} apart"
        + (f":\n{answer.seeds_command}" if answer.seeds_command else ".")
    )


def format_interval(row: Row, digits: int = 4) -> str:
    return "" if row.low is None else f"{row.low:.{digits}f} to {row.high:.{digits}f}"


def format_rows(title: str, budget: str, rows: Sequence[Row]) -> str:
    def cells(row: Row) -> tuple[str, ...]:
        return (
            row.name,
            f"{row.loss:.4f}",
            format_interval(row) or "–",
            f"{row.cost:.4g}",
            parameter_count(row.parameters, row.active_parameters),
            f"{row.tokens:.4g}",
            "–" if row.probability is None else f"{row.probability:.2f}",
        )

    dropped = {3} if budget == "parameters" else set()  # a column of its own
    if rows[0].probability is None:
        dropped |= {2, 6}
    kept = [i for i in range(7) if i not in dropped]
    table = [
        (title, "loss", "80% interval", budget, "parameters", "tokens", "P(best)"),
        *map(cells, rows),
    ]
    return "\n".join(aligned_rows([[row[i] for i in kept] for row in table]))
