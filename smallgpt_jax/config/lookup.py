"""Looks up what a config names: an entry of a table, or `package.module:name` of the user's."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from smallgpt_jax.errors import UserError, suggestion


def find_named(
    name: str, table: Mapping[str, Any], where: str, arguments: Sequence[str] | None = None
):
    """Returns the entry of `table`, or imports the function or class `package.module:name`, which
    must take the `arguments`, if these are given. UserErrors begin with `where`.
    """
    module, attribute = split_name(name)
    if not module:
        if str(name) not in table:
            raise UserError(
                f"{where}: must be one of {', '.join(table)}, or package.module:name"
                + suggestion(str(name), table)
            )
        return table[name]
    try:
        named = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{where}: no module {error.name!r}; run the command in the folder that contains it, "
            "or add that folder to PYTHONPATH"
        ) from None
    except AttributeError:
        raise UserError(
            f"{where}: the module {module} has no {attribute!r}; expected package.module:name"
        ) from None
    if arguments is not None:
        require_arguments(named, arguments, where)
    return named


def require_arguments(function, arguments: Sequence[str], where: str) -> None:
    """Raises UserError if `function` cannot be called with so many arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        raise UserError(
            f"{where}: must be callable with {len(arguments)} arguments "
            f"({', '.join(arguments)}); see docs/your-own.md"
        ) from None


def split_name(name) -> tuple[str, str]:
    """Returns the module and the name of custom code; ("", "") for an entry of a table."""
    module, colon, attribute = str(name).partition(":")
    is_custom = bool(module and colon) and not module.startswith(".")
    return (module, attribute) if is_custom else ("", "")
