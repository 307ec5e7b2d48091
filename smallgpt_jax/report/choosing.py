"""Answers `choose`: the model for a budget, how to train it, and how to learn more; and `choose
--next`: the run that is worth most.

Imports neither JAX nor matplotlib, so that `choose` starts fast.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.analysis import choice as choices
from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.budgets import BUDGETS, TRAINING_BUDGETS
from smallgpt_jax.analysis.candidates import evidence_of
from smallgpt_jax.analysis.findings import Choice, Contest, Range, Standing
from smallgpt_jax.analysis.further_runs import Cost, NextRun, cost_of, next_runs, runs_of_a_seed
from smallgpt_jax.analysis.record import Record, Run, grouped, size_of
from smallgpt_jax.analysis.scaling_curves import SAME_BUDGET
from smallgpt_jax.errors import UserError, suggestion
from smallgpt_jax.report import commands, tables, words
from smallgpt_jax.report.rendering import render
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.storage.paths import as_path

MAX_FIELDS = 12  # of the config that are printed
MAX_SEEDS = 20  # per model, for which a command is given
CHOSEN = "runs/chosen"  # output of the command that trains the chosen model
CHOSEN_SIZE = "runs/chosen-size"  # workdir of `Answer.sized_command`
MORE_SEEDS = "runs/more-seeds"  # output of the command that trains them
NEXT_RUN = "runs/next"  # output of the command of `choose --next`
LEAST_STAKE = 0.01  # nats; with less at stake, no run is worth it


@dataclasses.dataclass(frozen=True)
class Answer:
    choice: Choice
    run: str = ""  # the trained run that is nearest to the first model that may be the best
    run_cost: float | None = None  # of this run, in the unit of the budget
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # of this run
    differences: tuple[str, ...] = ()  # its fields that say which model of the contest it is
    sized_command: str = ""  # that trains the model at the size that suits a budget of FLOPs
    command: str = ""  # that trains the nearest run again
    step_ratio: float = 1.0  # steps of `command`, per step of the nearest run
    cost: Cost | None = None  # of `command`
    seeds_needed: Range | None = None  # per model, to tell the first two that may be the best apart
    seeds_command: str = ""  # that trains such seeds, if they are few
    seeds: int = 0  # per model, after `seeds_command`
    seeds_cost: Cost | None = None  # of `seeds_command`
    merge_command: str = ""  # that adds these seeds to the record, for another choice

    def __str__(self) -> str:
        fields = []
        for field in self.differences[:MAX_FIELDS]:
            fields.append(f"{field.partition('.')[2]}={self.config[field]}")
        content = {"choice": self.choice, "answer": self, "fields": ", ".join(fields)}
        return render("choice", "text", tables=tables, **content)


def choose(
    results: str | Path,
    budget: str,
    limit: float,
    batch: int = 1,
    models: Sequence[str] = (),
) -> Answer:
    """Returns the model of a comparison's results.json for at most `limit` of `budget`; print()
    shows the answer.

    `budget` is a key of `analysis.budgets.BUDGETS`, such as "flops"; `batch` is the batch size of
    decoding; `models` are those to choose among, by default all. Raises UserError for an unknown
    budget, a wrong limit, and a record that cannot answer it.
    """
    if budget not in BUDGETS:
        raise UserError(
            f"budget={budget!r}: must be one of {', '.join(BUDGETS)}{suggestion(budget, BUDGETS)}"
        )
    if not 0 < limit < math.inf:
        raise UserError(f"limit={limit}: must be a finite number above 0")
    record = records.read(as_path("--results", str(results)))
    return _answer(choices.choose(record, budget, limit, batch, models), record, str(results))


def _answer(choice: Choice, record: Record, results: str) -> Answer:
    """Returns the choice with commands; `results` is the path of the record, as the user gave it."""
    if choice.contest is None:
        return Answer(choice)
    # The commands train the chosen model or, without one, the first that may be the best.
    run = _run_of(choice.contest.possible[0], record)
    is_beyond = choice.refusal == "beyond"
    sized_command = ""
    if choice.budget == "flops" and (choice.is_direct or is_beyond):
        sized_command = commands.train_sized(run, choice.limit, CHOSEN_SIZE)
    # Neither more seeds nor a run of the record would answer a question beyond its range.
    if is_beyond:
        return Answer(choice, sized_command=sized_command)
    run_cost = BUDGETS[choice.budget](run, choice.batch)
    return Answer(
        choice,
        run=run.label,
        run_cost=run_cost,
        config=run.config,
        differences=_distinguishing_fields(run, choice.contest, record),
        sized_command=sized_command,
        **_training(run, _step_ratio(choice, run_cost), record),
        **_further_seeds(choice.contest, record, results),
    )


def _run_of(standing: Standing, record: Record) -> Run:
    """Returns a run behind a standing, a finished one if there is any; the nearest one of an
    interpolated loss.
    """
    runs = [run for run in record.runs if run.name == standing.name]
    return min(runs, key=lambda run: (not run.is_finished, abs(run.steps - standing.steps)))


def _distinguishing_fields(run: Run, contest: Contest, record: Record) -> tuple[str, ...]:
    """Returns shape and rate, and the fields of `model` in which others of the contest differ."""
    others = [_run_of(standing, record).config for standing in contest.standings]
    fields = ["model.architecture", "model.num_layers", "model.d_model", "optimizer.learning_rate"]
    for field, value in run.config.items():
        is_equal = all(other.get(field) == value for other in others)
        if field.startswith("model.") and not is_equal:
            fields.append(field)
    return tuple(field for field in dict.fromkeys(fields) if field in run.config)


# ------------------------------------------------------------------ commands
def _training(run: Run, ratio: float, record: Record) -> dict[str, Any]:
    """Returns the fields of an answer about training a run again with `ratio` times its steps.

    If its workdir is not on this machine: with the comparison's command, if any, and its own steps.
    """
    if (as_path("--results", run.workdir) / CONFIG_FILE).is_file():
        command = commands.train_again(run, ratio, CHOSEN)
        return {"command": command, "step_ratio": ratio, "cost": cost_of([run], [ratio])}
    # A folder of its own: that of the comparison may have a report on all models.
    flags = [f"--output={CHOSEN}", "--config.compare.seeds=1"]
    same_seed = [one for one in record.runs if (one.name, one.seed) == (run.name, run.seed)]
    if run.horizon != 1:
        trained = same_seed  # a shorter run starts from the longest one
    else:
        trained = [run]
        if len(same_seed) > 1:
            flags.append("--config.compare.horizons=()")
    command = commands.train_name(record, run.name, *flags)
    return {"command": command, "cost": cost_of(trained)}


def _step_ratio(choice: Choice, run_cost: float | None) -> float:
    """Returns the steps with which a training budget is used up, per step of the nearest run; 1 for
    other budgets, and where the run's own steps are within SAME_BUDGET of that.
    """
    if choice.budget not in TRAINING_BUDGETS or not run_cost or not choice.compared_at:
        return 1.0
    ratio = choice.compared_at / run_cost
    return 1.0 if 1 / SAME_BUDGET <= ratio <= SAME_BUDGET else ratio


def _further_seeds(contest: Contest, record: Record, results: str) -> dict[str, Any]:
    """Returns the fields of an answer about the seeds that tell the first two apart."""
    needed = contest.seeds_needed
    if needed is None:
        return {}
    # All sizes of the models: the first one of each has the grid of learning rates.
    models = {one.model for one in contest.possible}
    runs = [run for run in record.runs if run.model in models]
    # The middle of a range such as 5 to 80, in which each factor is equally likely: 20.
    middle = math.ceil(math.sqrt(needed.low * needed.high))
    seeds = min(middle, MAX_SEEDS)
    further: list[Run] = []  # runs that cost as much as those to be trained
    by_name = grouped(runs, lambda run: run.name)
    for of_name in by_name.values():
        lacking = seeds - len({run.seed for run in of_name})
        further += lacking * runs_of_a_seed(of_name)
    if middle > 2 * MAX_SEEDS or not further:  # MAX_SEEDS would hardly decide
        return {"seeds_needed": needed}
    command = commands.compare_again(
        record,
        f"--output={MORE_SEEDS}",
        f"--results={results}",
        f"--config.compare.names={','.join(by_name)}",
        f"--config.compare.seeds={seeds}",
    )
    return {
        "seeds_needed": needed,
        "seeds_command": command,
        "seeds": seeds,
        "seeds_cost": cost_of(further),
        # A report on these models alone estimates their spread from fewer runs.
        "merge_command": commands.merge(results, MORE_SEEDS) if command else "",
    }


# ------------------------------------------------------------------ the next run
@dataclasses.dataclass(frozen=True)
class Advice:
    run: NextRun | None  # None if no run is worth it
    at_stake: float  # nats, the most of all sizes
    few_seeds: bool = False  # too few to know what is at stake, so that a run is always worth it
    command: str = ""  # that trains the run; "" if the record does not tell
    merge_command: str = ""  # that adds it to the record

    def __str__(self) -> str:
        if self.run is None:
            return (
                f"No run is worth it: at most {self.at_stake:.2g} nats are at stake, which is what "
                "taking the model with the lowest loss costs on average."
            )
        run = self.run
        doubt = (
            "There are too few seeds to know how much the losses vary.\n" if self.few_seeds else ""
        )
        size = f" at {size_of(run.name)}" if size_of(run.name) else ""
        text = (
            f"{doubt}Next run: {run.name}, seed {run.seed} ({words.cost(run)}).\n"
            f"At stake{size}: {run.at_stake:.2g} nats, which this run is expected to lower by "
            f"{run.gain:.2g}."
        )
        if not self.command:
            return text
        return f"{text}\n\n    {self.command}\n\nThen add it to the record:\n\n    {self.merge_command}"


def choose_next(
    results: str | Path, stake: float = LEAST_STAKE, models: Sequence[str] = ()
) -> Advice:
    """Returns the run (model, size and seed) that lowers the expected loss at stake in a comparison's
    results.json most per FLOP, with the command that trains it; print() shows the advice.

    Sizes with less than `stake` nats at stake do not count, unless seeds are too few to know.
    `models` are those to choose among, by default all. Raises UserError if the record does not tell
    how much losses vary.
    """
    record = records.read(as_path("--results", str(results)))
    evidence = evidence_of(record).among(models)
    runs = next_runs(evidence)
    if not runs:
        raise UserError(
            "--results: no size has two models whose FLOPs are known and whose losses vary over "
            "seeds; train two seeds of two models"
        )
    most_at_stake = max(run.at_stake for run in runs)
    few_seeds = not evidence.variance_prior.is_enough
    # the largest gain per FLOP first
    worth_it = [run for run in runs if run.at_stake > stake or few_seeds]
    if not worth_it:
        return Advice(None, most_at_stake)
    command = _next_command(worth_it[0], record, str(results))
    merge_command = commands.merge(str(results), NEXT_RUN) if command else ""
    return Advice(worth_it[0], most_at_stake, few_seeds, command, merge_command)


def _next_command(run: NextRun, record: Record, results: str) -> str:
    """Returns the command of the comparison, for this name and the seeds up to that of the run; "" if
    it is unknown.
    """
    first_seed = min(one.seed for one in record.runs if one.name == run.name)
    flags = (
        f"--output={NEXT_RUN}",
        f"--results={results}",
        f"--config.compare.seeds={run.seed - first_seed + 1}",
    )
    return commands.train_name(record, run.name, *flags)
