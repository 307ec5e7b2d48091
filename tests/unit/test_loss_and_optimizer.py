"""Tests of loss, optimizer, axis rules and FLOP counts on small arrays and shapes, without
training.
"""

import copy
import itertools
import math
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags
from conftest import ABSL_FLAGS, ARCHITECTURES, ROOT, build, init, load_config
from flax import linen as nn
from scipy.special import logsumexp

from smallgpt_jax import models
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.flops import UnknownFlops, count_operations, train_flops_per_token
from smallgpt_jax.models.stacks import layer_configs, stack_blocks
from smallgpt_jax.ops.cross_entropy import LossOptions, cross_entropy
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.learning_rate import learning_rate_schedule
from smallgpt_jax.optim.optimizer import make_optimizer
from smallgpt_jax.training.build import build_program


@pytest.mark.parametrize("chunks", [1, 4])
def test_cross_entropy_and_its_gradients(chunks):
    keys = jax.random.split(jax.random.key(0), 4)
    x, head = jax.random.normal(keys[0], (3, 16, 8)), jax.random.normal(keys[1], (50, 8))
    targets = jax.random.randint(keys[2], (3, 16), 0, 50)
    weights = jax.random.uniform(keys[3], (3, 16))

    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    one_hot = np.eye(50)[targets]
    expected = -np.sum(np.asarray(weights) * np.log((probabilities * one_hot).sum(axis=-1)))
    d_logits = np.asarray(weights)[..., None] * (probabilities - one_hot)

    def loss(x, head):
        return 3 * cross_entropy(x, head, targets, weights, chunks)

    value, (d_x, d_head) = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, head)
    assert float(value) == pytest.approx(3 * expected, rel=1e-5)
    assert float(jax.jit(loss)(x, head)) == pytest.approx(3 * expected, rel=1e-5)
    np.testing.assert_allclose(d_x, 3 * d_logits @ np.asarray(head), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        d_head, 3 * np.einsum("btw,btv->vw", x, d_logits), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "chunks, logit_scale, z, cap",
    [(1, 1, 0.03, 0), (4, 1, 0.03, 0), (4, 30, 0.03, 0), (4, 2, 0.03, 3.0), (4, 2, 0.0, 3.0)],
)
def test_z_loss_and_softcap(chunks, logit_scale, z, cap):
    """Compares the loss and its gradients with the formula −log p + z·log(Σ exp(logits))² in
    float64.

    In the formula, p is the probability of the target token, and z is the coefficient of the
    z-loss. Logits may be capped to c·tanh(logit/c). With large logits, the targets' probabilities
    are below exp(−70).
    """
    rng = np.random.default_rng(0)
    x, head, weights = (
        rng.standard_normal((3, 16, 8)),
        rng.standard_normal((50, 8)),
        rng.random((3, 16)),
    )
    targets = rng.integers(0, 50, (3, 16))
    head *= logit_scale
    logits = cap * np.tanh(x @ head.T / cap) if cap else x @ head.T
    log_sums = logsumexp(logits, axis=-1)
    losses = (
        log_sums - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] + z * log_sums**2
    )
    probabilities = np.exp(logits - log_sums[..., None])
    d_logits = weights[..., None] * (
        (1 + 2 * z * log_sums)[..., None] * probabilities - np.eye(50)[targets]
    )
    if cap:
        d_logits /= np.cosh(np.arctanh(logits / cap)) ** 2  # the derivative of tanh

    def loss(x, head):
        return cross_entropy(x, head, targets, weights, chunks, LossOptions(z, cap))

    x, head, weights = (np.float32(array) for array in (x, head, weights))
    value, (d_x, d_head) = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, head)
    assert float(value) == pytest.approx(np.sum(weights * losses), rel=1e-5)
    assert float(jax.jit(loss)(x, head)) == pytest.approx(np.sum(weights * losses), rel=1e-5)
    np.testing.assert_allclose(d_x, d_logits @ head, rtol=1e-4, atol=1e-4 * logit_scale)
    np.testing.assert_allclose(d_head, np.einsum("btw,btv->vw", x, d_logits), rtol=1e-4, atol=1e-4)


def test_improbable_tokens():
    """Losses above 70 nats are exact in evaluation. In training, the computed loss is too low, but
    finite.
    """
    x, head = jnp.ones((1, 1, 1)), jnp.array([[0.0], [200.0], [190.0]])
    arguments = head, jnp.array([[0]]), jnp.ones((1, 1)), 1
    assert float(cross_entropy(x, *arguments)) == pytest.approx(200, rel=1e-6)
    value, gradient = jax.value_and_grad(cross_entropy)(x, *arguments)
    assert 70 <= float(value) < 72 and float(gradient.squeeze()) > 100


