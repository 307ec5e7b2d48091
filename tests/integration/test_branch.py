"""Tests of runs that start from a trunk: exactness, crashes, refused trunks."""

import json
import shutil

import pytest
from run_helpers import SMALL, assert_equal, config_for, losses_in, read_untimed_metrics, state_of

from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE
from smallgpt_jax.run.sessions import read_sessions
from smallgpt_jax.run.workdir import initialize_workdir
from smallgpt_jax.training.branch import Branch, open_branch
from smallgpt_jax.training.trainer import train_and_evaluate

# log_every does not divide the steps of the checkpoints, so these contain losses that are not
# logged yet.
FIELDS = {
    **SMALL,
    "optimizer__schedule": "wsd",
    "optimizer__warmup_steps": 2,
    "optimizer__decay_fraction": 0.25,
    "train__log_every": 5,
    "train__eval_every": 5,
    "train__eval_steps": 1,
    "train__checkpoint_every": 4,
    "train__keep_checkpoints": 1,
}


@pytest.mark.slow
def test_a_run_from_a_trunk_equals_one_trained_alone(text_file, tmp_path, capsys):
    """The trunk is stopped and resumed. Afterwards, the run no longer needs it."""
    trunk, alone, short = (tmp_path / name for name in ("trunk", "alone", "short"))
    for stop in (10, 24):
        train_and_evaluate(
            config_for(
                text_file,
                **FIELDS,
                train__steps=stop,
                train__kept_steps=(6, 12),
                optimizer__decay_steps=24,
            ),
            str(trunk),
        )
    assert saved_steps(trunk / CHECKPOINT_FOLDER) == [6, 12, 24]
    config = config_for(text_file, **FIELDS, train__steps=16)
    train_and_evaluate(config, str(alone))
    capsys.readouterr()
    config.train.trunk = str(trunk)
    train_and_evaluate(config, str(short))
    assert ", 12 done" in capsys.readouterr().out and read_sessions(short)[0]["first_step"] == 12
    assert_equal(state_of(short, 16), state_of(alone, 16))
    assert read_untimed_metrics(short) == read_untimed_metrics(alone)
    assert list(losses_in(short, "eval")) == [5, 10, 15, 16]
    rates, others = (losses_in(folder, metric="learning_rate") for folder in (short, trunk))
    assert rates[10] == others[10] and rates[15] < others[15]  # only the short run decays there
    shutil.rmtree(trunk)
    train_and_evaluate(config, str(short))


@pytest.fixture
def trunk(text_file, tmp_path):
    """Returns the workdir of a run of 24 steps with a checkpoint of step 12, without training."""
    config, folder = Config.of(config_for(text_file, **FIELDS, train__steps=24)), tmp_path / "trunk"
    folder.mkdir()
    initialize_workdir(folder, config, load_or_prepare(config.data))
    (folder / METRICS_FILE).write_text(
        "".join(
            json.dumps({"step": step, "split": "train", "loss": 1.0}) + "\n"
            for step in (10, 12, 14)
        )
    )
    for step in (12, 24):
        (folder / CHECKPOINT_FOLDER / str(step)).mkdir(parents=True)
        (folder / CHECKPOINT_FOLDER / str(step) / "array").write_text(str(step))
    return folder


def short_config(text_file, trunk, **fields) -> Config:
    return Config.of(
        config_for(
            text_file, **{**FIELDS, "train__steps": 16, "train__trunk": str(trunk), **fields}
        )
    )


def test_an_interrupted_copy_is_repeated(text_file, trunk, tmp_path, monkeypatch):
    config, folder = short_config(text_file, trunk), tmp_path / "run"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "copytree", lambda source, target: (target.mkdir(parents=True), 1 / 0)
        )
        with pytest.raises(ZeroDivisionError):
            open_branch(folder, config).copy_to(folder)
    assert saved_steps(folder / CHECKPOINT_FOLDER) == []
    open_branch(folder, config).copy_to(folder)
    assert [path.name for path in (folder / CHECKPOINT_FOLDER).iterdir()] == ["12"]
    assert list(losses_in(folder)) == [10, 12]
    assert open_branch(folder, config) is None  # the run resumes from its own checkpoint
    (folder / CHECKPOINT_FOLDER / "12" / "array").write_text("own")
    Branch(trunk, 12).copy_to(folder)
    assert (folder / CHECKPOINT_FOLDER / "12" / "array").read_text() == "own"


def test_a_checkpoint_that_vanishes(text_file, trunk, tmp_path):
    (tmp_path / "run").mkdir()
    opened = open_branch(tmp_path / "run", short_config(text_file, trunk))
    shutil.rmtree(trunk / CHECKPOINT_FOLDER / "12")
    with pytest.raises(
        UserError, match=r"config.train.trunk='.*': step 12 could not be copied \(.*\); rerun"
    ):
        opened.copy_to(tmp_path / "run")
    assert saved_steps(tmp_path / "run" / CHECKPOINT_FOLDER) == []


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"model__d_model": 32},
            "has another config: model.d_model is 16 there, but 32 here; use the same settings",
        ),
        (
            {"optimizer__warmup_steps": 1},
            "has another config: optimizer.warmup_steps is 2 there, but 1 here",
        ),
        ({"optimizer__final_fraction": 0.2}, "has another config: optimizer.final_"),
        ({"train__seed": 1}, "train.seed is 1337 there, but 1 here"),
        (
            {"optimizer__schedule": "wsd_linear"},
            "optimizer.schedule is 'wsd' there, but 'wsd_linear' here",
        ),
        (
            {"optimizer__schedule": "cosine"},
            "config.optimizer.schedule='cosine': the runs of a trunk need a schedule with",
        ),
        (
            {"train__steps": 20},
            "has no checkpoint of step 15, where the decay of this run starts (it has steps 12, "
            "24); train the trunk with config.train.kept_steps=15",
        ),
        (
            {"train__steps": 32},
            "its decay starts at step 18, but the decay of this run at step 24; use a trunk with "
            "more",
        ),
        ({"optimizer__decay_steps": 40}, "the decay of this run would start at step 30 of 16"),
        (
            {"train__trunk": "nowhere"},
            "config.train.trunk='nowhere': not a run; give the workdir of a run",
        ),
    ],
)
def test_refused_trunks(fields, message, text_file, trunk, tmp_path):
    with pytest.raises(UserError) as refused:
        open_branch(tmp_path / "run", short_config(text_file, trunk, **fields))
    assert message in str(refused.value) and "\n" not in str(refused.value), refused.value


def test_accepted_differences(text_file, trunk, tmp_path):
    """Fields of a machine may differ, and so may those of the decay."""
    config = short_config(
        text_file,
        trunk,
        train__log_every=1,
        train__microbatches=2,
        train__steps=15,
        optimizer__decay_fraction=0.2,
    )
    assert open_branch(tmp_path / "run", config) == Branch(trunk, 12)


def test_refuses_a_trunk_of_another_text(trunk, tmp_path):
    (tmp_path / "other.txt").write_text("\n\n".join(str(n) * 40 for n in range(1000)))
    config = short_config(tmp_path / "other.txt", trunk)
    with pytest.raises(UserError, match=r"config.train.trunk='.*': was trained on another text \("):
        Branch(trunk, 12).check_text(load_or_prepare(config.data))
    with pytest.raises(UserError, match=r"data\.source is"):
        open_branch(tmp_path / "run", config)
