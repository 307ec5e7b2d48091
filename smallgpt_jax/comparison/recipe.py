"""The recipe of a comparison: its runs, each with the common config and the fields of its own."""

import copy
import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.analysis.candidates import level_of_pair
from smallgpt_jax.analysis.further_runs import Rounds
from smallgpt_jax.analysis.record import size_of
from smallgpt_jax.comparison import budget
from smallgpt_jax.comparison.config import CompareConfig
from smallgpt_jax.comparison.runs import Comparison, run_folder, shortened
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.errors import UserError, suggestion
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.training.build import build_program


def make_comparison(config: ConfigDict, output: Path) -> Comparison:
    """Returns the planned comparison. Raises UserError for a recipe that cannot be trained."""
    runs = resolve_runs(config)
    compare = CompareConfig.from_fields(config.compare)
    reference = resolve_run(config, compare.reference)
    runs = budget.with_equal_budgets(runs, reference, compare, output)
    horizons = tuple(map(float, compare.horizons)) or (1.0,)
    models_by_name = {name: Config.of(run) for name, run in runs.items()}
    for name, model in models_by_name.items():
        if compare.horizons:
            _require_horizons(name, model, horizons)
        # The shortest run has the fewest evaluations.
        _require_evaluations(name, shortened(model, horizons[0]), compare.averaged_evaluations)
    rounds = None
    if compare.most_seeds:
        level = level_of_pair(models_by_name)
        rounds = Rounds(compare.seeds, compare.most_seeds, compare.stake, level)
    first_seed = config.train.seed
    return Comparison(
        output=output,
        models=models_by_name,
        seeds=range(first_seed, first_seed + compare.seeds),
        multiples=compare.learning_rates,
        max_added=compare.max_added_learning_rates,
        averaged=compare.averaged_evaluations,
        horizons=horizons,
        held_out=compare.held_out,
        train_held_out=compare.train_held_out,
        rounds=rounds,
    )


def resolve_runs(config: ConfigDict) -> dict[str, ConfigDict]:
    """Returns {name: config} of the runs of a comparison, before the budget is applied."""
    _validate(config)
    runs = {name: resolve_run(config, name) for name in run_names(config)}
    _require_same_text(runs)
    return runs


def run_names(config: ConfigDict) -> list[str]:
    names = [name.strip() for name in config.compare.names.split(",")]
    return list(dict.fromkeys(filter(None, names)))


def own_fields(config: ConfigDict, name: str) -> dict[str, dict]:
    """Returns the fields that a run overrides: {group: {field: value}}. None overrides nothing."""
    overrides = {}
    for group, fields in config.runs[name].items():
        if group not in GROUPS or not isinstance(fields, ConfigDict):
            raise UserError(
                f"config.runs.{name}.{group}: must be one of the groups {', '.join(GROUPS)} and "
                "contain the fields that the run overrides"
            )
        overrides[group] = {field: value for field, value in fields.items() if value is not None}
    return overrides


def ignored_overrides(config: ConfigDict, flags: Mapping[str, Any]) -> list[str]:
    """Returns a line for each {GROUP.FIELD: VALUE} of --config that a run overrides by its own."""
    if "runs" not in config:
        return []
    lines = []
    for path, value in flags.items():
        group, _, field = path.partition(".")
        for name in run_names(config):
            if name not in config.runs:  # refused later
                continue
            overrides = own_fields(config, name).get(group, {})
            if field in overrides:
                advice = shlex.quote(f"--config.runs.{name}.{path}")
                lines.append(
                    f"--config.{path}={value}: does not apply to {name}, which sets the field to "
                    f"{overrides[field]!r}; use {advice}"
                )
    return lines


def resolve_run(config: ConfigDict, name: str) -> ConfigDict:
    """Returns a run's config before the budget is applied: common fields, then its own ones."""
    run = ConfigDict({group: copy.deepcopy(config[group]) for group in GROUPS})
    overrides = own_fields(config, name)
    architecture = overrides.get("model", {}).get("architecture", run.model.architecture)
    allowed = models.field_names(architecture)
    if architecture != run.model.architecture:
        # Drop the fields that the run's architecture does not have.
        run.model = ConfigDict({name: run.model[name] for name in run.model if name in allowed})
    for group, fields in overrides.items():
        for field, value in fields.items():
            # The common fields may be those of another architecture, which lacks this one.
            if group == "model" and field in allowed and field not in run.model:
                run.model[field] = value
            else:
                _override(run[group], field, value, f"config.runs.{name}.{group}.{field}")
    run = run.copy_and_resolve_references()
    _require_trainable(name, run)
    return run


def _override(group: ConfigDict, field: str, value, where: str) -> None:
    """Sets a field. Raises UserError, beginning with `where`, for an unknown one or another type."""
    if field not in group:
        raise UserError(f"{where}: no such field" + suggestion(field, group))
    before = group[field]
    try:
        group[field] = value
    except TypeError:
        raise UserError(f"{where}={value!r}: expected the same type as {before!r}") from None


