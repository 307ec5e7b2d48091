"""Comparisons: a recipe, the fields that its runs override, and a budget that all of them share.

A comparison is a config (groups `model`, `data`, `mesh`, `optimizer`, `train`: what the runs share) with two more
groups. `runs` has a group per run, by name, with the fields that the run overrides. `compare` has the budget, the
seeds and the measurements. This trains three widths and plots them:

    def get_config(size="quickstart"):
        common = base.recipe("gpt", size)
        return base.comparison(common, {f"width {d}": {"model": {"d_model": d}} for d in (64, 128, 256)})

and this last line three learning rates:

        return base.comparison(common, {f"lr {x}": {"optimizer": {"learning_rate": x}} for x in (1e-3, 3e-3, 1e-2)})

On the command line, a field of one run is set by the run's name: '--config.runs.lr 0.003.optimizer.warmup_steps=100'.
"""

import importlib

from ml_collections import ConfigDict


def comparison(common: ConfigDict, runs: dict[str, dict], **compare) -> ConfigDict:
    """Returns a comparison of `runs`, {name: {group: {field: value}}} of what each overrides in `common`; `compare` are
    fields of that group."""
    config = common.unlock()
    config.compare = group = ConfigDict()
    group.budget = "tokens"  # equal for all runs: "tokens" | training "flops" | "parameters", by width, and tokens |
    # "seconds" of training
    group.names = ",".join(runs)  # the runs to train, in this order
    group.reference = next(iter(runs), "")  # the run whose train.steps and parameters set the budget
    group.seconds = 0.0  # for budget "seconds"
    group.seeds = 2  # runs per name: with train.seed, train.seed + 1, …
    group.contexts = (1,)  # finished runs are also evaluated at these multiples of their context length …
    group.texts = ""  # … and on further texts: "NAME=SOURCE,NAME=SOURCE", sources as in data.source
    group.decoding = True  # measure the decoding speed of finished runs
    group.lock().update(compare)
    config.runs = ConfigDict(runs, allow_dotted_keys=True)
    return config.lock()


def recipe(name: str, size: str) -> ConfigDict:
    """Returns the config of the recipe configs/NAME.py at this size."""
    return importlib.import_module(f"configs.{name}").get_config(size)


def differences(config: ConfigDict, common: ConfigDict) -> dict[str, dict]:
    """Returns {group: {field: value}} of the fields in which `config` differs from `common`."""
    found = {group: {field: value for field, value in fields.items()
                     if field not in common[group] or value != common[group][field]}
             for group, fields in config.to_dict().items()}
    return {group: fields for group, fields in found.items() if fields}


def recipes(names, size: str, **compare) -> ConfigDict:
    """Returns a comparison of recipes; the first one's fields are the common ones."""
    common = recipe(names[0], size)
    return comparison(common, {name: differences(recipe(name, size), common) for name in names}, **compare)
