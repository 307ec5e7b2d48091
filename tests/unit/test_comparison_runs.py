"""Tests of learning-rate grids with made-up losses: their extension, the best rate, and the order
of the runs.
"""

import math
from pathlib import Path

import pytest
from conftest import load_config

from smallgpt_jax.analysis.record import Grid
from smallgpt_jax.comparison.runs import Comparison, learning_rate_grid, run_folder
from smallgpt_jax.run.config import Config

INF = math.inf


def searched(multiples, losses: dict, max_added: int = 4) -> Grid:
    return learning_rate_grid(6, 0.01, multiples, max_added, losses.get)


def parabola(optimum: float) -> dict[float, float]:
    """Returns losses with a minimum at `optimum` (a power of two), {multiple: loss}."""
    return {2.0**n: (n - math.log2(optimum)) ** 2 for n in range(-10, 11)}


@pytest.mark.parametrize(
    "multiples, losses, max_added, tried, edge",
    [
        ((0.5, 1, 2), parabola(1), 4, [0.5, 1, 2], ""),
        ((2, 0.5, 1), parabola(1), 4, [0.5, 1, 2], ""),  # the order of the multiples has no effect
        ((0.5, 1, 2), parabola(4), 4, [0.5, 1, 2, 4, 8], ""),
        ((0.5, 1, 2), parabola(1 / 4), 4, [0.125, 0.25, 0.5, 1, 2], ""),
        ((0.5, 1, 2), parabola(4), 1, [0.5, 1, 2, 4], "highest"),  # limits
        ((0.5, 1, 2), parabola(256), 3, [0.5, 1, 2, 4, 8, 16], "highest"),
        ((0.5, 1, 2), parabola(1 / 256), 0, [0.5, 1, 2], "lowest"),
        (
            (1, 2, 8),
            {1: 3.0, 2: 2.0, 8: 1.0, 32: 2.0},
            4,
            [1, 2, 8, 32],
            "",
        ),  # each end is extended by its own ratio
        ((1, 2, 8), {0.5: 2.0, 1: 1.0, 2: 2.0, 8: 3.0}, 4, [0.5, 1, 2, 8], ""),
        ((1, 3), {0.333333: 3.0, 1: 2.0, 3: 2.5}, 4, [0.333333, 1, 3], ""),
        (
            (0.5, 1, 2),
            {0.25: 3.0, 0.5: 2.0, 1: INF, 2: INF},
            4,
            [0.25, 0.5, 1, 2],
            "",
        ),  # divergence is the worst loss
        ((1, 2), {2.0**n: INF for n in range(-9, 9)}, 3, [0.125, 0.25, 0.5, 1, 2], "lowest"),
        (
            (0.5, 1, 2),
            {0.5: 3.0, 2: 1.0},
            4,
            [0.5, 1, 2],
            "",
        ),  # not extended before all losses are known
        ((0.5, 1, 2), {0.5: 3.0, 1: 2.0, 2: 1.0}, 4, [0.5, 1, 2, 4], ""),
    ],
)
def test_grids_are_extended_at_the_edges(multiples, losses, max_added, tried, edge):
    grid = searched(multiples, losses, max_added)
    assert (list(grid.losses), grid.edge) == (tried, edge)
    known = [losses.get(multiple) for multiple in tried]
    assert list(grid.losses.values()) == known
    assert grid.best == (None if None in known else tried[known.index(min(known))])
    assert grid.has_diverged == all(loss == INF for loss in known)


def comparison(
    folder: Path, *, seeds: int = 2, multiples=(0.5, 1, 2), max_added: int = 4
) -> Comparison:
    config = Config.of(
        load_config("gpt", optimizer__learning_rate=0.01, optimizer__final_learning_rate=0.001)
    )
    return Comparison(folder, {"a": config, "b": config}, range(7, 7 + seeds), multiples, max_added)


def run_comparison(comparison: Comparison, losses: dict[str, dict]) -> list[str]:
    """Returns the folders of the runs in training order. `losses` contains {name: {multiple:
    loss}}.
    """
    known, order = {}, []
    while run := next((run for run in comparison.runs(known) if run.folder not in known), None):
        assert run.folder == run_folder(
            comparison.output, run.name, run.config.train.seed, run.multiple
        )
        known[run.folder] = losses[run.name][run.multiple]
        order.append(run.folder.name)
        assert len(order) <= len(comparison.expected_runs(known))
    assert len(order) == len(comparison.expected_runs(known))
    assert all(run.folder in known for run in comparison.runs(known))
    return order


def test_grids_are_trained_before_the_seeds_of_the_comparison(tmp_path):
    """The best rate of model a is at the edge of its grid, so the grid is extended. That of b is in
    the middle.

    The grids have the seed before the comparison's, which is not in the comparison.
    """
    losses = {"a": parabola(2), "b": parabola(1)}
    assert run_comparison(comparison(tmp_path, seeds=3), losses) == [
        "a-seed6-lr0.5x",
        "a-seed6",
        "a-seed6-lr2x",
        "a-seed6-lr4x",
        "b-seed6-lr0.5x",
        "b-seed6",
        "b-seed6-lr2x",
        "a-seed7-lr2x",
        "b-seed7",
        "a-seed8-lr2x",
        "b-seed8",
        "a-seed9-lr2x",
        "b-seed9",
    ]
    assert run_comparison(comparison(tmp_path, seeds=3, multiples=()), losses) == [
        "a-seed7",
        "b-seed7",
        "a-seed8",
        "b-seed8",
        "a-seed9",
        "b-seed9",
    ]


def test_a_model_that_always_diverges_is_not_in_the_comparison(tmp_path):
    losses = {"a": {2.0**n: INF for n in range(-9, 9)}, "b": parabola(1)}
    assert run_comparison(comparison(tmp_path, max_added=1), losses) == [
        "a-seed6-lr0.5x",
        "a-seed6",
        "a-seed6-lr2x",
        "a-seed6-lr0.25x",
        "b-seed6-lr0.5x",
        "b-seed6",
        "b-seed6-lr2x",
        "b-seed7",
        "b-seed8",
    ]


def test_the_finished_runs_alone_determine_the_next_runs(tmp_path):
    """If a model's grid is finished, its next seeds do not wait for other grids.

    The multiple of a run scales its learning rate and its final learning rate.
    """
    folder = comparison(tmp_path).output
    known = {run_folder(folder, "b", 6, multiple): loss for multiple, loss in parabola(1).items()}
    runs = comparison(tmp_path).runs(known)
    assert [(run.name, run.multiple, run.config.train.seed) for run in runs if not run.in_grid] == [
        ("b", 1.0, 7),
        ("b", 1.0, 8),
    ]
    scaled = {
        run.multiple: (run.config.optimizer.learning_rate, run.config.optimizer.final_learning_rate)
        for run in runs
        if run.name == "a"
    }
    assert scaled == {0.5: (0.005, 0.0005), 1.0: (0.01, 0.001), 2.0: (0.02, 0.002)}
