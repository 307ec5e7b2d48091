"""Tests of the scaling section of a report, on runs whose losses follow known laws."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from smallgpt_jax.comparison import (
    choice,
    choice_report,
    prediction,
    records,
    report,
    results,
    scaling_report,
)
from smallgpt_jax.comparison.power_law import Law
from smallgpt_jax.comparison.records import Record

BASE = Law(1.5, 60.0, 60.0, 0.34, 0.28)
# b has the law of a, with 2/3 of its FLOPs per token. c has the law of a, by active parameters; it
# has three times as many in all.
LAWS = {"a": BASE, "b": BASE, "c": BASE}
A = {"a": BASE}
COSTS = {"a": 6.0, "b": 4.0, "c": 6.0}
SIZES, HELD_OUT = {"1": 300_000, "2": 700_000, "3": 1_600_000}, {"4": 4_000_000}


def make_runs(
    laws=LAWS, sizes=SIZES, seeds: int = 2, noise: float = 2e-4, costs=COSTS
) -> list[results.Run]:
    """Returns runs of 20 tokens per parameter, with shorter horizons, at the sizes {SIZE:
    parameters}.
    """
    rng, runs = np.random.default_rng(len(sizes)), []
    for size, parameters in sizes.items():
        for seed in range(seeds):
            for name, law in laws.items():
                for horizon in (0.25, 0.5, 1.0):
                    tokens = round(20 * parameters * horizon)
                    loss = float(law.loss(parameters, tokens)) + noise * rng.standard_normal()
                    flops = costs[name] * parameters * tokens
                    runs.append(
                        results.Run(
                            name=f"{name}@{size}",
                            workdir=f"{name}{size}{seed}-{horizon}",
                            seed=seed,
                            config={"train.steps": 100},
                            is_finished=True,
                            diverged=False,
                            is_imported=False,
                            steps_done=100,
                            parameters=parameters * (3 if name == "c" else 1),
                            active_parameters=parameters,
                            components={},
                            flops_per_token=costs[name] * parameters,
                            tokens_per_step=tokens / 100,
                            tokens_per_second=None,
                            memory_bytes=None,
                            sessions=(),
                            expert_load=None,
                            texts=(),
                            benchmarks={},
                            horizon=horizon,
                            run=f"{name}{size}{seed}",
                            curve=(results.Point(100, tokens, flops, None, loss, 1.0, 512),),
                        )
                    )
    return runs


def written(folder, runs, **fields) -> str:
    """Writes the report of runs. Returns report.md."""
    report.write_report(folder, Record("t", "b", "c", "a@1", tuple(runs), **fields))
    return (folder / "report.md").read_text()


def row_of(markdown: str, *cells: str) -> list[str]:
    """Returns the cells of the first row of a table that begins with `cells`."""
    line = next(
        line for line in markdown.splitlines() if line.startswith("| " + " | ".join(cells) + " |")
    )
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
def test_laws_multipliers_and_order(tmp_path):
    markdown = written(tmp_path, make_runs())
    for cells, factor in (
        (("a", "total"), 1),
        (("b", "total"), 1),
        (("c", "total"), 3**0.34),
        (("c", "active"), 1),
    ):
        found = row_of(markdown, *cells)
        assert found[2] == "6"
        constants = [float(cell.split()[0]) for cell in found[3:8]]
        assert constants == pytest.approx([1.5, factor * 60, 0.34, 60, 0.28], rel=0.15)
    assert (
        "Training FLOPs: b at " in markdown
        and "cannot tell at 1e+15, because the budget is beyond" in markdown
    )
    section = markdown.partition("Compute multipliers")[2]
    ratios = row_of(section, "b")[
        1:-1
    ]  # without the largest budget, whose loss is at the end of b's range
    assert [float(cell.split()[0]) for cell in ratios] == pytest.approx(
        [1.5] * len(ratios), rel=0.03
    ) and ratios
    low, high = (
        6 * 0.25 * 20 * 300_000**2,
        4 * 20 * 1_600_000**2,
    )  # that both a and b were trained on
    assert f"| b | {low:.2g} to {high:.2g}: b |" in section
    assert "cannot be told" in row_of(section.partition("The order of")[2], "c")[1]


def test_a_loss_of_one_seed_has_no_interval():
    rows = tuple(
        choice.Row(name, 2.5, *interval, 1e12, 100, 100, 1e6, 0.5)
        for name, interval in (("a", (2.4, 2.6)), ("b", (None, None)))
    )
    table = choice_report.equal_flops_table(
        [choice.Answer("flops", "FLOPs", 1e12, "a", "", contenders=rows)]
    )
    assert table.rows == (("a", "2.500 (2.400 to 2.600)"), ("b", "2.500"))


@pytest.mark.slow
@pytest.mark.draws
def test_the_held_out_check_uses_the_stored_predictions(tmp_path):
    runs, held_out = make_runs(), make_runs(sizes=HELD_OUT)
    content = prediction.predict(prediction.records_of(runs), prediction.records_of(held_out))
    content |= {"time": "2026-11-23T10:00:00+00:00", "command": "c", "held_out": "4"}
    stored = content["predictions"]["parameters"][0]
    assert stored["name"] == "a" and stored["low"] < stored["loss"] < stored["high"]
    stored.update(loss=9.0, low=8.9, high=9.1)  # a later fit would not predict this
    markdown = written(tmp_path, runs + held_out, held_out="4", predictions=content)
    trained = np.mean(
        [run.last.loss for run in held_out if run.name == "a@4" and run.horizon == 0.25]
    )
    assert (
        f"| a | total | 20,000,000 | 9.0000 | 8.9000 to 9.1000 | {trained:.4f} | "
        f"{trained - 9:+.4f} | no | 2 |" in markdown
    )
    for name, kind in (("b", "total"), ("c", "total"), ("c", "active")):
        _, _, _, loss, interval, mean, error, is_inside, _ = row_of(
            markdown, name, kind, "80,000,000"
        )
        low, high = map(float, interval.split(" to "))
        assert (
            float(error) == pytest.approx(float(mean) - float(loss), abs=2e-4)
            and abs(float(error)) < 0.01
        )
        assert is_inside == ("yes" if low < float(mean) < high else "no")
    assert "before a run of size 4 was trained" in markdown
    assert "| b | active |" not in markdown  # the same as its row with all parameters
    assert (
        "The laws failed" not in markdown
        and "of these losses are inside the predicted 80% intervals" in markdown
    )
    assert (
        markdown.index("## Which model?")
        < markdown.index("## Scaling laws")
        < markdown.index("## Ranking at 4")
    )
    actual = {
        name: np.mean([run.last.loss for run in held_out if run.name == f"{name}@4"])
        for name in LAWS
    }
    order = row_of(markdown, "baseline: order of the most expensive runs fitted")
    assert float(order[3]) == pytest.approx(
        actual[order[1].split(", ")[0]] - min(actual.values()), abs=1e-4
    )
    first = row_of(
        markdown, "laws, N: total parameters"
    )  # the stored prediction of a is far too high
    assert first[1].split(", ")[-1] == "a"
    sizes = {Image.open(path).size for path in tmp_path.glob("*.png")}
    assert len(sizes) == 1 and (tmp_path / "scaling-held-out.png").exists()


def test_paired_differences_are_those_of_the_largest_common_size(tmp_path):
    """c is not trained at size 4."""
    runs = make_runs() + [run for run in make_runs(sizes=HELD_OUT) if run.name != "c@4"]
    shown = records.at_one_size(Record("t", "b", "c", "a@1", tuple(runs)))
    assert shown.reference == "a@3" and {run.name for run in shown.runs} == {"a@3", "b@3", "c@3"}
    unfinished = [
        dataclasses.replace(run, is_finished=False) if run.name == "b@3" else run for run in runs
    ]
    assert records.largest_common_size(unfinished) == "2"


@pytest.mark.parametrize(
    "runs, held_out, text",
    [
        (
            make_runs(sizes={"1": 300_000, "2": 700_000}),
            "",
            "No scaling law for lack of 2 more runs, 1 more size: a, b, c.",
        ),
        (
            [
                dataclasses.replace(run, curve=(dataclasses.replace(run.last, flops=None),))
                for run in make_runs()
            ],
            "",
            "No scaling law, because the FLOPs are unknown: a, b, c.",
        ),
        (
            make_runs(A) + make_runs(A, HELD_OUT),
            "4",
            "No prediction was made before the runs of size 4 were trained",
        ),
        (make_runs(A), "4", "The runs of size 4 are neither predicted nor trained yet."),
    ],
)
def test_says_what_is_missing(runs, held_out, text):
    found = scaling_report.scaling_blocks(
        Record("t", "b", "c", "a@1", tuple(runs), held_out=held_out)
    )
    assert any(text in getattr(block, "text", "") for block in found)
