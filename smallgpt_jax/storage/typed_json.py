"""JSON files whose content is a dataclass: its types are the schema of the file."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from smallgpt_jax.formatting import printable
from smallgpt_jax.storage import json_files
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import BOOLEAN, NULL, NUMBER, TEXT, Each, Kind, integer

T = TypeVar("T")

Positive = Annotated[float, json_files.POSITIVE]
Count = Annotated[int, integer(1)]
Finite = Annotated[float, NUMBER]


class Schema:
    """A schema of json_files.py that has no type. It can be hashed, as types are."""

    def __init__(self, schema: Any):
        self.schema = schema


def read(kind: type[T], path: Path, advice: str, **further: Kind) -> T:
    """Returns the content of a file. Raises UserError, which names the field, if it is no `kind`.
    `further` are the schemas of fields beside those of `kind`.
    """
    return parse(kind, json_files.read_json(path, {**further, **schema_of(kind)}, advice))


def read_or_none(kind: type[T], path: Path) -> T | None:
    """Returns the content of a file that can be made again; None if it is missing or damaged."""
    value = json_files.read_json_or_none(path, schema_of(kind))
    return None if value is None else parse(kind, value)


def write(value: Any, path: Path) -> None:
    write_atomically(path, json.dumps(dataclasses.asdict(value), indent=1) + "\n")


_KINDS: dict[Any, Kind] = {
    int: integer(0),
    float: json_files.LOSS,
    str: TEXT,
    bool: BOOLEAN,
    types.NoneType: NULL,
    list: json_files.ARRAY,
    Any: json_files.ANYTHING,
}


@functools.cache
def schema_of(kind: Any) -> Any:
    """Returns the schema (json_files.py) of a type: a dataclass, a scalar, or a container of these.

    A field with a default may be missing. `Annotated[float, POSITIVE]` has the annotated schema.
    """
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return {
            field.name: _field_schema(field, hints[field.name])
            for field in dataclasses.fields(kind)
        }
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return arguments[1].schema if isinstance(arguments[1], Schema) else arguments[1]
    if origin in (types.UnionType, typing.Union):
        # None comes first, because the message about a mismatch is that of the last schema.
        return tuple(map(schema_of, sorted(arguments, key=lambda kind: kind is not types.NoneType)))
    if origin is tuple:
        return [schema_of(arguments[0])]
    if origin is dict:
        return Each(schema_of(arguments[1]))
    return _KINDS[kind]


def _field_schema(field: dataclasses.Field, hint: Any) -> Any:
    schema, missing = schema_of(hint), dataclasses.MISSING
    has_default = field.default is not missing or field.default_factory is not missing
    return json_files.Optional(schema) if has_default else schema


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def parse(kind: type[T], value: Any) -> T:
    """Returns a JSON value that matches `schema_of(kind)` as an instance of `kind`."""
    return _reader(kind)(value)


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    if dataclasses.is_dataclass(kind):
        readers = {name: _reader(hint) for name, hint in _hints(kind).items()}
        return lambda fields: kind(
            **{name: read(fields[name]) for name, read in readers.items() if name in fields}
        )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _reader(arguments[0])
    if origin in (types.UnionType, typing.Union):
        (other,) = (argument for argument in arguments if argument is not types.NoneType)
        return lambda value: None if value is None else _reader(other)(value)
    if origin is tuple:
        return lambda items: tuple(map(_reader(arguments[0]), items))
    if origin is dict:
        return lambda items: {
            printable(name): _reader(arguments[1])(item) for name, item in items.items()
        }
    # Somebody else may have written control codes into a record, which is shown.
    return printable if kind is str else lambda value: value
