"""experiments/together.py: runs that are trained in one program have the losses of separate runs."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, load_config
from ml_collections import ConfigDict
from run_helpers import SMALL

from configs.compare import base
from smallgpt_jax.comparison.comparing import TrainedComparison, compare
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE
from smallgpt_jax.training.trainer import train_and_evaluate

sys.path.insert(0, str(ROOT / "experiments"))
import together

pytestmark = pytest.mark.slow


def comparison(text_file) -> ConfigDict:
    """Returns two learning rates with two seeds each, and a checkpoint before the last step."""
    common = load_config(
        "gpt",
        **SMALL,
        data__source=str(text_file),
        train__steps=40,
        train__eval_every=20,
        train__log_every=20,
        train__eval_steps=2,
        train__batch_size=8,
        train__kept_steps=(20,),
    )
    rates = {f"rate {rate}": {"optimizer": {"learning_rate": rate}} for rate in (0.001, 0.01)}
    return base.comparison(
        common, rates, budget="own", reference="rate 0.001", seeds=2, decoding=False
    )


def losses(folder: Path) -> dict[str, float]:
    lines = read_lines(folder / METRICS_FILE)
    return {
        f"{line['split']} {line['step']} {key}": line[key]
        for line in lines
        for key in ("loss", "loss_mean")
        if key in line
    }


def test_the_losses_are_those_of_separate_runs(text_file, tmp_path):
    config = comparison(text_file)
    together.train_missing(config, tmp_path)
    runs = TrainedComparison(config, tmp_path, (), "").outcomes.comparison.runs({})
    assert len({losses(run.folder)["eval 40 loss"] for run in runs}) == 4
    for run in (runs[0], runs[-1]):  # of other rates and seeds
        alone = tmp_path / "alone" / run.folder.name
        train_and_evaluate(run.config, alone)
        assert losses(run.folder) == pytest.approx(losses(alone), abs=1e-4)
        assert saved_steps(run.folder / CHECKPOINT_FOLDER) == [20, 40]

    # Neither trains again what is there.
    before = {run.folder: (run.folder / METRICS_FILE).stat().st_mtime_ns for run in runs}
    together.train_missing(config, tmp_path)
    compare(config, tmp_path)
    assert before == {folder: (folder / METRICS_FILE).stat().st_mtime_ns for folder in before}


def test_programs_keep_the_reference_of_the_budget(tmp_path, monkeypatch):
    commands = []

    def run(command, stdout, stderr):
        commands.append(command)
        return SimpleNamespace(returncode=int("b/2" in command[-1]))

    monkeypatch.setattr(together, "_OUTPUT", SimpleNamespace(value=str(tmp_path)))
    monkeypatch.setattr(together, "_PROGRAMS", SimpleNamespace(value=2))
    monkeypatch.setattr(together.subprocess, "run", run)
    with pytest.raises(UserError, match=r": b/2 failed; the \.log files say why"):
        together.train_in_programs(["a", "b/2"])
    own = {tuple(argument for argument in command if "compare" in argument) for command in commands}
    assert own == {("--config.compare.names=a",), ("--config.compare.names=b/2",)}
    assert {path.name for path in tmp_path.iterdir()} == {"a.log", "b_2.log"}


def test_an_unfinished_run_is_refused(text_file, tmp_path):
    (tmp_path / "runs" / "rate_0.001-seed1337").mkdir(parents=True)
    with pytest.raises(UserError, match="is unfinished; train on with compare"):
        together.train_missing(comparison(text_file), tmp_path)
