"""Comparisons of runs: a common config, the fields that each run overrides, and a shared budget.

A comparison is a config that its runs share, with two additional groups:

- `runs`: {name of a run: the fields that this run overrides}
- `compare`: the budget, the seeds and the measurements to take (smallgpt_jax/comparison/config.py)

This example compares three widths:

    def get_config(size="quickstart"):
        common = base.recipe("gpt", size)
        runs = {f"width {d}": {"model": {"d_model": d}} for d in (64, 128, 256)}
        return base.comparison(common, runs)

To compare three learning rates instead, replace its second line:

        runs = {f"lr {x}": {"optimizer": {"learning_rate": x}} for x in (1e-3, 3e-3, 1e-2)}

On the command line, --config.runs.NAME.GROUP.FIELD=VALUE sets any field of one run. For example,
'--config.runs.lr 0.003.optimizer.warmup_steps=100' sets a field of the run "lr 0.003". A run's
fields are None where it has the value of the common config.
"""

import copy
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from smallgpt_jax.comparison.config import CompareConfig
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config


def comparison(common: ConfigDict, runs: dict[str, dict], **compare) -> ConfigDict:
    """Returns the config of a comparison.

    Args:
      common: config that the runs share.
      runs: fields that each run overrides, {name: {group: {field: value}}}.
      **compare: fields of the group `compare`.
    """
    config = copy.deepcopy(common).unlock()
    fields = {name: with_placeholders(own, common) for name, own in runs.items()}
    config.runs = ConfigDict(fields, allow_dotted_keys=True)
    config.compare = CompareConfig.config_dict().lock()
    config.compare.update({"names": ",".join(runs), "reference": next(iter(runs), ""), **compare})
    return config.lock()


def preset(name: str, presets: Mapping[str, Any]) -> Any:
    """Returns the preset that a user has named after the colon. Raises UserError for another name."""
    if name not in presets:
        raise UserError(f"--config: no preset {name!r}; choose from {', '.join(presets)}")
    return presets[name]


def with_placeholders(own: dict[str, dict], common: ConfigDict) -> dict[str, dict]:
    """Returns the fields of a run, and None for the other fields of the common config, so that
    flags can set them.
    """
    return {
        **own,
        **{
            group: {
                **{field: config_dict.placeholder(fields.get_type(field)) for field in fields},
                **own.get(group, {}),
            }
            for group, fields in common.items()
        },
    }


def recipe(name: str, size: str, change: dict[str, dict] | None = None) -> ConfigDict:
    """Returns the config of the recipe configs/NAME.py, or of a module such as my_models.recipe, at
    size `size`, with the fields of `change`, {group: {field: value}}.
    """
    module = name if "." in name else f"configs.{name}"
    config = importlib.import_module(module).get_config(size)
    for group, fields in (change or {}).items():
        config[group].update(fields)
    # Of a size such as 30M, the values that follow from it: a budget of the comparison changes them.
    if config.train.size:
        for group, fields in Config.of(config).to_dict().items():
            config[group].update(fields)
    return config


def differences(config: ConfigDict, common: ConfigDict) -> dict[str, dict]:
    """Returns the fields of `config` that `common` lacks or has with another value, {group: {field:
    value}}.
    """
    found = {
        group: {
            field: value
            for field, value in fields.items()
            if field not in common[group] or value != common[group][field]
        }
        for group, fields in config.to_dict().items()
    }
    return {group: fields for group, fields in found.items() if fields}


def recipes(names: Sequence[str] | Mapping[str, str], size: str, **compare) -> ConfigDict:
    """Returns the config of a comparison with one run per recipe; a mapping names the runs, {name of
    a run: recipe}. The first recipe is the common config.
    """
    recipe_of = names if isinstance(names, Mapping) else {name: name for name in names}
    common = recipe(next(iter(recipe_of.values())), size)
    runs = {}
    for name, one in recipe_of.items():
        runs[name] = differences(recipe(one, size), common)
        if compare.get("budget") != "own":
            _leave_steps_to_budget(runs[name])
    return comparison(common, runs, **compare)


def _leave_steps_to_budget(fields: dict[str, dict]) -> None:
    # A sized recipe has steps that suit its own parameters.
    if fields.get("train", {}).pop("steps", None):
        for field in ("warmup_steps", "decay_steps"):
            fields.get("optimizer", {}).pop(field, None)