def _require_trainable(name: str, run: ConfigDict) -> None:
    trunk, teacher = run.train.trunk, run.train.teacher
    try:
        if trunk:
            raise UserError(
                f"config.train.trunk={trunk!r}: comparisons set this field; use "
                "config.compare.horizons"
            )
        if teacher:
            raise UserError(
                f"config.train.teacher={teacher!r}: comparisons do not support a teacher, because "
                "they would not count its cost; set it to ''"
            )
        _require_buildable(Config.of(run))
    except UserError as error:
        raise UserError(f"run {name!r}: {error}") from None


@functools.cache  # building a program takes seconds
def _require_buildable(config: Config) -> None:
    build_program(config)


# ------------------------------------------------------------------ validation
def _validate(config: ConfigDict) -> None:
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
    _validate_names(config)
    for name in config.runs:
        if "steps" in own_fields(config, name).get("train", {}) and compare.budget != "own":
            raise UserError(
                f"config.runs.{name}.train.steps: the budget determines it; set "
                "config.train.steps, the number of steps of the reference, or "
                "config.compare.budget='own'"
            )


def _validate_names(config: ConfigDict) -> None:
    name_of_folder: dict[Path, str] = {}
    for name in config.runs:
        if "," in name or name != name.strip():
            raise UserError(
                f"config.runs: {name!r}: names cannot contain commas or start or end with spaces"
            )
        other = name_of_folder.setdefault(run_folder(Path(), name, 0), name)
        if other != name:
            raise UserError(
                f"config.runs: {other!r} and {name!r} have the same workdir; rename one of them"
            )
    names, choices = run_names(config), ", ".join(config.runs)
    if not names:
        raise UserError("config.compare.names: the comparison has no runs; name at least one")
    for name in names:
        if name not in config.runs:
            raise UserError(f"config.compare.names: no run {name!r}; choose from {choices}")
    reference, held_out = config.compare.reference, config.compare.held_out
    if reference not in config.runs:
        raise UserError(f"config.compare.reference={reference!r}: must be one of {choices}")
    sizes = dict.fromkeys(filter(None, map(size_of, config.runs)))
    if held_out and held_out not in sizes:
        advice = f"choose from {', '.join(sizes)}" if sizes else "the comparison has none"
        raise UserError(
            f"config.compare.held_out={held_out!r}: must be the SIZE of runs named MODEL@SIZE; "
            + advice
        )


def _require_same_text(runs: dict[str, ConfigDict]) -> None:
    of_text = (*DataConfig.field_names(in_store=True), *DataConfig.field_names(of_probe=True))
    fields = (*of_text, "store", "mixture")
    first, *others = runs
    for other in others:
        for field in fields:
            before, value = runs[first].data[field], runs[other].data[field]
            if before != value:
                raise UserError(
                    f"config.runs: data.{field} is {before!r} in {first!r} and {value!r} in "
                    f"{other!r}, but losses on different texts cannot be compared; train all runs "
                    "on the same text, and list texts for evaluation in config.compare.texts"
                )


def _require_evaluations(name: str, shortest: Config, averaged: int) -> None:
    count = -(-shortest.train.steps // shortest.train.eval_every)
    if count < averaged:
        raise UserError(
            f"config.compare.averaged_evaluations={averaged}: {name} has only {count} "
            "evaluations; decrease config.train.eval_every"
        )


def _require_horizons(name: str, model: Config, horizons: tuple[float, ...]) -> None:
    """Raises UserError unless each horizon decays after the warmup and is longer than the last."""
    try:
        decay_start(model.optimizer)  # refuses schedules without a decay
    except UserError as error:
        raise UserError(f"{name}: {error}; or remove config.compare.horizons") from None
    steps_before = 0
    for horizon in horizons:
        where = f"config.compare.horizons: {horizon:g}:"
        run = shortened(model, horizon)
        steps, warmup, end = run.train.steps, run.optimizer.warmup_steps, run.optimizer.decay_steps
        start = end - round(run.optimizer.decay_fraction * end)
        if not max(1, warmup) <= start < steps:
            raise UserError(
                f"{where} the decay of {name} would start at step {start} of {steps}, but must "
                f"start after the warmup ({warmup} steps) and before the end; remove the horizon, "
                "or change config.train.steps or config.optimizer.decay_fraction"
            )
        try:
            decay_start(run.optimizer)  # refuses a decay of fewer than two steps
        except UserError as error:
            raise UserError(f"{where} {name}: {error}") from None
        if steps <= steps_before:
            raise UserError(
                f"{where} {name} has {steps} steps, as at the horizon before it; remove the "
                "horizon, or increase config.train.steps"
            )
        steps_before = steps
