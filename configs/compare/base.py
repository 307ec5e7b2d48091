"""What a comparison is: a recipe, what its runs have different, and what all of them get as much of.

A comparison is a config like any other (groups `model`, `data`, `mesh`, `optimizer`, `train`: what the runs
share) with two groups more. `runs` holds a group for each run, by its name, with the fields that it has
different; any field can be. `compare` says what is equal. So this trains three widths and draws them:

    def get_config(size="quickstart"):
        common = base.recipe("gpt", size)
        return base.comparison(common, {f"width {d}": {"model": {"d_model": d}} for d in (64, 128, 256)})

and this, in its last line, three learning rates:

        return base.comparison(common, {f"lr {x}": {"optimizer": {"learning_rate": x}} for x in (1e-3, 3e-3, 1e-2)})

A field of one run is set on the command line by the run's name: '--config.runs.lr 0.003.optimizer.warmup_steps=100'.
"""

import importlib

from ml_collections import ConfigDict


def comparison(common: ConfigDict, runs: dict[str, dict], **compare) -> ConfigDict:
    """A comparison of `runs`, {name: {group: {field: value}}} with what each has different from `common`;
    `compare` are fields of that group."""
    config = common.unlock()
    config.compare = group = ConfigDict()
    group.budget = "tokens"  # what all get: as many "tokens" | as many "flops", of training | as many
    # "parameters", by their width, and tokens | as many "seconds" of training
    group.names = ",".join(runs)  # which of the runs, in this order
    group.reference = next(iter(runs), "")  # the run whose train.steps and parameters the others are given as much of
    group.seconds = 0.0  # for budget "seconds"
    group.seeds = 2  # runs of each: with train.seed, train.seed + 1, …
    group.contexts = (1,)  # finished runs are also evaluated at these multiples of their context …
    group.texts = ""  # … and on other texts: "NAME=SOURCE,NAME=SOURCE", sources as data.source takes them
    group.decoding = True  # measure how fast finished runs write
    group.lock().update(compare)
    config.runs = ConfigDict(runs, allow_dotted_keys=True)
    return config.lock()


def recipe(name: str, size: str) -> ConfigDict:
    """configs/NAME.py:SIZE."""
    return importlib.import_module(f"configs.{name}").get_config(size)


def differences(config: ConfigDict, common: ConfigDict) -> dict[str, dict]:
    """The fields of `config` that `common` has different, by group."""
    found = {group: {field: value for field, value in fields.items()
                     if field not in common[group] or value != common[group][field]}
             for group, fields in config.to_dict().items()}
    return {group: fields for group, fields in found.items() if fields}


def recipes(names, size: str, **compare) -> ConfigDict:
    """A comparison of recipes; they share what the first one says."""
    common = recipe(names[0], size)
    return comparison(common, {name: differences(recipe(name, size), common) for name in names}, **compare)
