"""Gives the runs of a comparison the same number of tokens, FLOPs, parameters or seconds."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from smallgpt_jax.comparison.config import CompareConfig
from smallgpt_jax.comparison.counts import count
from smallgpt_jax.comparison.parameters import num_parameters, with_equal_parameters
from smallgpt_jax.comparison.runs import run_folder
from smallgpt_jax.config.group import AT_START
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import POSITIVE, Each, read_json
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.microbatches import with_microbatches

BUDGET_TOLERANCE = 0.01  # maximum relative error of tokens, FLOPs or seconds
SPEEDS_FILE = "speeds.json"  # in a comparison's folder
SPEED_SECONDS = 5.0  # duration of a speed measurement
_UNITS = {"flops": "FLOPs", "parameters": "tokens"}


def with_equal_budgets(
    runs: dict[str, ConfigDict], reference: ConfigDict, compare: CompareConfig, output: Path
) -> dict[str, ConfigDict]:
    """Returns the runs with the widths and numbers of steps that the budget allows; may change
    them in place.
    """
    if compare.budget == "own":
        return runs
    if compare.budget == "seconds":
        # All are checked before the first is measured, which takes seconds.
        require_measurable(runs, output, compare.train)
        speeds = measured_speeds(runs, output)
        step_costs = {name: 1 / speed for name, speed in speeds.items()}
        target = compare.seconds
    else:
        if compare.budget == "parameters":
            runs = with_equal_parameters(runs, num_parameters(reference))
        step_costs = {name: cost_per_step(run, compare.budget) for name, run in runs.items()}
        target = cost_per_step(reference, compare.budget) * reference.train.steps
    for name, run in runs.items():
        _set_steps(name, run, compare.budget, step_costs[name], target)
    return runs


def _set_steps(name: str, run: ConfigDict, budget: str, step_cost: float, target: float) -> None:
    """Sets the run's number of steps, and scales its learning rate schedule in proportion.
    `step_cost` and `target`, the cost of the run, are in FLOPs, tokens or seconds.
    """
    steps = max(1, round(target / step_cost))
    error = steps * step_cost / target - 1
    if abs(error) > BUDGET_TOLERANCE:
        advice = "increase config.train.steps or decrease config.train.batch_size"
        if budget == "seconds":
            advice = "increase config.compare.seconds"
        unit = _UNITS.get(budget, budget)
        raise UserError(
            f"config.compare.budget={budget!r}: one step of {name} takes {step_cost:,.4g} {unit} "
            f"and the budget is {target:,.4g}, so the nearest number of steps, {steps}, misses "
            f"the budget by {error:+.1%} (limit: {BUDGET_TOLERANCE:.0%}); {advice}"
        )
    steps_before, run.train.steps = run.train.steps, steps
    for field in ("warmup_steps", "decay_steps"):
        if run.optimizer[field] != AT_START:  # else it follows from the number of steps
            run.optimizer[field] = round(run.optimizer[field] * steps / steps_before)


def cost_per_step(config: ConfigDict | Config, budget: str) -> float:
    """Returns a step's FLOPs, with padding and the optimizer, if that is the budget; else its
    tokens, without padding.
    """
    if budget != "flops":
        return tokens_per_step(config)
    config = Config.of(config)
    counts = count(config)
    flops = counts.flops_per_step(config)
    if flops is None:
        raise UserError(
            f"config.compare.budget='flops': {config.model.architecture}: {counts.flops_problem}; "
            "choose another budget"
        )
    return flops


def tokens_per_step(config: ConfigDict | Config) -> float:
    """Returns the number of tokens in a batch, without padding."""
    data, context_length = config.data, config.model.context_length
    inputs = config.train.batch_size * context_length
    if data.packing == "concat":  # there is no padding, so the text need not be read
        return inputs
    corpus = load_or_prepare(data)
    rows = corpus.pack("train", data.packing, data.separate_documents, context_length)
    return inputs * (1 - rows.padding)


# ------------------------------------------------------------------ speed
def require_measurable(runs: dict[str, ConfigDict], output: Path, may_measure: bool) -> None:
    """Raises UserError for a run that is not measured, and cannot be."""
    output.mkdir(parents=True, exist_ok=True)
    with file_lock(output / LOCK_FILE, wait=True):
        speeds = _read_speeds(output)
    for name, run in runs.items():
        if config_digest(run) in speeds:
            continue  # was measured before
        # With a speed that is measured now, a run that has started would get other steps.
        if run_folder(output, name, run.train.seed).exists():
            raise UserError(
                f"--output={output}: contains a run {name} with another budget or config; "
                "use the same budget and config to resume, or another --output"
            )
        if not may_measure:  # a speed beside other programs would give the run too few steps
            raise UserError(
                f"config.compare.train=False: the speed of {name}, which determines its "
                "number of steps, has not been measured; start the training first"
            )


def measured_speeds(runs: dict[str, ConfigDict | Config], output: Path) -> dict[str, float]:
    """Returns {name: steps per second}, measured once per config and stored in speeds.json."""
    output.mkdir(parents=True, exist_ok=True)
    with file_lock(output / LOCK_FILE, wait=True):  # only one process measures at a time
        speeds = _read_speeds(output)
        for run in runs.values():
            digest = config_digest(run)
            if digest not in speeds:
                speeds[digest] = steps_per_second(run)
                write_atomically(output / SPEEDS_FILE, json.dumps(speeds, indent=2) + "\n")
    return {name: speeds[config_digest(run)] for name, run in runs.items()}


def _read_speeds(output: Path) -> dict[str, float]:
    path = output / SPEEDS_FILE
    if not path.exists():
        return {}
    return read_json(path, Each(POSITIVE), "restore it, or use another --output")


def config_digest(run: ConfigDict | Config) -> str:
    """Returns a hash of the fields that differ from their defaults: new fields do not change it."""
    config = Config.of(run)
    changed = {}
    for name in GROUPS:
        group = getattr(config, name)
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            if value != field.default:
                changed[f"{name}.{field.name}"] = value
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def steps_per_second(config: ConfigDict | Config) -> float:
    """Returns the speed of training, measured for SPEED_SECONDS on zeros, so without reading data."""
    config = with_microbatches(Config.of(config))
    program = shared_program(config)
    step = program.bind(config)

    def zeros(x):
        return jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)

    batch = jax.tree.map(zeros, program.abstract_batch())
    state = program.initial_state(config.train.seed)
    for _ in range(2):  # the first compiles, the second has the state as steps return it
        state, _ = jax.block_until_ready(step(state, batch))
    steps, started = 0, time.monotonic()
    while not steps or time.monotonic() - started < SPEED_SECONDS:
        state, _ = jax.block_until_ready(step(state, batch))
        steps += 1
    return steps / (time.monotonic() - started)
