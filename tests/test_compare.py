"""Comparisons: budgets, what is trained and what is not trained again, and where a report's numbers come from."""

import concurrent.futures
import dataclasses
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, forward, load_config, run
from ml_collections import ConfigDict
from ml_collections.config_flags import config_path

from configs.compare import base
from smallgpt_jax import cli, data, inference, models, train, workdir
from smallgpt_jax.analysis.flops import train_flops_per_token
from smallgpt_jax.comparison import budget, figures, measure, report, results
from smallgpt_jax.data import prepare
from smallgpt_jax.data.pipeline import pack
from smallgpt_jax.errors import UserError

SHIPPED = sorted(path.stem for path in (ROOT / "configs" / "compare").glob("*.py") if path.stem != "base")


def comparison(size: str = "tiny", **fields) -> ConfigDict:
    config = base.recipes(("gpt", "pgpt", "lgpt", "cgpt"), size)
    for name, value in fields.items():
        group, field = name.split("__")
        config[group][field] = value
    return config


# ------------------------------------------------------------------ Budgets
def test_equal_tokens(tmp_path):
    config = comparison(compare__seeds=3)
    config.unlock()
    config.runs.pgpt.train = ConfigDict({"batch_size": 16})  # twice the tokens a step
    planned = budget.plan(config, tmp_path)
    assert [run.name for run in planned] == ["gpt", "pgpt", "lgpt", "cgpt"] * 3
    assert [run.config.train.seed for run in planned[::4]] == [1337, 1338, 1339]
    assert len({run.folder for run in planned}) == 12
    assert {run.name: run.config.train.steps for run in planned} == {"gpt": 40, "pgpt": 20, "lgpt": 40, "cgpt": 40}
    assert (planned[1].config.optimizer.warmup_steps, planned[1].config.optimizer.decay_steps) == (2, 20)


def test_padding_is_no_token_but_costs_flops(tmp_path):
    """A run of `best_fit` gets more steps than one of `concat` on equal tokens, and as many on equal FLOPs."""
    source = tmp_path / "source.jsonl"  # documents of 41 tokens: one to a row of 64
    source.write_text("".join(json.dumps({"text": f"{n:040}"}) + "\n" for n in range(400)))
    common = load_config("gpt", data__source=str(source), train__steps=200)
    for kind, steps in (("tokens", round(200 * 64 / 41)), ("flops", 200)):
        config = base.comparison(
            common, {"joined": {}, "whole": {"data": {"packing": "best_fit"}}}, budget=kind, seeds=1)
        planned = budget.plan(config, tmp_path)
        assert {run.name: run.config.train.steps for run in planned} == {"joined": 200, "whole": steps}


def flops(config) -> float:
    """By the counts that `plan` uses."""
    model = models.build(**config.model)
    return train_flops_per_token(model) * config.train.steps * config.train.batch_size * config.model.context_length


def test_equal_flops_within_one_percent(tmp_path):
    planned = budget.plan(comparison("quickstart", compare__budget="flops"), tmp_path)
    target = flops(load_config("gpt", "quickstart"))
    assert {run.name for run in planned} == {"gpt", "pgpt", "lgpt", "cgpt"}
    for run_ in planned:
        assert abs(flops(run_.config) / target - 1) < 0.01, run_.name
    # By hand, in products a token: 4 blocks of 12·D², 2·D·T for attention's two, the head; pgpt's dense layers.
    D, T, V = 128, 128, 1024
    gpt = 4 * (12 * D**2 + 2 * D * T) + D * V
    assert planned[1].config.train.steps == round(2000 * gpt / (gpt + 2 * D**2)) == 1939


@pytest.mark.parametrize("size", ["quickstart", "paper"])
def test_equal_parameters_within_two_percent(size, tmp_path):
    config = comparison(size, compare__budget="parameters", compare__seeds=1)
    config.runs.cgpt.model.conv_kernel = 1  # as configs/compare/paper.py has it
    planned = budget.plan(config, tmp_path)
    assert [run_.name for run_ in planned] == ["gpt", "pgpt", "lgpt", "cgpt"]
    gpt = models.num_parameters(models.build(**load_config("gpt", size).model))
    # Six halvings: the widths that lgpt can have lie 5% apart at full size; then the others follow it.
    target = {"quickstart": gpt, "paper": 157_112_256}[size]
    tokens = {run.config.train.steps * run.config.train.batch_size * run.config.model.context_length
              for run in planned}
    assert len(tokens) == 1
    for run_ in planned:
        assert abs(budget.num_parameters(run_.config) / target - 1) < 0.02, run_.name
        recipe = load_config(run_.name, size)
        recipe.model.update({"conv_kernel": 1} if run_.name == "cgpt" else {})
        ours = {**run_.config.model, "d_model": recipe.model.d_model, "num_heads": recipe.model.num_heads}
        assert ours == recipe.model.to_dict()  # nothing but the width


