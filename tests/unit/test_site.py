"""The documentation site is built without a warning, and shows the files that its pages link to."""

import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip(
    "mkdocs", reason="needs mkdocs: pip install -c docs/constraints.txt -e '.[docs]'"
)


def build_site(folder, *arguments):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_the_site_is_complete(tmp_path):
    result = build_site(tmp_path / "site")
    assert result.returncode == 0, result.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    assert "make quickstart" in home
    recipe = tmp_path / "site" / "source" / "configs" / "pgpt.py" / "index.html"
    assert "ParallelGPT" in recipe.read_text()
    assert "load" in (tmp_path / "site" / "reference" / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("link", ["missing.md", "index.md#missing"])
def test_a_broken_link_fails(tmp_path, link):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n[text]({link})\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\n"
        f"docs_dir: {tmp_path / 'docs'}\n"
        "nav: [index.md]\nhooks: []\nplugins: [search]\n"
    )
    result = build_site(tmp_path / "site", f"--config-file={config}")
    assert result.returncode != 0 and link in result.stderr
