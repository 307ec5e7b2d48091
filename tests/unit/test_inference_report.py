"""Tests of the report's sections about inference and the choice of a model, on made-up runs."""

import dataclasses

import pytest
from test_report import make_run, write

from smallgpt_jax.comparison import choice_report, inference_report
from smallgpt_jax.comparison.blocks import Paragraph, Table
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.comparison.results import Run


def quartiles(median: float) -> dict:
    return {"median": median, "low": 0.9 * median, "high": 1.2 * median, "count": 8}


def measured(
    name: str, seed: int, loss: float, ms: float, cache_bytes: int, parameters: int
) -> Run:
    run = make_run(seed, name=name)
    inference = {
        "device": "cpu",
        "dtype": "bfloat16",
        "context_length": 64,
        "cache_bytes": cache_bytes,
        "cache_bytes_per_token": cache_bytes // 64,
        "prefill_ms": quartiles(5 * ms),
        "decoding": [
            {"batch": batch, "cache": cache, "step_ms": quartiles(ms * factor)}
            for batch, factor in ((1, 1), (32, 8))
            for cache in ("empty", "full")
        ],
    }
    last = dataclasses.replace(run.curve[-1], loss=loss)
    return dataclasses.replace(
        run,
        curve=(run.curve[0], last),
        parameters=parameters,
        active_parameters=parameters,
        weight_bytes=2 * parameters,
        inference=inference,
    )


def record(noise: float = 0.001) -> Record:
    runs = [
        measured(name, seed, loss + noise * (seed - 1) * sign, ms + 0.1 * seed, size, parameters)
        for name, loss, sign, ms, size, parameters in (
            ("good", 3.0, 1, 4.0, 640_000, 2_000_000),
            ("fast", 3.2, -1, 1.0, 64_000, 1_000_000),
            ("bad", 3.4, 1, 5.0, 640_000, 2_000_000),
        )
        for seed in range(3)
    ]
    return Record("t", "", "", "good", tuple(runs))


def test_table_of_the_measurements():
    *_, table = inference_report.inference_blocks(record().runs)
    assert table.head[:6] == (
        "run",
        "weights MB",
        "cache bytes per token",
        "cache MB, full",
        "context",
        "prefill ms",
    )
    assert table.rows[1] == (
        "fast",
        "2.0",
        "1,000",
        "0.06",
        "64",
        "5.5 (4.95 to 6.6)",
        *["1.1 (0.99 to 1.32)"] * 2,
        *["8.8 (7.92 to 10.6)"] * 2,
    )
    paragraph = inference_report.inference_blocks(record().runs)[1]
    assert "bfloat16 (vectors" in paragraph.text and "Measured on cpu." in paragraph.text


def test_plots_mark_the_pareto_front():
    """Model bad is slower than good, larger than fast, and worse than both."""
    plots = {
        plot.name: plot.figure.axes[0] for plot in inference_report.inference_plots(record().runs)
    }
    assert list(plots) == ["loss-latency", "loss-latency-32", "loss-memory", "loss-memory-32"]
    front, *lines = plots["loss-latency"].lines
    assert front.get_xydata().tolist() == [pytest.approx([1.1, 3.2]), pytest.approx([4.1, 3.0])]
    models, filled = lines[::2], lines[1::2]
    assert [line.get_label() for line in models] == ["good", "fast", "bad"]
    assert [line.get_xdata().tolist() for line in filled] == [
        pytest.approx([4.1]),
        pytest.approx([1.1]),
        [],
    ]
    (at_32,) = (
        line.get_xdata().tolist()
        for line in plots["loss-memory-32"].lines
        if line.get_label() == "fast"
    )
    assert at_32 == [pytest.approx(2 + 32 * 0.064)]  # MB


def answers_table(found: list) -> Table:
    return next(block for block in found if isinstance(block, Table))


def test_which_model():
    heading, flops, parameters, latency, memory, table, text, *_ = choice_report.choice_blocks(
        record()
    )
    assert heading.text == "Which model?" and "from 97.5% on" in text.text
    assert flops.text == "Training FLOPs: good at 200."
    assert parameters.text == "Parameters: fast at 1.00 M; good at 2.00 M."
    assert latency.text.endswith("fast at 1.1 ms; good at 4.1 ms.") and memory.text.endswith(
        "good at 4.64 MB."
    )
    assert [row[:3] for row in table.rows] == [
        ("training FLOPs", "200", "good"),
        ("parameters", "1.00 M", "fast"),
        ("parameters", "2.00 M", "good"),
        ("decoding step, batch 1, full cache", "1.1 ms", "fast"),
        ("decoding step, batch 1, full cache", "4.1 ms", "good"),
        ("weights and full cache, batch 1", "2.06 MB", "fast"),
        ("weights and full cache, batch 1", "4.64 MB", "good"),
    ]
    assert table.rows[1][-1] == "it is the only model within the budget"
    assert table.rows[0][3] == "1.00" and table.rows[0][4].startswith("3.0000 (2.99")
    assert table.rows[0][5:] == ("–",) * 3