def test_equal_seconds_by_a_measured_speed_that_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "steps_per_second", lambda run: {"gpt": 3.0, "pgpt": 2.0}[run.model.architecture])
    config = comparison(compare__budget="seconds", compare__seconds=30.0, compare__names="gpt,pgpt")
    assert [run.config.train.steps for run in budget.plan(config, tmp_path)] == [90, 60] * 2
    monkeypatch.setattr(budget, "steps_per_second", lambda run: 5.0)
    assert [run.config.train.steps for run in budget.plan(config, tmp_path)] == [90, 60] * 2
    config.compare.seconds = 60.0
    assert [run.config.train.steps for run in budget.plan(config, tmp_path)] == [180, 120] * 2
    config.model.d_model = 128  # others, whose speed is not known
    assert [run.config.train.steps for run in budget.plan(config, tmp_path)] == [300, 300] * 2
    config.compare.seconds = 0.1
    with pytest.raises(UserError, match=r"gpt takes 0.2 of the 0.1 seconds; the nearest, 1 steps, are \+100.0% off"):
        budget.plan(config, tmp_path)
    config.compare.seconds, config.model.d_model = 60.0, 256
    budget.folder(tmp_path, "pgpt", config.train.seed).mkdir(parents=True)
    with pytest.raises(UserError, match="pgpt was begun there with another budget or config"):
        budget.plan(config, tmp_path)


def test_speed_is_that_of_training_steps(monkeypatch):
    monkeypatch.setattr(budget, "SPEED_SECONDS", 0.5)
    config = load_config("gpt", train__batch_size=8)
    slow = load_config("gpt", train__batch_size=64)
    assert 1.5 < budget.steps_per_second(config) / budget.steps_per_second(slow) < 40


def test_runs_with_any_name(tmp_path):
    """As in configs/compare/base.py: names with dots and blanks, for the command line too."""
    rates = {f"lr {x}": {"optimizer": {"learning_rate": x}} for x in (0.001, 0.01)}
    planned = budget.plan(base.comparison(load_config("gpt"), rates, seeds=1), tmp_path)
    assert [(run.name, run.config.optimizer.learning_rate, run.folder.name) for run in planned] == [
        ("lr 0.001", 0.001, "lr_0.001-seed1337"), ("lr 0.01", 0.01, "lr_0.01-seed1337")]


@pytest.mark.parametrize("given, read", [
    ("--config.runs.lr 0.1.optimizer.learning_rate=0.2", ("lr 0.1", "optimizer", "learning_rate", "0.2")),
    ("--config.runs.2×.model.d_model=8", ("2×", "model", "d_model", "8")),
    ("--config.runs.a.b.data.source=x.model.y=z", ("a.b", "data", "source", "x.model.y=z")),
    ("--config.runs.lgpt.model.d_model=8", ("lgpt", "model", "d_model", "8"))])
def test_overrides_of_runs_with_any_name(given, read):
    quoted, = cli.with_quoted_runs([given])
    path, _, value = quoted.removeprefix("--config.").partition("=")
    assert " " not in path and (*config_path.split(path), value) == ("runs", *read)
    assert cli.with_plain_runs(quoted) == given


@pytest.mark.parametrize("fields, words", [
    (dict(compare__budget="time"), "config.compare.budget='time': must be one of tokens, flops, parameters, seconds"),
    (dict(compare__budget="flops", train__steps=8), "pgpt .* the nearest, 8 steps, are .*% off, more than 1%"),
    (dict(compare__budget="seconds"), "config.compare.seconds=0: must be above 0"),
    (dict(compare__seconds=3.0), "only budget 'seconds' reads it"),
    (dict(compare__seeds=0), "config.compare.seeds=0: must be at least 1"),
    (dict(compare__names=""), "the comparison has no runs"),
    (dict(compare__names="gtp"), "there is no run 'gtp'; there are cgpt, gpt"),
    (dict(compare__reference="x"), "config.compare.reference='x': must be one of the runs: cgpt, gpt"),
    (dict(train__steps=0), "config.train.steps=0: must be at least 1"),
    (dict(train__batch_size=0), "config.train.batch_size=0: must be at least 1"),
    (dict(compare__contexts=(0,)), "must be whole numbers, 1 and above"),
    (dict(model__num_heads=3), "run 'gpt': config.model.num_heads=3: must divide")])
def test_comparisons_that_cannot_be_made_are_refused(fields, words, tmp_path):
    with pytest.raises(UserError, match=words):
        budget.plan(comparison(**fields), tmp_path)


