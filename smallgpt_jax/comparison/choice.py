"""The model to choose for a budget, from the records of a comparison, or the reason why it cannot be told.

A training budget (FLOPs, seconds) asks which model has the lowest loss after training with that budget. With enough
runs, scaling laws answer; otherwise, the runs that were trained with this budget. Any other budget (parameters, bytes,
latency, memory) is a limit that the trained models meet or not.

A comparison of several sizes names its runs MODEL@SIZE, such as gpt@1M. All runs of one MODEL have a common law.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallgpt_jax.comparison import scaling
from smallgpt_jax.comparison.costs import BUDGETS, Budget, budgets, rerun
from smallgpt_jax.comparison.names import RESULTS_FORMAT
from smallgpt_jax.errors import UserError, command_line
from smallgpt_jax.formatting import aligned_rows, parameter_count
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.storage.json_files import (
    BOOLEAN,
    LOSS,
    NULL,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    Each,
    Optional,
    integer,
    one_of,
    read_json,
)
from smallgpt_jax.storage.paths import as_path

DRAWS = 1000  # of a bootstrap; an answer takes less than two seconds
WITHIN = 1.01  # a cost up to this multiple of the budget is within it
NEAR = 1.25  # a training budget up to this multiple of a run's is the run's; a limit up to it is in the measured range
EQUAL = 1e-3  # models whose losses differ by less, in nats and for each seed, compute the same function up to rounding
POSSIBLE = 0.05  # probability of being best from which a model is listed as a possible best
MAX_ROWS = 6  # of a table
MEASURED = Optional((NULL, POSITIVE))
EMBEDDINGS = ("token embedding", "position embedding")
# The parts of results.json that are read.
INFERENCE = {"device": TEXT, "cache_bytes": integer(0),
             "decoding": [{"batch": integer(1), "cache": TEXT, "step_ms": {"median": POSITIVE}}]}
RESULTS = {"format": one_of(RESULTS_FORMAT), "command": Optional(TEXT), "runs": [{
    "name": TEXT, "workdir": TEXT, "seed": integer(0), "config": OBJECT, "is_finished": BOOLEAN, "diverged": BOOLEAN,
    "parameters": integer(1), "active_parameters": integer(1), "components": Each(integer(0)), "memory_bytes": MEASURED,
    "averaged": Optional(integer(1)), "weight_bytes": MEASURED, "inference": Optional((NULL, INFERENCE)),
    "horizon": Optional(POSITIVE), "run": Optional(TEXT),
    "curve": [{"step": integer(0), "tokens": integer(0), "flops": (NULL, NUMBER), "seconds": (NULL, NUMBER),
               "loss": (NULL, LOSS), "targets": Optional(integer(1))}]}]}


def final_loss(run: dict) -> float:
    """Returns the mean over the run's last evaluations on the same rows, as in `results.Run.final`."""
    points = [point for point in run["curve"] if point.get("targets") == run["curve"][-1].get("targets")]
    return float(np.mean([point["loss"] for point in points[-run.get("averaged", 1):] if point["loss"] is not None]))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The finished runs of one config, which differ in their seeds. A shorter horizon is a part of the name."""

    name: str
    runs: tuple[dict, ...]
    cost: float | None  # median over the runs that have it

    @property
    def model(self) -> str:
        return scaling.model_of(self.runs[0]["name"])

    @property
    def loss(self) -> float:
        return float(np.mean([final_loss(run) for run in self.runs]))


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table: a candidate as trained, or a model's law at the budget."""

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
    run: str = ""  # the trained run whose config is given: the chosen one, or the one nearest to its law's best size
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
    fits, lacking = fit_laws(candidates, name)
    if lacking:
        notes.append(f"No scaling laws, only trained runs: {lacking}.")
    if name == "decode_ms":
        notes += other_devices(candidates)
    return [answer(candidates, fits, name, budget, limit, notes, comparison) for limit in limits]


def answer(candidates: Sequence["Candidate"], fits: Sequence[scaling.Fit], name: str, budget: Budget, limit: float,
           notes: Sequence[str], comparison: str) -> Answer:
    if budget.is_training:
        require_a_step(candidates, name, budget, limit)
    rows, chosen, nearest, notes = [], None, None, list(notes)
    try:
        rows, nearest = (rank_by_law(fits, candidates, name, limit, notes) if fits else
                         rank_by_runs(candidates, budget, limit, notes))
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