def test_logits_are_never_materialized():
    """The gradient computation has arrays with a chunk of the logits, but no array with all
    logits.
    """
    x, head = jax.ShapeDtypeStruct((4, 64, 8), "float32"), jax.ShapeDtypeStruct((999, 8), "float32")
    targets, weights = (jax.ShapeDtypeStruct((4, 64), dtype) for dtype in ("int32", "float32"))
    text = (
        jax.jit(jax.grad(cross_entropy), static_argnums=4)
        .lower(x, head, targets, weights, 8)
        .as_text()
    )
    assert "32x999x" in text and "256x999x" not in text and "4x64x999x" not in text


def test_learning_rate():
    rate = learning_rate_schedule(
        OptimizerConfig(
            learning_rate=6e-4, warmup_steps=715, decay_steps=19_073, final_learning_rate=6e-5
        )
    )
    for step, expected in ((0, 0.0), (143, 6e-4 / 5), (715, 6e-4), (19_073, 6e-5), (30_000, 6e-5)):
        assert float(rate(step)) == pytest.approx(expected, rel=1e-4)
    middle = 6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi * 0.25)) / 2
    assert float(rate(715 + (19_073 - 715) // 4)) == pytest.approx(middle, rel=1e-3)


def test_weight_decay_applies_to_matrices_only():
    for architecture in ARCHITECTURES:
        for p in jax.tree.leaves(models.abstract_params(build(architecture, use_bias=True))):
            assert p.is_matrix == (p.name not in ("bias", "scale", "path_logits")), p


class PlainBlock(nn.Module):
    """A block of flax's own layers, and of a vector with a name that says nothing about its
    kind.
    """

    config: models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        gate = self.param("gate", nn.initializers.normal(), x_BxTxD.shape[-1:])
        return x_BxTxD + gate[None, None] * nn.Dense(x_BxTxD.shape[-1])(nn.LayerNorm()(x_BxTxD))


class Plain(nn.Module):
    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        blocks = stack_blocks(
            layer_configs(self.config, self.config.num_layers), context, block=PlainBlock
        )
        return blocks(
            blocks(x_BxTxD)
        )  # the second pass reads the weights that the first one has created


@pytest.mark.parametrize(
    "fields", [{}, {"remat": "full"}, {"scan_layers": False, "attention_windows": (3, 0)}]
)
def test_stacks_of_plain_weights(fields):
    """Stacked vectors are not matrices: they do not decay. The matrices of both passes count as
    FLOPs.
    """
    layers, width = 4, 64
    model = build(
        "gpt",
        **{"architecture": f"{__name__}:Plain", "position": "none", "num_layers": layers, **fields},
    )
    params = init(model)
    updates = updates_of(model, params, jax.tree.map(jnp.zeros_like, params))
    for path, update in jax.tree_util.tree_leaves_with_path(updates["trunk"]):
        assert np.any(update) == (path[-1].key == "kernel"), path
    assert train_flops_per_token(model) == 6 * (
        2 * layers * width**2 + width * model.config.vocab_size
    )


def updates_of(model, params, gradients, **fields):
    """Returns the first update of an optimizer with learning rate 0.01 and weight decay 0.1."""
    settings = dict(name="adamw", beta1=0.9, beta2=0.95, clip_norm=1.0)
    optimizer = make_optimizer(
        models.abstract_params(model), OptimizerConfig(**{**settings, **fields})
    )
    return jax.jit(
        lambda gradients, params: optimizer.update(
            gradients, optimizer.init(params), params, learning_rate=0.01, weight_decay=0.1
        )[0]
    )(gradients, params)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_update_matches_the_paper(name):
    """The first update with clipped gradients equals that of algorithm 2 in the optimizer's paper.

    The papers are arXiv 1711.05101 (AdamW) and arXiv 2302.06675 (Lion).
    """
    model = build("pgpt", use_bias=True, num_layers=2)
    params = init(model)
    gradients = jax.tree.map(lambda x: 3 * np.sin(100 * np.asarray(x)), params)
    norm = math.sqrt(
        sum(float(np.sum(np.square(g, dtype=np.float64))) for g in jax.tree.leaves(gradients))
    )
    updates = updates_of(model, params, gradients, name=name)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for (path, update), g, p in zip(
        jax.tree_util.tree_leaves_with_path(updates),
        jax.tree.leaves(gradients),
        jax.tree.leaves(params),
    ):
        decay = 0.1 if path[-1].key not in ("bias", "scale", "path_logits") else 0
        # Clipping divides the gradients by their norm, which is above 1. With bias correction, the
        # moments of AdamW are g and g² at the first update.
        g = np.asarray(g, np.float64) / norm
        direction = g / (np.abs(g) + 1e-8) if name == "adamw" else np.sign(g)
        np.testing.assert_allclose(
            update, -0.01 * (direction + decay * np.asarray(p)), rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize(
    "change, substrings",
    [
        ({"name": "adamv"}, ["'adamv'", "adamw, lion, muon", "did you mean 'adamw'"]),
        ({"beta2": 1.0}, ["beta2=1.0"]),
        ({"weight_decay": -1.0}, ["weight_decay=-1.0"]),
        ({"learning_rate": -1.0}, ["learning_rate=-1.0"]),
        *(
            ({field: value}, [f"config.optimizer.{field}={value}", "must be"])
            for value in (math.nan, math.inf)
            for field in (
                "learning_rate",
                "final_learning_rate",
                "weight_decay",
                "clip_norm",
                "beta1",
                "beta2",
            )
        ),
        ({"decay_steps": 5, "warmup_steps": 5}, ["decay_steps=5", "warmup_steps=5"]),
    ],
)
def test_refuses_impossible_optimizers(change, substrings):
    with pytest.raises(UserError) as error:
        build_program(
            load_config("gpt", **{f"optimizer__{field}": value for field, value in change.items()})
        )
    assert all(s in str(error.value) for s in substrings), str(error.value)


def test_axis_rules_place_weights():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=2, tensor=2, path=2))
    params = sharding.param_shardings(mesh, models.abstract_params(build("pgpt")))
    P = jax.sharding.PartitionSpec
    blocks = params["trunk"]["paths"]["blocks"]
    assert blocks["mlp"]["up"]["kernel"].spec == P("path", None, "fsdp", "tensor")
    assert blocks["attention"]["out"]["kernel"].spec == P("path", None, "tensor", None, "fsdp")
    assert params["token_embedding"].spec == P("tensor", "fsdp")
    # The 3 heads are replicated, because 3 is not a multiple of 2, the length of the mesh axis
    # `tensor`.
    odd = sharding.param_shardings(
        mesh, models.abstract_params(build("gpt", d_model=96, num_heads=3))
    )
    assert odd["trunk"]["blocks"]["attention"]["qkv"]["kernel"].spec == P(
        None, "fsdp", None, None, None
    )


def test_fsdp_shards_whole_rows_where_it_divides_their_number(monkeypatch):
    mesh = sharding.make_mesh(sharding.MeshConfig(data=1, fsdp=8))
    P = jax.sharding.PartitionSpec

    def specs(**fields):
        model = build("gpt", d_model=96, vocab_size=64, **fields)
        params = sharding.param_shardings(mesh, models.abstract_params(model))
        block = params["trunk"]["blocks"]
        kernels = (
            block["mlp"]["up"],
            block["mlp"]["down"],
            block["attention"]["qkv"],
            block["attention"]["out"],
        )
        return [params["token_embedding"].spec, *(module["kernel"].spec for module in kernels)]

    up, down, qkv = (
        P(None, "fsdp", "tensor"),
        P(None, "fsdp", None),
        P(None, "fsdp", "tensor", None, None),
    )
    table, out = (
        P("tensor", "fsdp"),
        P(None, "tensor", None, "fsdp"),
    )  # (vocab, embed), (layers, heads, width, embed)
    # 3 heads of width 32 are not divisible by 8, 8 heads of width 12 are; 384 rows of "down" are,
    # 390 are not.
    assert specs(num_heads=3) == [table, up, down, qkv, out]
    assert specs(num_heads=8) == [table, up, down, qkv, P(None, "fsdp", None, None)]
    monkeypatch.setattr(sharding, "platform", lambda mesh=None: "tpu")
    assert specs(num_heads=3) == [P("fsdp", None), up, down, qkv, out]
    assert specs(num_heads=3, mlp_ratio=4.0625)[2] == P(None, "tensor", "fsdp")
    assert (
        sharding.replicated_dimensions(
            mesh, models.abstract_params(build("gpt", d_model=96, num_heads=3))
        )
        == []
    )


@pytest.mark.parametrize(
    "lengths, shards",
    [
        ({"data": 8}, {8}),
        ({"data": 2, "fsdp": 4}, {4}),
        ({"data": 1, "fsdp": 8}, {8}),
        ({"data": 4, "tensor": 2}, {8}),
        ({"data": 1, "tensor": 8}, {1, 8}),
    ],
)
def test_devices_divide_the_train_state(lengths, shards):
    """Each device stores a part of the weights and of Adam's moments, along `fsdp` or, without it,
    along `data`.
    """
    program = build_program(
        load_config("gpt", **{f"mesh__{axis}": length for axis, length in lengths.items()})
    )
    state = program.abstract_state
    for tree in (state.params, state.opt_state):
        assert shards == {
            math.prod(x.shape) // math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(tree)
            if x.ndim > 2
        }


def test_frozen_weights_are_not_divided():
    for fields in ({"lora_rank": 2}, {"train_only": "mlp/down"}):
        program = build_program(
            load_config(
                "gpt",
                mesh__data=8,
                **{f"optimizer__{name}": value for name, value in fields.items()},
            )
        )
        params = program.abstract_state.params
        divided = {
            p.path[-2:]
            for p, x in zip(
                jax.tree.leaves(models.abstract_params(program.model)), jax.tree.leaves(params)
            )
            if not x.sharding.is_fully_replicated
        }
        assert divided == (set() if "lora_rank" in fields else {("down", "kernel")})


@pytest.mark.parametrize("axis", ["fsdp", "data"])
@pytest.mark.parametrize(
    "shape, spec",
    [
        ((3, 8, 12), (None, "fsdp", "tensor")),  # as the parameter
        ((3, 8, 8), (None, "fsdp", None)),
        ((3, 12, 12), (None, "fsdp", "tensor")),  # the parameter's 12 are its last dimension
        ((3, 12), (None, "fsdp")),
        ((3, 9, 9), (None, None, None)),
        ((20,), ("fsdp",)),
        ((), ()),
    ],
)
def test_optimizer_state_of_any_shape_is_sharded(shape, spec, axis):
    mesh = sharding.make_mesh(sharding.MeshConfig(**{"data": 1, axis: 4}, tensor=2))
    params = {
        "mlp": {
            "up": models.Parameter(("mlp", "up"), (3, 8, 12), "float32", ("layers", "embed", "mlp"))
        }
    }
    optimizer = optax.GradientTransformation(
        lambda _: {"count": jnp.zeros((4,)), "mlp": {"up": (jnp.zeros(shape), None)}}, None
    )
    found = sharding.optimizer_shardings(mesh, optimizer, params)
    expected = jax.sharding.PartitionSpec(*(axis if part == "fsdp" else part for part in spec))
    assert found["mlp"]["up"][0].spec == expected
    assert found["count"].is_fully_replicated


def test_reports_undivided_dimensions_once():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=1, tensor=4, path=1))
    lines = sharding.replicated_dimensions(
        mesh, models.abstract_params(build("gpt", d_model=96, num_heads=3))
    )
    assert lines == ["heads = 3 is replicated: config.mesh.tensor=4 does not divide it"]


