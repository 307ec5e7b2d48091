"""Comparisons of runs: a common config, the fields that each run overrides, and a shared budget.

A comparison is a config that its runs share, with two additional groups:

- `runs`: {name of a run: the fields that this run overrides}
- `compare`: the budget, the seeds and the measurements to take

This example compares three widths:

    def get_config(size="quickstart"):
        common = base.recipe("gpt", size)
        return base.comparison(common, {f"width {d}": {"model": {"d_model": d}} for d in (64, 128, 256)})

To compare three learning rates instead, replace the last line:

        return base.comparison(common, {f"lr {x}": {"optimizer": {"learning_rate": x}} for x in (1e-3, 3e-3, 1e-2)})

On the command line, --config.runs.NAME.GROUP.FIELD=VALUE sets a field of one run. For example,
'--config.runs.lr 0.003.optimizer.warmup_steps=100' sets a field of the run "lr 0.003".
"""

import importlib

from ml_collections import ConfigDict


def comparison(common: ConfigDict, runs: dict[str, dict], **compare) -> ConfigDict:
    """Returns the config of a comparison.

    Args:
      common: config that the runs share.
      runs: fields that each run overrides, {name: {group: {field: value}}}.
      **compare: fields of the group `compare`.
    """
    config = common.unlock()
    config.compare = group = ConfigDict()
    # The quantity that is equal for all runs: training "tokens" | training "flops" | training "seconds" | "parameters".
    # With "parameters", the models get widths at which their numbers of parameters are equal within 2%. All runs are
    # then trained on the same number of tokens.
    group.budget = "tokens"
    group.names = ",".join(runs)  # names of the runs to train, in this order
    group.reference = next(iter(runs), "")  # the run whose train.steps and number of parameters set the budget
    group.seconds = 0.0  # seconds of training per run, for budget "seconds"
    group.seeds = 2  # number of seeds that each run is trained with: train.seed, train.seed + 1, …
    group.learning_rates = ()  # multiples of each run's learning_rate and final_learning_rate, for example (0.5, 1, 2).
    # The first seed is trained at all multiples. The other seeds are trained only at the best one, which has the lowest
    # validation loss after the last step. (): only the runs' own rates
    group.max_added_learning_rates = 4  # maximum number of multiples that are added per run. As long as the best
    # multiple is the lowest or the highest, the next one beyond it is added
    group.contexts = (1,)  # finished runs are also evaluated at these multiples of their context length
    group.texts = ""  # finished runs are also evaluated on these texts: "NAME=SOURCE,…" (see data.source)
    group.decoding = True  # measure the decoding speed of finished runs
    group.lock().update(compare)
    config.runs = ConfigDict(runs, allow_dotted_keys=True)
    return config.lock()


def recipe(name: str, size: str) -> ConfigDict:
    """Returns the config of the recipe configs/NAME.py at size `size`."""
    return importlib.import_module(f"configs.{name}").get_config(size)


def differences(config: ConfigDict, common: ConfigDict) -> dict[str, dict]:
    """Returns the fields of `config` that `common` lacks or has with another value, {group: {field: value}}."""
    found = {group: {field: value for field, value in fields.items()
                     if field not in common[group] or value != common[group][field]}
             for group, fields in config.to_dict().items()}
    return {group: fields for group, fields in found.items() if fields}


def recipes(names, size: str, **compare) -> ConfigDict:
    """Returns the config of a comparison with one run per recipe. The first recipe is the common config."""
    common = recipe(names[0], size)
    return comparison(common, {name: differences(recipe(name, size), common) for name in names}, **compare)
