"""Tests of Muon: its updates compared with Newton–Schulz steps in float64, the choice of
parameters, and its FLOPs.
"""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from conftest import ARCHITECTURES, build, init, load_config

from smallgpt_jax import models
from smallgpt_jax.comparison.budget import cost_per_step
from smallgpt_jax.models.flops import update_flops
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.muon import uses_muon
from smallgpt_jax.optim.optimizer import make_optimizer
from smallgpt_jax.run.config import Config

RATE, DECAY = 0.01, 0.1
SMALL = dict(d_model=16, num_heads=4, num_layers=2, vocab_size=32, context_length=16)


def make(abstract, name="muon") -> optax.GradientTransformation:
    optimizer = make_optimizer(abstract, OptimizerConfig(name=name, clip_norm=0.0))
    return optax.GradientTransformation(
        optimizer.init, functools.partial(optimizer.update, learning_rate=RATE, weight_decay=DECAY)
    )


def some(params):
    """Returns a few arrays of a gpt, where the others would only have to be compiled, too."""
    mlp = params["trunk"]["blocks"]["mlp"]
    return {name: params[name] for name in ("token_embedding", "final_norm")} | {"mlp": mlp}


def gradients_like(params, step: int):
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda x: np.float32(rng.standard_normal(x.shape) * 10.0 ** rng.integers(-3, 3)), params
    )


def update_of(abstract, params, steps: int):
    """Computes `steps` updates without changing the parameters. Returns the last one."""
    optimizer = make(abstract)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(steps):
        updates, state = update(gradients_like(params, step), state, params)
    return updates


def newton_schulz(matrix):
    """Divides a matrix by its norm, and returns it after five Newton–Schulz steps
    (github.com/KellerJordan/Muon).
    """
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def expected_update(gradients, param, matrices):
    """Returns the update of a weight in float64.

    `matrices` is a function that yields the index and the shape of each matrix in the weight.
    """
    m = np.zeros(param.shape)
    for step, g in enumerate(np.asarray(gradients, np.float64), start=1):
        m = 0.95 * m + 0.05 * g
        nesterov = 0.95 * m / (1 - 0.95 ** (step + 1)) + 0.05 * g / (
            1 - 0.95**step
        )  # with bias correction
    direction = np.full(param.shape, np.nan)
    for index, shape in matrices(param.shape):
        part = nesterov[index]
        direction[index] = (
            0.2 * math.sqrt(max(shape)) * newton_schulz(part.reshape(shape)).reshape(part.shape)
        )
    return -RATE * (direction + DECAY * np.asarray(param, np.float64))


def stacked(axes: int, inputs: int):
    """Returns a function that lists the matrices of a weight.

    The first `axes` axes number the matrices. The next `inputs` axes are a matrix's inputs, the
    rest its outputs.
    """

    def matrices(shape):
        own = shape[axes:]
        for index in np.ndindex(shape[:axes]):
            yield index, (math.prod(own[:inputs]), math.prod(own[inputs:]))

    return matrices


def fused(axes: int):
    """Returns a function that lists the query, key and value matrices in a fused projection."""

    def matrices(shape):
        width, groups, parts, head_width = shape[axes:]
        for index in np.ndindex(shape[:axes]):
            for part in (slice(0, parts - 2), slice(parts - 2, parts - 1), slice(parts - 1, parts)):
                yield (
                    (*index, slice(None), slice(None), part),
                    (width, groups * (part.stop - part.start) * head_width),
                )

    return matrices


