"""The recipes that come with the package: lookup by name, and imports of `configs`.

In a clone, the recipes are in the folder configs/. A wheel contains a copy of that folder beside
this file (setup.py).
"""

import difflib
import importlib
import sys
from pathlib import Path

from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.paths import refuse_url

INSTALLED = Path(__file__).parent / "configs"
FOLDER = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


def find_recipe(value: str) -> str:
    """Returns a value of --config with the name of a recipe replaced by its path: gpt:tiny →
    FOLDER/gpt.py:tiny.
    """
    refuse_url("--config", value)
    name, colon, argument = value.partition(":")
    if Path(name).is_file():
        return value
    shipped = recipes_in(FOLDER)
    if name in shipped:
        return f"{shipped[name]}{colon}{argument}"
    is_path = name.endswith(".py")
    known = {Path(shipped_name).name: shipped_name for shipped_name in shipped}
    if is_path:
        known |= {path.stem: str(path) for path in recipes_in(Path("configs")).values()}
    near = difflib.get_close_matches(Path(name).stem, known, n=1)
    raise UserError(
        f"--config: no {'file' if is_path else 'recipe or file'} {name!r}"
        + (f"; did you mean {known[near[0]]}{colon}{argument}?" if near else "")
    )


def recipes_in(folder: Path) -> dict[str, Path]:
    """Returns {"gpt": …, "compare/paper": …}."""
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.py"))
        if path.stem not in ("base", "__init__")
    }


def make_importable() -> None:
    """Lets recipes import `configs.base`. A configs/ in the working directory takes precedence over
    FOLDER.
    """
    if str(FOLDER.parent) not in sys.path:
        sys.path.append(str(FOLDER.parent))
    configs = importlib.import_module("configs")
    folders = list(getattr(configs, "__path__", ()))
    if (
        str(FOLDER) not in folders
    ):  # another configs/ has an __init__.py, so Python searches only there
        configs.__path__ = [*folders, str(FOLDER)]