def require_a_step(candidates: Sequence["Candidate"], name: str, budget: Budget, limit: float) -> None:
    costs = [cost / run["curve"][-1]["step"] for candidate in candidates for run in candidate.runs
             if (cost := budget.cost(run))]
    if costs and limit < min(costs):
        raise UserError(f"--{name}={limit:g}: below one training step, which takes {min(costs):.3g} {budget.label} or "
                        "more; use a larger budget")


def other_devices(candidates: Sequence["Candidate"]) -> list[str]:
    devices = dict.fromkeys(run["inference"]["device"] for candidate in candidates
                            for run in candidate.runs if run.get("inference"))
    return [f"Measured on different devices: {', '.join(devices)}."] if len(devices) > 1 else []


def read_candidates(runs: Sequence[dict], budget: Budget) -> tuple[list[Candidate], list[str]]:
    """Returns the finished runs by name and horizon, and notes about the others.

    Shorter horizons are left out if the budget is not one of training, because they cost as much as the longest.
    """
    groups: dict[tuple[str, float], list[dict]] = {}
    runs = [run for run in runs if budget.is_training or run.get("horizon", 1) == 1]
    for run in runs:
        last = run["curve"][-1] if run["curve"] else {"loss": None}
        is_trained = run["is_finished"] and not run["diverged"] and last["loss"] is not None
        if is_trained and np.isfinite(last["loss"]) and last["tokens"]:
            groups.setdefault((run["name"], run.get("horizon", 1)), []).append(run)
    found = []
    for (name, horizon), group in groups.items():
        costs = [cost for run in group if (cost := budget.cost(run))]
        found.append(Candidate(name + f" × {horizon:g}" * (horizon != 1), tuple(group),
                               float(np.median(costs)) if costs else None))
    left_out = len(runs) - sum(map(len, groups.values()))
    return found, [f"{left_out} of {len(runs)} runs are unfinished or have diverged."] if left_out else []


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates, cheapest first, whose loss is below that of all that cost no more."""
    front: list[Candidate] = []
    for candidate in sorted((one for one in candidates if one.cost is not None), key=lambda one: (one.cost, one.loss)):
        if not front or candidate.loss < front[-1].loss:
            front.append(candidate)
    return front


def _row(candidate: Candidate, interval=(None, None), probability: float | None = None) -> Row:
    run = candidate.runs[0]
    return Row(candidate.name, candidate.loss, *interval, candidate.cost, run["parameters"], run["active_parameters"],
               run["curve"][-1]["tokens"], probability)


def decide(rows: Sequence[Row]) -> tuple[str | None, str]:
    """Returns (the chosen name or None, the reason). `rows` are the contenders by loss."""
    if len(rows) == 1:
        return rows[0].name, "it is the only model within the budget"
    equal, probability = best_rows(rows)
    if probability >= scaling.CERTAIN:
        others = f", as that of {enumeration(equal[1:])}, which costs no less" if len(equal) > 1 else ""
        return equal[0].name, f"its loss is the lowest with a probability of {probability:.2f}{others}"
    possible = enumeration(row for row in rows if row in equal or row.probability >= POSSIBLE)
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


# ------------------------------------------------------------------ trained runs
def rank_by_runs(candidates: Sequence[Candidate], budget: Budget, limit: float, notes: list[str]
                 ) -> tuple[list[Row], dict[str, Candidate]]:
    """Returns (rows by loss, {name: candidate}) of the candidates within the limit.

    Raises CannotTellError if the limit is outside the measured range, if the losses have no known spread, or if a
    candidate without a measured cost may be the best.
    """
    measured = [candidate for candidate in candidates if candidate.cost is not None]
    unmeasured = [candidate for candidate in candidates if candidate.cost is None]
    if not measured:
        raise CannotTellError(f"no run has measured {budget.label}; to measure: {budget.advice}")
    within = [candidate for candidate in measured if candidate.cost <= WITHIN * limit]
    require_range(within, measured, budget, limit)
    if budget.is_training:
        within = [candidate for candidate in within if limit <= NEAR * candidate.cost]
        if absent := {one.model for one in measured} - {one.model for one in within}:
            notes.append(f"Not trained near this budget: {', '.join(sorted(absent))}.")
    else:
        flops = [one.runs[0]["curve"][-1]["flops"] for one in within]
        if None not in flops and max(flops) > WITHIN * min(flops):
            notes.append(f"Losses after unequal training, {min(flops):.3g} to {max(flops):.3g} FLOPs.")
    contenders = sorted([*within, *unmeasured], key=lambda candidate: candidate.loss)
    draws = loss_draws(contenders)
    rows = _contender_rows(contenders, draws)
    if risky := [row.name for row in rows if row.cost is None and row.probability >= POSSIBLE]:
        raise CannotTellError(f"{risky[0]} may be the best, but its {budget.label} were not measured; to "
                              f"measure: {budget.advice}")
    return [row for row in rows if row.cost is not None], {candidate.name: candidate for candidate in contenders}


def require_range(within: Sequence[Candidate], measured: Sequence[Candidate], budget: Budget, limit: float) -> None:
    """Raises CannotTellError unless candidates are near the limit, or on both sides of it."""
    costs = [candidate.cost for candidate in measured]
    if not within:
        raise CannotTellError(f"no model is within the budget; the cheapest takes {min(costs):.3g} {budget.label}, "
                              f"{min(costs) / limit:.3g} times as much")
    nearest = max(candidate.cost for candidate in within)
    if limit > NEAR * nearest and (budget.is_training or nearest == max(costs)):
        _refuse_extrapolation(limit, min(costs), max(costs), nearest)


def _refuse_extrapolation(limit: float, low: float, high: float, nearest: float) -> None:
    factor = max(limit / nearest, nearest / limit)
    if low <= limit <= high:
        raise CannotTellError(f"no run was trained near the budget; the nearest budget below it is {nearest:.3g}, by a "
                              f"factor of {factor:.3g}")
    raise CannotTellError(f"the budget is beyond the validated range, {low:.3g} to {high:.3g}, by a factor of "
                          f"{factor:.3g}")


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
    all_losses = [{run["seed"]: final_loss(run) for run in candidate.runs} for candidate in candidates]
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


# ------------------------------------------------------------------ scaling laws
def fit_laws(candidates: Sequence[Candidate], budget: str) -> tuple[list[scaling.Fit], str]:
    """Returns (a law per model, "") or ([], what is missing for the first model without one)."""
    if not BUDGETS[budget].is_training:
        return [], ""
    groups = scaling.group_by_name(read_records(candidates))
    for name, records in groups.items():
        if missing := scaling.missing_for_fit(records):
            return [], f"{name} needs {missing}"
        if any(getattr(record, budget) is None for record in records):
            return [], f"{name} has runs without measured {BUDGETS[budget].label}"
    return [scaling.fit(records, draws=DRAWS) for records in groups.values()], ""


def read_records(candidates: Sequence[Candidate]) -> list[scaling.Record]:
    """Returns the last loss of each run. Earlier ones are before the end of the decay and follow no law."""
    found = []
    for candidate in candidates:
        for run in candidate.runs:
            last, embeddings = run["curve"][-1], sum(run["components"].get(name, 0) for name in EMBEDDINGS)
            trunk = run.get("run") or run["workdir"]
            found.append(scaling.Record(
                candidate.model, f"{trunk} {run['name']} {run['seed']}", run["seed"], run["parameters"],
                run["parameters"] - embeddings, run["active_parameters"], last["tokens"], last["flops"],
                final_loss(run), last["seconds"]))
    return found


def rank_by_law(fits: Sequence[scaling.Fit], candidates: Sequence[Candidate], budget: str, limit: float,
                notes: list[str]) -> tuple[list[Row], dict[str, Candidate]]:
    """Returns (rows by predicted loss, {model: the trained candidate nearest to its best size and tokens}).

    Raises CannotTellError if the limit is outside the range of budgets that all models were trained on.
    """
    low, high = scaling.trained_range(fits, budget)
    if low >= high:
        raise CannotTellError("the models were trained on budgets that do not overlap; train all with equal budgets")
    if limit > WITHIN * high or WITHIN * limit < low:
        _refuse_extrapolation(limit, low, high, high if limit > high else low)
    notes.append("The losses, sizes and tokens within the budget are those of scaling laws.")
    rows, nearest = [], {}
    frontiers = [scaling.frontier(fitted, np.array([limit]), budget) for fitted in fits]
    draws = np.stack([frontier.draws[:, 0] for frontier in frontiers])
    for frontier, draw, share in zip(frontiers, draws, best_shares(draws)):
        size, tokens = frontier.sizes[0], frontier.tokens[0]
        trained = [candidate for candidate in candidates if candidate.model == frontier.name]
        near = min(trained, key=lambda one: (abs(np.log(one.runs[0]["parameters"] / size)),
                                             abs(np.log(one.runs[0]["curve"][-1]["tokens"] / tokens))))
        active = near.runs[0]["active_parameters"] / near.runs[0]["parameters"]
        interval = np.quantile(draw, [0.1, 0.9])
        rows.append(Row(frontier.name, float(frontier.losses[0]), *map(float, interval), limit, round(size),
                        round(active * size), float(tokens), float(share)))
        nearest[frontier.name] = near
    return sorted(rows, key=lambda row: row.loss), nearest


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
