"""Tests of the documentation: links lead to existing files and headings."""

import re
import runpy

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: str) -> set[str]:
    """Returns the anchors of the headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    }


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links(path):
    text = re.sub(
        r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
    )  # without code
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith("http"):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text()), target


def test_the_list_of_modules_is_current():
    """After a change of a module's docstring: python docs/tree.py."""
    tree = runpy.run_path(str(ROOT / "docs" / "tree.py"))
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page == tree["with_modules"](page)
