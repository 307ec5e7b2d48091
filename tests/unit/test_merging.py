"""Merging the records of several comparisons, and refusing those that do not match."""

import json

import pytest
from comparison_helpers import record, run, saved

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.record import Grid, GridRate, Prediction, Predictions, Record
from smallgpt_jax.comparison import comparability, merging
from smallgpt_jax.errors import UserError


def merged(*paths) -> Record:
    return merging.merge([(path, records.read(path)) for path in paths], "merge")


def grid(seed: int) -> dict[str, Grid]:
    return {"gpt": Grid(seed, 0.003, (GridRate(0.5, 3.0, False), GridRate(1.0, 2.5, False)))}


def test_runs_are_ordered_by_seed_and_count_once(tmp_path):
    runs = [run(name, seed, 3.0) for seed in (1, 2, 3) for name in ("gpt", "pgpt")]
    one = saved(tmp_path / "one.json", *runs[2:])
    two = saved(tmp_path / "two.json", *runs[:4], budget="Other budget.")
    both = merged(one, two)
    assert both.runs == tuple(runs)
    assert (both.title, both.reference) == ("2 models, from 2 records", "gpt")
    assert (both.budget, both.command) == ("Equal tokens. Other budget.", "merge")
    assert merged(one).title == "t"


def test_horizons_of_one_seed_are_different_runs(tmp_path):
    short = run("gpt", 1, 3.0, horizon=0.5, config={"optimizer__decay_fraction": 0.2})
    one = saved(tmp_path / "one.json", run("gpt", 1, 2.9))
    two = saved(tmp_path / "two.json", short)
    assert [one.horizon for one in merged(one, two).runs] == [1.0, 0.5]


def test_the_earliest_predictions_are_kept(tmp_path):
    row = Prediction("gpt", 100.0, 200.0, 3.0, 2.9, 3.1)
    paths = []
    for name, day in (("1M", 24), ("2M", 23)):
        time = f"2026-11-{day}T10:00:00+00:00"
        predictions = Predictions(time, "c", "4M", 0.8, "0", {"parameters": (row,)}, {})
        path = tmp_path / f"{name}.json"
        paths.append(
            saved(path, run(f"gpt@{name}", 1, 3.0), held_out="4M", predictions=predictions)
        )
    paths.append(saved(tmp_path / "other.json", run("llama@1M", 1, 3.0)))
    assert merged(*paths).predictions.time.startswith("2026-11-23")
    assert merged(*paths).held_out == "4M"


def test_a_grid_whose_seed_is_in_a_mean_is_kept(tmp_path):
    """The report must warn of it."""
    one = saved(tmp_path / "one.json", run("gpt", 2, 3.0), learning_rates=grid(1))
    two = saved(tmp_path / "two.json", run("gpt", 3, 3.0), learning_rates=grid(3))
    assert merged(one, two).learning_rates["gpt"].seed == 3
    assert merged(one).learning_rates["gpt"].seed == 1


def test_a_field_that_is_newer_than_a_run_has_its_default(tmp_path):
    older, newer = run("gpt", 1, 3.0), run("gpt", 2, 3.1)
    del older.config["model.smear"]
    one, two = saved(tmp_path / "one.json", older), saved(tmp_path / "two.json", newer)
    assert [one.seed for one in merged(one, two).runs] == [1, 2]
    other = run("gpt", 3, 3.1)
    other.config["model.smear"] = not newer.config["model.smear"]
    with pytest.raises(UserError, match=r"with different configs \(model.smear"):
        merged(one, saved(tmp_path / "three.json", other))


def test_machines_may_differ(tmp_path):
    """Paths and options of a machine do not matter."""
    here = run("gpt", 1, 3.0, config={"data__source": "/here/books.txt"})
    fields = {"data__source": "/there/books.txt", "train__microbatches": 2, "mesh__data": 4}
    there = run("gpt", 2, 3.1, config=fields)
    both = merged(saved(tmp_path / "one.json", here), saved(tmp_path / "two.json", there))
    assert [one.seed for one in both.runs] == [1, 2]


@pytest.mark.parametrize(
    "other, message",
    [
        (
            {"name": "lgpt", "fingerprint": "other"},
            "two.json: cannot be compared, since their texts differ (other",
        ),
        ({"name": "lgpt", "targets": 1024}, "means over different rows (targets 512 and 1024)"),
        (
            {"name": "lgpt", "config": {"data__packing": "best_fit"}},
            "different rows (config.data.packing 'concat' and 'best_fit')",
        ),
        ({"name": "lgpt", "averaged": 2}, "means over 1 and 2 evaluations"),
        (
            {"seed": 2, "config": {"model__d_model": 32}},
            "both contain 'gpt', with different configs (model.d_model 64 and 32)",
        ),
        ({"loss": 3.01}, "both contain 'gpt' with seed 1, with different losses"),
    ],
)
def test_refuses_to_merge(other, message, tmp_path):
    other = run(**{"name": "gpt", "seed": 1, "loss": 3.0, **other})
    one, two = saved(tmp_path / "one.json", run("gpt", 1, 3.0)), saved(tmp_path / "two.json", other)
    with pytest.raises(UserError) as refused:
        merged(one, two)
    assert message in str(refused.value)


def test_refuses_a_run_that_is_listed_twice():
    with pytest.raises(UserError, match="same config and seed; list the run once"):
        comparability.require_comparable(record(run("gpt", 1, 3.0), run("gpt", 1, 3.0)).runs)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content.pop("format"), "format: missing"),
        (lambda content: content.update(format=2), "format: expected 1, found 2"),
        (lambda content: content["runs"][0].pop("text"), "text: missing"),
        (
            lambda content: content["runs"][0]["curve"][0].update(loss="low"),
            r"curve[0].loss: expected a number",
        ),
    ],
)
def test_refuses_damaged_records(change, message, tmp_path):
    path = saved(tmp_path / "results.json", run("gpt", 1, 3.0))
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as refused:
        records.read(path)
    assert message in str(refused.value)