BLOCK = {
    "qkv": fused,
    "out": lambda axes: stacked(axes, 2),
    "up": lambda axes: stacked(axes, 1),
    "down": lambda axes: stacked(axes, 1),
    "gate": lambda axes: stacked(axes, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, fields, stacked_axes, others",
    [
        ("gpt", {"num_kv_heads": 2, "mlp": "gated"}, 1, {}),  # two query heads per key–value head
        ("gpt", {"num_kv_heads": 2, "rank_ratio": 0.5}, 1, {}),  # two factors per matrix
        ("pgpt", {"num_layers": 4}, 2, {"dense": stacked(1, 1)}),
        (
            "cgpt",
            {"blocks_per_stage": 1, "conv_kernel": 3},
            1,
            {"compress_0": stacked(0, 2), "compress_1": stacked(0, 2)},
        ),
    ],
)
def test_updates_match_newton_schulz_steps(architecture, fields, stacked_axes, others):
    """The updates of all kernels at step 3 match. The gradients' scales differ by factors of up to
    10⁵.
    """
    model = build(architecture, **{**SMALL, **fields}, use_bias=True)
    params = init(model)
    updates = update_of(models.abstract_params(model), params, steps=3)
    gradients = [gradients_like(params, step) for step in range(3)]
    kinds = {name: kind(stacked_axes) for name, kind in BLOCK.items()} | others
    one_input = stacked(stacked_axes, 1)
    kinds = {
        "kernel": kinds,
        "kernel_in": {**kinds, "qkv": one_input},
        "kernel_out": {**kinds, "out": one_input},
    }
    found = set()
    for (path, update), param, *own in zip(
        jax.tree_util.tree_leaves_with_path(updates),
        jax.tree.leaves(params),
        *map(jax.tree.leaves, gradients),
    ):
        if path[-1].key in kinds:
            found.add(path[-2].key)
            expected = expected_update(own, param, kinds[path[-1].key][path[-2].key])
            assert np.isfinite(expected).all()
            np.testing.assert_allclose(
                update, expected, atol=1e-3 * RATE, err_msg=jax.tree_util.keystr(path)
            )
    assert found >= {"qkv", "out", "up", "down", *others}


@pytest.mark.slow
def test_other_parameters_are_updated_as_by_adamw():
    model = build("pgpt", **SMALL, use_bias=True, qk_norm=True)
    params, abstract = init(model), models.abstract_params(model)
    adamw = make(abstract, "adamw")
    state = adamw.init(params)
    for step in range(2):
        expected, state = jax.jit(adamw.update)(gradients_like(params, step), state, params)
    for (path, update), other in zip(
        jax.tree_util.tree_leaves_with_path(update_of(abstract, params, steps=2)),
        jax.tree.leaves(expected),
    ):
        if path[-1].key == "kernel":
            assert not np.allclose(update, other, rtol=0.1)
        else:
            np.testing.assert_allclose(update, other, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_layers_in_separate_arrays_are_updated_as_in_one_array():
    """The layers of a gpt are stacked in one array, unless their attention windows differ."""
    joined, separate = build("gpt", **SMALL), build("gpt", **SMALL, attention_windows=(8, 0))
    params = init(joined)
    blocks = params["trunk"]["blocks"]
    cut = {
        **params,
        "trunk": {
            "blocks": {str(i): jax.tree.map(lambda x, i=i: x[i : i + 1], blocks) for i in range(2)}
        },
    }

    def update(model, params):  # with gradients that equal the parameters
        optimizer = make(models.abstract_params(model))
        return jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params)[0])(
            params
        )

    expected, found = update(joined, params), update(separate, cut)
    for i in range(2):
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_allclose(x[0], y[i], rtol=1e-4, atol=1e-6),
            found["trunk"]["blocks"][str(i)],
            expected["trunk"]["blocks"],
        )


