"""An optimizer whose state has matrices: registered in OPTIMIZERS, trained on sharded devices, and
resumed.

It stands for all optimizers whose state is not shaped like the parameters.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import init, load_config
from jax.sharding import PartitionSpec as P
from run_helpers import start_from

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.optim.optimizer import OPTIMIZERS
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.training.build import build_program

SMALL = dict(
    model__num_layers=2,
    model__d_model=16,
    model__num_heads=2,
    model__vocab_size=64,
    model__context_length=32,
    train__batch_size=16,
    optimizer__warmup_steps=0,
    optimizer__learning_rate=0.01,
    optimizer__name="kronecker",
)


def kronecker(params, config) -> optax.GradientTransformation:
    """Multiplies the gradient G of each (m, n) matrix by the running means of G·Gᵀ, (m, m), and of
    Gᵀ·G, (n, n).
    """

    def as_matrices(p, x):  # (stack, m, n); the last axis is the output
        first = p.own_axes[0]
        return x.reshape(*p.shape[:first], math.prod(p.shape[first:-1]), p.shape[-1])

    def init(weights):
        def factors(p, x):
            *stack, m, n = as_matrices(p, x).shape
            return {"left": jnp.zeros((*stack, m, m)), "right": jnp.zeros((*stack, n, n))}

        return {
            "factors": jax.tree.map(
                lambda p, x: factors(p, x) if p.is_matrix else (), params, weights
            ),
            "steps": jnp.zeros((3,)),
        }

    def update(gradients, state, _=None):
        def mean(old, new):
            return config.beta2 * old + (1 - config.beta2) * new

        def moved(p, gradient, factors):
            g = as_matrices(p, gradient)
            return {
                "left": mean(factors["left"], g @ jnp.swapaxes(g, -1, -2)),
                "right": mean(factors["right"], jnp.swapaxes(g, -1, -2) @ g),
            }

        def direction(p, gradient, factors):
            if not p.is_matrix:
                return gradient
            y = factors["left"] @ as_matrices(p, gradient) @ factors["right"]
            return (y / jnp.sqrt(jnp.mean(jnp.square(y), axis=(-2, -1), keepdims=True))).reshape(
                p.shape
            )

        factors = jax.tree.map(
            lambda p, g, old: moved(p, g, old) if p.is_matrix else (),
            params,
            gradients,
            state["factors"],
        )
        return (
            jax.tree.map(direction, params, gradients, factors),
            {"factors": factors, "steps": state["steps"] + 1},
        )

    return optax.GradientTransformation(init, update)


def step_once(program, config, state, seed: int):
    tokens = np.random.default_rng(seed).integers(0, 64, (16, 33)).astype(np.int32)
    step = program.bind(config)
    return step(state, Batch(jax.device_put(tokens, sharding.batch_sharding(program.mesh))))[0]


@pytest.mark.slow
def test_matrices_of_the_optimizer_are_sharded_and_resumed(monkeypatch, tmp_path):
    """Two steps on eight devices, with a restart after the first, give the weights and the state of
    one device.
    """
    monkeypatch.setitem(OPTIMIZERS, "kronecker", kronecker)
    alone_config = load_config("pgpt", **SMALL)
    alone = build_program(alone_config, jax.devices()[:1])
    expected = start_from(alone, init(alone.model))
    for seed in range(2):
        expected = step_once(alone, alone_config, expected, seed)

    mesh = dict(mesh__data=1, mesh__fsdp=2, mesh__tensor=2, mesh__path=2)
    config = load_config("pgpt", **SMALL, **mesh)
    program = build_program(config)
    checkpoints = Checkpoints(tmp_path, keep=1, log=print)
    state = step_once(program, config, start_from(program, init(program.model)), seed=0)
    checkpoints.save(1, state)
    checkpoints.wait_until_finished()
    state = step_once(program, config, checkpoints.restore_latest(program.abstract_state), seed=1)
    checkpoints.close()

    factors = state.opt_state[1]["factors"]["trunk"]["paths"]["blocks"]
    stack = ("path", None)
    # (…, D, D) and (…, F, F) of the weight (…, D, F); (…, D, D) of the weight (…, heads, head
    # width, D)
    assert factors["mlp"]["up"]["kernel"]["left"].sharding.spec == P(*stack, "fsdp", None)
    assert factors["mlp"]["up"]["kernel"]["right"].sharding.spec == P(*stack, "fsdp", "tensor")
    assert factors["attention"]["out"]["kernel"]["left"].sharding.spec == P(*stack, "fsdp", None)
    assert state.opt_state[1]["steps"].sharding.is_fully_replicated
    for found, wanted in ((state.params, expected.params), (state.opt_state, expected.opt_state)):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-3 * np.max(np.abs(y)))
