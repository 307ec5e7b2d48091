"""JSON files that are read back: bounded in size, depth and number of values, and checked against
a schema.

A file may be damaged, edited by hand, or come from somebody else. A schema describes what its
reader relies on. It is

- a `Kind`, such as TEXT or integer(1): a value that is no container, or a container of any content
- a dict: an object with these fields. A field whose schema is `Optional` may be missing; further
  fields are ignored
- `Each`: an object whose fields all have the same schema
- a list of one schema: an array whose items have this schema
- a tuple of schemas: a value of any of them
"""

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import printable
from smallgpt_jax.storage.bounded import MAX_BYTES, read_bounded
from smallgpt_jax.storage.object_storage import is_remote, is_request_error

MAX_VALUES = 2**20  # each takes up to 200 bytes of memory, and only 2 bytes of a file
_MAX_DEPTH = 50
_JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_MAX_INTEGER = 2**53  # larger integers are not the same in all programs that read JSON


class Kind(NamedTuple):
    name: str  # for messages
    accepts: Callable[[Any], bool]


class Optional(NamedTuple):
    schema: Any


class Each(NamedTuple):
    schema: Any


def integer(minimum: int, maximum: int = _MAX_INTEGER) -> Kind:
    name = f"an integer of at least {minimum}"
    # `type`, because isinstance(True, int)
    return Kind(name, lambda value: type(value) is int and minimum <= value <= maximum)


def one_of(*values) -> Kind:
    return Kind(
        " or ".join(map(json.dumps, values)),
        lambda value: any(type(value) is type(allowed) and value == allowed for allowed in values),
    )


TEXT = Kind("a string", lambda value: isinstance(value, str))
BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool))
# Differences and means of these numbers are finite.
NUMBER = Kind("a finite number", lambda value: type(value) in (int, float) and abs(value) < 1e300)
POSITIVE = Kind("a number above 0", lambda value: NUMBER.accepts(value) and value > 0)
LOSS = Kind(
    "a number, NaN or Infinity", lambda value: type(value) is float or NUMBER.accepts(value)
)
NULL = Kind("null", lambda value: value is None)
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
ARRAY = Kind("an array", lambda value: isinstance(value, list))
ANYTHING = Kind("any value", lambda value: True)


def read_json(path: Path, schema, advice: str):
    """Returns the content of a file. Raises UserError, ending with `advice`, if it is unreadable or
    does not match `schema`.
    """
    try:
        return parse_json(read_bounded(path), schema)
    except OSError as error:
        if is_remote(path) and is_request_error(error):  # not the file's fault; commands explain it
            raise
        raise UserError(f"{path}: {error.strerror or error}; {advice}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; {advice}") from None


def read_json_or_none(path: Path, schema):
    """Returns the content of a file that can be made again; None if `read_json` would raise
    UserError.
    """
    try:
        return read_json(path, schema, "")
    except UserError:
        return None


def read_json_lines(path: Path, schema) -> list:
    """Returns the lines that match `schema`; [] without a file. Raises UserError if unreadable."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            lines = io.BufferedReader(file)  # object storage ignores readline's limit
            return parse_lines(iter(lambda: lines.readline(MAX_BYTES + 1), b""), schema)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def parse_lines(lines: Iterable[bytes], schema) -> list:
    """Returns the lines that match `schema`, as values."""
    parsed = []
    for line in lines:
        with contextlib.suppress(ValueError):
            parsed.append(parse_json(line, schema))
    return parsed


def parse_json(content: bytes, schema, max_values: int = MAX_VALUES):
    """Returns the value of a JSON document. Raises ValueError if `content` is not JSON or does not
    match `schema`.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES / 1e6:,.0f} MB")
    require_few_values(content, max_values)
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} in line {error.lineno}") from None
    except ValueError:
        raise ValueError("an integer has thousands of digits") from None
    if _is_deeper(value, _MAX_DEPTH):
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    mismatch = find_mismatch(value, schema)
    if mismatch:
        raise ValueError(mismatch)
    return value


def require_few_values(content: bytes, max_values: int = MAX_VALUES) -> None:
    """Raises ValueError if a JSON document has more values. Does not parse it."""
    if _count_values(content) <= max_values:  # the usual case, and fast
        return
    without_strings = _JSON_STRING.sub(b"", content)
    if _count_values(without_strings) > max_values:
        raise ValueError(f"has more than {max_values:,} values")


def _count_values(content: bytes) -> int:
    """Returns at least the number of values after the first; also counts the commas of strings."""
    return content.count(b",") + content.count(b"[") + content.count(b"{")


def _is_deeper(value, limit: int) -> bool:
    # Level by level: a recursion would fail at the depths that it has to find.
    level = [value]  # all values at one depth
    for _ in range(limit):
        next_level = []
        for container in level:
            if isinstance(container, dict):
                next_level += container.values()
            elif isinstance(container, list):
                next_level += container
        if not next_level:
            return False
        level = next_level
    return True


def find_mismatch(value, schema, field: str = "") -> str | None:
    """Returns a message or None. `field` is where `value` is in its file, such as splits.train."""
    if isinstance(schema, Kind):
        return None if schema.accepts(value) else _mismatch(field, schema.name, value)
    if isinstance(schema, list):
        return _find_mismatch_in_array(value, schema[0], field)
    if isinstance(schema, Each | dict):
        return _find_mismatch_in_object(value, schema, field)
    # a tuple of choices: first without messages, which take most of the time
    if any(isinstance(choice, Kind) and choice.accepts(value) for choice in schema):
        return None
    for choice in schema:
        message = find_mismatch(value, choice, field)
        if message is None:
            return None
    return message


def _find_mismatch_in_array(value, item_schema, field: str) -> str | None:
    if not isinstance(value, list):
        return _mismatch(field, "an array", value)
    for number, item in enumerate(value):
        message = find_mismatch(item, item_schema, f"{field}[{number}]")
        if message:
            return message
    return None


def _find_mismatch_in_object(value, schema: Each | dict, field: str) -> str | None:
    if not isinstance(value, dict):
        return _mismatch(field, "an object", value)
    if isinstance(schema, Each):
        schema = dict.fromkeys(value, schema.schema)
    # Missing fields first, which are the clearer message.
    for name, item_schema in schema.items():
        if name not in value and not isinstance(item_schema, Optional):
            return f"{_join(field, name)}: missing"
    for name, item_schema in schema.items():
        if name not in value:
            continue
        if isinstance(item_schema, Optional):
            item_schema = item_schema.schema
        message = find_mismatch(value[name], item_schema, _join(field, name))
        if message:
            return message
    return None


def _join(field: str, name: str) -> str:
    return f"{field}.{_shorten(name)}" if field else _shorten(name)


def _mismatch(field: str, expected: str, value) -> str:
    if isinstance(value, dict):
        actual = "an object"
    elif isinstance(value, list):
        actual = "an array"
    else:
        actual = _shorten(json.dumps(value))
    message = f"expected {expected}, found {actual}"
    return f"{field}: {message}" if field else message


def _shorten(text: str) -> str:
    return printable(text if len(text) <= 40 else f"{text[:40]}…")


def printable_values(value):
    """Returns a copy of a JSON value, without the control codes that its strings may contain."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): printable_values(item) for name, item in value.items()}
    if isinstance(value, list):
        return [printable_values(item) for item in value]
    return value
