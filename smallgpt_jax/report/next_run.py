"""Answers `choose --next`: the run that is worth most, and the commands that train it."""

import dataclasses
from pathlib import Path

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.candidates import evidence_of
from smallgpt_jax.analysis.further_runs import NextRun, next_runs
from smallgpt_jax.analysis.record import Record, model_of, size_of
from smallgpt_jax.errors import UserError
from smallgpt_jax.report import commands, words
from smallgpt_jax.storage.paths import as_path

STAKE = 0.01  # nats; with less at stake, no run is worth it
OUTPUT = "runs/next"


@dataclasses.dataclass(frozen=True)
class Advice:
    run: NextRun | None  # None if no run is worth it
    at_stake: float  # nats, the most of all sizes
    command: str = ""  # that trains the run; "" if the record does not tell
    merge_command: str = ""  # that adds it to the record

    def __str__(self) -> str:
        if self.run is None:
            return (
                f"No run is worth it: at most {self.at_stake:.2g} nats are at stake, which is what "
                "taking the model with the lowest loss costs on average."
            )
        cost = words.cost(self.run)
        size = size_of(self.run.name)
        lines = [
            f"Next run: {self.run.name}, seed {self.run.seed} ({cost}).",
            f"At stake{f' at {size}' if size else ''}: {self.run.at_stake:.2g} nats, which this run "
            f"is expected to lower by {self.run.gain:.2g}.",
        ]
        if self.command:
            lines += ["", f"    {self.command}", "", "Then add it to the record:"]
            lines += ["", f"    {self.merge_command}"]
        return "\n".join(lines)


def choose_next(results: str | Path, stake: float = STAKE) -> Advice:
    """Returns the run (model, size and seed) that lowers the expected loss at stake in a comparison's
    results.json most per FLOP, with the command that trains it; print() shows the advice.

    Sizes with less than `stake` nats at stake do not count. Raises UserError if the record does not
    tell how much losses vary.
    """
    record = records.read(as_path("--results", str(results)))
    runs = next_runs(evidence_of(record))
    if not runs:
        raise UserError(
            "--results: no size has two models whose FLOPs are known and whose losses vary over "
            "seeds; train two seeds of two models"
        )
    most = max(run.at_stake for run in runs)
    worth = [run for run in runs if run.at_stake > stake]
    if not worth:
        return Advice(None, most)
    command = _command(worth[0], record, str(results))
    merge_command = commands.merge(str(results), OUTPUT) if command else ""
    return Advice(worth[0], most, command, merge_command)


def _command(run: NextRun, record: Record, results: str) -> str:
    """Returns the command of the comparison, for this name and one seed more; "" if it is unknown."""
    seeds = {one.seed for one in record.runs if one.name == run.name}
    flags = [
        f"--output={OUTPUT}",
        f"--results={results}",
        f"--config.compare.names={run.name}",
        f"--config.compare.seeds={len(seeds) + 1}",
    ]
    if record.held_out:  # its runs alone determine no law
        flags.append("--config.compare.held_out=")
    if any(model_of(name) == model_of(run.name) for name in record.learning_rates):
        # The rate that the grid has chosen, without a grid of this name.
        config = next(one.config for one in record.runs if one.name == run.name)
        flags.append("--config.compare.learning_rates=()")
        for field in ("optimizer.learning_rate", "optimizer.final_learning_rate"):
            flags.append(f"--config.runs.{run.name}.{field}={config[field]}")
    return commands.compare_again(record, *flags)
