"""Classes of a user's own package, which a config names as `package.module:Class`."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn

from smallgpt_jax.config.lookup import find_named, require_arguments
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.models.config import ModelConfig


def find_module(
    field: str, name: str, table: Mapping[str, Any], arguments: tuple[str, ...] = ("x", "context")
) -> Any:
    """Returns the entry of a table, or the user's class that `config.model.FIELD` names: a Linen
    module with a field `config`, called with `arguments`.
    """
    where = f"config.model.{field}={short_repr(name)}"
    module = find_named(name, table, where)
    if module in table.values():
        return module
    is_module = isinstance(module, type) and issubclass(module, nn.Module)
    if not is_module or "config" not in {field.name for field in dataclasses.fields(module)}:
        raise UserError(
            f"{where}: must be a Linen module with a field config; see docs/your-own.md"
        )
    if module.__module__.startswith("smallgpt_jax."):
        # A whole block or trunk has modules of its own, without an end.
        kind = {"mixers": "mixer", "mlp": "MLP"}.get(field, field)
        raise UserError(f"{where}: is no {kind}; use one of {', '.join(table)}")
    require_arguments(module.__call__, ("self", *arguments), where)
    return module


def custom_classes(model: Mapping | ModelConfig) -> list[tuple[str, str]]:
    """Returns (field, name) of each class that is not built in; a mapping has any values."""
    fields = model if isinstance(model, Mapping) else dataclasses.asdict(model)
    mixers = fields.get("mixers")
    if not isinstance(mixers, (list, tuple)):
        mixers = ()
    named = [(field, fields.get(field)) for field in ("architecture", "mlp", "norm")]
    named += [("mixers", name) for name in mixers]
    return [(field, name) for field, name in named if isinstance(name, str) and ":" in name]


def name_custom_classes(model: ModelConfig) -> str:
    """Returns their fields and names, for messages."""
    fields = [f"config.model.{field}={name!r}" for field, name in custom_classes(model)]
    return ", ".join(dict.fromkeys(fields))


def foreign_classes(saved: Mapping, model: ModelConfig) -> dict[str, tuple]:
    """Returns {field: (saved, now)} for custom classes that `model` does not name."""
    known = custom_classes(model)
    # A class may be in another place of a pattern of mixers, so pairs are compared, not fields.
    return {
        field: (saved[field], getattr(model, field))
        for field, name in custom_classes(saved)
        if (field, name) not in known
    }


def refuse_custom_code(fields: Mapping, where: Path, trust: bool) -> None:
    """Raises UserError if building the model would import a new module, unless `trust`."""
    for field, name in custom_classes(fields):
        module, _, _ = name.partition(":")
        if not trust and module not in sys.modules:
            raise UserError(
                f"{where}: config.model.{field}={name!r} is not built in, so loading the model "
                f"would run the code of {module}; if you trust it, add --trust_custom_code (in Python: "
                "trust_custom_code=True)"
            )
