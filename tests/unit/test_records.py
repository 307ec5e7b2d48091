"""Tests of results.json: reading back what was written, merging records, and refusing those that do
not match.
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from conftest import call, load_config

from smallgpt_jax.comparison import loss_report, records, report
from smallgpt_jax.comparison.learning_rates import Grid
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.results import Point, Run
from smallgpt_jax.data import store
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config

SPLIT = {"tokens": 1000, "documents": 10, "text_bytes": 4000}
TEXT = {
    "description": {
        "format": store.FORMAT,
        "vocab_size": 300,
        "end_of_text": 1,
        "begin_of_text": 2,
        "dtype": "uint16",
        "skipped": {},
        "made_from": {
            "source": "books.txt",
            "tokenizer": "bytes",
            "text_field": "text",
            "text_endings": "",
            "max_document_bytes": 1000,
            "invalid_utf8": "refuse",
            "invalid_items": "refuse",
            "validation_fraction": 0.1,
        },
        "splits": {"train": SPLIT, "validation": SPLIT},
        "fingerprints": {"train": "t", "validation": "v"},
    },
    "tokenizer": "0" * 64,
}


STEP_MS = {"median": 2.0, "low": 1.9, "high": 2.2, "count": 24}
INFERENCE = {
    "device": "cpu",
    "dtype": "float32",
    "context_length": 64,
    "cache_bytes": 6400,
    "cache_bytes_per_token": 100,
    "prefill_ms": STEP_MS,
    "decoding": [{"batch": 1, "cache": "full", "step_ms": STEP_MS}],
}
INSIDE = {
    "step": 2,
    "loss": 2.5,
    "in_context_score": -0.1,
    "least_important_block": 0.1,
    "most_important_block": 1.0,
    "blocks": [
        {
            "token_similarity": 0.5,
            "neighbour_similarity": 0.6,
            "effective_rank": 9.0,
            "entropy": None,
            "first_weight": None,
        }
    ],
}
LOSSES = {0.5: 3.0, 1.0: 2.5, 2.0: 2.75}  # of a grid


def run(
    name: str,
    seed: int,
    loss: float,
    fingerprint: str = "v",
    targets: int = 512,
    averaged: int = 1,
    **fields,
) -> Run:
    config = Config.of(load_config("gpt", train__seed=seed, train__steps=2, **fields))
    text = json.loads(json.dumps(TEXT))
    text["description"]["fingerprints"]["validation"] = fingerprint
    points = tuple(
        Point(step, step * 100, step * 1e6, 1.0 * step, loss + 2 - step, 1.5, targets)
        for step in (1, 2)
    )
    session = {
        "time": "2026-11-23T00:00:00+00:00",
        "device": "cpu",
        "devices": 1,
        "padding": 0.0,
        "argument_bytes": 5,
        "temp_bytes": 5,
        "versions": {"jax": "1"},
        "commit": "c",
    }
    return Run(
        name=name,
        workdir=f"/elsewhere/{name}-seed{seed}",
        seed=seed,
        config=config.flat(),
        is_finished=True,
        diverged=False,
        is_imported=False,
        steps_done=2,
        parameters=100,
        active_parameters=100,
        components={"blocks": 100},
        flops_per_token=600.0,
        tokens_per_step=100.0,
        curve=points,
        tokens_per_second=1e3,
        memory_bytes=10**6,
        sessions=(session,),
        expert_load=None,
        texts=(),
        benchmarks={"copa acc": 0.5},
        text=text,
        averaged=averaged,
        weight_bytes=400,
        inference=INFERENCE,
        inside=INSIDE,
    )


def record(*runs: Run, **fields) -> Record:
    return Record(
        **{
            "title": "t",
            "budget": "Equal tokens.",
            "command": "c",
            "reference": "gpt",
            "runs": runs,
            **fields,
        }
    )


def saved(path: Path, *runs: Run, **fields) -> Path:
    path.parent.mkdir(exist_ok=True)
    records.write(record(*runs, **fields), path)
    return path


def merged(*paths: Path) -> Record:
    return records.merge([(path, records.read(path)) for path in paths], "merge")


def test_predictions_are_kept_and_the_earliest_are_merged(tmp_path):
    row = {"name": "gpt", "size": 100.0, "tokens": 200.0, "loss": 3.0, "low": 2.9, "high": 3.1}
    content = {
        "format": 1,
        "time": "2026-11-23T10:00:00+00:00",
        "command": "c",
        "held_out": "4M",
        "interval": 0.8,
        "draws": 10,
        "records_sha256": "0",
        "records": [{"name": "gpt"}],
        "at_one_size": {"gpt": 3.2},
        "laws": {
            "parameters": {
                "gpt": {"constants": {"irreducible": 1.5}, "intervals": {"irreducible": [1.4, 1.6]}}
            }
        },
        "predictions": {"parameters": [row]},
        "not_predicted": {},
    }
    later = {**content, "time": "2026-11-24T10:00:00+00:00"}
    paths = [
        saved(
            tmp_path / name / "results.json",
            run(f"gpt@{name}", 1, 3.0),
            held_out="4M",
            predictions=predictions,
        )
        for name, predictions in (("1M", later), ("2M", content))
    ]
    paths.append(saved(tmp_path / "other" / "results.json", run("llama@1M", 1, 3.0)))
    assert (
        records.read(paths[0]).predictions == later and records.read(paths[2]).predictions is None
    )
    assert (merged(*paths).predictions, merged(*paths).held_out) == (content, "4M")
    broken = json.loads(paths[0].read_text())
    broken["predictions"]["predictions"]["parameters"][0]["loss"] = "3"
    paths[0].write_text(json.dumps(broken))
    with pytest.raises(UserError, match=r"predictions.predictions.parameters\[0\].loss: "):
        records.read(paths[0])


def test_a_record_is_read_back(tmp_path):
    grid = Grid(1336, 0.003, {0.5: 3.0, 1.0: 2.5, 2.0: 2.75, 4.0: math.inf})
    original = record(
        run("gpt", 1, 3.0),
        run("gpt", 2, 3.1),
        run("pgpt", 1, 2.9),
        run("pgpt", 2, 3.05),
        grids={"gpt": grid},
    )
    records.write(original, tmp_path / "results.json")
    found = records.read(tmp_path / "results.json")
    assert found == dataclasses.replace(
        original,
        runs=tuple(
            dataclasses.replace(run, config=json.loads(json.dumps(run.config)))
            for run in original.runs
        ),
    )  # no tuples
    records.write(found, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "results.json").read_bytes()


@pytest.mark.slow
def test_merging_gives_the_report_of_one_comparison(tmp_path):
    """Half of the seeds was trained elsewhere. The merged report has the rows of a comparison with
    all seeds.
    """
    runs = [
        run(name, seed, loss + seed / 100)
        for seed in (1, 2, 3, 4)
        for name, loss in (("gpt", 3.0), ("pgpt", 2.9))
    ]
    one, two, whole = (tmp_path / name / "results.json" for name in ("one", "two", "whole"))
    saved(one, *(run for run in runs if run.seed < 3))
    saved(two, *(run for run in runs if run.seed > 1), budget="Other budget.")  # seed 2 is in both
    saved(whole, *runs)
    output = tmp_path / "out"
    done = call("compare", f"--results={two},{one},{two}", f"--output={output}")
    assert (done.returncode, done.stderr) == (0, "")
    found, expected = (json.loads(path.read_text()) for path in (output / "results.json", whole))
    assert [(run["name"], run["seed"]) for run in found["runs"]] == [
        (name, seed) for seed in (1, 2, 3, 4) for name in ("gpt", "pgpt")
    ]
    assert found["ranking"] == expected["ranking"] and found["runs"] == expected["runs"]
    assert (found["title"], found["reference"]) == ("2 models, from 2 records", "gpt")
    assert (
        found["budget"] == "Other budget. Equal tokens."
        and f"--results={two},{one}" in found["command"]
    )
    report.write_report(tmp_path, records.read(whole))
    table = "| **pgpt** | **2.9250 (2.9100 to 2.9400)** | **lower** |"
    assert (
        table in (tmp_path / "report.md").read_text()
        and table in (output / "report.md").read_text()
    )


def test_a_field_that_is_newer_than_a_run_has_its_default(tmp_path):
    older, newer = run("gpt", 1, 3.0), run("gpt", 2, 3.1)
    del older.config["model.smear"]
    paths = [
        saved(tmp_path / found.workdir[-1] / "results.json", found) for found in (older, newer)
    ]
    assert [found.seed for found in merged(*paths).runs] == [1, 2]
    other = run("gpt", 3, 3.1)
    other.config["model.smear"] = not newer.config["model.smear"]
    with pytest.raises(UserError, match=r"with different configs \(model.smear"):
        merged(paths[0], saved(tmp_path / "3" / "results.json", other))


@pytest.mark.parametrize(
    "other, message",
    [
        (
            run("lgpt", 1, 3.0, fingerprint="other"),
            "two.json: cannot be compared, since their texts differ (other",
        ),
        (run("lgpt", 1, 3.0, targets=1024), "means over different rows (targets 512 and 1024)"),
        (
            run("lgpt", 1, 3.0, data__packing="best_fit"),
            "different rows (config.data.packing 'concat' and 'best_fit')",
        ),
        (run("lgpt", 1, 3.0, averaged=2), "means over 1 and 2 evaluations"),
        (
            run("gpt", 2, 3.0, model__d_model=32),
            "both contain 'gpt', with different configs (model.d_model 64 and 32)",
        ),
        (run("gpt", 1, 3.01), "both contain 'gpt' with seed 1, with different losses"),
    ],
)
def test_refuses_to_merge(other, message, tmp_path):
    one, two = saved(tmp_path / "one.json", run("gpt", 1, 3.0)), saved(tmp_path / "two.json", other)
    with pytest.raises(UserError) as refused:
        merged(one, two)
    assert message in str(refused.value), refused.value


def test_horizons(tmp_path):
    """Only the longest runs are ranked. A record without horizons has only longest runs."""
    short = [
        dataclasses.replace(
            run(name, seed, loss, optimizer__decay_fraction=0.2), horizon=0.5, run=name
        )
        for seed in (1, 2)
        for name, loss in (("gpt", 3.0), ("pgpt", 4.0))
    ]
    full = [
        run(name, seed, loss) for seed in (1, 2) for name, loss in (("gpt", 2.9), ("pgpt", 2.8))
    ]
    one, two = (
        saved(tmp_path / "one.json", *full[:2], *short[:2]),
        saved(tmp_path / "two.json", *full[2:], *short[2:]),
    )
    both = merged(one, two)
    assert [(run.name, run.seed, run.horizon) for run in both.runs] == [
        (name, seed, horizon)
        for seed in (1, 2)
        for horizon in (1.0, 0.5)
        for name in ("gpt", "pgpt")
    ]
    report.write_report(tmp_path, both)
    content = json.loads((tmp_path / "results.json").read_text())
    assert list(content["ranking"]["means"]) == ["pgpt", "gpt"]
    assert (
        "| gpt | 3.0000 (3.0000 to 3.0000) | 2.9000 (2.9000 to 2.9000) |"
        in (tmp_path / "report.md").read_text()
    )
    for fields in content["runs"]:
        del fields["horizon"], fields["run"]
    content["runs"] = content["runs"][:2]
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert [run.horizon for run in records.read(tmp_path / "old.json").runs] == [1.0, 1.0]


def test_warns_of_a_seed_that_chose_the_learning_rate(tmp_path):
    """The grid of the second record has a seed that is in the first record's mean."""
    one = saved(
        tmp_path / "one.json",
        run("gpt", 2, 3.0),
        run("gpt", 3, 3.0),
        grids={"gpt": Grid(1, 0.003, LOSSES)},
    )
    two = saved(tmp_path / "two.json", run("gpt", 4, 3.0), grids={"gpt": Grid(3, 0.003, LOSSES)})
    both = merged(one, two)
    (warning,) = loss_report.grid_warnings(both.grids, both.runs)
    assert (
        warning
        == "gpt: seed 3 chose the learning rate and is also in the mean, which is therefore too low."
    )
    assert merged(one).grids["gpt"].seed == 1 and not loss_report.grid_warnings(
        merged(one).grids, merged(one).runs
    )