@pytest.mark.parametrize(
    "lengths, substrings",
    [
        ({"data": 3}, ["data=3", "which is 8"]),
        ({"data": -1, "fsdp": -1}, ["one of them may be -1"]),
        ({"data": 0}, ["data=0", "at least 1"]),
        ({"data": -1, "tensor": 3}, ["tensor=3", "which is 8"]),
    ],
)
def test_refuses_impossible_meshes(lengths, substrings):
    with pytest.raises(UserError) as error:
        sharding.make_mesh(sharding.MeshConfig(**{"data": 1, **lengths}))
    assert all(s in str(error.value) for s in substrings), str(error.value)


def test_refuses_meshes_that_do_not_fit_a_slice_of_tpus():
    """16 is not a product of sides of a slice of 4×8×8 chips, if each side is used once."""
    devices = [
        types.SimpleNamespace(
            id=i,
            coords=coords,
            core_on_chip=0,
            device_kind="TPU v5",
            platform="tpu",
            process_index=0,
            slice_index=0,
        )
        for i, coords in enumerate(itertools.product(range(4), range(8), range(8)))
    ]
    with pytest.raises(UserError, match=r"data=16, fsdp=16.*4×8×8.*1 or a product of sides"):
        sharding.make_mesh(sharding.MeshConfig(data=16, fsdp=16, tensor=1, path=1), devices)


