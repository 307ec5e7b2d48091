"""Tests of mixtures of experts: outputs, gradients, balance, sharding, FLOPs and logs.

The oracles are the equations of DeepSeek-V3 in float64 and the module of transformers' DeepSeek-V3.
Random models (test_random_models.py) are also decoded, and sharded in other ways.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_helpers
from conftest import build, forward, init, load_config
from flax import linen as nn
from run_helpers import start_from, train_three_steps
from scipy.special import erf

from smallgpt_jax import models
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import texts
from smallgpt_jax.models.context import EVALUATION, Context
from smallgpt_jax.models.flops import count_operations, train_flops_per_token
from smallgpt_jax.models.layers import MLPS
from smallgpt_jax.models.stacks import stack_blocks
from smallgpt_jax.ops import grouped_matmul
from smallgpt_jax.planning import hlo
from smallgpt_jax.training import trainer
from smallgpt_jax.training.build import build_program, shared_program

MOE = {
    "mlp": "moe",
    "mlp_ratio": 1.0,
    "num_experts": 6,
    "experts_per_token": 2,
    "expert_scale": 2.5,
}
SMALL = dict(
    model__num_layers=2,
    model__d_model=16,
    model__num_heads=2,
    model__vocab_size=64,
    model__context_length=32,
    train__batch_size=16,
    optimizer__warmup_steps=0,
)


def random_state(model, seed=0):
    """Returns a model state with random biases that are large enough to change the chosen
    experts.
    """
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.float32(rng.uniform(0, 0.1, x.shape)), models.abstract_model_state(model)
    )


def deepseek_v3(config, weights, bias_E, u_TxD, is_token_T=True):
    """Returns the output for one sequence, the load of each expert, and Σ f_i·P_i, in float64.

    Written from the equations of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), without the
    residual u_t of (12). Two things are not in the paper: `expert_scale`, and a single gate, which
    is not divided by itself in (13), because the router would have no gradient. Only the tokens in
    `is_token_T` count in the load and in (18) and (20).
    """
    experts, chosen, width = config.num_experts, config.experts_per_token, config.mlp_width
    is_token_T = np.broadcast_to(is_token_T, len(u_TxD))
    act = {
        "gelu": lambda h: h * 0.5 * (1 + erf(h / np.sqrt(2))),
        "silu": lambda h: h / (1 + np.exp(-h)),
    }[config.activation]

    def ffn(up, down, gate=None):
        return (act(u_TxD @ up) if gate is None else act(u_TxD @ gate) * (u_TxD @ up)) @ down

    def is_in_top_k(x_TxE):
        return x_TxE >= np.sort(x_TxE)[:, -chosen, None]

    names = ("up", "down", "gate") if config.expert_mlp == "gated" else ("up", "down")
    routed = [[weights[name][i] for name in names] for i in range(experts)]
    parts = [slice(i * width, (i + 1) * width) for i in range(config.num_shared_experts)]
    shared = [
        [
            weights["shared"][name]["kernel"][(part,) if name == "down" else (slice(None), part)]
            for name in names
        ]
        for part in parts
    ]

    s_TxE = 1 / (1 + np.exp(-u_TxD @ weights["router"]["kernel"]))  # (15)
    g_TxE = np.where(is_in_top_k(s_TxE + bias_E), s_TxE, 0)  # (16), in place of (14)
    load_E = np.sum(g_TxE[is_token_T] > 0, axis=0)
    if chosen > 1:
        g_TxE = g_TxE / g_TxE.sum(axis=1, keepdims=True)  # (13)
    h_TxD = sum(
        (ffn(*weights) for weights in shared), np.zeros_like(u_TxD)
    ) + config.expert_scale * sum(
        g_TxE[:, i, None] * ffn(*weights) for i, weights in enumerate(routed)
    )  # (12)
    tokens = max(1, is_token_T.sum())
    f_E = experts / (chosen * tokens) * is_in_top_k(s_TxE)[is_token_T].sum(axis=0)  # (18)
    p_E = (s_TxE / s_TxE.sum(axis=1, keepdims=True))[is_token_T].sum(axis=0) / tokens  # (19), (20)
    return h_TxD, load_E, f_E @ p_E  # (17), without α


def random_weights(module, x, seed=1):
    variables = jax.eval_shape(module.init, jax.random.key(0), x, EVALUATION)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: 0.3 * rng.standard_normal(w.shape), nn.unbox(variables["params"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"expert_mlp": "gated", "activation": "silu", "grouped_matmul": "ragged"},
        {"experts_per_token": 6, "num_shared_experts": 2},
        {
            "experts_per_token": 1,
            "num_shared_experts": 0,
            "num_experts": 40,
            "grouped_matmul": "ragged",
        },
    ],
)
def test_outputs_loads_and_balance_match_deepseek_v3(fields):
    """The biases affect the choice of experts, but neither the gates nor the balance loss. Padding
    does not count, but prompts do, which are in a row before its last target in the loss mask.
    """
    config = build("gpt", **{**MOE, "balance_loss": 0.5, **fields}).config
    module = MLPS["moe"](config)
    x = np.random.default_rng(0).standard_normal((2, 24, config.d_model))
    weights = random_weights(module, jnp.float32(x))
    bias = np.random.default_rng(2).uniform(0, 0.3, config.num_experts)
    variables = {
        "params": jax.tree.map(jnp.float32, weights),
        "state": {"router": {"bias": jnp.float32(bias)}},
    }
    apply = jax.jit(
        lambda mask: module.apply(
            variables,
            jnp.float32(x),
            Context(train=True, loss_mask_BxT=mask),
            mutable=["loads", "losses"],
        )
    )
    for is_token in (np.ones((2, 24), bool), np.arange(24)[None] < [[17], [0]]):
        in_loss = None if is_token.all() else is_token & (np.arange(24) % 4 == 0)
        expected, load, balance = zip(
            *(deepseek_v3(config, weights, bias, *row) for row in zip(x, is_token))
        )
        found, collections = apply(in_loss)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
        sown = {name: values["router"] for name, values in collections.items()}
        assert sown["losses"]["expert_balance"][0] == pytest.approx(
            0.5 * np.mean(balance), rel=1e-4
        )
        assert np.array_equal(sown["loads"]["load"][0], np.sum(load, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_gradient_of_the_router(experts_per_token):
    """The derivative along a random direction is that of the float64 model, by central
    differences.
    """
    config = build("gpt", **{**MOE, "experts_per_token": experts_per_token}).config
    module, rng = MLPS["moe"](config), np.random.default_rng(3)
    x, ct = rng.standard_normal((2, 24, config.d_model))
    weights, bias = (
        random_weights(module, jnp.float32(x[None])),
        rng.uniform(0, 0.3, config.num_experts),
    )
    direction = rng.standard_normal(weights["router"]["kernel"].shape)

    def expected(step):
        kernel = weights["router"]["kernel"] + step * direction
        return np.sum(
            ct * deepseek_v3(config, {**weights, "router": {"kernel": kernel}}, bias, x)[0]
        )

    def found(step):
        params = jax.tree.map(jnp.float32, weights)
        params["router"]["kernel"] += step * jnp.float32(direction)
        return jnp.sum(
            ct
            * module.apply(
                {"params": params, "state": {"router": {"bias": jnp.float32(bias)}}},
                jnp.float32(x[None]),
                EVALUATION,
            )[0]
        )

    assert jax.jit(jax.grad(found))(0.0) == pytest.approx(
        (expected(1e-6) - expected(-1e-6)) / 2e-6, rel=1e-3
    )


@pytest.mark.slow
def test_outputs_match_deepseek_v3_of_transformers():
    torch = pytest.importorskip("torch")
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = build(
        "gpt", **{**MOE, "expert_mlp": "gated", "activation": "silu", "num_shared_experts": 2}
    ).config
    theirs = deepseek.DeepseekV3MoE(
        deepseek.DeepseekV3Config(
            hidden_size=config.d_model,
            moe_intermediate_size=config.mlp_width,
            n_routed_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
            n_shared_experts=config.num_shared_experts,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=config.expert_scale,
            hidden_act="silu",
        )
    ).eval()
    rng = np.random.default_rng(0)
    state = {
        name: torch.tensor(0.3 * rng.standard_normal(x.shape), dtype=torch.float32)
        for name, x in theirs.state_dict().items()
    }
    theirs.load_state_dict(state)
    ours = {name: x.numpy() for name, x in state.items()}
    gate_up = ours["experts.gate_up_proj"]  # (E, 2F, D)
    weights = {
        "router": {"kernel": ours["gate.weight"].T},
        "gate": gate_up[:, : config.mlp_width].swapaxes(1, 2),
        "up": gate_up[:, config.mlp_width :].swapaxes(1, 2),
        "down": ours["experts.down_proj"].swapaxes(1, 2),
        "shared": {
            name: {"kernel": ours[f"shared_experts.{name}_proj.weight"].T}
            for name in ("gate", "up", "down")
        },
    }
    router = {"bias": ours["gate.e_score_correction_bias"]}
    x = rng.standard_normal((2, 24, config.d_model)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    found = jax.jit(
        lambda x: MLPS["moe"](config).apply(
            {"params": weights, "state": {"router": router}}, x, EVALUATION
        )
    )(x)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend, rows", [("blocks", 200), ("blocks", 3), ("ragged", 200)])
@pytest.mark.parametrize("skew", ["uniform", "one group", "no row in the first and last"])
def test_no_row_is_dropped(backend, rows, skew):
    """Products and their gradients match a loop over rows, however the rows are distributed over
    the groups.
    """
    rng = np.random.default_rng(0)
    groups = {
        "uniform": rng.integers(0, 5, rows),
        "one group": np.full(rows, 3),
        "no row in the first and last": rng.integers(1, 4, rows),
    }[skew]
    x, w, ct = (
        rng.standard_normal((rows, 4)),
        rng.standard_normal((5, 4, 7)),
        rng.standard_normal((rows, 7)),
    )

    @jax.jit
    def product(x, w, groups):
        grouping = grouped_matmul.group_rows(groups, 5, grouped_matmul.block_size(backend, rows, 5))
        slots = grouped_matmul.into_slots(x, grouping)
        return grouped_matmul.from_slots(
            grouped_matmul.grouped_matmul(slots, w, grouping, backend), grouping
        )

    found, gradient = jax.vjp(
        lambda x, w: product(x, w, jnp.int32(groups)), jnp.float32(x), jnp.float32(w)
    )
    np.testing.assert_allclose(found, [row @ w[g] for row, g in zip(x, groups)], atol=1e-5)
    dx, dw = gradient(jnp.float32(ct))
    np.testing.assert_allclose(dx, [w[g] @ row for row, g in zip(ct, groups)], atol=1e-5)
    expected = np.zeros_like(w)
    for row, g, row_ct in zip(x, groups, ct):
        expected[g] += np.outer(row, row_ct)
    np.testing.assert_allclose(dw, expected, atol=1e-4)


@pytest.mark.parametrize("block", [1, 4])
def test_copies_of_a_row_are_summed(block):
    """Row i of the grouping is x[i mod T]. Both functions and their gradients match loops over
    three copies.
    """
    rng, rows, copies = np.random.default_rng(0), 5, 3
    groups = jnp.int32(rng.integers(0, 4, rows * copies))
    grouping = jax.jit(grouped_matmul.group_rows, static_argnums=(1, 2))(groups, 4, block)
    slot_of_row = np.asarray(grouping.slot_of_row_R)
    x, y = (
        np.float32(rng.standard_normal((size, 2))) for size in (rows, len(grouping.row_of_slot_S))
    )
    placed, summed = np.zeros_like(y), np.zeros_like(x)
    for row, slot in enumerate(slot_of_row):
        placed[slot] = x[row % rows]
        summed[row % rows] += y[slot]
    for function, argument, expected, cotangent, gradient in (
        (grouped_matmul.into_slots, x, placed, y, summed),
        (grouped_matmul.from_slots, y, summed, x, placed),
    ):

        @jax.jit
        def with_gradient(a, ct, function=function):
            found, backward = jax.vjp(lambda a: function(a, grouping, copies), a)
            return found, backward(ct)[0]

        found, backward = with_gradient(argument, cotangent)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(backward, gradient, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["blocks", "ragged"])
def test_gradients_in_bfloat16_are_summed_in_float32(backend):
    """The gradient of a matrix is a sum over 4,096 rows in many blocks. Only the final sum is
    rounded to bfloat16.
    """
    rng = np.random.default_rng(0)
    x, ct = (jnp.asarray(1 + 0.1 * rng.standard_normal((4096, 4)), jnp.bfloat16) for _ in range(2))

    def product(w):
        grouping = grouped_matmul.group_rows(
            jnp.zeros(4096, jnp.int32), 256, grouped_matmul.block_size(backend, 4096, 256)
        )
        slots = grouped_matmul.into_slots(x, grouping)
        return grouped_matmul.from_slots(
            grouped_matmul.grouped_matmul(slots, w, grouping, backend), grouping
        )

    @jax.jit
    def gradient(w, ct):
        return jax.vjp(product, w)[1](ct)[0]

    found = gradient(jnp.zeros((256, 4, 4), jnp.bfloat16), ct)[0]
    expected = np.float64(x).T @ np.float64(ct)
    np.testing.assert_allclose(np.float64(found), expected, rtol=2**-8)


# ---------------------------------------------------------------------- training


def train_on(devices: int, folder, **fields) -> tuple[list, list]:
    """Returns metrics and states of three steps of a pgpt, whose blocks have experts and the mixer
    `delta`, on separate documents.
    """
    moe = {f"model__{name}": value for name, value in MOE.items()}
    config = load_config(
        "pgpt",
        **{**SMALL, **moe, **fields},
        data__separate_documents=True,
        model__mixers=("delta",),
        model__expert_mlp="gated",
        model__balance_loss=0.01,
    )
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(1, 4, (16, 32)), axis=1).astype(np.int32)
    batch = Batch(rng.integers(0, 64, (16, 33), np.int32), segments)
    program = build_program(config, jax.devices()[:devices])
    return train_three_steps(
        program, config, batch, folder, start_from(program, init(program.model))
    )


@pytest.mark.slow
def test_training_does_not_depend_on_devices_or_resumption(tmp_path):
    """Losses and loads match, and biases are equal. One device has scanned layers, one microbatch
    and the backend "blocks". On eight devices, `train_three_steps` compares the third step with that
    of a restored state, bit for bit.
    """
    expected, expected_states = train_on(1, None)
    metrics, states = train_on(
        8,
        tmp_path,
        mesh__data=1,
        mesh__fsdp=2,
        mesh__tensor=2,
        mesh__path=2,
        train__microbatches=4,
        model__grouped_matmul="ragged",
        model__scan_layers=False,
    )
    losses = [m["loss"] for m in expected]
    assert losses[0] > losses[1] > losses[2]
    for name in ("loss", "grad_norm", "expert_load"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5),
            [m[name] for m in metrics],
            [m[name] for m in expected],
        )
    jax.tree.map(
        np.testing.assert_array_equal, states[-1].model_state, expected_states[-1].model_state
    )


class ExpertBlock(nn.Module):
    config: models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        return x_BxTxD + MLPS["moe"](self.config, name="mlp")(x_BxTxD, context)


class ExpertsTwice(nn.Module):
    """A trunk of mixtures of experts without attention, applied twice."""

    config: models.ModelConfig

    Config = models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context):
        blocks = stack_blocks([self.config] * self.config.num_layers, context, block=ExpertBlock)
        return blocks(blocks(x_BxTxD))


@pytest.mark.slow
def test_biases_move_once_per_update(monkeypatch):
    """At the end of each step, b_i moves by ±expert_bias_rate (arXiv 2412.19437, section 2.1.2).

    The load is that of all passes and microbatches, without padding, of which one microbatch has
    more. Evaluation chooses the same experts as training.
    """
    monkeypatch.setitem(models.ARCHITECTURES, "twice", ExpertsTwice)
    moe = {
        f"model__{name}": value
        for name, value in {
            **MOE,
            "position": "none",
            "expert_bias_rate": 0.1,
            "remat": "full",
        }.items()
    }
    config = load_config(
        "gpt",
        **{**SMALL, **moe},
        model__architecture="twice",
        train__microbatches=2,
        data__packing="best_fit",
        optimizer__learning_rate=0.0,
        optimizer__final_learning_rate=0.0,
    )
    program = build_program(config, jax.devices()[:1])
    step, evaluate = program.bind(config), program.evaluate
    state = start_from(program, jax.tree.map(lambda x: 5 * x, init(program.model)))
    tokens = np.random.default_rng(0).integers(0, 64, (16, 33), np.int32)
    is_token = np.arange(32) < np.tile([[24], [6]], (8, 1))
    batch = Batch(tokens, loss_mask_BxT=is_token, targets_BxT=tokens[:, 1:])
    params = jax.tree.map(np.float64, state.params)
    layers = [jax.tree.map(lambda x, i=i: x[i], params["trunk"]["blocks"]["mlp"]) for i in range(2)]
    bias = np.zeros((2, 6))
    for _ in range(2):
        h, load = params["token_embedding"][tokens[:, :-1]], np.zeros((2, 6))
        for layer in (0, 1, 0, 1):
            y, loads, _ = zip(
                *(
                    deepseek_v3(program.model.config, layers[layer], bias[layer], *row)
                    for row in zip(h, is_token)
                )
            )
            h, load[layer] = h + y, load[layer] + np.sum(loads, axis=0)
        bias += 0.1 * np.sign(load.mean(axis=1, keepdims=True) - load)
        validation = batch._replace(row_numbers_B=np.arange(16, dtype=np.uint32))
        nats, targets, *_ = evaluate(state.params, state.model_state, validation)
        state, metrics = step(state, batch)
        assert metrics["loss"] == pytest.approx(float(nats) / int(targets), rel=1e-6)
        router = state.model_state["trunk"]["blocks"]["mlp"]["router"]
        np.testing.assert_allclose(router["bias"], bias, atol=1e-6)
        relative = load / load.mean(axis=1, keepdims=True)
        np.testing.assert_allclose(
            metrics["expert_load"]["trunk/blocks/mlp/router"], relative, rtol=1e-5
        )
        assert metrics["expert_load_max"] == pytest.approx(relative.max(axis=1).mean(), rel=1e-5)


def test_the_bias_rate_affects_only_training():
    """A teacher, an import and an evaluation may have another `expert_bias_rate` than the run that
    made the state.
    """
    model, other = (build("gpt", **MOE, num_layers=1, expert_bias_rate=rate) for rate in (0.0, 0.5))
    tokens = np.random.default_rng(0).integers(0, 512, (2, 64))
    params, state = init(model), random_state(model)
    assert np.array_equal(*(forward(m, params, tokens, state) for m in (model, other)))


# ---------------------------------------------------------------------- everything else


@pytest.mark.slow
def test_parameters_and_flops():
    """A token uses three of 16 routed experts and one shared expert. Each has two (d_model,
    d_model) matrices.
    """
    moe, gpt = (
        models.build(**load_config(name, "paper", model__scan_layers=True).model)
        for name in ("moe", "gpt")
    )
    width, router = 768, 768 * 16
    assert models.num_parameters(moe) - models.num_parameters(gpt) == 12 * (
        17 * 2 * width**2 - 8 * width**2 + router
    )
    assert models.num_active_parameters(moe) - models.num_parameters(gpt) == 12 * router
    assert train_flops_per_token(moe) - train_flops_per_token(gpt) == 6 * 12 * router
    without = build("gpt", num_experts=0)
    assert models.num_active_parameters(without) == models.num_parameters(without)


def test_flops_of_unknown_grouped_products_are_refused():
    """FLOPs are known for `ragged_dot`, but not for its gradient, which sums over groups of
    different lengths.
    """
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((2, 4, 3)), jnp.array([3, 5])
    assert (
        count_operations(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w).products
        == 2 * 8 * 4 * 3
    )
    with pytest.raises(ValueError, match="ragged_dot_general"):
        count_operations(jax.grad(lambda w: jax.lax.ragged_dot(x, w, sizes).sum()), w)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_experts": 0}, r"config.model.num_experts=0: must be at least 1"),
        (
            {"experts_per_token": 7},
            r"experts_per_token=7: must be at least 1 and at most config.model.num_experts=6",
        ),
        ({"experts_per_token": 0}, r"experts_per_token=0: must be at least 1"),
        ({"num_shared_experts": -1}, r"num_shared_experts=-1: must be at least 0"),
        ({"expert_mlp": "moe"}, r"expert_mlp='moe': must be one of dense, gated"),
        ({"expert_scale": 0.0}, r"expert_scale=0.0: must be a finite number above 0"),
        ({"expert_bias_rate": -0.1}, r"expert_bias_rate=-0.1: must be a finite number, at least 0"),
        ({"balance_loss": float("nan")}, r"balance_loss=nan: must be a finite number"),
        (
            {"grouped_matmul": "megablox"},
            r"grouped_matmul='megablox': must be one of auto, ragged, blocks",
        ),
        ({"use_bias": True}, r"use_bias=True: must be False with config.model.mlp='moe'"),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        build("gpt", **{**MOE, **fields})


@pytest.mark.slow
def test_a_run_on_eight_devices(text_file, tmp_path):
    """It logs the load of each expert, and `compare` can measure it. With data parallelism, devices
    exchange only weights, gradients and loads, once per step, and no tokens.
    """
    config = load_config(
        "moe",
        **run_helpers.SMALL,
        data__source=str(text_file),
        data__validation_fraction=0.2,
        train__batch_size=16,
        train__microbatches=2,
        train__steps=2,
        train__log_every=1,
        train__eval_every=2,
        train__eval_steps=1,
    )
    trainer.train_and_evaluate(config, str(tmp_path))
    check_that_rows_do_not_move(shared_program(config))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    loads = [
        np.array(line["expert_load"]["trunk/blocks/mlp/router"])
        for line in lines
        if line["split"] == "train"
    ]
    assert len(loads) == 2 and all(load.shape == (2, 16) for load in loads)
    np.testing.assert_allclose([load.mean() for load in loads], 1, atol=1e-3)
    assert all(
        line["expert_load_max"] == pytest.approx(load.max(axis=1).mean(), abs=1e-3)
        for line, load in zip(lines, loads)
    )
    sample = texts.TextSample(load_or_prepare(config.data), config, (1,), "own")
    assert 0 < texts.measure_loss(tmp_path, sample, 1)["loss"] < 10


def check_that_rows_do_not_move(program):
    assert "compiled_train_step" in vars(program)  # not compiled again
    traffic = hlo.HloModule(program.compiled_train_step.as_text()).collectives()
    stored = [
        x
        for x in jax.tree.leaves(program.abstract_state.params)
        if not x.sharding.is_fully_replicated
    ]
    weight_bytes, gradient_bytes = (
        4 * sum(x.size for x in stored),
        4 * models.num_parameters(program.model),
    )
    assert traffic.pop("all-gather")["bytes"] == weight_bytes
    assert traffic.pop("reduce-scatter")["bytes"] == weight_bytes / 8
    gradient_bytes -= weight_bytes
    assert set(traffic) == {"all-reduce"}
    assert 0 < traffic["all-reduce"]["bytes"] - gradient_bytes < 1024