@pytest.mark.parametrize("runs, words", [
    ({"a": {"modl": {"d_model": 8}}}, "config.runs.a.modl: must be one of the groups"),
    ({"a": {"model": {"num_haeds": 2}}}, "config.runs.a.model.num_haeds: there is no such field; did you mean 'num_he"),
    ({"a": {"model": {"d_model": "wide"}}}, "config.runs.a.model.d_model='wide': not of the type"),
    ({"a": {"model": {"d_model": None}}}, "config.runs.a.model.d_model=None: not of the type"),
    ({"a": {"model": {"architecture": "pgpt", "num_paths": "two"}}}, "run 'a': config.model.num_paths='two': must be"),
    ({"a": {"train": {"microbatches": 3}}}, "run 'a': config.train.batch_size=8: must be a multiple of"),
    ({"a": {"optimizer": {"name": "sgd"}}}, "run 'a': config.optimizer.name='sgd'"),
    ({"a": {"train": {"steps": 8}}}, "config.runs.a.train.steps: follows from the budget"),
    ({"a, b": {}}, "names have no commas"),
    ({"a": {"model": {"num_paths": 2}}}, "config.runs.a.model.num_paths: there is no such field"),
    ({"a": {}, "b": {"data": {"tokenizer": "gpt2"}}}, "'a' has data.tokenizer='bytes' and 'b' 'gpt2'"),
    ({"a b": {}, "a_b": {}}, "'a b' and 'a_b' would have the same workdir"),
    ({}, "the comparison has no runs")])
def test_runs_that_cannot_be_compared_are_refused(runs, words, tmp_path):
    with pytest.raises(UserError, match=re.escape(words)):
        budget.plan(base.comparison(load_config("gpt"), runs), tmp_path)


def test_parameters_that_no_width_has_are_refused_with_the_nearest(tmp_path):
    config = base.comparison(
        load_config("gpt"), {"gpt": {}, "deep": {"model": {"num_layers": 400, "d_model": 8}}}, budget="parameters",
        reference="gpt")
    with pytest.raises(UserError, match=r"deep and the others cannot have equally many within 2%. Nearest to 266,816 "
                                        r"it has [\d,]+ \([+-][\d.]+%\), with model.d_model=\d+, model.num_heads=\d+"):
        budget.plan(config, tmp_path)


def test_a_misspelt_field_of_a_comparison_is_refused():
    with pytest.raises(KeyError, match="budget"):
        base.comparison(load_config("gpt"), {"gpt": {}}, bugdet="flops")


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("size", ["tiny", "quickstart", "paper"])
def test_shipped_comparisons_can_be_made(name, size, tmp_path):
    config = importlib.import_module(f"configs.compare.{name}").get_config(size)
    planned = budget.plan(config, tmp_path)
    assert len(planned) == len(config.runs) * config.compare.seeds
    assert {run.name for run in planned} == set(config.runs)
    if name == "stages":  # what the others are told apart from is lgpt as it is
        assert planned[0].config.model.to_dict() == load_config("lgpt", size).model.to_dict()
    measure.named_sources(config.compare.texts)


# ------------------------------------------------------------------ From nothing to the report
ARGUMENTS = ("compare", "--config=configs/compare/paper.py:tiny", "--config.train.steps=8",
             "--config.train.eval_every=4", "--config.train.log_every=2", "--config.train.checkpoint_every=4",
             "--config.optimizer.decay_steps=8")


