"""The model to choose for a budget, from the records of a comparison, or the reason why it cannot be told.

A training budget (FLOPs, seconds) asks which model has the lowest loss after training with that budget. The runs that
were trained with it answer, or runs with less and more, between which losses are interpolated. Any other budget
(parameters, bytes, latency, memory) is a limit that the trained models meet or not.

A comparison of several sizes names its runs MODEL@SIZE, such as gpt@1M.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallgpt_jax.comparison import scaling
from smallgpt_jax.comparison.candidates import (
    NEAR,
    RESULTS,
    WITHIN,
    Candidate,
    at_training_budget,
    pareto_front,
    read_candidates,
)
from smallgpt_jax.comparison.costs import Budget, budgets, rerun
from smallgpt_jax.errors import UserError, command_line
from smallgpt_jax.formatting import aligned_rows, parameter_count
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.storage.json_files import read_json
from smallgpt_jax.storage.paths import as_path

DRAWS = 1000  # of a bootstrap; an answer takes less than two seconds
EQUAL = 1e-3  # models whose losses differ by less, in nats and for each seed, compute the same function up to rounding
POSSIBLE = 0.05  # probability of being best from which a model is listed as a possible best
MAX_ROWS = 6  # of a table


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
    contenders: tuple[Row, ...]  # by loss
    front: tuple[Row, ...]  # the Pareto front of loss against cost, over all runs
    notes: tuple[str, ...] = ()
    run: str = ""  # the trained run whose config is given: the chosen one, or the nearest to it
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    command: str = ""  # that trains the chosen model


class CannotTellError(Exception):
    """The records do not answer the question; the message says why."""


def choose(path: Path, name: str, limit: float, batch: int = 1) -> Answer:
    """Returns the model for at most `limit` of the budget called `name`, from a results.json."""
    results = read_json(path, RESULTS, "give the results.json of a comparison")
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
    return [answer(candidates, name, budget, limit, notes, comparison) for limit in limits]


def answer(candidates: Sequence[Candidate], name: str, budget: Budget, limit: float, notes: Sequence[str],
           comparison: str) -> Answer:
    if budget.is_training:
        require_a_step(candidates, name, budget, limit)
    rows, chosen, nearest, notes = [], None, None, list(notes)
    try:
        rows, nearest = rank(candidates, budget, limit, notes)
        chosen, reason = decide(rows)
    except CannotTellError as error:
        reason = str(error)
    front = tuple(map(_row, pareto_front(candidates)))
    found = Answer(name, budget.label, limit, chosen, reason, tuple(rows), front, tuple(notes))
    if chosen is None:
        return found
    trained = nearest[chosen]
    return dataclasses.replace(found, run=trained.name, config=trained.runs[0]["config"], command=training_command(
        trained, comparison, limit if budget.is_training else None))


def require_a_step(candidates: Sequence[Candidate], name: str, budget: Budget, limit: float) -> None:
    costs = [cost / run["curve"][-1]["step"] for candidate in candidates for run in candidate.runs
             if (cost := budget.cost(run))]
    if costs and limit < min(costs):
        raise UserError(f"--{name}={limit:g}: below one training step, which takes {min(costs):.3g} {budget.label} or "
                        "more; use a larger budget")


def other_devices(candidates: Sequence[Candidate]) -> list[str]:
    devices = dict.fromkeys(run["inference"]["device"] for candidate in candidates
                            for run in candidate.runs if run.get("inference"))
    return [f"Measured on different devices: {', '.join(devices)}."] if len(devices) > 1 else []


def _row(candidate: Candidate, interval=(None, None), probability: float | None = None) -> Row:
    return Row(candidate.name, candidate.loss, *interval, candidate.cost, candidate.parameters,
               candidate.active_parameters, candidate.tokens, probability)


def decide(rows: Sequence[Row]) -> tuple[str | None, str]:
    """Returns (the chosen name or None, the reason). `rows` are the contenders by loss."""
    if len(rows) == 1:
        return rows[0].name, "it is the only model within the budget"
    equal, probability = best_rows(rows)
    if probability >= scaling.CERTAIN:
        others = f", as that of {enumeration(equal[1:])}, which costs no less" if len(equal) > 1 else ""
        return equal[0].name, f"its loss is the lowest with a probability of {probability:.2f}{others}"
    second = max((row for row in rows if row not in equal), key=lambda row: row.probability)
    possible = enumeration(row for row in rows if row in (*equal, second) or row.probability >= POSSIBLE)
    verb = "is" if len(equal) == 1 else "(equal) are"
    raise CannotTellError(f"the intervals of {possible} overlap: {enumeration(equal)} {verb} the best with a "
                          f"probability of only {probability:.2f}; train more seeds")


def best_rows(rows: Sequence[Row]) -> tuple[list[Row], float]:
    """Returns the most probable row, with those of equal losses, cheapest first; and their joint probability."""
    best = max(rows, key=lambda row: row.probability)
    equal = [row for row in rows if (row.probability, row.low, row.high) == (best.probability, best.low, best.high)]
    return sorted(equal, key=lambda row: row.cost), sum(row.probability for row in equal)


def enumeration(rows: Iterable[Row]) -> str:
    *names, last = [row.name for row in rows]
    return f"{', '.join(names)} and {last}" if names else last


# ------------------------------------------------------------------ contenders
def rank(candidates: Sequence[Candidate], budget: Budget, limit: float, notes: list[str]
         ) -> tuple[list[Row], dict[str, Candidate]]:
    """Returns (rows by loss, {name: the trained candidate nearest to it}) of what is within the limit.

    Raises CannotTellError if the limit is outside the measured range, if the losses have no known spread, or if a
    candidate without a measured cost may be the best.
    """
    measured = [candidate for candidate in candidates if candidate.cost is not None]
    unmeasured = [candidate for candidate in candidates if candidate.cost is None]
    if not measured:
        raise CannotTellError(f"no run has measured {budget.label}; to measure: {budget.advice}")
    if limit * WITHIN < (least := min(one.cost for one in measured)):
        raise CannotTellError(f"no model is within the budget; the cheapest takes {least:.3g} {budget.label}, "
                              f"{least / limit:.3g} times as much")
    pairs = (models_at if budget.is_training else models_within)(measured, limit, notes)
    contenders = sorted([*(one for one, _ in pairs), *unmeasured], key=lambda one: one.loss)
    draws = loss_draws(contenders)
    rows = _contender_rows(contenders, draws)
    if risky := [row.name for row in rows if row.cost is None and row.probability >= POSSIBLE]:
        raise CannotTellError(f"{risky[0]} may be the best, but its {budget.label} were not measured; to "
                              f"measure: {budget.advice}")
    return [row for row in rows if row.cost is not None], {one.name: trained for one, trained in pairs}


def models_at(measured: Sequence[Candidate], limit: float, notes: list[str]) -> list[tuple[Candidate, Candidate]]:
    """Returns the models at a training budget, each with its nearest trained candidate."""
    groups: dict[str, list[Candidate]] = {}
    for one in measured:
        groups.setdefault(one.model, []).append(one)
    found = {model: pair for model, group in groups.items() if (pair := at_training_budget(group, limit))}
    if not found:
        refuse_range([one.cost for one in measured], limit)
    if absent := sorted(groups.keys() - found.keys()):
        if len(found) == 1:
            raise CannotTellError(f"of {len(groups)} models, only {next(iter(found))} was trained near the budget")
        notes.append(f"Not trained near this budget: {', '.join(absent)}.")
    if any(one.losses != trained.losses for one, trained in found.values()):
        notes.append("Losses, sizes and tokens are interpolated between the runs with the next smaller and larger "
                     "budgets.")
    return list(found.values())


def models_within(measured: Sequence[Candidate], limit: float, notes: list[str]) -> list[tuple[Candidate, Candidate]]:
    """Returns the trained candidates that cost no more than the limit, twice each: they are their own nearest."""
    costs = [one.cost for one in measured]
    if limit > NEAR * max(costs):
        refuse_range(costs, limit)
    within = [one for one in measured if one.cost <= WITHIN * limit]
    flops = [one.runs[0]["curve"][-1]["flops"] for one in within]
    if None not in flops and max(flops) > WITHIN * min(flops):
        notes.append(f"Losses after unequal training, {min(flops):.3g} to {max(flops):.3g} FLOPs.")
    return [(one, one) for one in within]


def refuse_range(costs: Sequence[float], limit: float) -> None:
    """Raises CannotTellError: the limit is beyond the costs, or too far from the next lower one."""
    low, high, nearest = min(costs), max(costs), max(cost for cost in costs if cost <= WITHIN * limit)
    if limit <= high:
        raise CannotTellError(f"no run was trained near the budget; the nearest budget below it is {nearest:.3g}, by a "
                              f"factor of {limit / nearest:.3g}")
    raise CannotTellError(f"the budget is beyond the validated range, {low:.3g} to {high:.3g}, by a factor of "
                          f"{limit / high:.3g}")


def _contender_rows(contenders: Sequence[Candidate], draws: np.ndarray) -> list[Row]:
    shares = best_shares(draws)
    intervals = [tuple(map(float, interval)) if np.ptp(interval) else (None, None)
                 for interval in np.quantile(draws, [0.1, 0.9], axis=1).T]
    return [_row(candidate, interval, float(share))
            for candidate, interval, share in zip(contenders, intervals, shares)]


def best_shares(draws: np.ndarray) -> np.ndarray:
    """Returns each row's share of the draws, (rows, draws), in which it is the lowest. Equal rows divide a draw."""
    is_lowest = draws == draws.min(0)
    return (is_lowest / is_lowest.sum(0)).mean(-1)


