"""The Python interface as notebooks use it: the README's example, interruptions, and the cells of
docs/colab.ipynb.
"""

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time

import pytest
from conftest import ROOT, call
from run_helpers import SMALL, flags_of

import smallgpt_jax
from smallgpt_jax.config import recipes
from smallgpt_jax.run.names import METRICS_FILE
from smallgpt_jax.training import trained_run
from smallgpt_jax.training.program import Program

SHELL = re.compile(
    r"^( *)(\w+ = )?!(.+)$", re.MULTILINE
)  # a line for the shell, in the syntax of notebooks
OTHER = re.compile(r"^(%cd|from IPython).+$", re.MULTILINE)  # lines that are left out
FIELDS = {name.replace("__", "."): value for name, value in SMALL.items()}


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
                arguments += flags_of(SMALL)
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


@pytest.mark.slow
def test_the_example_in_the_readme(text_file, tmp_path, monkeypatch):
    """With a tiny model, and 2 steps for 500. The command `generate` prints the same text."""
    pytest.importorskip("safetensors", reason="needs safetensors (extra hf)")
    monkeypatch.chdir(tmp_path)
    steps, printed = [], []

    def load_small(config, overrides=None):
        loaded = recipes.load_config(
            config.replace("quickstart", "tiny"),
            {**FIELDS, "train.log_every": 1, **(overrides or {})},
        )
        loaded.data.source = str(text_file)
        loaded.train.steps = 4 if overrides else 2
        steps.append(loaded.train.steps)
        return loaded

    monkeypatch.setattr(trained_run, "load_config", load_small)
    example = re.search(
        r"```python\n(import smallgpt_jax\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )[1]
    assert len(example.strip().splitlines()) <= 11
    names = {"print": lambda *values: printed.append(values)}
    example = example.replace("runs/pgpt-quickstart", "runs/pgpt-tiny")
    exec(example.replace("top_k=40", "top_k=40, max_new_tokens=8"), names)

    run = names["run"]
    assert steps == [2, 4] and run.step == 4 and run.config.model.architecture == "pgpt"
    lines = [json.loads(line) for line in (run.workdir / METRICS_FILE).open()]
    assert run.metrics == lines and run.validation_loss == lines[-1]["loss"]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 3, 4]
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    (loss, last_line), (text,), (texts,), (exported,) = printed
    assert loss == last_line["loss"] == lines[2]["loss"]  # before the run was trained further
    assert [len(continuations) for continuations in texts] == [2, 2]
    assert exported.startswith("pgpt of step 4, ") and (tmp_path / "exported/from-python").is_dir()
    command = call(
        "generate",
        "--workdir=runs/pgpt-tiny",
        "--prompt=def main(",
        "--temperature=0.5",
        "--top_k=40",
        "--max_new_tokens=8",
        cwd=tmp_path,
    )
    assert command.stdout == f"{text}\n"


def interrupt_after(condition) -> None:
    """Sends Ctrl-C to this process, as a notebook's button does."""

    def wait():
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_an_interrupted_cell(text_file, tmp_path, capsys):
    """The run is saved, the process lives, and the same call resumes. A notebook shows one line."""
    metrics = tmp_path / "run" / METRICS_FILE
    interrupt_after(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
    fields = {
        **FIELDS,
        "train.log_every": 1,
        "data.source": str(text_file),
        "train.eval_every": 10**6,
    }
    with pytest.raises(smallgpt_jax.StoppedError) as stopped:
        smallgpt_jax.train("gpt:tiny", tmp_path / "run", {**fields, "train.steps": 10**6})
    step = smallgpt_jax.TrainedRun(tmp_path / "run").step
    assert stopped.value._render_traceback_() == [
        f"stopped after step {step} and saved; rerun the same command to resume"
    ]
    assert not isinstance(stopped.value, Exception)  # so that a loop over runs ends, too
    run = smallgpt_jax.train("gpt:tiny", tmp_path / "run", {**fields, "train.steps": step + 2})
    assert run.step == step + 2 and f"{step} done" in capsys.readouterr().out


@pytest.mark.slow
def test_an_interrupted_compilation(text_file, tmp_path, monkeypatch):
    """There is nothing to save. The workdir is free again."""

    def compile_for_minutes(program):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    fields = {**FIELDS, "data.source": str(text_file), "train.steps": 2}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Program, "start_compilation", compile_for_minutes)
        smallgpt_jax.train("gpt:tiny", tmp_path / "run", fields)
    assert smallgpt_jax.train("gpt:tiny", tmp_path / "run", fields).step == 2
