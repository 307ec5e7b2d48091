"""Tests of recipes by name, and of the software that sessions.jsonl records."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from ml_collections import ConfigDict, FrozenConfigDict
from run_helpers import SMALL

from configs.compare import base
from smallgpt_jax import __version__
from smallgpt_jax.config import recipes
from smallgpt_jax.errors import UserError
from smallgpt_jax.run import provenance
from smallgpt_jax.run.config import Config


@pytest.mark.parametrize(
    "value, expected",
    [
        ("gpt", f"{ROOT}/configs/gpt.py"),
        ("gpt:tiny", f"{ROOT}/configs/gpt.py:tiny"),
        ("compare/paper:tiny", f"{ROOT}/configs/compare/paper.py:tiny"),
        ("run:runs/a:b", f"{ROOT}/configs/run.py:runs/a:b"),
        ("mine.py:tiny", "mine.py:tiny"),
        ("lgpt:tiny", "lgpt:tiny"),  # a file in the working directory
    ],
)
def test_a_name_is_a_recipe_and_a_path_is_a_file(value, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "lgpt").touch()
    (tmp_path / "gpt").mkdir()  # a folder is not a recipe
    assert recipes.find_recipe(value) == expected


@pytest.mark.parametrize("form", [ConfigDict, ConfigDict.to_dict])
@pytest.mark.parametrize(
    "overrides",
    [{"runs.gpt@0.2M.train.steps": 7}, {"runs": {"gpt@0.2M": {"train": {"steps": 7}}}}],
)
def test_overrides_of_a_run_whose_name_has_a_dot(form, overrides):
    comparison = base.comparison(recipes.load_config("gpt:tiny"), {"gpt@0.2M": {}, "gpt@0": {}})
    given = comparison if form is ConfigDict else form(comparison)
    loaded = recipes.load_config(given, overrides)
    assert loaded.runs["gpt@0.2M"].train.steps == 7
    assert loaded.runs["gpt@0"].train.steps is None is comparison.runs["gpt@0.2M"].train.steps
    with pytest.raises(UserError, match=r"config\.runs\.gpt@0\.2M\.trian: no such field"):
        recipes.load_config(comparison, {"runs.gpt@0.2M.trian.steps": 7})


def test_overrides_of_a_recipe(tmp_path):
    """Nested or by names, of any type that the field accepts; fields that depend on them follow."""
    rate = ConfigDict({"learning_rate": 1})
    overrides = {"train.steps": 7, "optimizer": rate, "train.kept_steps": [3, 4]}
    loaded = recipes.load_config("pgpt:tiny", overrides)
    config = Config.of(loaded)
    assert (config.train.steps, config.optimizer.decay_steps) == (7, 7)
    assert (config.optimizer.learning_rate, config.train.kept_steps) == (1.0, (3, 4))
    assert config.model.architecture == "pgpt"
    again = recipes.load_config(FrozenConfigDict(loaded), {"train.steps": 8})
    assert (loaded.train.steps, again.train.steps, again.optimizer.learning_rate) == (7, 8, 1)
    assert recipes.load_config({"train": {"seed": 1}}, {"data.source": "x"}).to_dict() == {
        "train": {"seed": 1},
        "data": {"source": "x"},
    }
    (tmp_path / "own.py").write_text(
        "from ml_collections import ConfigDict, FieldReference\nwidth = FieldReference(8)\n"
        "def get_config(): return ConfigDict({'model': {'d_model': width, 'head_dim': width * 2}})\n"
    )
    own = recipes.load_config(f"{tmp_path}/own.py", {"model.d_model": 16})
    assert own.to_dict() == {"model": {"d_model": 16, "head_dim": 32}}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"train.step": 3}, "config.train.step: no such field; did you mean 'steps'?"),
        ({"trian.steps": 3}, "config.trian: no such field; did you mean 'train'?"),
        ({"train": 3}, "config.train: is a group of fields"),
        ({"train.steps.x": 3}, "config.train.steps: is a field"),
        ({"train.steps": "many"}, "config.train.steps='many': must be an integer"),
        (
            {"model": {"num_layer": 3}},
            "config.model.num_layer=3: gpt has no such field; did you mean 'num_layers'?",
        ),
    ],
)
def test_wrong_overrides(overrides, message):
    with pytest.raises(UserError) as error:
        Config.of(recipes.load_config("gpt:tiny", overrides))
    assert str(error.value) == message


def test_the_config_of_a_run_is_a_config():
    config = Config.of(recipes.load_config("gpt:tiny"))
    changed = recipes.load_config(config, {"train.steps": 7})
    assert Config.of(changed) == config.replace(train={"steps": 7})


def test_a_comparison_is_not_a_run():
    with pytest.raises(UserError, match=r"is a comparison, .* with smallgpt_jax.compare$"):
        Config.of(recipes.load_config("compare/paper:tiny"))


@pytest.mark.parametrize(
    "value, message",
    [
        ("configs/gpt.py:tiny", "no file 'configs/gpt.py'; did you mean gpt:tiny?"),
        ("my/own.py", "no file 'my/own.py'; did you mean configs/owns.py?"),
        ("compare/papr", "no recipe or file 'compare/papr'; did you mean compare/paper?"),
        ("base:tiny", "no recipe or file 'base'"),
        ("", "no recipe or file ''"),
    ],
)
def test_missing_recipes(value, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "owns.py").touch()
    with pytest.raises(UserError) as error:
        recipes.find_recipe(value)
    assert str(error.value) == f"--config: {message}"


BESIDE_OTHER_CONFIGS = """
from configs import base
import smallgpt_jax
from smallgpt_jax.config.recipes import load_config

config = load_config("compare/paper:tiny")
mine = load_config("configs/mine.py")
import configs.base
print(len(config.runs), mine.rate, base.RATE, configs.base is base)
"""


def test_shipped_recipes_beside_the_configs_of_another_program(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.py").write_text("RATE = 0.5\n")
    (tmp_path / "configs" / "mine.py").write_text(
        "from configs import base\nfrom ml_collections import ConfigDict\n\n"
        "def get_config():\n    return ConfigDict({'rate': base.RATE})\n"
    )

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    assert run("-c", BESIDE_OTHER_CONFIGS) == "4 0.5 0.5 True\n"
    command = ("-m", "smallgpt_jax.main", "--config=gpt:tiny", "--workdir=out")
    assert "expected an integer" in run(*command, "--config.train.steps=many")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_clone(tmp_path):
    def git(*arguments) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    assert provenance.commit_of(tmp_path) == {}
    git("init")
    assert provenance.commit_of(tmp_path) == {}  # no commit yet
    (tmp_path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "--message=Begin")
    git("tag", "--annotate", "--message=1", "v1")
    head = git("rev-parse", "HEAD")
    (tmp_path / "untracked.txt").touch()
    assert provenance.commit_of(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "code.py").write_text("2\n")
    assert provenance.commit_of(tmp_path) == {"commit": head, "dirty": True}
    (tmp_path / "environment").mkdir()  # such as .venv, with an installed package
    assert provenance.commit_of(tmp_path / "environment") == {}


@pytest.mark.slow
def test_a_run_records_its_software(trained_run):
    session = json.loads(
        (trained_run("gpt", **SMALL) / "sessions.jsonl").read_text().splitlines()[-1]
    )
    assert session["versions"]["smallgpt_jax"] == __version__ and "jax" in session["versions"]
    if (ROOT / ".git").exists() and shutil.which("git"):
        assert len(session["commit"]) == 40 and isinstance(session["dirty"], bool)
