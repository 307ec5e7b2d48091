"""Functions of a user's own package that the groups `optimizer` and `train` of a config name. Only
training, and what counts the cost of training, calls them.
"""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

from smallgpt_jax.config.lookup import split_name
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.run.config import Config

_FIELDS = (
    ("optimizer", "name"),
    ("optimizer", "schedule"),
    ("train", "objective"),
    ("train", "future_head"),
)


def refuse_training_code(config: Config | Mapping, where: Path, trust: bool) -> None:
    """Raises UserError if using the config would import a new module, unless `trust`. `config` may
    come from a file, with any values.
    """
    for path, name in _named_code(config):
        module, _ = split_name(name)
        if not trust and module not in sys.modules:
            raise UserError(
                f"{where}: {path}={short_repr(name)} is not built in, so using it would run the code of "
                f"{module}; if you trust it, add --trust_custom_code (in Python: trust_custom_code=True)"
            )


def import_training_code(config: Config) -> None:
    # Imports what the user's own config names, so that workdirs of its runs may name it too.
    for _, name in _named_code(config):
        module, _ = split_name(name)
        importlib.import_module(module)


def _named_code(config: Config | Mapping) -> list[tuple[str, str]]:
    """Returns (path of a field, its value) of each field that names custom code."""
    groups = config.to_dict() if isinstance(config, Config) else config
    named = []
    for group, field in _FIELDS:
        name = groups.get(group, {}).get(field, "")
        module, _ = split_name(name)
        if module:
            named.append((f"config.{group}.{field}", name))
    return named
