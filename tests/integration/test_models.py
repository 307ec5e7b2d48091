"""Tests of every architecture: logits (compared with plain NumPy), longer contexts, bfloat16 and dropout."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, build, forward, init
from flax import linen as nn
from scipy.special import erf, softmax

from smallgpt_jax import models
from smallgpt_jax.models.context import Context

# The variants cover scanned and unrolled layers. Each option occurs in every architecture that might interact with it.
VARIANTS = [
    ("gpt", {}),
    ("gpt", {"use_bias": True, "tie_embeddings": True, "scan_layers": False}),
    ("gpt", {"position": "rope", "num_kv_heads": 2, "qk_norm": True, "norm": "rms", "mlp": "gated",
             "activation": "silu", "attention_windows": (5, 0)}),
    ("gpt", {"position": "alibi", "d_model": 48, "num_heads": 6, "mlp": "gated", "scan_layers": False}),
    ("gpt", {"position": "none", "attention_windows": (5, 0, 0)}),
    ("pgpt", {}),
    ("pgpt", {"num_paths": 4, "position": "rope", "use_bias": True, "scan_layers": False}),
    ("pgpt", {"num_paths": 1}),
    ("gpt", {"norm_position": "post", "activation": "relu2"}),
    ("pgpt", {"norm_position": "deepnorm", "norm": "rms", "mlp": "gated", "activation": "relu2", "num_layers": 6}),
    ("lgpt", {"norm_position": "deepnorm", "use_bias": True}),
    ("pgpt", {"path_weights": "equal", "attention_windows": (3, 9)}),
    ("lgpt", {}),
    ("lgpt", {"compress_last_stage": False, "stage_heads": "scaled", "position": "alibi", "scan_layers": False}),
    ("lgpt", {"blocks_per_stage": 1, "use_bias": True, "attention_windows": (3, 9, 0)}),
    ("lgpt", {"blocks_per_stage": 4, "compress_last_stage": False, "tie_embeddings": True}),
    ("cgpt", {}),
    ("cgpt", {"conv_kernel": 1, "position": "rope", "scan_layers": False}),
]


def random_tokens(model, batch=2, time=None, seed=0):
    shape = (batch, time or model.config.context_length)
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, shape)


@pytest.mark.parametrize("architecture, fields", [
    pytest.param(*variant, marks=() if variant[1] == {} else pytest.mark.slow) for variant in VARIANTS])
def test_logits_match_the_formulas(architecture, fields):
    """Logits match NumPy formulas that compute one sequence and one head at a time, in float64.

    No logit depends on a later token.
    """
    model = build(architecture, **fields)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), init(model))
    first, other = random_tokens(model, 2, time=24)
    tokens = np.stack([first, np.append(first[:12], other[12:])])
    logits = np.asarray(forward(model, jax.tree.map(jnp.float32, params), tokens))
    expected = np.stack([plain_logits(model.config, params, row) for row in tokens])
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
    assert np.array_equal(logits[0, :12], logits[1, :12]) and not np.allclose(logits[0, 12:], logits[1, 12:])


def plain_logits(config, params, tokens_T):
    x = params["token_embedding"][tokens_T]
    if config.position == "learned":
        x = x + params["position_embedding"][:len(tokens_T)]
    trunk = params["trunk"]
    if config.architecture == "gpt":
        x = plain_blocks(config, trunk["blocks"], x)
    elif config.architecture == "pgpt":
        paths = []
        for p in range(config.num_paths):
            path = jax.tree.map(lambda w: w[p], trunk["paths"])
            h = x @ path["dense"]["kernel"] + path["dense"]["bias"]
            paths.append(plain_blocks(config, path["blocks"], h))
        weights = softmax(np.append(trunk.get("path_logits", []), 0.0))
        if config.path_weights == "equal":
            weights = np.full(config.num_paths, 1 / config.num_paths)
        x = sum(w * path for w, path in zip(weights, paths))
    else:
        for i in range(config.num_layers // config.blocks_per_stage):
            heads = config.num_heads // (2**i if config.stage_heads == "scaled" else 1)
            x = plain_blocks(config, trunk[f"stage_{i}"], x, heads, i * config.blocks_per_stage)
            if f"compress_{i}" in trunk:
                layer = trunk[f"compress_{i}"]
                kernels = layer["kernel"] if config.architecture == "cgpt" else [layer["kernel"]]
                y = np.tile(layer["bias"], (len(x), 1))
                for back, kernel in enumerate(reversed(list(kernels))):
                    for t in range(back, len(x)):
                        y[t] += x[t - back] @ kernel
                x = y
    if config.norm_position == "pre" or getattr(config, "compress_last_stage", False):
        x = plain_norm(config, params["final_norm"], x)
    return x @ params["token_embedding" if config.tie_embeddings else "head"].T


def plain_layers(stack):
    """Returns the parameters of each block of a stack, from first to last."""
    if "mlp" in stack:
        length = len(stack["mlp_norm"]["scale"])
        return [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(length)]
    parts = [plain_layers(stack[name]) for name in sorted(stack)]
    # Parts of equal length belong to a repeated sequence of blocks (a `Pattern`). The first part contains the first
    # block of every repetition, the second part the second block, and so on.
    if len({len(part) for part in parts}) == 1:
        return [part[i] for i in range(len(parts[0])) for part in parts]
    return [block for part in parts for block in part]  # each part contains consecutive blocks with the same config


def plain_blocks(config, stack, x, num_heads=None, first=0):
    num_heads = num_heads or config.num_heads
    windows = config.attention_windows or (0,)
    depth = config.num_layers // getattr(config, "num_paths", 1)
    alpha = (2 * depth) ** 0.25 if config.norm_position == "deepnorm" else 1
    activation = {"gelu": lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))), "silu": lambda x: x / (1 + np.exp(-x)),
                  "relu2": lambda x: np.where(x > 0, x, 0) ** 2}[config.activation]

    def norm(name, x, is_before):
        return plain_norm(config, block[name], x) if (config.norm_position == "pre") == is_before else x

    for number, block in enumerate(plain_layers(stack), start=first):
        window = windows[number % len(windows)] or len(x)
        h = norm("attention_norm", x, True)
        x = alpha * x
        qkv = block["attention"]["qkv"]["kernel"]
        groups, per_group = qkv.shape[1], qkv.shape[2] - 2
        assert groups * per_group == num_heads
        bias = block["attention"]["qkv"].get("bias", np.zeros(qkv.shape[1:]))
        for head in range(num_heads):
            group = head // per_group
            q, k, v = (h @ qkv[:, group, j] + bias[group, j] for j in (head % per_group, per_group, per_group + 1))
            if config.qk_norm:
                q, k = (x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + config.norm_epsilon)
                        * block["attention"][name]["scale"] for x, name in ((q, "q_norm"), (k, "k_norm")))
            if config.position == "rope":
                q, k = plain_rope(q), plain_rope(k)
            scores = q @ k.T / math.sqrt(q.shape[1])
            for i, j in np.ndindex(scores.shape):
                if config.position == "alibi":
                    scores[i, j] -= 2 ** (-8 * (head + 1) / num_heads) * (i - j)
                if j > i or j <= i - window:
                    scores[i, j] = -np.inf
            x = x + softmax(scores, axis=1) @ v @ block["attention"]["out"]["kernel"][head]
        x = norm("attention_norm", x + block["attention"]["out"].get("bias", 0), False)
        h = norm("mlp_norm", x, True)
        mlp = {name: h @ layer["kernel"] + layer.get("bias", 0)
               for name, layer in block["mlp"].items() if name != "down"}
        h = activation(mlp["gate"]) * mlp["up"] if config.mlp == "gated" else activation(mlp["up"])
        down = block["mlp"]["down"]
        x = norm("mlp_norm", alpha * x + h @ down["kernel"] + down.get("bias", 0), False)
    return x


def plain_rope(x_TxK):
    """Returns the rotary embedding of x. Each pair of entries is a complex number, multiplied by exp(i·t·θ)."""
    half = x_TxK.shape[1] // 2
    points = x_TxK[:, :half] + 1j * x_TxK[:, half:]
    thetas = [10_000 ** (-2 * i / x_TxK.shape[1]) for i in range(half)]
    points = points * np.exp(1j * np.outer(np.arange(len(x_TxK)), thetas))
    return np.concatenate([points.real, points.imag], axis=1)


def plain_norm(config, norm, x):
    if config.norm == "rms":
        return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-5) * norm["scale"]
    centred = x - x.mean(axis=1, keepdims=True)
    return (centred / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * norm["scale"]
            + norm.get("bias", 0))


@pytest.mark.slow
@pytest.mark.parametrize("architecture, fields", [("pgpt", {"position": "alibi"}), ("cgpt", {"position": "rope"})])
def test_weights_without_position_embedding_fit_any_context(architecture, fields):
    model = build(architecture, **fields)
    params = init(model)
    assert "position_embedding" not in params
    longer = models.LanguageModel(dataclasses.replace(model.config, context_length=128))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, nn.unbox(models.abstract_params(longer)))
    tokens = random_tokens(longer, 1)
    logits = forward(longer, params, tokens)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[:, :64], forward(model, params, tokens[:, :64]), atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_stays_near_float32(architecture):
    exact, rounded = (build(architecture, dtype=dtype) for dtype in ("float32", "bfloat16"))
    params, tokens = init(exact), random_tokens(exact, 2, time=24)
    a, b = (np.asarray(forward(m, params, tokens)) for m in (exact, rounded))
    assert b.dtype == np.float32
    assert 0 < np.sqrt(np.mean((a - b)**2)) < 0.03 * np.std(a)


def test_dropout_applies_in_training_only():
    model = build("gpt", dropout=0.5, num_layers=1)
    params, tokens = init(model), random_tokens(model)

    @jax.jit
    def hidden(seed):
        return [model.apply({"params": params}, tokens, Context(train=train), method="hidden",
                            rngs={"dropout": jax.random.key(seed)}) for train in (True, False)]

    (train_0, eval_0), (again_0, _), (train_1, eval_1) = hidden(0), hidden(0), hidden(1)
    assert np.array_equal(eval_0, eval_1) and np.array_equal(train_0, again_0)
    assert not np.allclose(train_0, train_1)
