"""Tests of muP and CompleteP: multipliers, updates and initial weights against the rules of the
papers' tables.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from conftest import ARCHITECTURES, init, load_config

from smallgpt_jax.errors import UserError
from smallgpt_jax.optim.mup import Multipliers, scale_initial
from smallgpt_jax.training.build import build_program

TRANSFER = dict(model__d_model=128, optimizer__base_width=32, optimizer__base_depth=1)
BLOCK = {  # m = 4, m_L = 2 → (initial std, rate, ε), each relative to a model without transfer
    # 1/√m from the width, 1/m_L from the branch, and √m_L because 0.02/√(2N) has the N of the base
    # model
    "attention/out/kernel": (0.5 / 2**0.5, 1 / 8, 1 / 4),
    "mlp/down/kernel": (0.5 / 2**0.5, 1 / 8, 1 / 4),
    "mlp/up/kernel": (0.5, 1 / 4, 1 / 8),
    "attention_norm/scale": (1, 1, 1 / 8),
    "mlp_norm/scale": (1, 1, 1 / 8),
}
TOP = {
    "token_embedding": (1, 1, 1 / 4),
    "position_embedding": (1, 1, 1 / 4),
    "final_norm/scale": (1, 1, 1 / 4),
    "head": (1 / 4, 1 / 4, 1),
}
# A dense layer outside of blocks already has the initial std 1/√inputs.
DENSE = {"kernel": (1, 1 / 4, 1 / 4), "bias": (1, 1, 1 / 4)}
QUERIES, KEYS_AND_VALUES = (
    (0.25, 1 / 8, 1 / 4),
    (0.5, 1 / 4, 1 / 8),
)  # queries have the factor 1/√m: heads are wider


def program(architecture, **fields):
    return build_program(load_config(architecture, **fields), jax.devices()[:1])


def by_path(tree):
    return {
        "/".join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: isinstance(x, Multipliers)
        )
    }


def numbers(multipliers):
    """Returns {path: the distinct values of each multiplier}."""
    return {
        path: tuple(np.unique(np.float64(x)).tolist() for x in m)
        for path, m in by_path(multipliers).items()
    }


def assert_multipliers(multipliers, expected):
    found = numbers(multipliers)
    assert {path for path in found if not path.endswith("qkv/kernel")} == expected.keys()
    for path, values in expected.items():
        np.testing.assert_allclose(found[path], np.float64(values)[:, None], err_msg=path)


def prefixed(prefix, values):
    return {f"{prefix}/{name}": value for name, value in values.items()}


def test_multipliers_of_lgpt():
    """Each stage is as much wider as the whole model, because the stages of the base model shrink,
    too.
    """
    found = program("lgpt", **TRANSFER, model__num_layers=2, model__blocks_per_stage=1).multipliers
    assert_multipliers(
        found,
        TOP
        | {
            path: value
            for i in (0, 1)
            for path, value in {
                **prefixed(f"trunk/stage_{i}", BLOCK),
                **prefixed(f"trunk/compress_{i}", DENSE),
            }.items()
        },
    )


def test_multipliers_of_pgpt():
    """With two paths, four blocks are two in sequence."""
    found = program("pgpt", **TRANSFER, model__num_layers=4, model__num_paths=2).multipliers
    assert_multipliers(
        found,
        TOP
        | prefixed("trunk/paths/blocks", BLOCK)
        | prefixed("trunk/paths/dense", DENSE)
        | {"trunk/path_logits": (1, 1, 1)},
    )


def test_queries_have_the_factor_of_the_scores():
    """Scores are divided by K, relative to a base model with heads of width K/4, whose scores are
    divided by √(K/4).
    """
    found = program(
        "gpt",
        **TRANSFER,
        model__num_layers=2,
        model__num_heads=4,
        model__num_kv_heads=2,
        model__use_bias=True,
    ).multipliers["trunk"]["blocks"]["attention"]["qkv"]
    for values, multiplier in zip(
        zip(QUERIES, KEYS_AND_VALUES), found["kernel"]
    ):  # (L, D, G, J, K)
        np.testing.assert_allclose(multiplier.shape, (1, 1, 1, 4, 1))
        np.testing.assert_allclose(multiplier.ravel(), np.repeat(values, 2))
    np.testing.assert_allclose(found["bias"].rate.ravel(), (0.5, 0.5, 1, 1))


def test_more_heads_of_a_fixed_width_leave_the_scores():
    fields = {**TRANSFER, "model__num_layers": 2, "model__num_heads": 8, "model__head_dim": 16}
    attention = program("llama", **fields, model__num_kv_heads=4).multipliers["trunk"]["blocks"][
        "attention"
    ]
    np.testing.assert_allclose(np.unique(attention["qkv"]["kernel"].rate), 1 / 4)
    np.testing.assert_allclose(attention["out"]["kernel"].rate, 1 / 8)


def test_with_qk_norm_its_scale_has_the_factor():
    attention = program("gpt", **TRANSFER, model__qk_norm=True).multipliers["trunk"]["blocks"][
        "attention"
    ]
    assert attention["qkv"]["kernel"].rate == 1 / 4
    np.testing.assert_allclose(attention["q_norm"]["scale"].rate, [[0.5]])
    assert attention["k_norm"]["scale"] == (1, 1, 1 / 16)


def test_scales_that_more_heads_share_keep_epsilon():
    """Their gradient is the sum over the heads (arXiv 2512.22382, on the norm of queries)."""
    fields = {**TRANSFER, "model__num_layers": 2, "model__num_heads": 8, "model__head_dim": 16}
    attention = program("llama", **fields, model__num_kv_heads=4, model__qk_norm=True).multipliers[
        "trunk"
    ]["blocks"]["attention"]
    assert attention["k_norm"]["scale"].epsilon == 1 / 2
    assert attention["qkv"]["kernel"].epsilon == 1 / 8


@pytest.mark.parametrize("name", ["delta", "mamba", "conv"])
def test_mixers(name):
    """With heads of a fixed width, a norm of heads is shared by more of them. Mamba's keys and
    queries have as many entries as in the base model, like a router.
    """
    fields = {**TRANSFER, "model__num_layers": 2, "model__num_heads": 8, "model__head_dim": 16}
    if name == "conv":
        fields |= {"model__num_heads": 4, "model__head_dim": 0}
    found = numbers(
        program("gpt", **fields, model__mixers=(name,), model__position="none").multipliers
    )
    hidden, narrow, taps = (1 / 2, 1 / 4, 1 / 8), (1 / 4, 1 / 4, 1 / 2), (1, 1, 1 / 8)
    expected = {
        "delta": {
            "query/kernel": hidden,
            "beta/kernel": hidden,  # one per head
            "convolution/taps": taps,
            "A_log": taps,
            "out_norm/scale": (1, 1, 1 / 2),
        },
        "mamba": {
            "value/kernel": hidden,
            "key/kernel": narrow,
            "query/kernel": narrow,
            "convolution/taps": taps,
            "key_query_convolution/taps": (1, 1, 1 / 2),
            "out_norm/scale": taps,
        },
        "conv": {"input_gate/kernel": hidden, "convolution/taps": taps},
    }[name]
    for path, values in {"out/kernel": BLOCK["attention/out/kernel"], **expected}.items():
        np.testing.assert_allclose(
            found[f"trunk/blocks/mixer/{path}"], np.float64(values)[:, None], err_msg=path
        )


def test_experts_and_router():
    """A router is an output layer, with as many outputs as there are experts."""
    mlp = numbers(
        program("moe", **TRANSFER, model__num_layers=2).multipliers["trunk"]["blocks"]["mlp"]
    )
    assert mlp["router/kernel"] == ([1 / 4], [1 / 4], [1 / 2])
    assert mlp["up"] == mlp["shared/up/kernel"] == ([1 / 2], [1 / 4], [1 / 8])
    np.testing.assert_allclose(mlp["down"], np.float64(BLOCK["mlp/down/kernel"])[:, None])


def test_block_options():
    """Value embeddings are embeddings. A gate is a score: the number of heads does not grow without
    `head_dim`.
    """
    found = numbers(
        program(
            "gpt",
            **TRANSFER,
            model__num_layers=2,
            model__value_embeddings=(1,),
            model__canon_taps=2,
            model__attention_gate=True,
            model__residual_scales=True,
        ).multipliers
    )
    for path, values in {
        "attention/value_embedding": (1, 1, 1 / 8),
        "attention/gate/kernel": (1 / 4, 1 / 4, 1 / 2),
        "mlp_canon/convolution/taps": (1, 1, 1 / 8),
        "residual_scales": (1, 1, 1 / 2),  # one number for all outputs
    }.items():
        assert found[f"trunk/blocks/{path}"] == tuple([value] for value in values), path


def test_a_tied_head_leaves_its_factor_to_the_final_norm():
    found = program("gpt", **TRANSFER, model__tie_embeddings=True).multipliers
    assert found["token_embedding"] == (1, 1, 1 / 4)
    assert found["final_norm"]["scale"] == (1 / 4, 1 / 4, 1)


def test_muon_scales_with_the_root_of_the_width():
    """Its updates of a matrix with m times as many rows and columns have √m times the singular
    values.
    """
    found = numbers(
        program("gpt", **TRANSFER, model__num_layers=2, optimizer__name="muon").multipliers
    )
    assert found["trunk/blocks/mlp/up/kernel"][1] == [1 / 2]
    assert found["head"][1] == [1 / 4]


def test_without_a_base_nothing_changes_and_at_the_base_all_multipliers_are_1():
    assert program("gpt").multipliers is None
    found = program("moe", optimizer__base_width=64, optimizer__base_depth=4).multipliers
    assert {value for values in numbers(found).values() for x in values for value in x} == {1.0}


@pytest.mark.parametrize("name", [*ARCHITECTURES, "moe"])
def test_updates_of_all_recipes_have_the_shapes_of_the_parameters(name):
    p = program(name, **TRANSFER, model__num_layers=4, optimizer__name="muon")
    params = p.abstract_state.params
    update = functools.partial(p.optimizer.update, learning_rate=0.1, weight_decay=0.1)
    updates, _ = jax.eval_shape(update, params, p.abstract_state.opt_state, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )


def test_training_follows_the_table_of_completep():
    """Trains the weights of arXiv 2505.01618, table 1, with the ε of arXiv 2512.22382, by AdamW's
    formula, with their factors in the loss. The products of weights and factors are our weights.
    Gradients are small, so that ε matters.
    """
    rate, decay, epsilon, m, m_l = 0.1, 0.3, 1e-8, 4, 2
    p = program(
        "gpt",
        model__d_model=32,
        model__num_heads=2,
        optimizer__base_width=8,
        optimizer__base_depth=1,
        model__num_layers=2,
        model__qk_norm=True,
        optimizer__clip_norm=0.0,
    )
    # path → (factor in the forward pass, rate, decay, ε)
    in_block = epsilon / (m * m_l)
    table = {
        "token_embedding": (1, rate, decay, epsilon / m),
        "position_embedding": (1, rate, decay, epsilon / m),
        "head": (1 / m, rate, decay, epsilon / m),
        "final_norm/scale": (1, rate, 0, epsilon / m),
        "qkv/kernel": (1, rate / m, decay * m, in_block),
        "up/kernel": (1, rate / m, decay * m, in_block),
        "out/kernel": (1 / m_l, rate / m, decay * m, in_block),
        "down/kernel": (1 / m_l, rate / m, decay * m, in_block),
        "q_norm/scale": (m**-0.5, rate, 0, in_block),
        "k_norm/scale": (1, rate, 0, in_block),
        "attention_norm/scale": (1, rate, 0, in_block),
        "mlp_norm/scale": (1, rate, 0, in_block),
    }
    params, phases = init(p.model), init(p.model, seed=1)
    expected = {
        path: trained(w, by_path(phases)[path], *named(table, path))
        for path, w in by_path(params).items()
    }
    state = p.optimizer.init(params)
    update = jax.jit(functools.partial(p.optimizer.update, learning_rate=rate, weight_decay=decay))
    for _ in range(4):
        updates, state = update(jax.tree.map(loss_gradient, params, phases), state, params)
        params = optax.apply_updates(params, updates)
    for path, w in by_path(params).items():
        np.testing.assert_allclose(w, expected[path], rtol=2e-4, atol=1e-5, err_msg=path)


def trained(w, phase, factor, rate, decay, epsilon):
    """Returns factor · v after four steps of AdamW with the loss of factor · v, from factor · v =
    w, in float64.
    """
    v, phase = np.float64(w) / factor, np.float64(phase)
    mean = square = np.zeros_like(v)
    for step in range(1, 5):
        gradient = factor * loss_gradient(factor * v, phase)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        direction = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.95**step)) + epsilon)
        v = v - rate * (direction + decay * v)
    return factor * v


def loss_gradient(w, a):
    """Of Σ 1e-8·cos(20·a + w)."""
    return -1e-8 * np.sin(20 * a + w)


def test_initial_stds():
    """σ = 0.02, times 1/√m in hidden matrices, 1/m in the head, and 1/√2 · 1/m_L at the end of a
    branch (N = 1).
    """
    p = program(
        "gpt",
        **TRANSFER,
        model__num_layers=2,
        model__position="rope",
        model__head_dim=32,
        model__use_bias=True,
    )
    usual = {
        "qkv/kernel": 0.02,
        "up/kernel": 0.02,
        "out/kernel": 0.02 / 4**0.5,
        "down/kernel": 0.02 / 4**0.5,
        "token_embedding": 0.02,
        "head": 0.02,
        "scale": 1.0,
        "bias": 0.0,
    }  # of this model, with N = 2
    expected = {
        "qkv/kernel": 0.01,
        "up/kernel": 0.01,
        "out/kernel": 0.01 / 2**0.5 / 2,
        "token_embedding": 0.02,
        "down/kernel": 0.01 / 2**0.5 / 2,
        "head": 0.02 / 4,
        "scale": 1.0,
        "bias": 0.0,
    }
    stds = jax.tree_util.tree_map_with_path(
        lambda path, x: np.full(
            x.shape, named(usual, "/".join(key.key for key in path)), np.float32
        ),
        p.abstract_state.params,
    )
    for path, std in by_path(scale_initial(stds, p.multipliers)).items():
        np.testing.assert_allclose(std, named(expected, path), rtol=1e-6)


def named(values, path):
    return next(value for name, value in values.items() if path.endswith(name))


def test_the_head_of_a_wide_model_starts_from_the_std_of_the_base():
    """Without transfer, heads wider than 256 have a smaller initial std than 0.02."""
    p = program("gpt", model__d_model=1024, optimizer__base_width=512)
    # 0.02·√(256/1024) times the multiplier is 0.02·√(256/512)/2
    np.testing.assert_allclose(p.multipliers["head"].init, 2**0.5 / 2)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"optimizer__base_width": -1}, "config.optimizer.base_width=-1: must be at least 0"),
        ({"optimizer__base_width": 30}, "config.optimizer.base_width=30: no such base model"),
        (
            {"optimizer__base_width": 32, "model__rank_ratio": 0.5},
            "config.model.rank_ratio=0.5: cannot be combined",
        ),
        (
            {"optimizer__base_depth": 2, "model__norm_position": "post"},
            "config.model.norm_position='post': must be 'pre'",
        ),
        (
            {
                "optimizer__base_width": 32,
                "model__norm_position": "post",
                "model__tie_embeddings": True,
            },
            "config.model.tie_embeddings=True: cannot be combined",
        ),
        (
            {"optimizer__base_width": 32, "model__smear": True},
            "config.model.smear=True: cannot be combined",
        ),
        (
            {"optimizer__base_depth": 2, "model__input_mix": True},
            "config.model.input_mix=True: cannot be combined",
        ),
        (
            {"optimizer__base_depth": 2, "model__loops": 2},
            "config.model.loops=2: cannot be combined",
        ),
        (
            {"optimizer__base_width": 24, "model__head_dim": 16},
            "the base model would have 4 · 24 / 64 heads",
        ),
    ],
)
def test_models_without_rules_are_refused(fields, message):
    with pytest.raises(UserError) as error:
        program("gpt", **fields)
    assert message in str(error.value)
