"""Test of muP in training by the coordinate check of experiments/coordinate_check.py."""

import sys

import pytest
from conftest import ROOT, load_config

from smallgpt_jax.run.config import Config

sys.path.insert(0, str(ROOT / "experiments"))
import coordinates

pytestmark = pytest.mark.slow


def test_activations_do_not_depend_on_the_width():
    config = Config.of(
        load_config(
            "gpt",
            model__num_layers=1,
            model__context_length=16,
            model__vocab_size=32,
            model__head_dim=16,
            train__batch_size=8,
            train__loss_chunks=1,
            optimizer__learning_rate=5e-3,
        )
    )

    def at_width(width, base):
        return coordinates.coordinates(coordinates.at_size(config, "d_model", width, base))

    base = at_width(64, 0)
    with_mup = coordinates.spread([base, at_width(512, 64)])
    assert {
        "embedding",
        "blocks/attention",
        "blocks/mlp",
        "trunk",
        "change of logits",
    } < with_mup.keys()
    assert max(with_mup.values()) < 1.3
    without = coordinates.spread([base, at_width(512, 0)])
    assert (
        min(
            without[kind]
            for kind in ("blocks/attention", "blocks/mlp", "trunk", "change of logits")
        )
        > 2
    )
