"""Tests of the mixer `delta` (Gated DeltaNet) in models. Random models (test_random_models.py)
compare it with float64 formulas, packed, cached and sharded; test_recurrences.py tests its rule,
and test_moe.py trains it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, forward, init, load_config
from run_helpers import draw_weights

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.decoder import Decoder, DecodeSession
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.components import components
from smallgpt_jax.models.context import EVALUATION, Context
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.gated_delta import GatedDeltaNet
from smallgpt_jax.optim.muon import uses_muon

HYBRID = ("delta", "delta", "delta", "attention")
SIZES = dict(d_model=16, num_heads=2, context_length=24, num_layers=4, vocab_size=64)


def random_tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (rows, length), np.int32)


@pytest.mark.slow
def test_transformers_has_the_same_layer():
    """The layer equals that of Qwen3-Next, in PyTorch, with our weights."""
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = build("gpt", **SIZES, mixers=("delta",), delta_head_dim=6).config
    mixer, x = (
        GatedDeltaNet(config),
        np.random.default_rng(0).standard_normal((2, 70, 16)).astype(np.float32),
    )
    params = draw_weights(mixer, x)
    theirs = qwen.Qwen3NextGatedDeltaNet(
        qwen.Qwen3NextConfig(
            hidden_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=6,
            linear_value_head_dim=12,
            rms_norm_eps=config.norm_epsilon,
            hidden_act="silu",
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        ),
        0,
    ).eval()
    qkvz_DxHxJ = np.concatenate(
        [params[name]["kernel"] for name in ("query", "key", "value", "gate")], axis=2
    )
    taps_JxHxC = params["convolution"]["taps"].reshape(
        4, 2, -1
    )  # theirs has all queries first, then keys, then values
    taps = np.concatenate(
        [part.reshape(4, -1) for part in np.split(taps_JxHxC, (6, 12), axis=2)], axis=1
    )
    state = {
        "in_proj_qkvz.weight": qkvz_DxHxJ.reshape(16, -1).T,
        "conv1d.weight": taps.T[:, None],
        "in_proj_ba.weight": np.stack(
            [params[name]["kernel"] for name in ("beta", "decay")], axis=2
        )
        .reshape(16, -1)
        .T,
        "A_log": params["A_log"],
        "dt_bias": params["dt_bias"],
        "norm.weight": params["out_norm"]["scale"],
        "out_proj.weight": params["out"]["kernel"].reshape(-1, 16).T,
    }
    theirs.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    assert expected.std() > 0.1
    found = jax.jit(lambda params, x: mixer.apply({"params": params}, x, EVALUATION))(params, x)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def decode(model, params, ids) -> DecodeSession:
    weights = layout.pack(model, jax.device_get(params))
    return DecodeSession(Decoder(model, 64), weights, [list(map(int, row)) for row in ids])


@pytest.mark.slow
def test_copies_of_rows_and_finished_rows():
    """Copies of a row have its state. A row without new tokens keeps its state while others
    continue.
    """
    model = build("gpt", **{**SIZES, "num_layers": 1}, mixers=("delta",))
    params, tokens = init(model), random_tokens(2, 24)
    logits, greedy = forward(model, params, tokens), Sampling(temperature=None)
    session = decode(model, params, [tokens[0, :6], tokens[1, :4]])
    session.repeat(2, greedy)
    for lengths in ((6, 7, 4, 4), (7, 7, 4, 4), (9, 7, 4, 5)):  # copies of row 0, then of row 1
        session.ids = [tokens[i // 2, :length].tolist() for i, length in enumerate(lengths)]
        before = session._cached_B.copy()
        _, found = session.sample_with_logits(greedy)
        for i, length in enumerate(lengths):
            if length > before[i]:
                np.testing.assert_allclose(found[i], logits[i // 2, length - 1], atol=1e-4)


@pytest.mark.slow
def test_the_cache_does_not_grow():
    """It has a state per head in float32, and three inputs of the convolution in the dtype of the
    model.
    """
    model = build("gpt", **SIZES, mixers=("delta",), dtype="bfloat16")
    key, value = 8, 16
    expected = 4 * 2 * (key * value * 4 + 3 * (2 * key + value) * 2)
    assert [decoder.num_cache_bytes(model, length) for length in (1, 2, 24)] == [expected] * 3


@pytest.mark.slow
def test_bfloat16_stays_near_float32():
    exact, rounded = (
        build("gpt", **SIZES, mixers=("delta",), dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    params, tokens = init(exact), random_tokens(2, 24)
    a, b = (np.asarray(forward(model, params, tokens)) for model in (exact, rounded))
    assert 0 < np.sqrt(np.mean((a - b) ** 2)) < 0.03 * np.std(a)


@pytest.mark.slow
def test_plan_counts_delta():
    """Parameters and FLOPs per token, which do not depend on the context, unlike those of
    attention.
    """
    width, blocks = 16, 3
    fields = {**SIZES, "mixers": HYBRID, "delta_head_dim": 6, "position": "none"}
    found = {}
    for length in (64, 256):
        model = build("gpt", **{**fields, "context_length": length})
        plain = build("gpt", **{**fields, "context_length": length, "mixers": ("attention",)})
        attention = blocks * (24 * width**2 + 12 * length * width)
        found[length] = train_flops_per_token(model) - (train_flops_per_token(plain) - attention)
    heads, key, value, chunk = 2, 6, 12, 64
    matrices = blocks * width * heads * (2 * key + 3 * value + 2)
    # Multiplications per chunk and head: two products of queries and keys, two of (C, C) matrices
    # with keys and values, one of keys with these, those of queries and of a (K, K) matrix with the
    # state, the sums of decays, and two products for each halving of the matrix to invert; blocks
    # of 16 have three such levels, since pairs need none.
    rule = (
        chunk**2 * (4 * key + 2 * value)
        + chunk * key * (key + 2 * value)
        + key**2 * value
        + chunk**3
        + 2 * chunk**2
        + 2 * (32**3 + 2 * 16**3 + 4 * 3 * 16**3)
    )
    assert found[64] == found[256] == 6 * (matrices + blocks * heads * rule / chunk)
    parts = components(model)
    assert parts["GatedDeltaNet"] == matrices + blocks * (
        4 * heads * (2 * key + value) + 2 * heads + value
    )


def test_muon_updates_the_matrices():
    """Those of queries, keys, values, gate, decay, β and output; not the convolution, which is no
    matrix.
    """
    model = build("gpt", **SIZES, mixers=("delta",), use_bias=True, rank_ratio=0.5)
    leaves = jax.tree.leaves(models.abstract_params(model)["trunk"]["blocks"]["mixer"])
    assert {p.path[-2] for p in leaves if uses_muon(p)} == {
        "query",
        "key",
        "value",
        "gate",
        "decay",
        "beta",
        "out",
    }
    (taps,) = (p for p in leaves if p.name == "taps")
    assert not taps.is_matrix and taps.axes == ("layers", "tap", "heads")


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"mixers": ("dleta", "attention")},
            "mixers='dleta': must be one of attention, delta.* did you mean 'delta'",
        ),
        ({"delta_value_ratio": 0}, "delta_value_ratio=0: must be at least 1"),
        ({"delta_head_dim": -1}, "delta_head_dim=-1: must be at least 0"),
        *(
            (
                {"mixers": ("delta",), field: value},
                rf"{field}=.*: only attention uses it, and .* no attention in 4 blocks",
            )
            for field, value in (
                ("attention", "cudnn"),
                ("attention", "splash"),
                ("position", "alibi"),
                ("position", "rope"),
                ("num_kv_heads", 1),
                ("qk_norm", True),
                ("attention_windows", (4, 0)),
            )
        ),
        (
            {"mixers": (*["delta"] * 4, "attention"), "attention": "cudnn"},
            "no attention in 4 blocks",
        ),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(UserError, match=message) as error:
        build("gpt", **{**SIZES, **fields})
    assert "\n" not in str(error.value)


def test_refuses_a_prefix():
    model = build("gpt", **SIZES, mixers=HYBRID)
    with pytest.raises(UserError, match="does not see later tokens; use attention in all blocks"):
        jax.eval_shape(
            model.apply,
            {"params": models.abstract_params(model)},
            random_tokens(1, 24),
            Context(prefix_BxT=jnp.arange(24)[None] < 3),
        )


def test_the_hybrid_recipe():
    """Delta has 6·D² parameters in its large matrices, as in the paper; the recipe's docstring names
    this number.
    """
    fields = load_config("hybrid", "paper", model__scan_layers=True, model__num_layers=4).model
    assert components(models.build(**fields))["GatedDeltaNet"] == 3 * (
        6 * 768**2 + 2 * 768 * 12 + 4 * 12 * 4 * 48 + 2 * 12 + 96
    )
