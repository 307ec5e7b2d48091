"""Resolves the runs of a comparison, so that all have the same number of tokens, FLOPs, parameters
or seconds.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.comparison import results
from smallgpt_jax.comparison.config import CompareConfig
from smallgpt_jax.comparison.names import size_of
from smallgpt_jax.comparison.parameters import num_parameters, with_equal_parameters
from smallgpt_jax.comparison.runs import Comparison, run_folder, shortened
from smallgpt_jax.config.group import AT_START
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.errors import UserError, suggestion
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import POSITIVE, Each, read_json
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.training.build import build_program, shared_program

BUDGET_TOLERANCE = 0.01  # maximum relative error of tokens, FLOPs or seconds
SPEEDS_FILE = "speeds.json"  # in a comparison's folder
SPEED_SECONDS = 5.0  # duration of a speed measurement


def make_comparison(config: ConfigDict, output: Path) -> Comparison:
    runs, compare, seed = resolve_runs(config), config.compare, config.train.seed
    reference = resolve_run(config, compare.reference)
    if compare.budget == "parameters":
        runs = with_equal_parameters(runs, num_parameters(reference))
    if compare.budget == "seconds":
        speeds = known_speeds(runs, output, compare.train)
        for name, run in runs.items():
            set_steps(name, run, compare.budget, 1 / speeds[name], compare.seconds)
    elif compare.budget != "own":
        target = cost_per_step(reference, compare.budget) * reference.train.steps
        for name, run in runs.items():
            set_steps(name, run, compare.budget, cost_per_step(run, compare.budget), target)
    horizons = tuple(map(float, compare.horizons)) or (1.0,)
    configs = {name: Config.of(run) for name, run in runs.items()}
    for name, model in configs.items():
        if compare.horizons:
            require_horizons(name, model, horizons)
        shortest = shortened(model, horizons[0]).train
        if (count := -(-shortest.steps // shortest.eval_every)) < compare.averaged_evaluations:
            raise UserError(
                f"config.compare.averaged_evaluations={compare.averaged_evaluations}: {name} has "
                f"only {count} evaluations; decrease config.train.eval_every"
            )
    return Comparison(
        output,
        configs,
        range(seed, seed + compare.seeds),
        compare.learning_rates,
        compare.max_added_learning_rates,
        compare.averaged_evaluations,
        horizons,
        compare.held_out,
        compare.train_held_out,
    )


def require_horizons(name: str, model: Config, horizons: tuple[float, ...]) -> None:
    """Raises UserError unless the run of each horizon has a decay after the warmup, and more steps
    than the last.
    """
    try:
        decay_start(model.optimizer)
    except UserError as error:
        raise UserError(f"{name}: {error}; or remove config.compare.horizons") from None
    reached = 0
    for horizon in horizons:
        run = shortened(model, horizon)
        steps, warmup, end = run.train.steps, run.optimizer.warmup_steps, run.optimizer.decay_steps
        start = end - round(run.optimizer.decay_fraction * end)
        if not max(1, warmup) <= start < steps:
            raise UserError(
                f"config.compare.horizons: {horizon:g}: the decay of {name} would start at step "
                f"{start} of {steps}, but must start after the warmup ({warmup} steps) and before "
                "the end; remove the horizon, or change config.train.steps or "
                "config.optimizer.decay_fraction"
            )
        try:
            decay_start(run.optimizer)
        except UserError as error:
            raise UserError(f"config.compare.horizons: {horizon:g}: {name}: {error}") from None
        if steps <= reached:
            raise UserError(
                f"config.compare.horizons: {horizon:g}: {name} has {steps} steps, as at the "
                "horizon before it; remove the horizon, or increase config.train.steps"
            )
        reached = steps


def resolve_runs(config: ConfigDict) -> dict[str, ConfigDict]:
    """Returns {name: config} of the runs of a comparison, before the budget is applied."""
    validate_comparison(config)
    runs = {name: resolve_run(config, name) for name in run_names(config)}
    require_same_text(runs)
    return runs


def validate_comparison(config: ConfigDict) -> None:
    if "compare" not in config or "runs" not in config:
        raise UserError(
            "--config: this is the recipe of one run, not a comparison; use a config in "
            "configs/compare/, or list existing runs in --workdirs"
        )
    compare = CompareConfig.from_fields(config.compare)
    if compare.learning_rates and config.train.seed < 1:
        raise UserError(
            f"config.train.seed={config.train.seed}: must be at least 1 with "
            "config.compare.learning_rates, whose runs have the seed before it"
        )
    if invalid := [name for name in config.runs if "," in name or name != name.strip()]:
        raise UserError(
            f"config.runs: {invalid[0]!r}: names cannot contain commas or start or end with spaces"
        )
    if not run_names(config):
        raise UserError("config.compare.names: the comparison has no runs; name at least one")
    if unknown := [name for name in run_names(config) if name not in config.runs]:
        raise UserError(
            f"config.compare.names: no run {unknown[0]!r}; choose from {', '.join(config.runs)}"
        )
    if compare.reference not in config.runs:
        raise UserError(
            f"config.compare.reference={compare.reference!r}: must be one of "
            f"{', '.join(config.runs)}"
        )
    sizes = list(dict.fromkeys(filter(None, map(size_of, config.runs))))
    if compare.held_out and compare.held_out not in sizes:
        raise UserError(
            f"config.compare.held_out={compare.held_out!r}: must be the SIZE of runs named "
            "MODEL@SIZE"
            + (f"; choose from {', '.join(sizes)}" if sizes else "; the comparison has none")
        )
    folders: dict[Path, str] = {}
    for name in config.runs:
        if "steps" in own_fields(config, name).get("train", {}) and compare.budget != "own":
            raise UserError(
                f"config.runs.{name}.train.steps: the budget determines it; set "
                "config.train.steps, the number of steps of the reference, or "
                "config.compare.budget='own'"
            )
        other = folders.setdefault(run_folder(Path(), name, 0), name)
        if other != name:
            raise UserError(
                f"config.runs: {other!r} and {name!r} have the same workdir; rename one of them"
            )


def run_names(config: ConfigDict) -> list[str]:
    return list(
        dict.fromkeys(name.strip() for name in config.compare.names.split(",") if name.strip())
    )


def own_fields(config: ConfigDict, name: str) -> dict[str, dict]:
    """Returns the fields that a run overrides, {group: {field: value}}. Its other fields are
    missing or None.
    """
    found = {}
    for group, fields in config.runs[name].items():
        if group not in GROUPS or not isinstance(fields, ConfigDict):
            raise UserError(
                f"config.runs.{name}.{group}: must be one of the groups {', '.join(GROUPS)} and "
                "contain the fields that the run overrides"
            )
        found[group] = {field: value for field, value in fields.items() if value is not None}
    return found


def resolve_run(config: ConfigDict, name: str) -> ConfigDict:
    """Returns a run's config before the budget is applied: the common fields, overridden by the
    run's own fields.
    """
    run = ConfigDict({group: copy.deepcopy(config[group]) for group in GROUPS})
    own = own_fields(config, name)
    architecture = own.get("model", {}).get("architecture", run.model.architecture)
    names = models.field_names(architecture)
    if (
        architecture != run.model.architecture
    ):  # drop the fields that the run's architecture does not have
        run.model = ConfigDict(
            {field: value for field, value in run.model.items() if field in names}
        )
    for group, fields in own.items():
        for field, value in fields.items():
            where = f"config.runs.{name}.{group}.{field}"
            if group == "model" and field in names and field not in run.model:
                run.model[field] = value
                continue
            if field not in run[group]:
                raise UserError(f"{where}: no such field" + suggestion(field, run[group]))
            before = run[group][field]
            try:
                run[group][field] = value
            except TypeError:
                raise UserError(
                    f"{where}={value!r}: expected the same type as {before!r}"
                ) from None
    run = run.copy_and_resolve_references()
    if run.train.trunk:
        raise UserError(
            f"run {name!r}: config.train.trunk={run.train.trunk!r}: comparisons set this field; "
            "use config.compare.horizons"
        )
    if run.train.teacher:
        raise UserError(
            f"run {name!r}: config.train.teacher={run.train.teacher!r}: comparisons do not "
            "support a teacher, because they would not count its cost; set it to ''"
        )
    try:
        require_trainable(Config.of(run))
    except UserError as error:
        raise UserError(f"run {name!r}: {error}") from None
    return run


@functools.cache  # building a program takes seconds
def require_trainable(config: Config) -> None:
    build_program(config)


def require_same_text(runs: dict[str, ConfigDict]) -> None:
    first, *others = runs
    for other in others:
        for field in (
            *DataConfig.names(in_store=True),
            *DataConfig.names(of_probe=True),
            "store",
            "mixture",
        ):
            if runs[first].data[field] != runs[other].data[field]:
                raise UserError(
                    f"config.runs: data.{field} is {runs[first].data[field]!r} in {first!r} and "
                    f"{runs[other].data[field]!r} in {other!r}, but losses on different texts "
                    "cannot be compared; train all runs on the same text, and list texts for "
                    "evaluation in config.compare.texts"
                )


def set_steps(name: str, run: ConfigDict, budget: str, step_cost: float, target: float) -> None:
    """Sets the run's number of steps according to the budget, and scales its learning rate schedule
    in proportion.

    `step_cost` is the cost of one step and `target` the cost of the run, in FLOPs, tokens or
    seconds.

    Raises UserError if every number of steps misses the target by more than BUDGET_TOLERANCE.
    """
    before, unit = run.train.steps, {"flops": "FLOPs", "parameters": "tokens"}.get(budget, budget)
    run.train.steps = steps = max(1, round(target / step_cost))
    error = steps * step_cost / target - 1
    if abs(error) > BUDGET_TOLERANCE:
        raise UserError(
            f"config.compare.budget={budget!r}: one step of {name} takes {step_cost:,.4g} {unit} "
            f"and the budget is {target:,.4g}, so the nearest number of steps, {steps}, misses "
            f"the budget by {error:+.1%} (limit: {BUDGET_TOLERANCE:.0%}); "
            + (
                "increase config.compare.seconds"
                if budget == "seconds"
                else "increase config.train.steps or decrease config.train.batch_size"
            )
        )
    for field in ("warmup_steps", "decay_steps"):
        if run.optimizer[field] != AT_START:
            run.optimizer[field] = round(run.optimizer[field] * steps / before)


def cost_per_step(config: ConfigDict, budget: str) -> float:
    """Returns a step's FLOPs, with padding and the optimizer, if that is the budget; else tokens
    without padding.
    """
    if budget != "flops":
        return tokens_per_step(config)
    counts = results.count(Config.of(config))
    if counts.cost.flops is None:
        raise UserError(
            f"config.compare.budget='flops': {config.model.architecture}: {counts.cost.problem}; "
            "choose another budget"
        )
    return (
        config.train.batch_size * config.model.context_length * counts.cost.flops
        + counts.optimizer_flops
    )


def tokens_per_step(config: ConfigDict | Config) -> float:
    """Returns the number of tokens in a batch, without padding."""
    inputs = config.train.batch_size * config.model.context_length
    if config.data.packing == "concat":  # there is no padding, so the text need not be read
        return inputs
    corpus = load_or_prepare(config.data)
    rows = corpus.pack(
        "train", config.data.packing, config.data.separate_documents, config.model.context_length
    )
    return inputs * (1 - rows.padding)


def known_speeds(
    runs: dict[str, ConfigDict], output: Path, measures: bool = True
) -> dict[str, float]:
    """Returns {name: steps per second}, measured once per run and stored in speeds.json.

    Without `measures`, raises UserError if the speed of a run is not stored.
    """
    path = output / SPEEDS_FILE
    output.mkdir(parents=True, exist_ok=True)
    with file_lock(output / LOCK_FILE, wait=True):  # only one process measures at a time
        speeds = (
            read_json(path, Each(POSITIVE), "restore it, or use another --output")
            if path.exists()
            else {}
        )
        for name, run in runs.items():
            if config_digest(run) not in speeds:
                if run_folder(output, name, run.train.seed).exists():
                    raise UserError(
                        f"--output={output}: contains a run {name} with another budget or config; "
                        "use the same budget and config to resume, or another --output"
                    )
                if not measures:  # a speed beside other programs would give the run too few steps
                    raise UserError(
                        f"config.compare.train=False: the speed of {name}, which determines its "
                        "number of steps, has not been measured; start the training first"
                    )
                speeds[config_digest(run)] = steps_per_second(run)
                write_atomically(path, json.dumps(speeds, indent=2) + "\n")
    return {name: speeds[config_digest(run)] for name, run in runs.items()}


def config_digest(run: ConfigDict) -> str:
    """Returns a hash of the config fields that differ from their defaults, so that new fields do
    not change it.
    """
    config = Config.of(run)
    changed = {
        f"{name}.{field.name}": value
        for name in GROUPS
        for field in dataclasses.fields(getattr(config, name))
        if (value := getattr(getattr(config, name), field.name)) != field.default
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:16]


def steps_per_second(config: ConfigDict) -> float:
    config = Config.of(config)
    program = shared_program(config)
    state, step = program.initial_state(config.train.seed), program.bind(config)
    batch = jax.tree.map(
        lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), program.abstract_batch()
    )
    steps, started = -2, 0.0  # two warm-up steps
    while steps <= 0 or time.monotonic() - started < SPEED_SECONDS:
        if steps == 0:
            started = time.monotonic()
        state, _ = jax.block_until_ready(step(state, batch))
        steps += 1
    return steps / (time.monotonic() - started)
