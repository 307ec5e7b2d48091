"""Comparisons that are continued from records: `compare --config=… --results=…`."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import call
from test_compare_learning_rates import TINY, FakeTrain

from smallgpt_jax.comparison import inference_cost
from smallgpt_jax.training import trainer


@pytest.fixture
def compare(tmp_path, text_file, monkeypatch):
    """Returns a function that runs `compare` with FakeTrain in a new folder, and returns (result,
    trained, record).
    """
    measured = []
    monkeypatch.setattr(
        inference_cost, "measure_inference", lambda folder: measured.append(folder.name)
    )

    def compared(output: str, *arguments, names="gpt"):
        fake, folder = FakeTrain(), tmp_path / output
        measured.clear()
        monkeypatch.setattr(trainer, "train", fake)
        done = call(
            *TINY,
            f"--config.data.source={text_file}",
            f"--output={folder}",
            f"--config.compare.names={names}",
            *arguments,
        )
        record = folder / "results.json"
        assert not (set(measured) - set(fake.trained))
        return done, fake.trained, json.loads(record.read_text()) if record.exists() else None

    return compared


@pytest.mark.slow
def test_continues_from_records(compare, tmp_path):
    """A run that is removed from a record is trained again; all others, and those of the grid, are
    taken over.

    The report is then the same. The record is the only file of the first comparison that is read.
    """
    grid = "--config.compare.learning_rates=1,2"
    done, trained, whole = compare("here", grid, "--config.compare.max_added_learning_rates=0")
    assert done.returncode == 0 and len(trained) == 4, done.stderr
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**whole, "runs": whole["runs"][:1]}))
    shutil.rmtree(tmp_path / "here")
    done, trained, found = compare(
        "more", grid, "--config.compare.max_added_learning_rates=0", f"--results={path}"
    )
    assert (done.returncode, done.stderr, trained) == (0, "", ["gpt-seed1338-lr2x"])

    def without_paths(record: dict) -> dict:
        runs = [
            {key: value for key, value in run.items() if key not in ("workdir", "run", "sessions")}
            for run in record["runs"]
        ]
        return {**record, "command": "", "runs": runs}

    assert (
        without_paths(found) == without_paths(whole) and found["learning_rates"]["gpt"]["best"] == 2
    )


@pytest.mark.slow
def test_trains_what_a_record_lacks(compare, tmp_path):
    """An unfinished run is trained, and a diverged one is not. Other names are left out, and said
    so.
    """
    compare("here", names="gpt,pgpt")
    path = tmp_path / "here" / "results.json"
    content = json.loads(path.read_text())
    for run in content["runs"]:
        if run["name"] == "gpt":
            run["is_finished"], run["diverged"] = False, run["seed"] == 1338
    path.write_text(json.dumps(content))
    done, trained, found = compare("more", f"--results={path}")
    assert (done.returncode, done.stderr, trained) == (0, "", ["gpt-seed1337"])
    assert "--results: pgpt is not in this comparison; left out\n" in done.stdout
    assert [(run["seed"], run["diverged"]) for run in found["runs"]] == [
        (1337, False),
        (1338, True),
    ]


def test_refuses_other_records(compare, tmp_path, text_file):
    """Before anything is trained."""
    compare("here", "--config.compare.seeds=1")
    other = tmp_path / "other.txt"
    other.write_text(Path(text_file).read_text().upper())
    for arguments, message in (
        (
            ["--config.model.num_layers=1"],
            "has another config than this comparison (model.num_layers 4 and 1)",
        ),
        (["--config.optimizer.learning_rate=1e-3"], ", optimizer.learning_rate 0.003 and 0.001)"),
        (["--config.train.steps=12"], "(train.steps 8 and 12"),
        (["--config.train.eval_steps=1"], "its loss is a mean over"),
        (
            [f"--config.data.source={other}"],
            "gpt, seed 1337: was trained on another text than this comparison",
        ),
        (["--workdirs=x"], "--results may be combined with --config"),
    ):
        done, trained, found = compare(
            "more", f"--results={tmp_path / 'here' / 'results.json'}", *arguments
        )
        assert (
            done.returncode in (1, 2) and message in done.stderr and done.stderr.count("\n") <= 2
        ), done.stderr
        assert (trained, found) == ([], None) and not (tmp_path / "more" / "runs").exists()