@pytest.fixture(scope="module")
def compared(tmp_path_factory, text_file):
    """A comparison of two runs with two seeds, killed while it trained and started again, twice at one time."""
    output = tmp_path_factory.mktemp("compared") / "out"
    arguments = (*ARGUMENTS, f"--config.data.source={text_file}", f"--output={output}",
                 "--config.compare.names=gpt,pgpt")
    command = [sys.executable, "-m", f"smallgpt_jax.{arguments[0]}", *arguments[1:]]
    with (output.parent / "out.txt").open("w") as out:
        killed = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={
            **os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"})
        second = output / "runs" / "pgpt-seed1337" / "checkpoints" / "4"
        while not second.is_dir() and killed.poll() is None:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL, (output.parent / "out.txt").read_text()
    before = {path: path.stat().st_mtime_ns for path in (output / "runs" / "gpt-seed1337").rglob("*") if path.is_file()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        done = [one.result() for one in [pool.submit(run, *arguments) for _ in range(2)]]
    for one in done:
        assert (one.returncode, one.stderr) == (0, "")
    return output, [one.stdout for one in done], before


@pytest.mark.slow
def test_a_killed_comparison_goes_on_and_does_nothing_twice(compared):
    output, told, before = compared
    finished = output / "runs" / "gpt-seed1337"
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")
            if path.is_file() and "evaluations" not in path.parts} == {
        path: time for path, time in before.items() if "evaluations" not in path.parts}
    assert "[1/4]" not in "".join(told) and "[2/4] pgpt, seed 1337" in told[0]
    begun = [re.findall(r"steps of 8 × 64 tokens(.*)", one) for one in told]
    assert sorted(begun[0] + begun[1]) == ["", "", ", 4 of them done"]  # each run by one of the two
    assert any("is training in it" in one for one in told)
    assert [path.name for path in sorted((output / "runs").iterdir())] == [
        "gpt-seed1337", "gpt-seed1338", "pgpt-seed1337", "pgpt-seed1338"]


def lines_of(workdir) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_number_of_the_report_is_in_the_metrics(compared):
    """Made anew from metrics.jsonl, by sums that are written out here."""
    output, _, _ = compared
    markdown, page = (output / "report.md").read_text(), (output / "report.html").read_text()
    told = json.loads((output / "results.json").read_text())["runs"]
    assert len(told) == 4
    for name in ("gpt", "pgpt"):
        losses, bits, speeds, ends = [], [], [], []
        for seed in (1337, 1338):
            lines = lines_of(output / "runs" / f"{name}-seed{seed}")
            evals = [line for line in lines if line["split"] == "eval"]
            assert [line["step"] for line in evals] == [4, 8]
            ours, = (run_ for run_ in told if (run_["name"], run_["seed"]) == (name, seed))
            assert [point["loss"] for point in ours["curve"]] == [line["loss"] for line in evals]
            assert [point["tokens"] for point in ours["curve"]] == [4 * 8 * 64, 8 * 8 * 64]
            flops = train_flops_per_token(models.build(**load_config(name).model))
            assert [point["flops"] for point in ours["curve"]] == [2048 * flops, 4096 * flops]
            seconds = [2 * 8 * 64 / line["tokens_per_second"] for line in lines if line["split"] == "train"]
            assert len(seconds) == 4
            np.testing.assert_allclose([point["seconds"] for point in ours["curve"]],
                                       [sum(seconds[:2]), sum(seconds)], rtol=1e-12)
            losses.append(evals[-1]["loss"])
            bits.append(evals[-1]["bits_per_byte"])
            speeds.append(8 * 8 * 64 / sum(seconds))
            ends.append(sum(seconds))
            assert f"| {name} | {seed} | 8 | {losses[-1]:.4f} |" in markdown
        cells = [name, "2", f"{models.num_parameters(models.build(**load_config(name).model)):,}", f"{flops:,.0f}",
                 f"{sum(speeds) / 2:,.0f}", f"{sum(ends) / 2:,.0f}"]
        assert "| " + " | ".join(cells) + " |" in markdown
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
        for values in (losses, bits):
            shown = f"{sum(values) / 2:.4f} ({min(values):.4f} to {max(values):.4f})"
            assert f"| {shown} |" in markdown and f"<td>{shown}</td>" in page
    assert "Lowest validation loss: " in markdown
    assert "| model.context_length | 64 |" in markdown and "| train.steps | 8 |" in markdown  # what the runs share
    assert (output / "loss-tokens.png").read_bytes().startswith(b"\x89PNG")
    assert "http://" not in re.sub(r"base64,[^\"]*", "", page) and page.count("data:image/svg+xml") == 4


@pytest.mark.slow
def test_finished_runs_are_drawn_without_training(compared, tmp_path):
    output, _, _ = compared
    folders = ",".join(str(path) for path in sorted((output / "runs").iterdir()))
    done = run("compare", f"--workdirs={folders}", f"--output={tmp_path / 'report'}")
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads((folder / "results.json").read_text())["runs"]
                    for folder in (tmp_path / "report", output))
    key = lambda run_: (run_["name"], run_["seed"])  # noqa: E731
    assert sorted(ours, key=key) == sorted(theirs, key=key)


def begun(source, folder):
    """A run that has come as far as step 4 of 8."""
    folder.mkdir()
    for path in ("config.json", "store.json", "tokenizer", "sessions.jsonl"):
        (folder / path).symlink_to(source / path)
    lines = (source / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["step"] <= 4) + "\n")
    return folder


@pytest.mark.slow
def test_an_unfinished_run_is_drawn_as_such(compared, tmp_path):
    output, _, _ = compared
    folder = begun(output / "runs" / "gpt-seed1337", tmp_path / "begun")
    done = run("compare", f"--workdirs={folder},{output / 'runs' / 'pgpt-seed1337'}", f"--output={tmp_path / 'report'}")
    assert done.returncode == 0, done.stderr
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "Unfinished: begun, seed 1337, at step 4 of 8." in markdown
    assert "| begun (unfinished, step 4) | 1 |" in markdown and "Fewer than two runs have ended" in markdown
    row = next(line for line in markdown.splitlines() if line.startswith("| begun (unfinished"))
    assert [cell.strip() for cell in row.split("|")][8:10] == ["–", "–"]  # loss, bits per byte


@pytest.mark.slow
def test_what_is_there_is_not_taken_for_another_comparison(compared):
    output, _, _ = compared
    source = json.loads((output / "runs" / "gpt-seed1337" / "config.json").read_text())["data"]["source"]
    common = (*ARGUMENTS, f"--config.data.source={source}", f"--output={output}", "--config.compare.names=gpt")
    for changed, words in (
            (["--config.train.steps=6", "--config.optimizer.decay_steps=8", "--config.compare.reference=gpt"],
             "has been trained for 8 steps, more than config.train.steps=6; ask for as many, or use another --output"),
            (["--config.model.d_model=128"],
             "gpt-seed1337: belongs to a run with another config: model.d_model was 64, now 128")):
        done = run(*common, *changed)
        assert done.returncode == 1 and words in done.stderr and "--workdir" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_text_that_has_changed_is_refused_before_anything_is_trained(compared, tmp_path):
    output, _, _ = compared
    shutil.copytree(output / "runs" / "gpt-seed1337", tmp_path / "runs" / "gpt-seed1337")
    folder = tmp_path / "runs" / "gpt-seed1337"
    described = json.loads((folder / "store.json").read_text())
    described["splits"]["train"]["tokens"] += 1
    (folder / "store.json").write_text(json.dumps(described))
    source = workdir.read_config(folder).data.source
    done = run(*ARGUMENTS, f"--config.data.source={source}", f"--output={tmp_path}", "--config.compare.names=pgpt,gpt")
    assert done.returncode == 1 and "its text has changed since the run began" in done.stderr
    assert "or the text of then" in done.stderr and "another --output" in done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gpt-seed1337"]


