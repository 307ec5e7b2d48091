"""Updates with a non-finite loss or gradient are skipped. Non-finite updated weights are only
reported.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import build, init, load_config
from run_helpers import program_of

from smallgpt_jax import models
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.optimizer import make_optimizer
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.step import Hyperparameters, train_step

BROKEN = 63  # the token whose embedding the tests overwrite


def build_tiny():
    return build("gpt", num_layers=1, d_model=16, num_heads=2, vocab_size=64, context_length=16)


def make_step(optimizer, learning_rate):
    """Returns a state, and a step with this learning rate."""
    model = build_tiny()
    params = init(model)
    state = TrainState(jnp.int32(0), params, optimizer.init(params))

    program = program_of(model, optimizer=optax.with_extra_args_support(optimizer))

    @jax.jit
    def step(state, batch):
        hyperparameters = Hyperparameters(jnp.uint32(0), learning_rate, 0.1)
        return train_step(program, state, batch, hyperparameters)

    return state, step


def with_broken_embedding(state, value):
    table = state.params["token_embedding"].at[BROKEN].set(value)
    return state._replace(params={**state.params, "token_embedding": table})


def assert_equal(one, other):
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_nonfinite_update_is_skipped(name):
    """A batch that contains a token with a NaN embedding does not change weights and optimizer
    state.
    """
    tokens = np.random.default_rng(0).integers(0, BROKEN, (4, 17), np.int32)
    good, bad = Batch(tokens), Batch(np.where(tokens % 9, tokens, BROKEN))
    optimizer = make_optimizer(models.abstract_params(build_tiny()), OptimizerConfig(name=name))
    state, step = make_step(optimizer, learning_rate=0.01)
    first, metrics = step(with_broken_embedding(state, np.nan), good)
    assert metrics["skipped"] == 0
    second, metrics = step(first, bad)
    assert np.isnan(metrics["loss"]) and not metrics["is_finite"]
    assert metrics["skipped"] == 1 and second.step == 2
    assert_equal(second[1:], first[1:])
    third, metrics = step(second, good)
    assert metrics["skipped"] == 1
    assert_equal(third[1:], step(first, good)[0][1:])


def test_the_learning_rate_follows_the_steps():
    """Also after skipped updates, which the optimizer does not count: the decay ends with the run."""
    schedule = dict(
        optimizer__warmup_steps=4,
        optimizer__decay_steps=10,
        optimizer__learning_rate=0.4,
        optimizer__final_learning_rate=0.1,
        optimizer__schedule="linear",
    )
    config = load_config("gpt", **schedule)
    program = build_program(config, jax.devices()[:1])
    vars(program)["compiled_train_step"] = lambda state, batch, hyperparameters: hyperparameters
    step = program.bind(config)
    state = TrainState(jnp.int32(0), {}, optax.ScaleByAdamState(jnp.int32(0), {}, {}))
    rates = [
        float(step(state._replace(step=jnp.int32(number)), None).learning_rate)
        for number in (0, 2, 4, 7, 10)
    ]
    np.testing.assert_allclose(rates, [0.0, 0.2, 0.4, 0.25, 0.1], rtol=1e-6)


@pytest.mark.slow
def test_updated_weights_that_are_not_finite_are_reported():
    """Updated weights that are not finite are reported, even if the loss and the gradient are
    finite.

    The test overwrites the embedding of a token that is not in the batch, so the loss does not
    depend on it. Infinite and NaN embeddings are reported. So is an embedding that the update makes
    infinite. An embedding of 1.0 is not.
    """
    batch = Batch(np.random.default_rng(0).integers(0, BROKEN, (4, 17), np.int32))
    state, step = make_step(optax.adamw(40.0, weight_decay=0.1), learning_rate=40.0)
    for value in (3e38, np.inf, np.nan, 1.0):
        _, metrics = step(with_broken_embedding(state, value), batch)
        assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
        assert metrics["is_finite"] == (value == 1.0), value
