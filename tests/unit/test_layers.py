"""Tests of layers and model configs: positions, activations, initial weights, paths of pgpt,
refused configs.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build
from flax import linen as nn

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.pgpt import with_paths
from smallgpt_jax.models.positions import alibi_slopes, apply_rope
from smallgpt_jax.ops.activations import gelu

rotate = functools.partial(apply_rope, base=10_000.0)


def complex_rope(x_BxHxTxK, positions_BxT, base=10_000.0):
    """Returns x, rotated as in Su et al. (arXiv 2104.09864). The rotation is computed with complex
    numbers.

    Entries n and n + K/2 of the last axis of x are the real part and the imaginary part of a
    complex number. At position t, this number is multiplied by exp(i·t·θ_n), where θ_n =
    base^(−2n/K).
    """
    half = x_BxHxTxK.shape[-1] // 2
    thetas = base ** (-2 * np.arange(half) / (2 * half))
    points = x_BxHxTxK[..., :half] + 1j * x_BxHxTxK[..., half:]
    points = points * np.exp(1j * positions_BxT[:, None, :, None] * thetas)
    return np.concatenate([points.real, points.imag], axis=-1)


def test_rope_matches_complex_rotation():
    x = np.random.default_rng(0).standard_normal((2, 3, 40, 24)).astype(np.float32)
    positions = np.stack([np.arange(40), np.arange(700, 740)])
    rotated = rotate(jnp.array(x), jnp.array(positions))
    np.testing.assert_allclose(rotated, complex_rope(x, positions), atol=5e-4)
    assert np.abs(rotated - x).max() > 1
    slower = apply_rope(jnp.array(x), jnp.array(positions), base=500_000.0)
    np.testing.assert_allclose(slower, complex_rope(x, positions, base=500_000.0), atol=5e-4)
    # With a bfloat16 input, the rotation is computed in float32, and only its result is rounded to
    # bfloat16.
    coarse = jnp.array(x, "bfloat16")
    exact = rotate(coarse.astype("float32"), jnp.array(positions))
    assert np.array_equal(rotate(coarse, jnp.array(positions)), exact.astype("bfloat16"))


def test_rope_scores_depend_on_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 5, 16))
    scores = [
        rotate(jnp.array(q), at) @ jnp.swapaxes(rotate(jnp.array(k), at), 2, 3)
        for at in (jnp.arange(5)[None], 300 + jnp.arange(5)[None], 2 * jnp.arange(5)[None])
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)
    assert np.abs(scores[0] - scores[2]).max() > 0.5


def test_alibi_slopes_match_the_paper():
    """The slopes for 8 and 16 heads are those in section 3 of arXiv 2108.12409.

    They are 1/2, 1/4, … 1/256 for 8 heads and 1/√2, 1/2, 1/(2√2), … for 16 heads.
    """
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    np.testing.assert_allclose(alibi_slopes(16), [0.5 ** (i / 2) for i in range(1, 17)], rtol=1e-6)
    np.testing.assert_allclose(
        alibi_slopes(12), [0.5 ** (i / 1.5) for i in range(1, 13)], rtol=1e-6
    )


def test_gelu_and_its_derivative():
    x = jnp.linspace(-6, 6, 201)
    cdf = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    density = np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(gelu(x), x * cdf, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(gelu))(x), cdf + x * density, rtol=1e-5, atol=2e-6)
    # For a bfloat16 input, `gelu` computes in float32. With 1 + erf in bfloat16, the result for −3
    # would be 45% off.
    tail = jnp.array([-3.0], "bfloat16")
    assert float(gelu(tail)[0]) == pytest.approx(-3 * math.erfc(3 / math.sqrt(2)) / 2, rel=0.01)


@pytest.mark.slow
def test_gpt2_initialization():
    """The weights of a block that is applied twice add to the stream twice."""
    model = build("gpt", d_model=128, num_layers=8, loops=2, use_bias=True)
    tokens = jnp.zeros((1, 64), int)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens))["params"]
    block = params["trunk"]["blocks"]
    for weight in (
        params["token_embedding"],
        params["position_embedding"],
        params["head"],
        block["attention"]["qkv"]["kernel"],
        block["mlp"]["up"]["kernel"],
    ):
        assert np.std(weight) == pytest.approx(0.02, rel=0.03)
    for weight in (block["attention"]["out"]["kernel"], block["mlp"]["down"]["kernel"]):
        assert np.std(weight) == pytest.approx(0.02 / math.sqrt(2 * 2 * 8), rel=0.03)
    assert not any(
        np.any(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key == "bias"
    )
    # Every layer has its own random weights.
    assert np.std(block["mlp"]["up"]["kernel"][0] - block["mlp"]["up"]["kernel"][1]) > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("mixer, least", [("delta", 0.01), ("mamba", 1.0)])
def test_initialization_of_recurrences(mixer, least):
    """With deepnorm, which scales values. Decay rates are uniform up to 16, and steps log-uniform
    from 0.001 to 0.1, as in the papers' codes.
    """
    model = build(
        "gpt", d_model=128, num_heads=64, num_layers=8, mixers=(mixer,), norm_position="deepnorm"
    )
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), int)))["params"]
    weights, scaled = params["trunk"]["blocks"]["mixer"], 0.02 * (8 * 8) ** -0.25
    for name, std in (("value", scaled), ("out", scaled), ("gate", 0.02), ("key", 0.02)):
        assert np.std(weights[name]["kernel"]) == pytest.approx(std, rel=0.03)
    rates = np.exp(weights["A_log"])
    assert least <= rates.min() < least + 0.2 and 15.8 < rates.max() <= 16
    assert np.mean(rates) == pytest.approx((least + 16) / 2, rel=0.1)
    steps = np.log10(np.log1p(np.exp(np.float64(weights["dt_bias"]))))
    assert -3 <= steps.min() < -2.98 and -1.02 < steps.max() <= -1
    assert np.mean(steps) == pytest.approx(-2, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm_position, scaled, others",
    [("post", 0.02, 0.02), ("deepnorm", 0.02 * (8 * 4) ** -0.25, 0.02)],
)
def test_initialization_by_norm_position(norm_position, scaled, others):
    """DeepNorm scales the weights of MLPs, values and attention outputs by (8N)^−¼ for N blocks per
    path.
    """
    model = build(
        "pgpt", d_model=128, num_layers=8, num_paths=2, norm_position=norm_position, mlp="gated"
    )
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 64), int)))["params"]
    block = params["trunk"]["paths"]["blocks"]
    # The axes are (paths, layers, width, key heads, J, head width). The last entry of axis J
    # belongs to the values, and the other entries belong to the queries and keys.
    qkv = block["attention"]["qkv"]["kernel"]
    for weight in (
        qkv[..., -1, :],
        block["attention"]["out"]["kernel"],
        *(block["mlp"][name]["kernel"] for name in ("gate", "up", "down")),
    ):
        assert np.std(weight) == pytest.approx(scaled, rel=0.03)
    assert np.std(qkv[..., :-1, :]) == pytest.approx(others, rel=0.03)
    assert "final_norm" not in params


@pytest.mark.parametrize(
    "norm_position, compress_last_stage, has_final_norm",
    [("pre", False, True), ("post", False, False), ("deepnorm", True, True)],
)
def test_final_norm(norm_position, compress_last_stage, has_final_norm):
    """The model has a final norm, except if its trunk already ends with a norm."""
    model = build("lgpt", norm_position=norm_position, compress_last_stage=compress_last_stage)
    assert ("final_norm" in models.abstract_params(model)) == has_final_norm


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, d_model, num_layers", [("gpt", 768, 1), ("pgpt", 64, 2), ("cgpt", 64, 2)]
)
def test_initial_loss_is_uniform(architecture, d_model, num_layers):
    """The initial loss of narrow and wide models is that of a uniform distribution over the
    vocabulary.

    Both widths are tested, because the initial std of some weights depends on the width.
    """
    model = build(architecture, d_model=d_model, num_layers=num_layers, mlp_ratio=1.0)
    tokens, targets = np.random.default_rng(0).integers(0, 512, (2, 4, 64))

    @jax.jit
    def loss(key):
        log_p = jax.nn.log_softmax(model.apply(model.init(key, tokens[:1]), tokens))
        return -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], -1))

    assert abs(float(loss(jax.random.key(0))) - math.log(512)) < 0.1


def test_with_paths_cuts_params_and_state():
    config = build("pgpt", num_paths=4).config
    stacked = np.arange(8.0).reshape(4, 2)
    params = {
        "head": stacked,
        "trunk": {"paths": {"w": stacked}, "path_logits": jnp.array([1.0, 2.0, 5.0])},
    }
    state = {"trunk": {"paths": {"energy": 10 * stacked}, "count": stacked}}
    cut_config, cut_params, cut_state = with_paths(config, params, state, [2, 1])
    assert (cut_config.num_paths, cut_config.num_layers) == (2, 2)
    assert np.array_equal(cut_params["trunk"]["paths"]["w"], [[4, 5], [2, 3]])
    assert cut_params["trunk"]["path_logits"].tolist() == [3.0] and cut_params["head"] is stacked
    assert np.array_equal(cut_state["trunk"]["paths"]["energy"], [[40, 50], [20, 30]])
    assert cut_state["trunk"]["count"] is stacked and "path_logits" in params["trunk"]
    _, cut_params, cut_state = with_paths(config, params, {}, [3])
    assert cut_state == {} and set(cut_params["trunk"]) == {"paths"}


@pytest.mark.parametrize(
    "architecture, fields, substrings",
    [
        ("gpt", {"num_heads": 3}, ["num_heads=3", "d_model=64"]),
        ("gpt", {"num_layers": 0}, ["num_layers=0", "at least 1"]),
        ("gpt", {"dropout": 1.0}, ["dropout=1.0"]),
        ("gpt", {"dtype": "float16"}, ["dtype='float16'", "bfloat16"]),
        ("gpt", {"position": "rotary"}, ["position='rotary'", "learned, rope, alibi, none"]),
        ("gpt", {"position": "rope", "d_model": 60}, ["position='rope'", "width 60 have 15"]),
        ("lgpt", {"position": "rope", "num_heads": 32}, ["position='rope'", "width 32 have 1;"]),
        (
            "cgpt",
            {"position": "rope", "d_model": 96, "num_heads": 16},
            ["position='rope'", "width 48 have 3;"],
        ),
        ("gpt", {"num_paths": 2}, ["num_paths=2", "gpt has no such field"]),
        ("gpt", {"architecture": "pgtp"}, ["'pgtp'", "did you mean 'pgpt'"]),
        ("pgpt", {"num_paths": 3}, ["num_paths=3", "num_layers=4"]),
        ("pgpt", {"num_paths": 0}, ["num_paths=0", "at least 1"]),
        ("gpt", {"path_weights": "equal"}, ["path_weights='equal'", "gpt has no such field"]),
        ("pgpt", {"path_weights": "best"}, ["path_weights='best'", "learned, equal"]),
        ("lgpt", {"blocks_per_stage": 3}, ["blocks_per_stage=3", "num_layers=4"]),
        ("lgpt", {"blocks_per_stage": 0}, ["blocks_per_stage=0"]),
        ("lgpt", {"stage_heads": "many"}, ["stage_heads='many'", "fixed, scaled"]),
        (
            "lgpt",
            {"d_model": 4, "num_heads": 1, "blocks_per_stage": 1},
            ["d_model=4", "halved 4 times"],
        ),
        ("lgpt", {"d_model": 96, "num_heads": 32}, ["num_heads=32"]),
        ("lgpt", {"num_heads": 1, "stage_heads": "scaled"}, ["num_heads=1", "2^1=2 must divide"]),
        (
            "lgpt",
            {"blocks_per_stage": 1, "num_heads": 4, "stage_heads": "scaled"},
            ["2^3=8 must divide"],
        ),
        ("lgpt", {"d_model": 64, "num_heads": 64}, ["num_heads=64", "must divide 32"]),
        ("gpt", {"architecture": None}, ["architecture=None", "must be one of"]),
        ("lgpt", {"tie_embeddings": True}, ["tie_embeddings=True", "width 16"]),
        ("gpt", {"num_layer": 3}, ["num_layer=3", "did you mean 'num_layers'"]),
        ("gpt", {"num_kv_heads": 3}, ["num_kv_heads=3", "must divide config.model.num_heads=4"]),
        ("gpt", {"num_kv_heads": -1}, ["num_kv_heads=-1"]),
        (
            "lgpt",
            {"num_kv_heads": 1, "stage_heads": "scaled"},
            ["num_kv_heads=1", "2^1=2 must divide"],
        ),
        ("gpt", {"attention_windows": (4, -1)}, ["attention_windows=(4, -1)"]),
        ("gpt", {"value_embeddings": (0, 2)}, ["value_embeddings=(0, 2): must be 0 or 1"]),
        ("gpt", {"canon_taps": 1}, ["canon_taps=1: must be 0, or at least 2"]),
        ("gpt", {"loops": 0}, ["loops=0: must be at least 1"]),
        ("gpt", {"logit_softcap": -1.0}, ["logit_softcap=-1.0: must be"]),
        (
            "gpt",
            {"attention_gate": True, "mixers": ("mamba",)},
            ["attention_gate=True: only attention uses it"],
        ),
        (
            "gpt",
            {"mixers": ("attention", "atention")},
            ["mixers='atention'", "did you mean 'attention'"],
        ),
        ("gpt", {"mixers": ()}, ["mixers=()", "at least one"]),
        (
            "gpt",
            {"mixers": ("no_such_package.module:Class",)},
            ["no module 'no_such_package'", "PYTHONPATH"],
        ),
        ("gpt", {"mixers": ("math:pi",)}, ["mixers='math:pi'", "Linen module"]),
        ("gpt", {"mixers": ("flax.linen:Dense",)}, ["mixers='flax.linen:Dense'", "a field config"]),
        ("gpt", {"norm": "batch"}, ["norm='batch'", "layer, rms"]),
        ("gpt", {"mlp": "sparse"}, ["mlp='sparse'", "dense, gated, moe"]),
        ("gpt", {"norm_epsilon": 0.0}, ["norm_epsilon=0.0", "above 0"]),
        (
            "gpt",
            {"architecture": "no_such_package.module:Class"},
            ["no module 'no_such_package'", "PYTHONPATH"],
        ),
        ("gpt", {"architecture": "math:Class"}, ["math has no 'Class'"]),
        ("gpt", {"architecture": "math:pi"}, ["needs a class attribute Config"]),
        ("cgpt", {"conv_kernel": 0}, ["conv_kernel=0"]),
        ("cgpt", {"conv_kernel": 65}, ["conv_kernel=65", "context_length=64"]),
    ],
)
def test_refuses_impossible_models(architecture, fields, substrings):
    with pytest.raises(UserError) as error:
        build(architecture, **fields)
    assert all(s in str(error.value) for s in substrings), str(error.value)
