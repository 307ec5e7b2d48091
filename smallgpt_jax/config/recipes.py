"""The recipes that come with the package: lookup by name, and imports of `configs`.

In a clone, the recipes are in the folder configs/. A wheel contains a copy of that folder beside
this file (setup.py).
"""

import contextlib
import copy
import difflib
import importlib
import importlib.util
import sys
import types
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ml_collections import ConfigDict, FrozenConfigDict

from smallgpt_jax.errors import UserError, suggestion
from smallgpt_jax.storage.paths import refuse_url

_INSTALLED = Path(__file__).parent / "configs"
# A recipe chooses its text, vocabulary and context by the size before any field is set.
SIZE_IS_NAMED = "config.train.size: is named with the recipe, such as llama:30M; remove the field"
FOLDER = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


class RunConfig(Protocol):
    """The config of a run, `run.config.Config`."""

    def to_dict(self) -> dict[str, Any]: ...


# a recipe, as in --config; groups of fields; or the config of a run
ConfigLike: TypeAlias = str | Mapping[str, Any] | RunConfig


def load_config(config: ConfigLike, overrides: Mapping[str, Any] | None = None) -> ConfigDict:
    """Returns a copy of a config with other values.

    `overrides` are nested, like the config, or have names such as "train.steps". Their types and
    values are checked where the config is used. Raises UserError for an unknown recipe, group or
    field.
    """
    if isinstance(config, str):
        loaded = _read_recipe(config)
    elif isinstance(config, ConfigDict):
        is_frozen = isinstance(config, FrozenConfigDict)
        thawed = config.as_configdict() if is_frozen else config
        loaded = thawed.copy_and_resolve_references()
    else:
        groups = config if isinstance(config, Mapping) else config.to_dict()
        # names of runs may have dots, such as gpt@0.2M
        loaded = ConfigDict(copy.deepcopy(dict(groups)), allow_dotted_keys=True)
    with loaded.ignore_type():
        _override(loaded, overrides or {}, "config")
    return loaded


def _read_recipe(value: str) -> ConfigDict:
    """Returns the config of a recipe, as in --config: gpt, gpt:tiny, configs/gpt.py, run:WORKDIR."""
    located = find_recipe(value)
    path, colon, argument = located.partition(":")
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_recipe", path)
    assert spec and spec.loader  # the path is that of a Python file
    recipe = importlib.util.module_from_spec(spec)
    with imports_of(located):
        spec.loader.exec_module(recipe)
        return recipe.get_config(argument) if colon else recipe.get_config()


def _override(fields: ConfigDict, overrides: Mapping[str, Any], where: str) -> None:
    for path, value in overrides.items():
        if isinstance(value, ConfigDict):
            value = value.to_dict()
        name = _first_name(path, fields)
        rest = path[len(name) + 1 :]
        # A group that is not locked, such as `model`, may get further fields.
        if name not in fields and fields.is_locked:
            raise UserError(f"{where}.{name}: no such field{suggestion(name, fields)}")
        if rest:
            value = {rest: value}
        if f"{where}.{name}" == "config.train.size" and value != fields.get(name):
            raise UserError(SIZE_IS_NAMED)
        is_group = isinstance(fields.get(name), ConfigDict)
        if name in fields and is_group != isinstance(value, Mapping):
            kind = "a group of fields" if is_group else "a field"
            raise UserError(f"{where}.{name}: is {kind}")
        if not isinstance(value, Mapping):
            fields[name] = value
            continue
        if name not in fields:
            fields[name] = ConfigDict()
        _override(fields[name], value, f"{where}.{name}")


def _first_name(path: str, fields: ConfigDict) -> str:
    """Returns the group or field that a name such as "train.steps" begins with."""
    # Names of runs may have dots: runs.gpt@0.2M.train.steps
    names = [name for name in fields if path == name or path.startswith(f"{name}.")]
    return max(names, key=len, default=path.partition(".")[0])


def find_recipe(value: str) -> str:
    """Replaces the name of a recipe in a value of --config: gpt:tiny → FOLDER/gpt.py:tiny."""
    refuse_url("--config", value)
    name, colon, argument = value.partition(":")
    if Path(name).is_file():
        return value
    shipped = _recipes_in(FOLDER)
    if name in shipped:
        return f"{shipped[name]}{colon}{argument}"
    # misspelt: what is near may be written as "compare/paper" or, of the user's own, "configs/my.py"
    spelling_of = {recipe.rpartition("/")[2]: recipe for recipe in shipped}
    is_path = name.endswith(".py")
    if is_path:  # without ".py", the user's own recipes are not found
        spelling_of |= {path.stem: str(path) for path in _recipes_in(Path("configs")).values()}
    near = difflib.get_close_matches(Path(name).stem, spelling_of, n=1)
    kind = "file" if is_path else "recipe or file"
    hint = f"; did you mean {spelling_of[near[0]]}{colon}{argument}?" if near else ""
    raise UserError(f"--config: no {kind} {name!r}{hint}")


def _recipes_in(folder: Path) -> dict[str, Path]:
    """Returns {"gpt": …, "compare/paper": …}."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.py"))
        if path.stem not in ("base", "__init__")
    }


@contextlib.contextmanager
def imports_of(recipe: str) -> Generator[None]:
    """Lets a recipe import `configs.base` while it is read: a user's recipe from configs/ in the
    working directory, if it has a base.py. That may be of a program with other configs, so the
    shipped recipes import theirs. `recipe` is a result of `find_recipe`.
    """
    make_importable()
    base, shipped = importlib.util.find_spec("configs.base"), FOLDER.resolve()
    is_shipped = Path(recipe.partition(":")[0]).resolve().is_relative_to(shipped)
    if not is_shipped or (base and base.origin and Path(base.origin).resolve().parent == shipped):
        yield
        return
    others = _without_configs()
    sys.modules["configs"] = types.ModuleType("configs")
    sys.modules["configs"].__path__ = [str(FOLDER)]
    try:
        yield
    finally:
        _without_configs()
        sys.modules.update(others)


def _without_configs() -> dict[str, types.ModuleType]:
    """Removes the package `configs` from the imported modules, and returns what it has removed."""
    names = [name for name in sys.modules if name.partition(".")[0] == "configs"]
    return {name: sys.modules.pop(name) for name in names}


def make_importable() -> None:
    """Makes `configs` importable, also where another `configs` hides that of FOLDER."""
    if str(FOLDER.parent) not in sys.path:
        sys.path.append(str(FOLDER.parent))
    configs = importlib.import_module("configs")
    folders = list(getattr(configs, "__path__", ()))
    # If another configs/ has an __init__.py, Python searches only there.
    if str(FOLDER) not in folders:
        configs.__path__ = [*folders, str(FOLDER)]