def test_parameters_are_chosen_by_their_axis_names():
    """Muon updates the matrix of each expert on its own. It updates neither routers nor weights
    without axis names.

    It also updates weights with unknown axis names, as in custom architectures. If no axis is named
    "embed", the last axis is the output, and all others are inputs.
    """
    shapes = {
        "expert_up": ("expert", "embed", "mlp"),
        "expert_down": ("layers", "expert", "mlp", "embed"),
        "factor": ("rank", "own"),
        "router": ("embed", "router"),
        "unnamed": (None, None),
        "expert_bias": ("expert", "mlp"),
        "table": ("position", "embed"),
    }
    sizes = {
        "expert": 3,
        "embed": 4,
        "mlp": 6,
        "layers": 2,
        "rank": 2,
        "own": 5,
        "router": 3,
        "position": 7,
        None: 4,
    }
    rng = np.random.default_rng(0)
    params = {
        name: {"kernel": np.float32(rng.standard_normal([sizes[axis] for axis in axes]))}
        for name, axes in shapes.items()
    }
    abstract = {
        name: {
            "kernel": models.Parameter(
                (name, "kernel"), param["kernel"].shape, np.dtype("float32"), axes
            )
        }
        for (name, axes), param in zip(shapes.items(), params.values())
    }
    updates, gradients = update_of(abstract, params, steps=1), gradients_like(params, 0)
    kinds = {"expert_up": stacked(1, 1), "expert_down": stacked(2, 1), "factor": stacked(0, 1)}
    for name, update in updates.items():
        g, param = gradients[name]["kernel"], params[name]["kernel"]
        decay = DECAY if name != "expert_bias" else 0
        expected = (
            expected_update([g], param, kinds[name])
            if name in kinds
            else -RATE * (np.sign(g) + decay * param)
        )  # the first step of Adam is the gradient's sign
        np.testing.assert_allclose(update["kernel"], expected, atol=1e-3 * RATE, err_msg=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_of_shipped_architectures(architecture):
    """Muon updates all kernels, and nothing else."""
    for p in jax.tree.leaves(
        models.abstract_params(build(architecture, use_bias=True, qk_norm=True))
    ):
        assert uses_muon(p) == (p.name == "kernel"), p


@pytest.mark.parametrize("name, reference", [("adamw", optax.adamw), ("lion", optax.lion)])
def test_adamw_and_lion_are_those_of_optax(name, reference):
    """The updates equal optax's bit for bit."""
    model = build("gpt", **SMALL, use_bias=True)
    params, abstract = some(init(model)), some(models.abstract_params(model))
    decayed = jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )
    both = (
        make(abstract, name),
        optax.chain(
            optax.identity(), reference(RATE, b1=0.9, b2=0.95, weight_decay=DECAY, mask=decayed)
        ),
    )
    states = [optimizer.init(params) for optimizer in both]
    for step in range(2):
        (found, expected), states = zip(
            *(
                optimizer.update(gradients_like(params, step), state, params)
                for optimizer, state in zip(both, states)
            )
        )
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Returns the FLOPs of five Newton–Schulz steps. Each has the products x·xᵀ, a·a and (…)·x,
    where x is (m, n).
    """
    m, n = min(rows, columns), max(rows, columns)
    return 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, fields, matrices",
    [
        (
            "gpt",
            {"num_kv_heads": 2, "mlp": "gated"},
            [(128, 128)] * 8 + [(128, 64)] * 8 + [(128, 512)] * 12,
        ),
        ("pgpt", {}, [(128, 128)] * 18 + [(128, 512)] * 8),
        (
            "cgpt",
            {"num_layers": 2, "blocks_per_stage": 1, "d_model": 64, "conv_kernel": 3},
            [(64, 64)] * 4
            + [(64, 256)] * 2
            + [(3 * 64, 32)]
            + [(32, 32)] * 4
            + [(32, 128)] * 2
            + [(3 * 32, 16)],
        ),
    ],
)
def test_flops(architecture, fields, matrices):
    """The FLOPs of an update match a formula. A FLOP budget counts them once per step."""
    expected = sum(newton_schulz_flops(*matrix) for matrix in matrices)
    config = load_config(architecture, "quickstart")
    config.model.update(fields)
    adamw = config.copy_and_resolve_references()
    config.optimizer.name = "muon"
    model = models.build(**config.model)
    params = models.abstract_params(model)
    assert update_flops(params, make_optimizer(params, Config.of(config).optimizer)) == expected
    assert cost_per_step(config, "flops") == cost_per_step(adamw, "flops") + expected
    assert cost_per_step(config, "tokens") == cost_per_step(adamw, "tokens")


def test_a_zero_gradient_leaves_only_the_decay():
    """Newton–Schulz steps start from the gradient divided by its norm, which must not become
    0/0.
    """
    model = build("gpt", **SMALL)
    params, optimizer = some(init(model)), make(some(models.abstract_params(model)))
    updates, _ = jax.jit(optimizer.update)(
        jax.tree.map(np.zeros_like, params), optimizer.init(params), params
    )
    kernel = params["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(updates["mlp"]["up"]["kernel"], -RATE * DECAY * kernel, rtol=1e-6)
