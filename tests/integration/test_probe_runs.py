"""Tests of runs on probes: measured answers, exact resumption, generation, comparison."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from comparison_helpers import FakeTrain
from conftest import call, forward, load_config
from run_helpers import SMALL, assert_equal, read_untimed_metrics, state_of

from smallgpt_jax import inference
from smallgpt_jax.data import batches
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config
from smallgpt_jax.training import trainer
from smallgpt_jax.training.trainer import train_and_evaluate

FIELDS = {
    **SMALL,
    "data__source": "synthetic:parity",
    "data__tokenizer": "symbols",
    "data__store": "",
    "data__probe_length": 4,
    "data__probe_min_length": 1,
    "data__probe_test_lengths": (9,),
    "model__vocab_size": 8,
    "model__dropout": 0.1,
    "train__eval_steps": 3,
    "train__microbatches": 1,
}


@pytest.fixture(scope="module")
def probe_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "probe"
    train_and_evaluate(load_config("gpt", **FIELDS), str(folder))
    return folder


@pytest.mark.slow
def test_a_run_on_a_probe(probe_run, tmp_path, capsys):
    config, folder = load_config("gpt", **FIELDS), shutil.copytree(probe_run, tmp_path / "run")
    lines, state = read_untimed_metrics(folder), state_of(folder, 40)
    last = [line for line in lines if line["split"] == "eval"][-1]
    assert last["targets"] == 3 * config.train.batch_size * 4 and last["bits_per_byte"] is None

    # The measures, from the logits of the trained model
    trained, corpus = inference.load_trained(folder), load_or_prepare(Config.of(config).data)
    rows = {"": corpus.pack("validation", "concat", False, 32), "_at_9": corpus.test_rows(32)[9]}
    for suffix, length in (("", 4), ("_at_9", 9)):
        numbers = batches.sample_rows(rows[suffix], 3 * config.train.batch_size)
        batch = rows[suffix].read_rows(numbers)
        logits = np.asarray(forward(trained.model, trained.params, batch.tokens_BxT1[:, :-1]))
        right = (logits.argmax(axis=2) == batch.targets_BxT)[:, 1 : length + 1]
        assert last[f"accuracy{suffix}"] == pytest.approx(right.mean())
        assert last[f"exact_match{suffix}"] == pytest.approx(right.all(axis=1).mean())
    assert last["accuracy"] > 0.4 and last["loss"] < 2

    shutil.rmtree(folder / "checkpoints" / "40")
    train_and_evaluate(config, str(folder))
    printed = capsys.readouterr().out
    assert "synthetic:parity, 1 to 4 bits: 89.06% padding" in printed and ", 20 done" in printed
    assert_equal(state_of(folder, 40), state)
    assert read_untimed_metrics(folder) == lines
    config.data.probe_length = 5
    with pytest.raises(UserError, match=r"data\.probe_length was 4, now 5"):
        train_and_evaluate(config, str(folder))

    done = call(
        "generate", f"--workdir={folder}", "--prompt=1 0 1", "--max_new_tokens=1", "--temperature=0"
    )
    assert done.returncode == 0 and done.stdout.strip() in ("1 0 1 0", "1 0 1 1"), done.stderr
    done = call("generate", f"--workdir={folder}", "--prompt=1 2")
    assert done.returncode == 1
    assert done.stderr == "error: '2': not a symbol of this probe; use 0 1, separated by spaces\n"


@pytest.mark.slow
def test_comparison_on_a_probe(probe_run, tmp_path, monkeypatch):
    done = call("compare", f"--workdirs={probe_run}", f"--output={tmp_path}")
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text()
    head = next(
        line for line in report.splitlines() if "exact match" in line and line.startswith("|")
    )
    assert (
        "## How well do the models solve the tasks?" in report
        and head.split("|")[2].strip() == "exact match"
        and "exact match at" in head
    )
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert ["exact_match" in run["curve"][-1]["answers"] for run in runs] == [True]
    merged = call(
        "compare", f"--results={tmp_path / 'results.json'}", f"--output={tmp_path / 'merged'}"
    )
    assert (
        merged.returncode == 0
        and "## How well do the models" in (tmp_path / "merged" / "report.md").read_text()
    ), merged.stderr

    fake = FakeTrain()
    monkeypatch.setattr(trainer, "train_and_evaluate", fake)
    done = call(
        "compare",
        "--config=configs/compare/probes.py:tiny",
        "--config.compare.names=gpt rope",
        "--config.compare.seeds=1",
        f"--output={tmp_path / 'recipe'}",
    )
    assert (done.returncode, len(fake.trained)) == (0, 1), done.stderr

    done = call(
        "prepare",
        "--config=gpt:quickstart",
        "--config.data.source=synthetic:copy",
        "--config.data.tokenizer=symbols",
    )
    assert done.returncode == 1 and "a probe has no token store" in done.stderr
    done = call(
        "compare",
        "--config=configs/compare/probes.py:tiny",
        "--config.compare.names=gpt rope",
        "--config.compare.contexts=1,2",
        f"--output={tmp_path / 'contexts'}",
    )
    assert done.returncode == 1 and "probes have no longer contexts" in done.stderr