def test_flops_of_a_matrix_product():
    a, b = jax.ShapeDtypeStruct((3, 4), "float32"), jax.ShapeDtypeStruct((4, 5), "float32")
    assert count_operations(jnp.dot, a, b) == (2 * 3 * 4 * 5, 0)

    def loop(a, b):
        return jax.lax.scan(lambda x, _: (x @ b @ b.T, None), a, length=7)[0]

    assert count_operations(jax.jit(loop), a, b).products == 7 * 2 * (2 * 3 * 4 * 5)
    with pytest.raises(UnknownFlops, match="unknown length"):
        count_operations(
            lambda a: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x.T @ x, a), a
        )


@pytest.mark.parametrize(
    "kernel, groups, strides, outputs", [(3, 1, 1, 10), (4, 6, 1, 10), (3, 2, 2, 5)]
)
def test_flops_of_a_convolution(kernel, groups, strides, outputs):
    """Each output is a product of `kernel` · 6 / `groups` inputs with as many weights."""
    conv = nn.Conv(
        6,
        (kernel,),
        strides,
        padding="CAUSAL" if strides == 1 else "SAME",
        feature_group_count=groups,
    )
    x = jax.ShapeDtypeStruct((2, 10, 6), "float32")
    found = count_operations(
        conv.apply, nn.unbox(jax.eval_shape(conv.init, jax.random.key(0), x)), x
    )
    assert found == (
        2 * 2 * outputs * 6 * kernel * 6 // groups,
        2 * outputs * 6,
    )  # one addition of the bias


