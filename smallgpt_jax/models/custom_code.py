"""Classes of a user's own package, which a config names as `package.module:Class`."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from smallgpt_jax.errors import UserError
from smallgpt_jax.models.config import ModelConfig


def custom_classes(model: Mapping | ModelConfig) -> list[tuple[str, str]]:
    """Returns (field, name) of each class that is not built in. Mappings may come from a file, with
    any values.
    """
    fields = model if isinstance(model, Mapping) else dataclasses.asdict(model)
    mixers = fields.get("mixers")
    if not isinstance(mixers, (list, tuple)):
        mixers = ()
    named = [("architecture", fields.get("architecture"))]
    named += [("mixers", name) for name in mixers]
    return [(field, name) for field, name in named if isinstance(name, str) and ":" in name]


def name_custom_classes(model: ModelConfig) -> str:
    """Returns their fields and names, for messages."""
    fields = [f"config.model.{field}={name!r}" for field, name in custom_classes(model)]
    return ", ".join(dict.fromkeys(fields))


def foreign_classes(saved: Mapping, model: ModelConfig) -> dict[str, tuple]:
    """Returns {field: (saved, now)} for custom classes that `saved` names and `model` does not.
    Imports no module.
    """
    known = custom_classes(model)
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
                f"would run the code of {module}; add --trust_custom_code if you trust it"
            )