def loss_draws(candidates: Sequence[Candidate], draws: int = DRAWS) -> np.ndarray:
    """Returns draws of the candidates' expected losses from Student's t-distribution, shape (candidates, draws).

    The spread over seeds is pooled over the candidates, because a few seeds determine no spread each. Runs of one seed
    share their batches: if all candidates have the same seeds, what they have in common is removed. Candidates of equal
    losses count as one and have equal draws: as several, they would make the spread look smaller than it is.
    """
    all_losses = [candidate.losses for candidate in candidates]
    firsts = [next(first for first, others in enumerate(all_losses) if are_equal(others, by_seed))
              for by_seed in all_losses]
    kept = sorted(set(firsts))
    losses = [all_losses[index] for index in kept]
    means = np.array([np.mean(list(by_seed.values())) for by_seed in losses])
    counts = np.array([len(by_seed) for by_seed in losses])
    residuals = [{seed: loss - mean for seed, loss in by_seed.items()} for by_seed, mean in zip(losses, means)]
    degrees = int((counts - 1).sum())
    if len(losses) > 1 and all(by_seed.keys() == losses[0].keys() for by_seed in losses):
        common = {seed: np.mean([by_seed[seed] for by_seed in residuals]) for seed in losses[0]}
        residuals = [{seed: value - common[seed] for seed, value in by_seed.items()} for by_seed in residuals]
        degrees -= len(common) - 1
    if degrees < 1 and len(losses) > 1:
        raise CannotTellError("every model was trained with one seed, so the spread of the losses is unknown; train "
                              "with config.compare.seeds=3 or more")
    rng = np.random.default_rng(0)
    squares = sum(value**2 for by_seed in residuals for value in by_seed.values())
    deviations = np.sqrt(squares / rng.chisquare(max(1, degrees), draws))
    found = means[:, None] + deviations * rng.standard_normal((len(means), draws)) / np.sqrt(counts)[:, None]
    return found[[kept.index(first) for first in firsts]]


