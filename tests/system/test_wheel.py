"""Tests of a wheel that is installed into an empty folder and used in another empty folder, without
the clone.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT, XLA_FLAGS
from run_helpers import SMALL, flags_of

from smallgpt_jax import __main__ as package
from smallgpt_jax import __version__

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("pip") is None or importlib.util.find_spec("setuptools") is None,
        reason="needs pip and setuptools to build a wheel without a network",
    ),
]


def pip(command: str, *arguments) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            command,
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Returns the folder of an installed wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"  # a copy, because setuptools writes build/ beside setup.py
    for name in ("smallgpt_jax", "configs"):
        shutil.copytree(ROOT / name, sources / name)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    # pip builds a wheel and installs it
    target = f"--target={folder / 'installed'}"
    pip("install", "--no-compile", "--no-build-isolation", target, sources)
    return folder / "installed"


def run_installed(installed: Path, *command, cwd: Path) -> str:
    """Runs Python with the wheel and its dependencies, but without the clone; returns what it
    prints.

    `-S` ignores the .pth files of site-packages, which make a clone importable after `pip install
    -e`.
    """
    path = os.pathsep.join(
        [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    )
    done = subprocess.run(
        [sys.executable, "-S", *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": XLA_FLAGS.format(devices=1)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trains_and_generates_in_an_empty_folder(installed, text_file, tmp_path):
    """The script finds the installed recipe, and, like `python -m`, modules in the working
    directory.
    """
    (tmp_path / "mine.py").write_text(
        "def flat(config):\n    return lambda step: config.learning_rate + 0 * step\n"
    )
    scripts = installed / "bin"
    output = run_installed(
        installed,
        scripts / "smallgpt-train",
        "--config=gpt:tiny",
        "--workdir=run",
        "--config.train.steps=2",
        *flags_of(SMALL),
        f"--config.data.source={text_file}",
        "--config.optimizer.schedule=mine:flat",
        cwd=tmp_path,
    )
    assert "step 2/2" in output
    session = json.loads((tmp_path / "run" / "sessions.jsonl").read_text())
    assert session["versions"]["smallgpt_jax"] == __version__ and "commit" not in session
    text = run_installed(
        installed,
        scripts / "smallgpt-generate",
        "--workdir=run",
        "--prompt=the cat",
        "--max_new_tokens=2",
        cwd=tmp_path,
    )
    assert text.startswith("the cat")


LOAD = """
import runpy, sys
from smallgpt_jax.config import recipes
recipes.make_importable()
for value in sys.argv[1:]:
    config = runpy.run_path(recipes.find_recipe(value))["get_config"]("tiny")
    print(config.model.architecture, config.get("compare", {}).get("names", ""))
"""


@pytest.mark.parametrize("own_file", ["configs/mine.py", "configs/__init__.py", "configs.py"])
def test_recipes_import_configs(installed, own_file, tmp_path):
    """Shipped recipes and a user's recipe are loaded, even if the working directory has its own
    `configs`.
    """
    (tmp_path / "own.py").write_text(
        "from configs import base\n\ndef get_config(size):\n"
        "    config = base.get_config(size)\n    config.model.architecture = 'own'\n"
        "    return config\n"
    )
    (tmp_path / own_file).parent.mkdir(exist_ok=True)
    (tmp_path / own_file).touch()
    output = run_installed(installed, "-c", LOAD, "pgpt", "compare/paper", "own.py", cwd=tmp_path)
    assert output.splitlines() == ["pgpt ", "gpt gpt,pgpt,lgpt,cgpt", "own "]


def test_every_command_has_a_script(installed):
    commands = {"train" if command == "main" else command: command for command in package.COMMANDS}
    assert {path.name for path in (installed / "bin").iterdir()} == {
        f"smallgpt-{name}" for name in commands
    }
    assert {name: getattr(package, name).args[0] for name in commands} == commands