@pytest.mark.slow
def test_the_report_of_a_comparison_is_not_replaced_by_one_of_other_runs(compared, tmp_path):
    output, _, _ = compared
    before = (output / "report.md").read_bytes()
    done = run("compare", f"--workdirs={begun(output / 'runs' / 'gpt-seed1337', tmp_path / 'x')}", f"--output={output}")
    assert done.returncode == 1 and "has the report of runs of its own" in done.stderr
    assert (output / "report.md").read_bytes() == before


def test_a_field_set_for_all_is_told_of_runs_with_their_own(tmp_path):
    done = run("compare", "--config=configs/compare/paper.py:quickstart", "--config.compare.names=gpt,lgpt",
               "--config.model.d_model=64", "--config.compare.texts=wrong", f"--output={tmp_path / 'out'}")
    assert done.stdout == ("--config.model.d_model=64: not for lgpt, which has its own, 192: "
                           "--config.runs.lgpt.model.d_model\n")
    assert done.returncode == 1 and "is not NAME=SOURCE" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_that_diverges_is_left_and_told(text_file, tmp_path):
    arguments = (*ARGUMENTS, f"--config.data.source={text_file}", f"--output={tmp_path / 'out'}",
                 "--config.compare.names=gpt,pgpt", "--config.compare.seeds=1",
                 "--config.optimizer.learning_rate=1e30", "--config.optimizer.clip_norm=0.0")
    for again in (False, True):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        assert ("has diverged before" in done.stdout, "training has diverged" in done.stdout) == (again, not again)
    assert "Diverged: gpt, seed 1337" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_runs_of_different_texts_are_refused(compared, tmp_path):
    output, _, _ = compared
    other = tmp_path / "other"
    text = tmp_path / "numbers.txt"
    text.write_text("\n\n".join(str(n) * 40 for n in range(3000)))
    train.train(load_config("gpt", data__source=str(text), train__steps=1), str(other))
    done = run("compare", f"--workdirs={output / 'runs' / 'gpt-seed1337'},{other}", f"--output={tmp_path / 'report'}")
    assert done.returncode == 1
    assert "cannot be drawn in one plot: their texts differ" in done.stderr and done.stderr.count("\n") <= 2
    assert not (tmp_path / "report").exists()


def test_what_cannot_be_compared_is_told(tmp_path):
    for arguments, words, status in (
            (["--workdirs="], "--workdirs: names no run", 1),
            ([f"--workdirs={tmp_path / 'x'}"], "not a folder; a run's workdir is wanted", 1),
            ([], "give either --config", 2),
            (["--config=configs/compare/paper.py:tiny", "--config.compare.texts=x=/none.txt"], "/none.txt", 1),
            (["--config=configs/compare/paper.py:tiny", "--config.compare.contexts=1,99999"],
             "the validation split of the text 'own' is shorter than 99999 contexts", 1),
            (["--config=configs/gpt.py:tiny"], "not a comparison, but the recipe of one run", 1),
            (["--config=configs/compare/paper.py:huge"], "no size 'huge'", 2),
            ([f"--workdirs={tmp_path}", f"--logged={ROOT / 'README.md'}"], "not a table of model,step,val_loss", 1)):
        done = run("compare", *arguments, f"--output={tmp_path / 'out'}")
        assert (done.returncode, words in done.stderr) == (status, True), (arguments, done.stderr)
        assert done.stderr.count("\n") <= 2
    assert not list(tmp_path.glob("out/runs/*"))


