"""Config groups: frozen dataclasses that declare each config field once.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TrainConfig(ConfigGroup):
        GROUP = "train"

        # number of training steps
        steps: int = free(19_073)

A field has a type (one of TYPES), a comment, and its value in the recipe `paper`. The rest derives
from these lines: the ConfigDict of recipes and flags, messages for wrong fields, and what may
change when a run is resumed.

A config.json without a field was written before the field existed. The field then has its default,
so the default of a new field must not change what older runs compute.
"""

import contextlib
import dataclasses
import functools
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from ml_collections import ConfigDict, config_dict

from smallgpt_jax.errors import UserError, suggestion
from smallgpt_jax.formatting import printable, short_repr

_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple[int, ...]: "integers, separated by commas",
    tuple[str, ...]: "strings, separated by commas",
    tuple[float, ...]: "numbers, separated by commas",
}
TYPES = (int, float, bool, str, tuple)  # of fields; their values can be hashed
STEPS_LIMIT = 2**31  # the step and the optimizer's count are of the type int32
# Values that the start of a run replaces: of numbers, and of text
AT_START = -1
AUTO = "auto"
# Metadata of fields; see the functions of these names
REPLACED_AT_START = {"at_start": True}
IN_DECAY = {"in_decay": True}
NOT_COMPILED = {"compiled": False}


# Each of these functions declares a field with a default and a rule.


def per_run(default, **metadata) -> Any:
    """Of `model`: fixed by a run, but not by the weights of a trained model."""
    return dataclasses.field(default=default, metadata={"fixed_by": "run", **metadata})


def free(default, **metadata) -> Any:
    """May change when a run is resumed; affects results through rounding, or not at all."""
    return dataclasses.field(default=default, metadata={"fixed_by": None, **metadata})


def not_compiled(default) -> Any:
    """An input of the compiled steps, or unused by them: runs with other values share them."""
    return dataclasses.field(default=default, metadata=NOT_COMPILED)


def at_start(default, **metadata) -> Any:
    """AT_START is replaced when the run starts; a resumed run keeps the value."""
    return dataclasses.field(default=default, metadata=REPLACED_AT_START | metadata)


def in_decay(default) -> Any:
    """Affects only the steps from the start of the learning rate's decay on: runs that differ in
    such fields have the earlier steps in common, if their schedule has a constant phase.
    """
    return dataclasses.field(default=default, metadata=IN_DECAY | NOT_COMPILED)


def in_store(default, relaxable: bool = False) -> Any:
    """Fixes a token store. `relaxable`: may go from "refuse" to another value on resumption."""
    return dataclasses.field(default=default, metadata={"in_store": True, "relaxable": relaxable})


def of_probe(default) -> Any:
    """Fixes the examples of a probe (data/probes.py)."""
    return dataclasses.field(default=default, metadata={"of_probe": True})


