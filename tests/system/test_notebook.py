"""Runs the cells of docs/colab.ipynb on the CPU, with tiny models."""

import json
import re
import shlex
import shutil

import pytest
from conftest import ROOT, call

SHELL = re.compile(
    r"^( *)(\w+ = )?!(.+)$", re.MULTILINE
)  # a line for the shell, in the syntax of notebooks
OTHER = re.compile(r"^(%cd|from IPython).+$", re.MULTILINE)  # lines that are left out


@pytest.mark.slow
@pytest.mark.draws
def test_the_cells_of_the_notebook(text_file, tmp_path, monkeypatch):
    """Trains, plots, generates and exports. Downloads and installations are not run; plans have
    tests of their own.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)  # no GPU
    ran, shown = [], []

    def shell(command: str) -> None:
        program, *arguments = shlex.split(command)
        ran.append(program if program != "python" else arguments[1])
        if ran[-1] in ("smallgpt_jax.main", "smallgpt_jax.generate", "smallgpt_jax.convert"):
            arguments = [argument.replace(":quickstart", ":tiny") for argument in arguments]
            if any("--config=" in argument for argument in arguments):
                arguments.append(f"--config.data.source={text_file}")
            result = call(arguments[1].removeprefix("smallgpt_jax."), *arguments[2:], cwd=tmp_path)
            assert result.returncode == 0, result.stderr

    names = {"shell": shell, "Image": shown.append}
    for cell in json.loads((ROOT / "docs" / "colab.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(SHELL.sub(r"\1\2shell(f'''\3''')", OTHER.sub("", "".join(cell["source"]))), names)
    assert ran == [
        "git",
        "pip",
        *(f"smallgpt_jax.{name}" for name in ("plan", "main", "generate", "convert")),
    ]
    assert shown == ["runs/colab/curves.png"] and (tmp_path / shown[0]).stat().st_size > 1000
    assert (tmp_path / "exported" / "colab.zip").stat().st_size > 1000