# ------------------------------------------------------------------ What is measured of runs
@pytest.mark.slow
def test_other_texts_are_measured_as_by_the_plain_formula(compared, tmp_path):
    """In each context, by the plain float64 formula, over the same tokens of the stretches that were chosen."""
    output, _, _ = compared
    folder = output / "runs" / "gpt-seed1337"
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(" ".join(f"{n * n % 97}" for n in range(m, m + 60)) for m in range(900)))
    config = workdir.read_config(folder)
    config.model.position = "none"
    corpus = measure.corpora(config, {"other": str(other)})["other"]
    tokens = np.asarray(corpus.stores[0].validation.stream, np.int32)
    stretch = measure.Stretch(corpus, config, (1, 2, 4), "other")
    starts = stretch._chosen * 4 * 64
    assert len(starts) == len(set(starts)) == 4 * 8 // 4  # eval_steps · batch_size rows
    seen = [np.sort(np.concatenate([row[1:] for batch in stretch.batches(times, 5)
                                    for row in batch.tokens_BxT1[batch.counts_BxT.any(1)]])) for times in (1, 2, 4)]
    assert (seen[0] == seen[1]).all() and (seen[0] == seen[2]).all() and len(seen[0]) == len(starts) * 256

    found = measure.loss_on(folder, stretch, 1)
    rows = np.stack([tokens[start + i * 64:start + i * 64 + 65] for start in starts for i in range(4)])
    trained = inference.load_trained(folder)
    logits = np.asarray(forward(trained.model, trained.params, rows[:, :-1]), np.float64)
    logits -= logits.max(axis=2, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    losses = -np.take_along_axis(log_probabilities, rows[:, 1:, None], axis=2)
    assert found["tokens"] == losses.size
    assert abs(found["loss"] - losses.mean()) < 1e-5
    assert math.isclose(found["bits_per_byte"],
                        found["loss"] / math.log(2) / corpus.stores[0].validation.bytes_per_token)


@pytest.mark.slow
def test_longer_contexts_are_measured_once_and_of_the_last_step(text_file, tmp_path):
    fields = dict(data__source=str(text_file), data__packing="best_fit", train__eval_steps=2, model__position="rope")
    config = load_config("gpt", train__steps=2, **fields)
    train.train(config, str(tmp_path / "run"))
    told = []
    for _ in range(2):
        measure.measure_texts(tmp_path / "run", {}, (1, 2, 4), say=told.append)
    assert len(told) == 3 and "context 256" in told[2]
    run_ = results.read_run("run", tmp_path / "run")
    padding = pack(data.find(config.data), "train", config.data, config.model.context_length).padding
    inputs = 2 * 8 * 64
    assert padding > 0 and run_.last.tokens == round(inputs * (1 - padding))
    assert run_.last.flops == inputs * run_.flops_per_token
    rows = run_.texts
    assert [row["context_length"] for row in rows] == [64, 128, 256] and len({row["tokens"] for row in rows}) == 1
    assert {row["step"] for row in rows} == {2}
    train.train(load_config("gpt", train__steps=4, **fields), str(tmp_path / "run"))
    assert results.read_run("run", tmp_path / "run").texts == ()
    measure.measure_texts(tmp_path / "run", {}, (1,), say=told.append)  # nothing that validation does not say
    assert len(told) == 3


def begun_run(folder, source, **fields):
    """A run of a text that has not been trained: what `measure_texts` looks at."""
    config = load_config("gpt", data__source=str(source), **fields)
    workdir.begin(folder, config, data.find_or_make(config.data))
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": config.train.steps, "split": "eval", "loss": 4.0, "bits_per_byte": 2.0}))
    return folder


def numbers(first: int) -> str:
    return "\n\n".join(str(n) * 40 for n in range(first, first + 1000))


def test_a_text_that_has_changed_is_measured_again_and_not_compared(text_file, tmp_path, monkeypatch):
    """Its content counts: not its name, its size or its time."""
    losses = iter(range(1, 9))
    monkeypatch.setattr(measure, "loss_on", lambda *_: {"loss": 1.0, "bits_per_byte": next(losses)})
    one, other = ((tmp_path / name) for name in ("one", "other"))
    for folder in (one, other):
        folder.mkdir()
        begun_run(folder, text_file)
    text = tmp_path / "text.txt"

    def measured(folder, source=text) -> int:
        measure.measure_texts(folder, {"text": str(source)}, (1,), say=lambda _: None)
        return next(row["bits_per_byte"] for row in results.read_run("run", folder).texts if row["text"] == "text")

    def check() -> None:
        results.check_comparable([results.read_run(folder.name, folder) for folder in (one, other)])

    text.write_text(numbers(1000))
    assert measured(one) == measured(one) == 2  # 1 is its own text's
    again = tmp_path / "again.txt"
    again.write_text(text.read_text())
    assert measured(one, again) == 2
    text.write_text(numbers(2000))
    assert measured(other) == 4
    with pytest.raises(UserError, match=r"the texts measured as 'text' differ \(of '.*/again.txt' and '.*/text.txt'\)"):
        check()
    assert measured(one) == 5
    check()

    path = one / "evaluations" / "texts.json"  # as an older version wrote it
    rows = [{key: value for key, value in row.items() if key != "fingerprint"} for row in json.loads(path.read_text())]
    path.write_text(json.dumps(rows))
    check()
    old, = (warning for warning in report.warnings([results.read_run("one", one)]) if "older version" in warning)
    assert "measured own, text and did not record the content" in old
    assert measured(one) == 7


def test_runs_of_one_text_under_two_names_compare(tmp_path):
    runs = []
    for name, first in (("a", 1000), ("b", 1000), ("c", 2000)):
        (tmp_path / f"{name}.txt").write_text(numbers(first))
        (tmp_path / name).mkdir()
        runs.append(results.read_run(name, begun_run(tmp_path / name, tmp_path / f"{name}.txt")))
    results.check_comparable(runs[:2])
    with pytest.raises(UserError, match="cannot be drawn in one plot: their texts differ"):
        results.check_comparable(runs)


def test_a_mixture_is_measured_by_weight_and_on_the_same_tokens_in_each_context(token_store, tmp_path):
    (tmp_path / "numbers.txt").write_text("\n\n".join(str(n) * 40 for n in range(3000)))
    numbers = prepare.prepare_store(
        tmp_path / "numbers", source=str(tmp_path / "numbers.txt"), tokenizer="bytes", validation_fraction=0.2,
        text_field="text", invalid_utf8="refuse", invalid_items="refuse", say=lambda _: None)
    corpus = data.Corpus([token_store, numbers], [0.25, 0.75])
    config = load_config("gpt", train__eval_steps=4)  # 32 rows of 64 tokens: 2 and 6 stretches of 256
    stretch = measure.Stretch(corpus, config, (1, 2, 4), "own")
    of_one, of_four = (corpus.packed("validation", "concat", False, 64 * n)[0].num_rows for n in (1, 4))
    assert of_one > 4 * of_four  # so that the second store's rows begin elsewhere in each
    seen = [np.sort(np.concatenate([row[1:] for batch in stretch.batches(times, 5)
                                    for row in batch.tokens_BxT1[batch.counts_BxT.any(1)]])) for times in (1, 2, 4)]
    assert len(seen[0]) == 8 * 256 and (seen[0] == seen[1]).all() and (seen[0] == seen[2]).all()
    digits = np.isin(seen[0], token_store.tokenizer.encode(["0123456789"])[0]).mean()
    assert 0.7 < digits <= 0.75  # and line breaks


def test_texts_need_names():
    assert measure.named_sources("a=x.txt, b=y/*.txt") == {"a": "x.txt", "b": "y/*.txt"}
    for texts in ("x.txt", "=x", "a=", "a=x,a=y", "own=x"):
        with pytest.raises(UserError, match="is not NAME=SOURCE"):
            measure.named_sources(texts)


def a_run(seed: int, steps=(1, 2), name: str = "a", worse: float = 0.0) -> results.Run:
    points = tuple(results.Point(step, step * 10, step * 100.0, float(step), 6.0 - step + seed + worse, 1.0, 512)
                   for step in steps)
    return results.Run(
        name=name, workdir="x", seed=seed, config={"train.steps": 2}, is_finished=2 in steps, diverged=False,
        is_imported=False, steps_done=max(steps), parameters=1, components={}, flops_per_token=1.0, tokens_per_step=10,
        curve=points, tokens_per_second=1.0, memory_bytes=None, sessions=(), texts=(), decoding=None, benchmarks={})


def test_seconds_between_and_beyond_the_logged_steps():
    lines = [{"step": 3, "split": "train", "tokens_per_second": 30.0},  # of 10 tokens a step: 1 s
             {"step": 3, "split": "eval"}, {"step": 6, "split": "train", "tokens_per_second": 15.0}]
    logged = results.training_seconds(lines, 10)
    assert logged == ([0, 3, 6], [0.0, 1.0, 3.0])
    assert [results.seconds_at(step, *logged) for step in (3, 4.5, 6, 9)] == [1.0, 2.0, 3.0, 5.0]
    assert results.seconds_at(3, [0], [0.0]) is None


def test_runs_of_one_seed_are_compared_with_each_other():
    """Seeds differ by more than the two models: that is no reason not to tell them apart."""
    groups = {"a": [a_run(seed) for seed in range(3)], "b": [a_run(seed, name="b", worse=0.5) for seed in range(3)]}
    assert report.outcome(groups) == (
        "Lowest validation loss: a, 5.0000; then b, 5.5000. Of the 3 seeds that all have, a is lower in 3, by 0.5000 "
        "to 0.5000.")
    assert "no telling what chance does" in report.outcome({name: group[:1] for name, group in groups.items()})
    # The seed that only a has is its worst: a mean over all three would put it behind b.
    fewer = [a_run(seed, name="b", worse=0.2) for seed in range(2)]
    assert "a, 4.5000; then b, 4.7000. Of the 2 seeds that all have" in report.outcome({**groups, "b": fewer})
    groups["c"] = [a_run(seed, name="c", worse=worse) for seed, worse in enumerate((0.2, -0.1, 0.2))]
    assert report.outcome({"a": groups["a"], "c": groups["c"]}).endswith(
        "Of the 3 seeds that all have, a is lower in 2; c less a is -0.1000 to +0.2000.")
    assert "equal with each of the 3 seeds" in report.outcome({**groups, "b": groups["a"]})


def test_benchmarks_are_those_of_the_last_step_and_the_whole_model(tmp_path):
    """On all examples; with other shots, or on other examples, a task is another one."""
    def write(name: str, score: float, shots: int = 0, examples: int = 100, scored: int | None = None) -> None:
        scored = scored or examples
        (tmp_path / name).write_text(json.dumps({
            "results": {"copa": {"acc,none": score, "sample_len": scored}}, "n-shot": {"copa": shots},
            "n-samples": {"copa": {"original": examples, "effective": scored}}}))

    for name, score in (("step20-copa.json", 0.7), ("step10-copa.json", 0.1), ("step200-copa.json", 0.2),
                        ("step20-paths0-copa.json", 0.3), ("step20-bfloat16-copa.json", 0.4)):
        write(name, score)
    write("step20-copa-limit10.json", 0.9, scored=10)
    write("step20-copa-limit1000.json", 0.7, scored=100)
    write("step20-copa-5shot.json", 0.8, shots=5)
    write("step20-paper.json", 0.6, examples=1570)
    assert results.benchmarks(tmp_path, 20) == {
        "copa acc (0-shot, 100 examples)": 0.7, "copa acc (5-shot, 100 examples)": 0.8,
        "copa acc (0-shot, 1,570 examples)": 0.6}
    assert report.shown(results.spread([0.7]), seeds=2) == "0.7000, 1 of 2 seeds"


def test_names_that_plots_and_files_would_misread(tmp_path):
    runs = [a_run(0, name=r"a$\frac$"), a_run(0, name="_b <i>|")]
    runs = [dataclasses.replace(run_, texts=tuple(
        {"text": "my/te xt", "context_length": length, "bits_per_byte": 2.0, "source": "s"} for length in (64, 128)))
        for run_ in runs]
    report.write(tmp_path, runs, {"title": "<b>", "budget": "", "command": ""})
    assert (tmp_path / "context-my_te_xt.png").exists()
    assert "_b &lt;i&gt;|" in (tmp_path / "report.html").read_text()
    assert r"| _b <i>\| |" in (tmp_path / "report.md").read_text()
    legend, = figures.loss_against("tokens", runs).legends
    assert [text.get_text() for text in legend.get_texts()] == [r"a$\frac$", "_b <i>|"]


def test_the_report_of_a_single_run_draws_its_loss_and_compares_nothing(tmp_path):
    told = report.write(tmp_path, [a_run(0)], {"title": "a", "budget": "One run.", "command": "c"})
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "loss-flops.png", "loss-seconds.png", "loss-tokens.png"]
    markdown = (tmp_path / "report.md").read_text()
    assert "| a | 1 |" in markdown and "4.0000" in told
    for words in ("rank", "mean over the seeds", "means over seeds", "What the configs"):
        assert words not in markdown


