"""Tests of the report's section about the inside of the models, on made-up runs and diagnoses."""

import dataclasses
import json

import pytest
from test_report import make_run

from smallgpt_jax.comparison import inside_report
from smallgpt_jax.diagnosis.summary import read_summary, summarize


def diagnosis(paths: int, offset: float = 0.0) -> dict:
    """Of two blocks per path. The second ones have no attention, and their absence has no known
    effect.
    """
    blocks = [
        {
            "width": 8,
            "output": {
                "token_similarity": 0.1 * depth + path + offset,
                "neighbour_similarity": 0.5,
                "effective_rank": 4.0 + depth,
            },
            **(
                {}
                if depth
                else {"attention": {"entropy": [0.5, 0.7 + path], "first_weight": [0.0, None]}}
            ),
        }
        for path in range(paths)
        for depth in range(2)
    ]
    losses = {
        "loss": 3.0 + offset,
        "in_context_score": -0.25,
        "without_block": [{"difference": value} for value in (2.0, None, 0.5, -0.125)[: 2 * paths]],
        "repeats": {"fraction": 0.2, "loss": 2.0 - offset, "others": 3.5},
    }
    return {
        "format": 1,
        "split": "validation",
        "step": 7,
        "paths": paths,
        "trained": {"blocks": blocks, "losses": losses},
    }


def test_a_summary_averages_paths_and_heads(tmp_path):
    found = summarize(diagnosis(paths=2))
    first, second = found.pop("blocks")
    assert first == pytest.approx(
        {
            "token_similarity": 0.5,
            "neighbour_similarity": 0.5,
            "effective_rank": 4.0,
            "entropy": 0.85,
            "first_weight": 0.0,
        }
    )
    assert second == pytest.approx(
        {
            "token_similarity": 0.6,
            "neighbour_similarity": 0.5,
            "effective_rank": 5.0,
            "entropy": None,
            "first_weight": None,
        }
    )
    assert found == {
        "step": 7,
        "loss": 3.0,
        "in_context_score": -0.25,
        "loss_of_repeats": 2.0,
        "loss_of_others": 3.5,
        "least_important_block": -0.125,
        "most_important_block": 2.0,
    }
    (tmp_path / "diagnosis").mkdir()
    (tmp_path / "diagnosis/diagnose.json").write_text(json.dumps(diagnosis(paths=1)))
    assert (
        read_summary(tmp_path, step=8) is None
    )  # it was measured before the run was trained further
    assert read_summary(tmp_path, step=7)["most_important_block"] == 2.0
    (tmp_path / "diagnosis/diagnose.json").write_text(
        json.dumps(diagnosis(paths=1) | {"split": None})
    )
    assert read_summary(tmp_path, step=7) is None  # it was measured on other texts


def test_the_section_has_means_over_seeds():
    def run(name: str, seed: int, inside: dict | None):
        return dataclasses.replace(make_run(seed, name=name), inside=inside)

    measured = [summarize(diagnosis(1, offset)) for offset in (0.0, 0.2)]
    runs = [run("gpt", 0, measured[0]), run("gpt", 1, measured[1]), run("mamba", 0, None)]
    *_, plot, table = inside_report.inside_blocks(runs)
    assert table.rows == (
        (
            "gpt",
            "0.200",
            "0.500",
            "5.0",
            "0.600",
            "0.000",
            "1.900 (1.800 to 2.000)",
            "3.500 (3.500 to 3.500)",
            "-0.2500",
            "+2.0000",
            "+2.0000",
        ),
    )
    others = [run("b", 0, measured[1]), run("b", 1, summarize(diagnosis(1, 0.41)))]
    *_, table = inside_report.inside_blocks([*runs, *others], "gpt")
    assert table.rows[0] == (
        "similarity",
        "b",
        "+0.2050",
        "+0.1415 to +0.2685",
        "2",
        "0.016",
        "higher",
    )
    lines = {
        axes.get_ylabel(): [line.get_xydata().tolist() for line in axes.lines]
        for axes in plot.figure.axes
    }
    assert lines["mean cosine of all tokens"] == [
        [[0, pytest.approx(0.1)], [1, pytest.approx(0.2)]]
    ]
    assert lines["attention entropy / ln(keys)"] == [[[0, pytest.approx(0.6)]]]
    assert (
        inside_report.inside_blocks([*runs[2:], run("empty", 0, measured[0] | {"blocks": []})])
        == []
    )