@dataclasses.dataclass(frozen=True)
class NotCompiled:
    """Replaces a value in `ConfigGroup.compiled_part`: equals none; using it raises TypeError."""

    field: str

    def __bool__(self):
        raise TypeError(
            f"{self.field} has no value in the compiled steps (config.group.not_compiled)"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigGroup:
    GROUP: ClassVar[str]

    def __post_init__(self):
        for name, declared in field_types(type(self)).items():
            value, kind = getattr(self, name), _kind(declared)
            if kind is tuple and isinstance(value, list):  # from JSON
                object.__setattr__(self, name, tuple(value))
            # An integer for a number is the same value, also in config.json.
            if kind is float and type(value) is int:
                with contextlib.suppress(OverflowError):
                    object.__setattr__(self, name, float(value))

    @classmethod
    def from_fields(cls, fields: Mapping) -> Self:
        """Missing fields get defaults. Raises UserError for unknown fields and invalid values."""
        field_types(cls)  # a declaration may be wrong
        declared = {field.name: field for field in dataclasses.fields(cls)}
        owner = f"{fields['architecture']} " if "architecture" in fields else ""
        for name, value in fields.items():
            if name not in declared:
                reason = f"{owner}has no such field" if owner else "no such field"
                advice = suggestion(name, declared) or "; remove it"
                raise UserError(
                    f"config.{cls.GROUP}.{printable(name[:100])}={short_repr(value)}: "
                    f"{reason}{advice}"
                )
        for name, field in declared.items():
            if field.default is dataclasses.MISSING and name not in fields:
                raise UserError(
                    f"config.{cls.GROUP}.{name}: {owner}needs a value for this field; set it"
                )
        group = cls(**fields)
        group.validate_types()
        group.validate()
        return group

    @classmethod
    def config_dict(cls) -> ConfigDict:
        values = {}
        for field in dataclasses.fields(cls):
            values[field.name] = field.default
            if field.default is dataclasses.MISSING:  # a flag can still set it
                values[field.name] = config_dict.placeholder(_kind(field_types(cls)[field.name]))
        return ConfigDict(values)

    @classmethod
    def field_names(cls, **metadata) -> tuple[str, ...]:
        """Returns the fields with this metadata. `fixed_by` is "model" in the group `model` and
        "run" elsewhere, unless the field says otherwise.
        """

        def matches(field: dataclasses.Field) -> bool:
            default = "model" if cls.GROUP == "model" else "run"
            marks = {"fixed_by": default, **field.metadata}
            return all(marks.get(name) == value for name, value in metadata.items())

        return tuple(field.name for field in dataclasses.fields(cls) if matches(field))

    def replace(self, **fields) -> Self:
        return dataclasses.replace(self, **fields)

    def compiled_part(self) -> Self:
        """Groups with equal parts have equal compiled steps."""
        fields = self.field_names(compiled=False)
        return self.replace(**{name: NotCompiled(f"config.{self.GROUP}.{name}") for name in fields})

    def validate(self) -> None:
        """Raises UserError."""

    def refuse(self, field: str, rule: str):
        raise UserError(f"config.{self.GROUP}.{field}={short_repr(getattr(self, field))}: {rule}")

    def validate_types(self) -> None:
        # A config.json can contain values of any type.
        for name, declared in field_types(type(self)).items():
            value, kind = getattr(self, name), _kind(declared)
            # Python's True is an int, but no number of steps.
            is_bool_for_number = isinstance(value, bool) and kind is not bool
            if not isinstance(value, kind) or is_bool_for_number:
                self.refuse(name, f"must be {_TYPE_NAMES.get(declared, declared)}")

    def validate_choice(self, field: str, allowed: Iterable[str]) -> None:
        if (value := getattr(self, field)) not in allowed:
            self.refuse(
                field,
                f"must be one of {', '.join(name or repr('') for name in allowed)}"
                + suggestion(str(value), allowed),
            )

    def validate_range(self, *fields: str, least: float = 0, above: bool = False) -> None:
        """Also refuses values that are not finite."""
        for field in fields:
            value = getattr(self, field)
            is_enough = least < value if above else least <= value
            if is_enough and value < math.inf:
                continue
            limit = f"above {least:g}" if above else f"at least {least:g}"
            if isinstance(value, float):
                limit = f"a finite number {limit}" if above else f"a finite number, {limit}"
            self.refuse(field, f"must be {limit}")

    def validate_fraction(self, *fields: str, above: bool = False, below: bool = True) -> None:
        """Refuses values outside [0, 1). `above` excludes 0; without `below`, 1 is valid."""
        for field in fields:
            value = getattr(self, field)
            is_enough = value > 0 if above else value >= 0
            is_small = value < 1 if below else value <= 1
            if not (is_enough and is_small):
                least = "above 0" if above else "at least 0"
                most = "below 1" if below else "at most 1"
                self.refuse(field, f"must be {least} and {most}")


@functools.cache
def field_types(group: type[ConfigGroup]) -> dict[str, Any]:
    """Returns {field: type}. Raises UserError for unsupported declarations, which users make."""
    # A group may also be a user's own class, whose declarations nothing else has checked.
    fields = {field.name: field for field in dataclasses.fields(group)}
    hints = typing.get_type_hints(group)
    for name, declared in hints.items():
        where = f"config.{group.GROUP}.{name}: {group.__name__}"
        if _kind(declared) in (ClassVar, dataclasses.KW_ONLY):
            continue
        if name not in fields:
            raise UserError(
                f"{where} is not a dataclass with this field; decorate it with "
                "@dataclasses.dataclass(frozen=True, kw_only=True)"
            )
        if _kind(declared) not in TYPES:
            raise UserError(
                f"{where} declares another type than int, float, bool, str or a tuple such as "
                "tuple[int, ...]; declare one of them, with a value such as 0 or '' for none"
            )
        if fields[name].default_factory is not dataclasses.MISSING:
            raise UserError(f"{where} declares a default_factory; declare a default value")
    return {name: hints[name] for name in fields}


def _kind(declared) -> Any:
    """Returns tuple for tuple[int, ...], and int for int."""
    return typing.get_origin(declared) or declared