def test_machines_may_differ(tmp_path):
    """Paths and options of a machine do not matter."""
    one = saved(tmp_path / "one.json", run("gpt", 1, 3.0, data__source="/here/books.txt"))
    two = saved(
        tmp_path / "two.json",
        run("gpt", 2, 3.1, data__source="/there/books.txt", train__microbatches=2, mesh__data=4),
    )
    assert [run.seed for run in merged(one, two).runs] == [1, 2]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content.pop("format"), "format: missing"),
        (lambda content: content.update(format=2), "format: expected 1, found 2"),
        (lambda content: content["runs"][0].pop("text"), "text: missing"),
        (
            lambda content: content["runs"][0]["curve"][0].update(loss="low"),
            "curve[0].loss: expected a finite number",
        ),
    ],
)
def test_refuses_damaged_records(change, message, tmp_path):
    path = saved(tmp_path / "results.json", run("gpt", 1, 3.0))
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    done = call("compare", f"--results={path}", f"--output={tmp_path / 'out'}")
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") <= 2, (
        done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_bad_flags(tmp_path):
    path = saved(tmp_path / "a" / "results.json", run("gpt", 1, 3.0))
    for arguments, message, status in (
        (["--results="], "--results: the list is empty", 1),
        ([f"--results={tmp_path}/none.json"], "none.json: No such file", 1),
        ([f"--results={path}", "--workdirs=x"], "give either --config", 2),
    ):
        done = call("compare", *arguments, f"--output={tmp_path / 'out'}")
        assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    (tmp_path / "a" / "runs").mkdir()
    before = path.read_bytes()
    done = call("compare", f"--results={path}", f"--output={tmp_path / 'a'}")
    assert (
        done.returncode == 1
        and "contains the report of other runs" in done.stderr
        and path.read_bytes() == before
    )
