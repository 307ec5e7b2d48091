"""Tests of workdirs that another run takes."""

import contextlib
import json

import pytest
from run_helpers import SMALL, config_for

from smallgpt_jax.errors import UserError
from smallgpt_jax.run import workdir
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import write_config
from smallgpt_jax.run.logger import Logger
from smallgpt_jax.training.trainer import train_and_evaluate


def test_another_run_starts_before_the_lock_is_acquired(text_file, tmp_path, monkeypatch):
    ours, theirs = (
        Config.of(config_for(text_file, **SMALL, model__mlp_ratio=ratio)) for ratio in (2.0, 3.0)
    )
    file_lock = workdir.file_lock

    @contextlib.contextmanager
    def lock_after_another_run(path):
        write_config(path.parent, theirs.to_dict())
        with file_lock(path):
            yield

    monkeypatch.setattr(workdir, "file_lock", lock_after_another_run)
    with (
        pytest.raises(UserError, match=r"another config: model\.mlp_ratio was 3\.0, now 2\.0"),
        workdir.open_workdir(tmp_path / "run", ours, corpus=None),
    ):
        pass


@pytest.mark.slow
def test_a_workdir_that_is_moved_during_the_run(text_file, tmp_path, monkeypatch):
    """The run ends, and writes nothing to the folder that another run has created at the place."""
    folder, log = tmp_path / "run", Logger.log

    def log_and_move(self, metrics):
        log(self, metrics)
        if metrics.step == 4:
            folder.rename(tmp_path / "run-old")
            folder.mkdir()
            (folder / "metrics.jsonl").write_text("of the other run\n")

    monkeypatch.setattr(Logger, "log", log_and_move)
    config = config_for(
        text_file, **SMALL, train__steps=20, train__log_every=1, train__checkpoint_every=5
    )
    with pytest.raises(UserError, match=f"{folder}: was moved, or its file .lock removed"):
        train_and_evaluate(config, str(folder))
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    assert (folder / "metrics.jsonl").read_text() == "of the other run\n"
    lines = (tmp_path / "run-old" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
