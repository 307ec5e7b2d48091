"""Tests of muP in training: the coordinate check of experiments/coordinate_check.py, and ε."""

import sys

import jax
import numpy as np
import optax
import pytest
from conftest import ROOT, load_config

from benchmarks.measuring import Training
from smallgpt_jax.run.config import Config

sys.path.insert(0, str(ROOT / "experiments"))
import coordinates

pytestmark = pytest.mark.slow


def at_width(width: int, base: int, mixer: str = "attention") -> Config:
    config = load_config(
        "gpt",
        model__num_layers=1,
        model__context_length=16,
        model__vocab_size=32,
        model__head_dim=16,
        model__mixers=(mixer,),
        train__batch_size=8,
        train__loss_chunks=1,
        optimizer__learning_rate=5e-3,
        optimizer__clip_norm=0.0,
    )
    return coordinates.at_size(Config.of(config), "d_model", width, base)


def test_activations_do_not_depend_on_the_width():
    base = coordinates.coordinates(at_width(64, 0))
    with_mup = coordinates.spread([base, coordinates.coordinates(at_width(512, 64))])
    wrong = ("blocks/attention", "blocks/mlp", "trunk", "change of logits")
    assert {"embedding", *wrong} < with_mup.keys()
    assert max(with_mup.values()) < 1.3
    without = coordinates.spread([base, coordinates.coordinates(at_width(512, 0))])
    assert min(without[kind] for kind in wrong) > 2


@pytest.mark.parametrize("mixer", ["delta", "mamba", "conv"])
def test_activations_of_mixers_do_not_depend_on_the_width(mixer):
    sizes = [coordinates.coordinates(at_width(width, 64, mixer)) for width in (64, 512)]
    found = coordinates.spread(sizes)
    # The random head makes the change of the logits larger in narrow models: 0.36, 0.24, 0.20, 0.18
    # at widths 64, 256, 512, 1024 of delta.
    assert found.pop("change of logits") < 2
    if mixer == "mamba":  # as many outputs at all widths: as of the head, the random part shrinks
        for narrow in ("key", "query", "key_query_convolution"):
            del found[f"blocks/mixer/{narrow}"]
    assert max(found.values()) < 1.3


def test_epsilon_is_in_proportion_to_the_gradients():
    def over_epsilon(width):
        """Returns {parameter: its gradient's root mean square, divided by its multiplier of ε}."""
        training = Training(at_width(width, 64))
        training.run(5)
        ((_, squares),) = optax.tree_utils.tree_get_all_with_path(training.state.opt_state, "nu")
        return jax.tree.map(lambda square: np.sqrt(np.mean(square)), squares)

    narrow, wide = over_epsilon(64), over_epsilon(512)
    for path, ratio in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.divide, wide, narrow)):
        assert 0.7 < ratio < 1.4, path