def test_each_reason_is_its_own():
    """Two models of 1.1 and 4.1 ms; a better one is not measured, so nothing can be told."""
    unmeasured = [
        dataclasses.replace(run, inference=None) if run.name == "good" else run
        for run in record().runs
    ]
    latency = next(
        block.text
        for block in choice_report.choice_blocks(
            dataclasses.replace(record(), runs=tuple(unmeasured))
        )
        if getattr(block, "text", "").startswith("Decoding step")
    )
    assert "because good may be the best, but its ms per decoding step" in latency


def test_losses_at_equal_flops():
    """Two budgets, of which model bad was trained with the smaller one only."""

    def with_flops(run, factor: int, gain: float):
        last = dataclasses.replace(
            run.curve[-1], flops=factor * run.curve[-1].flops, loss=run.curve[-1].loss - gain
        )
        return dataclasses.replace(run, name=f"{run.name}@{factor}", curve=(run.curve[0], last))

    runs = [with_flops(run, *step) for run in record().runs for step in ((1, 0.0), (10, 0.5))]
    blocks = choice_report.choice_blocks(
        dataclasses.replace(record(), runs=tuple(run for run in runs if run.name != "bad@10"))
    )
    start = next(
        i
        for i, block in enumerate(blocks)
        if getattr(block, "text", "").startswith("Losses at equal")
    )
    table = blocks[start + 1]
    assert table.head == ("model", "200", "2e+03") and [row[0] for row in table.rows] == [
        "good",
        "fast",
        "bad",
    ]
    assert table.rows[0][1].startswith("3.000 (2.99") and table.rows[0][2].startswith("2.500 (2.49")
    assert table.rows[2][1].startswith("3.400 (3.") and table.rows[2][2] == "–"


def test_about_equal_budgets_are_one():
    near = tuple(
        dataclasses.replace(run, parameters=1_700_000) if run.name == "fast" else run
        for run in record().runs
    )
    table = answers_table(choice_report.choice_blocks(dataclasses.replace(record(), runs=near)))
    assert [row[1:3] for row in table.rows if row[0] == "parameters"] == [("2.00 M", "good")]


def test_when_it_cannot_be_told():
    blocks = choice_report.choice_blocks(record(noise=1.0))
    tie = answers_table(blocks).rows[0]
    assert " or " in tie[2] and "fast" in tie[2]
    assert blocks[1].text == f"Training FLOPs: {tie[2]} (cannot be told apart) at 200."
    assert sum(map(float, tie[3].split(", "))) == pytest.approx(1, abs=0.02) and float(tie[5]) > 0
    one_seed = dataclasses.replace(record(), runs=record().runs[::3])
    blocks = choice_report.choice_blocks(one_seed)
    assert answers_table(blocks).rows[1][2] == "fast"  # one model is within the smallest budget
    equal = dataclasses.replace(
        one_seed,
        runs=tuple(
            dataclasses.replace(run, parameters=9, weight_bytes=None, inference=None)
            for run in one_seed.runs
        ),
    )
    *_, text = choice_report.choice_blocks(equal)
    assert isinstance(text, Paragraph) and text.text.startswith(
        "Cannot tell, because the models have fewer than two"
    )
    assert choice_report.choice_blocks(dataclasses.replace(equal, runs=equal.runs[:1])) == []
    assert inference_report.inference_blocks(equal.runs) == []


@pytest.mark.slow
@pytest.mark.draws
def test_the_report_has_both_sections(tmp_path):
    write(tmp_path, record().runs)
    markdown = (tmp_path / "report.md").read_text()
    assert markdown.index("## Which model?") < markdown.index("## Inference")
    assert (tmp_path / "loss-latency.png").exists() and (tmp_path / "loss-memory-32.png").exists()
    assert "| good | 3.0000 (2.9990 to 3.0010) |" in markdown.replace("**", "")
