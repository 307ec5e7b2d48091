"""Bands of losses: which runs they apply to, and the message about a run outside of its band."""

import json
import math

import numpy as np
import pytest

from smallgpt_jax.config.recipes import load_config
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.logger import StepMetrics
from smallgpt_jax.training.loss_band import BANDS_FILE, BandPoint, LossBand, LossWatch, find_band

RECIPE = "pgpt:quickstart"
TEXT = {"splits": {"train": {"text_bytes": 9_215_938, "tokens": 3_696_818}}}


def band_of(text=TEXT, **fields):
    overrides = {name.replace("__", "."): value for name, value in fields.items()}
    return find_band(Config.of(load_config(RECIPE, overrides)), text)


def test_a_band_applies_to_its_recipe():
    assert {"gpt:quickstart", RECIPE} <= json.loads(BANDS_FILE.read_text()).keys()
    assert band_of().recipe == RECIPE


@pytest.mark.parametrize(
    "field, value",
    [
        *(("train.seed", 1), ("data.seed", 2), ("train.log_every", 7), ("mesh.path", 2)),
        *(("train.loss_chunks", 2), ("data.workers", 0), ("model.attention", "xla")),
        *(("train.eval_every", 100), ("optimizer.decay_steps", 2000), ("data.store", "x")),
    ],
)
def test_what_changes_no_loss_keeps_the_band(field, value):
    assert band_of(**{field: value})


@pytest.mark.parametrize(
    "field, value",
    [
        *(("optimizer.learning_rate", 2e-3), ("train.batch_size", 16), ("train.steps", 1000)),
        *(("model.d_model", 64), ("model.dtype", "bfloat16"), ("optimizer.warmup_steps", 0)),
        *(("data.source", "python_packages"), ("data.tokenizer", "bytes"), ("train.ema", 0.9)),
    ],
)
def test_another_config_has_no_band(field, value):
    assert band_of(**{field: value}) is None


@pytest.mark.parametrize(
    "text",
    [
        {"splits": {"train": {"text_bytes": 9_215_938, "tokens": 3_000_000}}},
        {"mixture": []},
        {"splits": {"train": {"rows": 3}}},  # a probe
    ],
)
def test_another_text_has_no_band(text):
    assert band_of(text) is None


BAND = LossBand(
    "r",
    (
        BandPoint(1, 2, "mean", 4.0, 0.1, 5),
        BandPoint(3, 4, "mean", 3.0, 0.1, 5),
        BandPoint(3, 4, "log_scatter", math.log(0.1), 0.1, 5),
    ),
)


def said(losses, band=BAND, first=1) -> list[str]:
    messages = []
    watch = LossWatch(band, messages.append)
    for step, loss in enumerate(losses, first):
        watch.check(StepMetrics(step, {}, True, loss))
    return messages


def test_losses_in_the_band_are_not_mentioned():
    assert said([4.1, 3.9, 3.05, 2.9, 99.0]) == []
    assert said([4.1, 9.0], band=None) == []


def test_the_first_point_outside_is_mentioned_once():
    # Student's t with 4 degrees of freedom: 6.254 at 1 − 0.01/6; times 0.1 · √1.2
    (message,) = said([6.0, 6.0, 9.0, 9.0])
    assert message.startswith(
        "step 2: the mean training loss of steps 1 to 2 is 6.000; that of other seeds of r is "
        "between 3.315 and 4.685 (5 runs)"
    )
    assert "config.train.check_loss=false" in message
    (message,) = said([4.0, 4.0, 1.0, 1.0])
    assert message.startswith("step 4: the mean training loss of steps 3 to 4 is 1.000")


def test_variation_from_step_to_step():
    (message,) = said([4.0, 4.0, 3.0, 3.0])
    assert message.startswith("step 4: the variation of the training loss from step to step")


def test_spans_with_missing_losses_are_not_compared():
    """A resumed run has no losses of the steps before; a skipped update has no finite one."""
    assert said([9.0, 3.05, 2.9], first=2) == []
    assert said([9.0, math.nan, 3.05, 2.9]) == []


def test_one_percent_of_honest_runs_are_outside():
    random, outside = np.random.default_rng(0), 0
    for _ in range(300):
        runs = 4 + 0.1 * random.standard_normal((9, 8))
        *others, run = runs.tolist()
        points = []
        for step, values in enumerate(zip(*others), 1):
            points.append(
                BandPoint(
                    step, step, "mean", float(np.mean(values)), float(np.std(values, ddof=1)), 8
                )
            )
        outside += bool(said(run, LossBand("r", tuple(points))))
    assert 0 < outside <= 8