def test_operations_of_recurrences():
    """h_t = a_t·h_(t−1) + b_t takes two operations per element, also in a loop. A running sum takes
    one.
    """
    a = jax.ShapeDtypeStruct((8, 5), "float32")

    def loop(a, b):
        return jax.lax.scan(lambda h, ab: (ab[0] * h + ab[1],) * 2, jnp.zeros(5), (a, b))[1]

    assert count_operations(loop, a, a) == (0, 2 * 8 * 5)
    assert count_operations(lambda a: jnp.cumsum(a, axis=0), a) == (0, 8 * 5)
    assert count_operations(lambda n: n + 1, jnp.arange(3)) == (0, 0)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_flops_of_gpt(scan_layers):
    """The training FLOPs per token match the formula in appendix B of arXiv 2204.02311.

    The formula is 6·weights + 12·layers·width·context. The first term counts the matrix products
    with weights, and the second term counts attention.
    """
    config = load_config("gpt", "paper", model__scan_layers=scan_layers).model
    weights = 12 * 12 * 768**2 + 768 * config.vocab_size
    expected = 6 * weights + 12 * 12 * 768 * 1024
    assert train_flops_per_token(models.build(**config)) == expected


@pytest.mark.parametrize(
    "windows, positions",
    [
        ((256, 256, 256, 0), 9 * 256 + 3 * 1024),
        ((256, 0), 6 * 256 + 6 * 1024),
        ((100,), 12 * 100),
        ((4096,), 12 * 1024),
    ],
)
def test_flops_of_windows(windows, positions):
    """Attention FLOPs are counted for min(T, window) positions per layer. `positions` is the sum
    over all layers.
    """
    config = load_config("gpt", "paper", model__attention_windows=windows).model
    weights = 12 * 12 * 768**2 + 768 * config.vocab_size
    assert train_flops_per_token(models.build(**config)) == 6 * weights + 12 * 768 * positions


def test_flops_of_the_benchmark_peer(monkeypatch):
    """The FLOPs of the benchmark's peer are those of a plain GPT-2, even if the recipe has other
    blocks.

    The peer is the PyTorch model with which benchmarks/train_step.py compares the recipe's model.
    Both have the same sizes.
    """
    for name, value in copy.deepcopy(
        ABSL_FLAGS
    ).items():  # the benchmark defines flags that other modules also define
        monkeypatch.setitem(flags.FLAGS.__dict__, name, value)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "train_step.py"))
    recipe = load_config(
        "llama", model__attention_windows=(32, 0), model__qk_norm=True, model__mlp_ratio=4.0
    )
    plain = load_config("gpt").model
    assert train_flops_per_token(benchmark["as_gpt"](recipe)) == train_flops_per_token(
        models.build(**plain)
    )


@pytest.mark.parametrize("change", [{"attention": "splash"}, {"remat": "full"}])
def test_flops_do_not_depend_on_backend_or_remat(change):
    config = load_config("gpt", model__context_length=128).model
    plain = train_flops_per_token(models.build(**config))
    assert train_flops_per_token(models.build(**{**config, **change})) == plain