def test_logged_curves_are_read_or_refused(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("model,step,val_loss\ngpt,10,4.5\n")
    assert figures.read_logged(table) == {"gpt": [(5_242_880, 4.5)]}
    for text in ("", "model,step,val_loss\n", "a,b\n1,2\n", "model,step,val_loss\ngpt,ten,4.5\n", "x" * 200_000):
        table.write_text(text)
        with pytest.raises(UserError, match=r"--logged=.*table.*model,step,val_loss"):
            figures.read_logged(table)


def test_spread_and_curves():
    runs = [a_run(0), a_run(2), a_run(1, steps=(1,))]
    assert results.mean_curve(runs[:2], "flops") == [(100.0, results.Spread(6.0, 5.0, 7.0, 2)),
                                                     (200.0, results.Spread(5.0, 4.0, 6.0, 2))]
    assert results.mean_curve(runs, "tokens") == [(10.0, results.Spread(6.0, 5.0, 7.0, 3))]
    assert results.last(runs[:2], "loss") == results.Spread(5.0, 4.0, 6.0, 2)
    assert results.last(runs, "loss") is None
    assert results.spread([1.0, None]) is None


def test_runs_validated_on_different_rows_are_told_and_not_ranked():
    def with_targets(run_: results.Run, *targets, **config) -> results.Run:
        curve = [dataclasses.replace(point, targets=count) for point, count in zip(run_.curve, targets)]
        return dataclasses.replace(run_, curve=tuple(curve), config={
            **run_.config, "model.context_length": 4, "data.packing": "concat", "data.separate_documents": False,
            "train.eval_steps": 4, "train.batch_size": 8, **config})

    def told(*targets, **config):
        runs = [with_targets(a_run(0), 512, 512), with_targets(a_run(0, name="b"), *targets, **config)]
        return report.warnings(runs), report.outcome(results.by_name(runs))

    assert told(512, 512)[0] == []
    # As many rows in other batches are the same rows.
    assert told(512, 512, **{"train.eval_steps": 2, "train.batch_size": 16})[0] == []
    warnings, outcome = told(512, 1536)
    assert "b, seed 0: 1 of 2 evaluations were on other rows than the last one" in warnings[0]
    assert "over different rows, 512 to 1,536 targets" in warnings[1] and len(warnings) == 2
    assert "nothing to rank" in outcome
    assert results.mean_curve([with_targets(a_run(0), 512, 1536)], "tokens") == [(20.0, results.Spread(4., 4., 4., 1))]
    warning, = told(512, 512, **{"data.packing": "best_fit"})[0]
    assert "differ in config.data.packing" in warning and "different rows" in warning
    # Runs of older versions, which did not record the number.
    warning, = told(None, None, **{"train.eval_steps": 8})[0]
    assert "differ in config.train.eval_steps" in warning and "different rows" in warning
