"""What a comparison will cost, before it is trained."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from smallgpt_jax.analysis.record import grouped
from smallgpt_jax.comparison import budget
from smallgpt_jax.comparison.counts import count
from smallgpt_jax.comparison.outcomes import Outcomes
from smallgpt_jax.comparison.runs import PlannedRun
from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.devices.chips import device_name
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import aligned_rows, duration, parameter_count
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.planning.plan import plan
from smallgpt_jax.run.config import Config


@dataclasses.dataclass(frozen=True)
class NameCost:
    """The runs of one name that are not finished yet."""

    name: str
    runs: int
    parameters: int
    active_parameters: int
    tokens: float  # of its longest run
    steps: int  # over all runs; steps that runs have in common count once
    total_tokens: float
    flops: float | None  # None if they cannot be counted
    seconds: float | None  # None if the speed is unknown


@dataclasses.dataclass(frozen=True)
class Forecast:
    costs: tuple[NameCost, ...]
    finished: int  # runs
    repeats: float | None  # times that the longest run reads the most used text; None for a probe
    corpus_tokens: int | None
    device: str
    is_roofline: bool  # the seconds are those of a roofline, not of a measured speed
    most_costs: tuple[NameCost, ...] = ()  # with all seeds that may be added; () if none are

    @property
    def seconds(self) -> float | None:
        return _total(self.costs, "seconds")

    @property
    def flops(self) -> float | None:
        return _total(self.costs, "flops")

    def __str__(self) -> str:
        runs = sum(cost.runs for cost in self.costs)
        finished = f", {self.finished} more are finished" if self.finished else ""
        lines = [*aligned_rows(_table(self.costs)), "", f"{runs} runs to train{finished}."]
        if self.flops is not None:
            lines.append(f"{self.flops:.3g} training FLOPs.")
        if self.most_costs:
            lines.append(_most_text(self.most_costs))
        if self.corpus_tokens is not None:
            lines.append(_corpus_text(self))
        basis = "at the roofline of" if self.is_roofline else "at the speed measured on"
        if self.seconds is None:
            lines.append(f"The time is unknown {basis} {self.device}.")
        else:
            lines.append(
                f"{duration(self.seconds)} of training {basis} {self.device}, one run after "
                "another; compilation, evaluation and measurements come on top."
            )
        return "\n".join(lines)


def _total(costs: Sequence[NameCost], field: str) -> float | None:
    """Returns the sum of a field; None if it is unknown for a name."""
    values = [getattr(cost, field) for cost in costs]
    return None if None in values else sum(values)


def forecast(outcomes: Outcomes, topology: str | None = None) -> Forecast:
    """Returns the cost of the runs that are not finished; beside it, with as many seeds as may be
    added. Seconds are measured here or, with `topology`, those of its roofline.
    """
    comparison, losses = outcomes.comparison, outcomes.losses()
    planned = comparison.expected_runs(losses)
    most = comparison.expected_runs(losses, at_most=True) if comparison.rounds else []
    missing = [run for run in planned if run.folder not in losses]
    missing_at_most = [run for run in most if run.folder not in losses]
    configs = {}  # of the longest run of each name
    for name, runs in grouped([*missing, *missing_at_most], lambda run: run.name).items():
        configs[name] = max(runs, key=lambda run: run.config.train.steps).config
    speeds = _speeds(configs, comparison.output, topology)
    longest = max(configs.values(), key=_tokens, default=None)  # None: all runs are finished
    corpus_tokens, repeats = None, None
    if longest and not is_synthetic(longest.data):  # the rows of a probe are generated
        corpus_tokens, repeats = _reading(outcomes.text, longest)
    return Forecast(
        costs=_costs(missing, configs, speeds),
        finished=len(planned) - len(missing),
        repeats=repeats,
        corpus_tokens=corpus_tokens,
        device=topology or f"{jax.device_count()} × {device_name(jax.devices()[0])}",
        is_roofline=bool(topology),
        most_costs=_costs(missing_at_most, configs, speeds),
    )


def _costs(
    runs: Sequence[PlannedRun],
    configs: Mapping[str, Config],
    speeds: Mapping[str, float | None],
) -> tuple[NameCost, ...]:
    """Returns the costs by name. `configs` are those of the longest runs; `speeds` are in steps per
    second.
    """
    costs = []
    for name, group in grouped(runs, lambda run: run.name).items():
        config, speed = configs[name], speeds[name]
        counts = count(config)
        flops = counts.flops_per_step(config)
        steps = sum(map(_own_steps, group))
        cost = NameCost(
            name=name,
            runs=len(group),
            parameters=counts.parameters,
            active_parameters=counts.active_parameters,
            tokens=_tokens(config),
            steps=steps,
            total_tokens=steps * budget.tokens_per_step(config),
            flops=None if flops is None else steps * flops,
            seconds=None if speed is None else steps / speed,
        )
        costs.append(cost)
    return tuple(costs)


def _own_steps(run: PlannedRun) -> int:
    """Returns the steps that a run does not copy from its trunk."""
    steps = run.config.train.steps
    return steps if run.trunk is None else steps - decay_start(run.config.optimizer)


def _tokens(config: Config) -> float:
    return config.train.steps * budget.tokens_per_step(config)


def _speeds(
    configs: dict[str, Config], output: Path, topology: str | None
) -> dict[str, float | None]:
    """Returns {name: steps per second}; None if a compiled program has no roofline."""
    if topology is None:
        return budget.measured_speeds(configs, output)
    speeds = {}
    for name, config in configs.items():
        try:
            seconds = plan(config.to_dict(), topology).estimate.estimated_step_seconds
        except UserError as error:
            raise UserError(f"run {name!r}: {error}") from None
        speeds[name] = 1 / seconds if seconds else None
    return speeds


def _reading(corpus: Corpus, config: Config) -> tuple[int, float]:
    """Returns the tokens of the corpus, and how often a run reads its most used text."""
    tokens = [store.metadata["splits"]["train"]["tokens"] for store in corpus.stores]
    read = [weight * _tokens(config) / size for weight, size in zip(corpus.weights, tokens)]
    return sum(tokens), max(read)


# ------------------------------------------------------------------ output
def _table(costs: Sequence[NameCost]) -> list[tuple[str, ...]]:
    rows = [("run", "runs", "parameters", "tokens, longest", "tokens, all", "FLOPs", "time")]
    for cost in costs:
        parameters = parameter_count(cost.parameters, cost.active_parameters)
        tokens, total = f"{cost.tokens:,.0f}", f"{cost.total_tokens:,.0f}"
        flops = "unknown" if cost.flops is None else f"{cost.flops:.2e}"
        time = "unknown" if cost.seconds is None else duration(cost.seconds)
        rows.append((cost.name, str(cost.runs), parameters, tokens, total, flops, time))
    return rows


def _most_text(costs: Sequence[NameCost]) -> str:
    """Returns what the comparison costs with all seeds of config.compare.most_seeds."""
    texts = [f"{sum(cost.runs for cost in costs)} runs"]
    flops, seconds = _total(costs, "flops"), _total(costs, "seconds")
    if flops is not None:
        texts.append(f"{flops:.3g} FLOPs")
    if seconds is not None:
        texts.append(f"{duration(seconds)} of training")
    return f"These are the least; with the seeds that may be added, at most {', '.join(texts)}."


def _corpus_text(result: Forecast) -> str:
    text = f"The training text has {result.corpus_tokens:,} tokens; "
    if result.repeats > 1:
        return text + (
            f"the longest run reads it {result.repeats:.1f} times: REPEATED TEXT. Losses of "
            "repeated text compare memory, too; use more text or fewer steps."
        )
    return text + f"the longest run reads {result.repeats:.1%} of it, nothing is repeated."
