"""Tests of reports on made-up runs: numbers, warnings, conclusions, names, logged curves."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from smallgpt_jax.comparison import (
    aggregation,
    blocks,
    figures,
    loss_report,
    measure,
    measurement_report,
    report,
    results,
)
from smallgpt_jax.comparison.records import Record
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config_file import write_config


def make_run(seed: int, steps=(1, 2), name: str = "a", worse: float = 0.0) -> results.Run:
    points = tuple(
        results.Point(
            step, step * 10, step * 100.0, float(step), 6.0 - step + seed + worse, 1.0, 512
        )
        for step in steps
    )
    return results.Run(
        name=name,
        workdir="x",
        seed=seed,
        config={"train.steps": 2},
        is_finished=2 in steps,
        diverged=False,
        is_imported=False,
        steps_done=max(steps),
        parameters=1,
        active_parameters=1,
        components={},
        flops_per_token=1.0,
        tokens_per_step=10,
        curve=points,
        tokens_per_second=1.0,
        memory_bytes=None,
        sessions=(),
        expert_load=None,
        texts=(),
        benchmarks={},
    )


def write(
    folder, runs, title: str = "t", budget: str = "", command: str = "", reference: str = ""
) -> str:
    """Writes a report of runs. Returns its text."""
    return report.write_report(folder, Record(title, budget, command, reference, tuple(runs)))


def conclusion(groups: dict, reference: str | None = None) -> str:
    return loss_report.conclusion(groups, aggregation.rank(groups, reference))


def test_seconds_are_interpolated_and_extrapolated():
    lines = [
        {"step": 3, "split": "train", "tokens_per_second": 30.0},  # 10 tokens per step: 1 s
        {"step": 3, "split": "eval"},
        {"step": 6, "split": "train", "tokens_per_second": 15.0},
    ]
    logged = results.training_seconds(lines, 10)
    assert logged == ([0, 3, 6], [0.0, 1.0, 3.0])
    assert [results.seconds_at(step, *logged) for step in (3, 4.5, 6, 9)] == [1.0, 2.0, 3.0, 5.0]
    assert results.seconds_at(3, [0], [0.0]) is None


def with_losses(name: str, losses, seeds=None) -> list[results.Run]:
    """Returns one run per loss, with the seeds 0, 1, … or `seeds`. The loss is that of the last
    evaluation.
    """
    runs = [make_run(seed, name=name) for seed in seeds or range(len(losses))]
    return [
        dataclasses.replace(run, curve=(run.curve[0], dataclasses.replace(run.curve[1], loss=loss)))
        for run, loss in zip(runs, losses)
    ]


def test_conclusion_compares_runs_with_the_same_seed():
    """Two models are compared seed by seed, because losses differ more between seeds than between
    models.
    """
    groups = {"a": with_losses("a", [4.0, 5.0, 6.0]), "b": with_losses("b", [4.49, 5.5, 6.51])}
    assert conclusion(groups) == (  # the half-width is 4.3027 · 0.01 / √3
        "Lowest validation loss: a, 5.0000; then b, 5.5000. b minus a: +0.5000 ± 0.0248 (95% "
        "interval over 3 seeds), higher."
    )
    assert conclusion({name: group[:1] for name, group in groups.items()}).endswith(
        "With one common seed, there is no interval: the order may be chance."
    )
    assert "With no common seed" in conclusion(
        {**groups, "b": with_losses("b", [7.0, 7.0], [8, 9])}
    )
    # Only model a has a run with the third seed. If the high loss of this run counted, a would rank
    # behind b.
    fewer = with_losses("b", [4.2, 5.21])
    assert "a, 4.5000; then b, 4.7050. b minus a: +0.2050" in conclusion({**groups, "b": fewer})
    assert "over 2 seeds" in conclusion({**groups, "b": fewer})
    groups["b"] = with_losses("b", [4.2, 4.9, 6.2])
    assert conclusion(groups).endswith(
        "+0.1000 ± 0.4303 (95% interval over 3 seeds), not distinguishable; about 26 "
        "seeds would decide."
    )
    assert conclusion({**groups, "b": with_losses("b", [4.0, 5.0, 6.0])}).endswith(
        "+0.0000 ± 0.0000 (95% interval over 3 seeds), not distinguishable; more than 10,000 "
        "seeds would be needed to decide."
    )


def test_models_not_distinguishable_from_the_best(tmp_path):
    """c is clearly worse than a and b, whose difference is within the noise. The reference is not
    the best model.
    """
    noise = np.array([0.01, -0.01, 0.0, 0.005, -0.005])
    groups = {
        "b": with_losses("b", 3.004 + noise[::-1]),
        "c": with_losses("c", 3.2 + noise / 2),
        "a": with_losses("a", 3.0 + noise),
    }
    order = aggregation.rank(groups, "b")
    assert list(order.means) == ["a", "b", "c"] and order.not_distinguishable == ("b",)
    assert [(row.name, row.other, row.verdict) for row in order.neighbors] == [
        ("b", "a", "not distinguishable"),
        ("c", "b", "higher"),
    ]
    assert [(row.name, row.verdict) for row in order.against_reference] == [
        ("a", "not distinguishable"),
        ("c", "higher"),
    ]
    assert {row.comparisons for row in order.neighbors} == {
        3
    }  # all pairs, because the losses chose the neighbors
    assert {row.comparisons for row in order.against_reference} == {2}
    assert conclusion(groups).endswith("Not distinguishable from a: b. Higher: c.")
    assert conclusion({**groups, "b": with_losses("b", 3.1 + noise / 2)}).endswith(
        "a is lower than every other run."
    )

    text = write(tmp_path, [run for group in groups.values() for run in group], reference="b")
    first, second, third = (" ".join(line.split()) for line in text.splitlines()[-3:])
    assert (
        first.startswith("a 3.0000 (2.9900 to 3.0100) not distinguishable (≈ ")
        and " reference " in second
    )
    assert third.startswith("c 3.2000 (3.1950 to 3.2050) higher 1.0000 5 ")
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["format"] == 1 and found["reference"] == "b"
    assert found["ranking"]["not_distinguishable"] == ["b"] and found["ranking"]["means"][
        "a"
    ] == pytest.approx(3)
    row = found["ranking"]["neighbors"][0]
    assert (row["name"], row["other"], row["seeds"], row["verdict"]) == (
        "b",
        "a",
        5,
        "not distinguishable",
    )
    markdown = (tmp_path / "report.md").read_text()
    assert f"| b | a | +0.0040 | {row['mean'] - row['half_width']:+.4f} to " in markdown
    assert "corrected for 2 comparisons" in markdown and "corrected for all 3 pairs" in markdown


def test_the_mean_of_the_last_evaluations():
    run = dataclasses.replace(make_run(0, steps=(1, 2)), averaged=2)  # losses 5 and 4
    assert (run.final("loss"), run.final("bits_per_byte")) == (4.5, 1.0)
    assert dataclasses.replace(run, averaged=1).final("loss") == 4.0
    other_rows = dataclasses.replace(run.curve[0], targets=9)
    assert dataclasses.replace(run, curve=(other_rows, run.curve[1])).final("loss") == 4.0
    assert (
        dataclasses.replace(
            run, curve=(dataclasses.replace(run.curve[0], loss=None), run.curve[1])
        ).final("loss")
        is None
    )
    assert aggregation.mean_losses({"a": [run], "b": [make_run(0, name="b", worse=0.2)]}) == {
        "b": 4.2,
        "a": 4.5,
    }


def test_speed_and_memory_have_medians_and_quartiles(tmp_path):
    runs = [
        dataclasses.replace(make_run(seed), tokens_per_second=speed, memory_bytes=2 * 10**6)
        for seed, speed in enumerate((1000.0, 1100.0, 1200.0, 9000.0))
    ]
    row = write(tmp_path, runs).splitlines()[-1]
    assert " 1,150 " in row and " 2.0 " in row
    assert (
        "| a | 4 | 1,150 (1,075 to 3,150) | 2 | 2.0 | – |" in (tmp_path / "report.md").read_text()
    )
    assert aggregation.quartiles([1.0, None]) is None and aggregation.quartiles([]) is None


def test_the_table_is_sorted_and_marks_the_best_row(tmp_path):
    """Finished runs are in ascending order of the loss. Unfinished ones are last, even if their
    loss is lower.
    """
    runs = [
        make_run(0, name="worst", worse=0.5),
        make_run(0, (1,), "unfinished", worse=-3),
        make_run(0, name="best"),
        make_run(0, name="middle", worse=0.1),
    ]
    text = write(tmp_path, runs)
    rows = text.splitlines()[-4:]
    assert [row.split()[0] for row in rows] == ["best", "middle", "worst", "unfinished"]
    assert ["← best" in row for row in rows] == [True, False, False, False]
    markdown = (tmp_path / "report.md").read_text()
    assert "| **best** | **4.0000** |" in markdown and markdown.startswith(
        "# t: worst, unfinished, best, middle\n"
    )
    page = (tmp_path / "report.html").read_text()
    assert "<tr class=best><td>best</td>" in page and page.count("class=best") == 1
    # Losses over different rows are not ranked.
    runs[0] = dataclasses.replace(
        runs[0], curve=tuple(dataclasses.replace(point, targets=9) for point in runs[0].curve)
    )
    text = write(tmp_path, runs)
    assert [row.split()[0] for row in text.splitlines()[-4:]] == [
        "worst",
        "unfinished",
        "best",
        "middle",
    ]
    assert "← best" not in text


@pytest.mark.draws
def test_figures_commands_and_headings_of_the_page(tmp_path):
    """All figures have one width. The command and columns of sentences wrap, columns of values do
    not.
    """
    load = {"mlp/router": [[0.5, 1.5]]}
    runs = [dataclasses.replace(make_run(0), expert_load=load), make_run(0, name="b")]
    write(tmp_path, runs, command="c" * 500)
    page = (tmp_path / "report.html").read_text()
    assert "figure { margin: 0; width: min(100%, 34rem); }" in page and "auto-fit" not in page
    assert "white-space: pre-wrap" in page
    table = blocks.Table(("number", "because"), (("1", "a reason of many words " * 5),))
    assert "<tr><th>number</th><th class=sentence>because</th></tr>" in blocks.to_html(
        "title", [table]
    )
    sizes = {Image.open(path).size for path in tmp_path.glob("*.png")}
    assert len(sizes) == 1


def test_says_how_little_short_runs_prove():
    def evidence(tokens: int, seeds: int) -> str:
        def trained(run):
            return dataclasses.replace(
                run,
                active_parameters=1000,
                curve=tuple(dataclasses.replace(point, tokens=tokens) for point in run.curve),
            )

        return loss_report.evidence(
            {name: [trained(make_run(seed, name=name)) for seed in range(seeds)] for name in "ab"}
        )

    text = evidence(51_000, seeds=1)
    assert text.startswith(
        "Little evidence: at least 51,000 tokens per run and 51 tokens per parameter."
    )
    assert "compute-optimal" not in text
    text = evidence(1_900, seeds=6)
    assert (
        text.startswith("Little evidence")
        and "1.9 tokens per parameter. About 20 per parameter" in text
    )
    assert evidence(20_000, seeds=2).startswith("Evidence: at least 20,000 tokens")


def test_benchmarks_of_the_last_step_and_the_whole_model(tmp_path):
    """`benchmarks` returns results of the given step only.

    It ignores results of a part of the model, of another dtype than the model's own, or of some
    examples of a task. Two results of the same task are separate entries if they differ in the
    number of shots or in the task's number of examples.
    """

    def write(
        name: str, score: float, shots: int = 0, examples: int = 100, scored: int | None = None
    ) -> None:
        scored = scored or examples
        (tmp_path / name).write_text(
            json.dumps(
                {
                    "results": {"copa": {"acc,none": score, "sample_len": scored}},
                    "n-shot": {"copa": shots},
                    "n-samples": {"copa": {"original": examples, "effective": scored}},
                }
            )
        )

    for name, score in (
        ("step20-copa.json", 0.7),
        ("step10-copa.json", 0.1),
        ("step200-copa.json", 0.2),
        ("step20-paths0-copa.json", 0.3),
        ("step20-bfloat16-copa.json", 0.4),
    ):
        write(name, score)
    write("step20-copa-limit10.json", 0.9, scored=10)
    write("step20-copa-limit1000.json", 0.7, scored=100)
    write("step20-copa-5shot.json", 0.8, shots=5)
    write("step20-paper.json", 0.6, examples=1570)
    assert results.benchmarks(tmp_path, 20) == {
        "copa acc (0-shot, 100 examples)": 0.7,
        "copa acc (5-shot, 100 examples)": 0.8,
        "copa acc (0-shot, 1,570 examples)": 0.6,
    }
    assert (
        measurement_report.format_spread(aggregation.spread([0.7]), seeds=2)
        == "0.7000, 1 of 2 seeds"
    )


def test_accuracies_of_examples_are_compared_over_seeds(tmp_path):
    def write(name: str, accuracy: float, **fields) -> None:
        (tmp_path / name).write_text(
            json.dumps(
                {
                    "examples": "/data/task/test.jsonl",
                    "count": 1500,
                    "is_whole": True,
                    "results": {"accuracy": {"mean": accuracy, "standard_error": 0.1}},
                    **fields,
                }
            )
        )

    write("examples-step20-test-accuracy.json", 0.75)
    write("examples-step20-a-limit10.json", 0.1, is_whole=False)
    write("examples-step20-b.json", 0.1, is_whole=1)  # damaged
    write("examples-step200-test-accuracy.json", 0.1)
    found = results.examples(tmp_path, 20)
    assert found == {"task/test.jsonl accuracy (1,500 examples)": 0.75}

    runs = [
        dataclasses.replace(make_run(seed, name=name), benchmarks={"task acc": score})
        for name, scores in (("a", (0.5, 0.6, 0.7)), ("b", (0.61, 0.7, 0.79)), ("c", (0.9,)))
        for seed, score in enumerate(scores)
    ]
    _, _, paragraph, table, *_ = measurement_report.measurement_blocks(
        aggregation.group_by_name(runs), runs, "a"
    )
    assert paragraph.text.startswith("Against a, paired by seed")  # half-width: 4.3027 · 0.01 / √3
    assert table.rows == (
        ("task acc", "b", "+0.1000", "+0.0752 to +0.1248", "3", "0.0033", "higher"),
    )
    _, _, after_scores, *_ = measurement_report.measurement_blocks({"a": runs[:3]}, runs[:3], "a")
    assert after_scores == blocks.Heading("Speed and memory")


def test_runs_of_one_model_have_one_name(tmp_path):
    """Tuned runs have the tokenizers of their own workdirs."""
    for name, rate in (("a-seed1", 0.1), ("a-seed2", 0.1), ("a-seed3", 0.2), ("b", 0.1)):
        (tmp_path / name).mkdir()
        write_config(
            tmp_path / name,
            {
                "model": {},
                "mesh": {},
                "data": {"tokenizer": f"runs/{name}/tokenizer"},
                "optimizer": {"learning_rate": rate},
                "train": {"seed": ord(name[-1])},
            },
        )
    named = results.name_workdirs(sorted(tmp_path.iterdir()))
    assert [name for name, _ in named] == ["a", "a", "a (2)", "b"]


def test_answers_of_all_objectives_compare():
    config = {"train.objective": "prefix", "data.format": "completion"}
    runs = [
        dataclasses.replace(make_run(0, name=name), config={"train.steps": 2, **fields})
        for name, fields in (("a", {"data.format": "completion"}), ("b", config))
    ]
    assert aggregation.rank(aggregation.group_by_name(runs), "a").means
    assert not any("objectives" in text for text in loss_report.warnings(runs))


@pytest.mark.slow
@pytest.mark.draws
def test_names_with_special_characters(tmp_path):
    runs = [make_run(0, name=r"a$\frac$"), make_run(0, name="_b <i>|")]
    runs = [
        dataclasses.replace(
            run_,
            texts=tuple(
                {"text": "my/te xt", "context_length": length, "bits_per_byte": 2.0, "source": "s"}
                for length in (64, 128)
            ),
        )
        for run_ in runs
    ]
    write(tmp_path, runs, title="<b>")
    assert (tmp_path / "context-my_te_xt.png").exists()
    assert "<h1>&lt;b&gt;: a$\\frac$, _b &lt;i&gt;|</h1>" in (tmp_path / "report.html").read_text()
    assert r"| _b <i>\| |" in (tmp_path / "report.md").read_text()
    (legend,) = figures.loss_against("tokens", runs).legends
    assert [text.get_text() for text in legend.get_texts()] == [r"a$\frac$", "_b <i>|"]


@pytest.mark.draws
def test_report_of_a_single_run(tmp_path):
    summary = write(tmp_path, [make_run(0)], "a", "One run.", "c", reference="a")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "loss-flops.png",
        "loss-seconds.png",
        "loss-tokens.png",
    ]
    markdown = (tmp_path / "report.md").read_text()
    assert "| a | 4.0000 | 1.0000 | 1 |" in markdown and "4.0000" in summary
    for phrase in (
        "rank",
        "mean over the seeds",
        "means over seeds",
        "Config differences",
        "Shared config",
    ):
        assert phrase not in markdown


@pytest.mark.slow
@pytest.mark.draws
def test_report_of_experts(tmp_path):
    """The report shows the active parameters, and an image of the load with one row per block."""
    load = {
        "trunk/stage_0/mlp/router": [[0.5, 1.5], [1.0, None]],
        "trunk/stage_1/mlp/router": [[2.5, 0.0]],
    }
    run = dataclasses.replace(make_run(0), parameters=1234, active_parameters=567, expert_load=load)
    text = write(tmp_path, [run, make_run(0, name="b")])
    assert "1,234 (567 active)" in text and (tmp_path / "experts-a.png").exists()
    assert "Load of experts" in (tmp_path / "report.md").read_text()
    (image,) = figures.expert_load(run).axes[0].images
    assert np.array_equal(
        image.get_array().filled(9), [[0.5, 1.5], [1.0, 9], [2.5, 0.0]]
    )  # 9: not finite, null


def test_logged_curves(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("model,step,val_loss\ngpt,10,4.5\n")
    assert figures.read_logged(table) == {"gpt": [(5_242_880, 4.5)]}
    for text in (
        "",
        "model,step,val_loss\n",
        "a,b\n1,2\n",
        "model,step,val_loss\ngpt,ten,4.5\n",
        "x" * 200_000,
    ):
        table.write_text(text)
        with pytest.raises(UserError, match=r"--logged=.*table.*model,step,val_loss"):
            figures.read_logged(table)


def test_spread_and_curves():
    runs = [make_run(0), make_run(2), make_run(1, steps=(1,))]
    assert aggregation.mean_curve(runs[:2], "flops") == [
        (100.0, aggregation.Spread(6.0, 5.0, 7.0, 2)),
        (200.0, aggregation.Spread(5.0, 4.0, 6.0, 2)),
    ]
    assert aggregation.mean_curve(runs, "tokens") == [(10.0, aggregation.Spread(6.0, 5.0, 7.0, 3))]
    assert aggregation.final_spread(runs[:2], "loss") == aggregation.Spread(5.0, 4.0, 6.0, 2)
    assert aggregation.final_spread(runs, "loss") is None
    assert aggregation.spread([1.0, None]) is None


def test_warns_of_different_validation_rows():
    def with_targets(run_: results.Run, *targets, **config) -> results.Run:
        curve = [
            dataclasses.replace(point, targets=count) for point, count in zip(run_.curve, targets)
        ]
        return dataclasses.replace(
            run_,
            curve=tuple(curve),
            config={
                **run_.config,
                "model.context_length": 4,
                "data.packing": "concat",
                "data.separate_documents": False,
                "train.eval_steps": 4,
                "train.batch_size": 8,
                **config,
            },
        )

    def warnings_and_conclusion(*targets, **config):
        runs = [
            with_targets(make_run(0), 512, 512),
            with_targets(make_run(0, name="b"), *targets, **config),
        ]
        return loss_report.warnings(runs), conclusion(aggregation.group_by_name(runs))

    assert warnings_and_conclusion(512, 512)[0] == []
    # The two runs are evaluated on the same rows, with different batch sizes.
    assert (
        warnings_and_conclusion(512, 512, **{"train.eval_steps": 2, "train.batch_size": 16})[0]
        == []
    )
    warnings, outcome = warnings_and_conclusion(512, 1536)
    assert "b, seed 0: 1 of 2 evaluations used other rows than the last one" in warnings[0]
    assert "over different rows, 512 to 1,536 targets" in warnings[1] and len(warnings) == 2
    assert "no ranking" in outcome
    assert "no ranking" in warnings_and_conclusion(512, 512, **{"train.objective": "masked"})[1]
    assert aggregation.mean_curve([with_targets(make_run(0), 512, 1536)], "tokens") == [
        (20.0, aggregation.Spread(4.0, 4.0, 4.0, 1))
    ]
    (warning,) = warnings_and_conclusion(512, 512, **{"data.packing": "best_fit"})[0]
    assert "differ in config.data.packing" in warning and "different rows" in warning


def test_parses_texts():
    assert measure.parse_texts("a=x.txt, b=y/*.txt") == {"a": "x.txt", "b": "y/*.txt"}
    for texts, message in (
        ("x.txt", "'x.txt' is not NAME=SOURCE"),
        ("=x", "is not NAME=SOURCE"),
        ("b=y,a=", "'a=' is not NAME=SOURCE"),
        ("a=x,a=y", "two texts are named 'a'"),
        ("own=x", "the name 'own' is reserved"),
    ):
        with pytest.raises(UserError, match=message):
            measure.parse_texts(texts)
