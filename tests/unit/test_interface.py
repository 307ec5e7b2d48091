"""The names of the package, which are imported when they are first used."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

import smallgpt_jax
from smallgpt_jax import inference
from smallgpt_jax.__main__ import COMMANDS

FUNCTIONS = ("train", "prepare", "load", "evaluate", "export", "import_", "plan", "diagnose")


def run_python(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_the_package_imports_neither_jax_nor_flags():
    """The names are known all the same."""
    code = (
        "import sys, smallgpt_jax; assert 'train' in dir(smallgpt_jax); "
        "print(*{'jax', 'absl', 'numpy', 'ml_collections'} & sys.modules.keys(), "
        "*(name for name in sys.modules if name.startswith('smallgpt_jax')))"
    )
    assert run_python("-c", code).stdout == "smallgpt_jax\n"


def test_every_public_name():
    assert set(FUNCTIONS) <= set(smallgpt_jax.__all__) <= set(dir(smallgpt_jax))
    tree = ast.parse(Path(smallgpt_jax.__file__).read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    for_checkers = {node.names[0].asname: node.module for node in typed.body}
    assert for_checkers.keys() == set(smallgpt_jax.__all__)
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ty"]["src"]["include"]
    for name, module in for_checkers.items():
        file = importlib.util.find_spec(module).origin
        assert Path(file).relative_to(ROOT).as_posix() in checked
        assert getattr(smallgpt_jax, name) is getattr(importlib.import_module(module), name)
        assert inspect.getdoc(getattr(smallgpt_jax, name))
    for name in FUNCTIONS:
        assert len(inspect.signature(getattr(smallgpt_jax, name)).parameters) <= 6
    assert smallgpt_jax.inference is inference
    with pytest.raises(AttributeError, match="module 'smallgpt_jax' has no attribute 'trian'"):
        smallgpt_jax.trian  # noqa: B018


@pytest.mark.parametrize(
    "name, call",
    [
        ("labels", lambda: smallgpt_jax.ExampleFile("a.jsonl", labels=" yes, no")),
        ("metrics", lambda: smallgpt_jax.ExampleFile("a.jsonl", metrics="accuracy")),
        ("tasks", lambda: smallgpt_jax.Benchmarks(tasks="paper")),
        ("workdirs", lambda: smallgpt_jax.compare_runs("runs/a", "out")),
        ("results", lambda: smallgpt_jax.merge_results("a.json", "out")),
        ("texts", lambda: smallgpt_jax.diagnose("runs/a", "b.txt")),
        ("models", lambda: smallgpt_jax.choose_next("docs/results/scaling.json", models="gpt")),
    ],
)
def test_a_text_in_place_of_a_list(name, call, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(smallgpt_jax.UserError, match=f"^{name}='.*': expected a list$"):
        call()


@pytest.mark.slow
def test_a_command_does_not_take_the_place_of_its_function():
    code = "import smallgpt_jax.prepare as function; print(function.__module__, function.__name__)"
    assert run_python("-c", code).stdout == "smallgpt_jax.data.corpus prepare\n"


@pytest.mark.parametrize("command", ["smallgpt_jax.main", "smallgpt_jax"])
def test_a_command_typed_without_the_environment(command):
    result = run_python("-S", "-m", command)  # without site-packages
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith(f"error: {sys.executable} has no JAX; ")
    assert result.stderr.count("\n") == 1


def test_flags_are_read_in_main_alone():
    """Functions take values. The module cli parses the flags of all commands."""
    reads, defined = [], []
    for command in COMMANDS:
        tree = ast.parse((Path(smallgpt_jax.__file__).parent / f"{command}.py").read_text())
        flag_names = set()
        for node in tree.body:
            if isinstance(node, ast.Assign) and re.match(
                r"flags\.DEFINE_|cli\.define_", ast.unparse(node.value)
            ):
                flag_names |= {target.id for target in node.targets}
        for function in tree.body:
            if not isinstance(function, ast.FunctionDef) or function.name == "main":
                continue
            for node in ast.walk(function):
                is_flag = isinstance(node, ast.Name) and node.id in flag_names
                if is_flag or (
                    isinstance(node, ast.Attribute) and node.attr in ("FLAGS", "present")
                ):
                    reads.append((command, function.name, node.lineno))
        defined += flag_names
    assert reads == [] and len(defined) > 70
