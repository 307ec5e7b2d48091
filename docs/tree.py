"""Writes the list of modules in docs/architecture.md: each with the first sentence of its docstring.

python docs/tree.py
"""

import ast
import re
from pathlib import Path

from smallgpt_jax.storage.atomic import write_atomically

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules -->\n", "<!-- end of modules -->\n"


def module_lists() -> str:
    """Returns one list per folder of the package, in the order of the page's folders."""
    package = ROOT / "smallgpt_jax"
    folders = sorted({path.parent for path in package.rglob("*.py")})
    return "".join(f"\n{module_list(folder)}" for folder in folders if documented(folder))


def module_list(folder: Path) -> str:
    name = folder.relative_to(ROOT).as_posix()
    lines = [f"- `{path.name}`: {sentence}" for path, sentence in documented(folder).items()]
    return "\n".join([f"### {name}/", "", *lines, ""])


def documented(folder: Path) -> dict[Path, str]:
    """Returns {module: first sentence of its docstring}."""
    docstrings = {path: docstring(path) for path in sorted(folder.glob("*.py"))}
    return {
        path: first_sentence(text)
        for path, text in docstrings.items()
        if text and path.name != "__init__.py"
    }


def docstring(path: Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text()))


def first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[\w)\]`]\.)\s", paragraph)[0].rstrip(".:")


def with_modules(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + module_lists() + "\n" + END + after


if __name__ == "__main__":
    write_atomically(PAGE, with_modules(PAGE.read_text()))