def are_equal(losses: dict[int, float], others: dict[int, float]) -> bool:
    return losses.keys() == others.keys() and all(abs(losses[seed] - others[seed]) < EQUAL for seed in losses)


# ------------------------------------------------------------------ output
def training_command(candidate: Candidate, comparison: str, limit: float | None) -> str:
    """Returns a command that trains a candidate again, with the training budget `limit` if one is given.

    If its workdir is not on this machine: the comparison's command, restricted to the candidate, or "" if unknown.
    """
    run = candidate.runs[0]
    workdir, config = run["workdir"], run["config"]
    if not (as_path("--results", workdir) / CONFIG_FILE).is_file():
        return rerun(comparison, f"--config.compare.names={run['name']}")
    overrides = ["--config.train.trunk="] if config.get("train.trunk") else []
    steps, ratio = run["curve"][-1]["step"], limit / candidate.cost if limit else 1.0
    if abs(ratio - 1) > WITHIN - 1:
        counts = {"train.steps": steps} | {
            field: config.get(field) for field in ("optimizer.warmup_steps", "optimizer.decay_steps")}
        overrides += [f"--config.{field}={round(count * ratio)}" for field, count in counts.items()
                     if type(count) is int and count > 0]
    return command_line("main", f"--config=run:{workdir}", *overrides, "--workdir=runs/chosen")


def format_answer(answer: Answer) -> str:
    verdict = f"Choose {answer.chosen}: " if answer.chosen else "Cannot tell, because "
    parts = [f"Budget: {answer.limit:.4g} {answer.label}", f"{verdict}{answer.reason}."]
    if answer.contenders:
        parts.append(format_rows("within the budget", answer.budget, answer.contenders[:MAX_ROWS]))
    if answer.front:
        near = sorted(answer.front, key=lambda row: abs(np.log(row.cost / answer.limit)))[:MAX_ROWS]
        parts.append(format_rows("Pareto front", answer.budget, sorted(near, key=lambda row: row.cost)))
    if answer.run:
        fields = ("architecture", "num_layers", "d_model", "num_heads", "context_length")
        values = [f"{field}={answer.config[key]}" for field in fields if (key := f"model.{field}") in answer.config]
        parts.append(f"Config of {answer.run}: {', '.join(values)}\n" * bool(values) + "Train: " + (
            answer.command or "the run's workdir is not on this machine; its config is in --json"))
    return "\n\n".join(parts + ["\n".join(answer.notes)] * bool(answer.notes))


def format_interval(row: Row) -> str:
    return "" if row.low is None else f"{row.low:.4f} to {row.high:.4f}"


def format_rows(title: str, budget: str, rows: Sequence[Row]) -> str:
    def cells(row: Row) -> tuple[str, ...]:
        return (row.name, f"{row.loss:.4f}", format_interval(row) or "–",
                f"{row.cost:.4g}", parameter_count(row.parameters, row.active_parameters), f"{row.tokens:.4g}",
                "–" if row.probability is None else f"{row.probability:.2f}")

    dropped = {3} if budget == "parameters" else set()  # a column of its own
    if rows[0].probability is None:
        dropped |= {2, 6}
    kept = [i for i in range(7) if i not in dropped]
    table = [(title, "loss", "80% interval", budget, "parameters", "tokens", "P(best)"), *map(cells, rows)]
    return "\n".join(aligned_rows([[row[i] for i in kept] for row in table]))
