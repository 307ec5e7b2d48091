"""Tests of the plots and sparklines of a run's metrics."""

import io
import json
import math
import sys

import matplotlib.image
import numpy as np
import pytest

from smallgpt_jax.formatting import sparkline
from smallgpt_jax.run import curves, plotting
from smallgpt_jax.training import messages

pytestmark = pytest.mark.draws
LINES = [
    {
        "step": 10,
        "split": "train",
        "loss": 5.5,
        "loss_mean": 6.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 900.0,
    },
    {
        "step": 20,
        "split": "train",
        "loss": None,
        "loss_mean": 4.5,
        "learning_rate": 2e-3,
        "tokens_per_second": 800.0,
    },
    {"step": 20, "split": "eval", "loss": 4.25, "bits_per_byte": 2.5, "targets": 64},
    {"step": 30, "split": "train", "loss": 3.5, "loss_mean": 3.75, "learning_rate": 0.5e-3},
    {"step": 30, "split": "eval", "loss": 3.875, "bits_per_byte": 1.5, "targets": 64},
]


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return tmp_path


def test_the_plotted_values(workdir, monkeypatch):
    """Non-finite values are logged as null. A metric may be missing."""
    figures, png = [], plotting.png
    monkeypatch.setattr(
        plotting, "png", lambda figure, dpi: figures.append(figure) or png(figure, dpi)
    )
    logged = []
    curves.save_curves(workdir, logged.append)
    assert logged == []
    plotted = {
        axes.get_ylabel(): [(line.get_label(), *map(list, line.get_data())) for line in axes.lines]
        for axes in figures[0].axes
    }
    (batch, *points), mean, validation = plotted.pop("loss, nats per token")
    assert (batch, points[0]) == ("training (one batch)", [10, 20, 30])
    assert points[1][::2] == [5.5, 3.5] and math.isnan(points[1][1])
    assert mean[1:] == ([10, 20, 30], [6.5, 4.5, 3.75])
    assert validation == ("validation", [20, 30], [4.25, 3.875])
    assert {label: lines[0][1:] for label, lines in plotted.items()} == {
        "validation, bits per byte": ([20, 30], [2.5, 1.5]),
        "learning rate": ([10, 20, 30], [1e-3, 2e-3, 0.5e-3]),
        "tokens per second": ([10, 20], [900.0, 800.0]),
    }
    image = matplotlib.image.imread(workdir / "curves.png")
    assert image.shape[:2] == (660, 990) and np.ptp(image) == 1
    assert sorted(path.name for path in workdir.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_a_run_without_metrics_has_no_plots(tmp_path):
    logged = []
    curves.save_curves(tmp_path, logged.append)
    assert logged == [] and not list(tmp_path.iterdir())


def fail_to_draw(workdir, monkeypatch):
    def fail(figure, dpi):
        raise RuntimeError("no fonts\nwere found")

    monkeypatch.setattr(plotting, "png", fail)


def fill_the_disk(workdir, monkeypatch):
    (workdir / ".curves.png.partial").symlink_to("/dev/full")


@pytest.mark.parametrize(
    "harm, message",
    [
        (fail_to_draw, "not drawn (no fonts)"),
        (fill_the_disk, "not drawn (No space left on device)"),
    ],
)
def test_errors_are_one_line_and_keep_the_old_plots(harm, message, workdir, monkeypatch):
    (workdir / "curves.png").write_bytes(b"old")
    harm(workdir, monkeypatch)
    logged = []
    curves.save_curves(workdir, logged.append)
    assert logged == [f"{workdir / 'curves.png'}: {message}"]
    assert (workdir / "curves.png").read_bytes() == b"old"


@pytest.mark.parametrize(
    "values, bars",
    [
        ([9, 5, 2, 1], "█▅▂▁"),
        ([3.0], "▁"),
        ([2, 2, 2], "▁▁▁"),
        ([4, 2, 0, 0, 7, 7, 6, 4], "▄▁█▆"),  # means of two: 3, 0, 7, 5
    ],
)
def test_sparkline(values, bars):
    assert sparkline(values, width=4) == bars


def test_the_final_message_shows_the_loss(workdir, monkeypatch):
    lines = [{"step": i, "split": "train", "loss": 0.0, "loss_mean": 8.0 - i} for i in range(8)]
    (workdir / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*LINES[2:3], *lines])
    )
    assert messages.loss_message(workdir) == "Training loss 8.00 █▇▆▅▄▃▂▁ 1.00\n"
    (workdir / "curves.png").touch()
    assert (
        messages.loss_message(workdir)
        == f"Training loss 8.00 █▇▆▅▄▃▂▁ 1.00 ({workdir / 'curves.png'})\n"
    )
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert messages.loss_message(workdir) == ""
    monkeypatch.undo()
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:7]))
    assert messages.loss_message(workdir) == ""
