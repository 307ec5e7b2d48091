"""The architectures: their sizes, what they compute, what they refuse."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, build, forward, init, load_config
from flax import linen as nn
from scipy.special import erf, softmax

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import layers
from smallgpt_jax.models.context import Context
from smallgpt_jax.ops.activations import gelu

VARIANTS = [
    ("gpt", {}),
    ("gpt", {"use_bias": True, "tie_embeddings": True}),
    ("pgpt", {}),
    ("pgpt", {"num_paths": 4}),
    ("pgpt", {"num_paths": 1}),
    ("pgpt", {"num_paths": 2, "path_weights": "equal"}),
    ("lgpt", {}),
    ("lgpt", {"compress_last_stage": False, "stage_heads": "scaled"}),
    ("lgpt", {"blocks_per_stage": 1, "use_bias": True}),
    ("lgpt", {"blocks_per_stage": 4, "compress_last_stage": False, "tie_embeddings": True}),
    ("cgpt", {}),
    ("cgpt", {"conv_kernel": 1}),
    ("gpt", {"position": "rope"}),
    ("gpt", {"position": "alibi", "d_model": 48, "num_heads": 6}),
    ("gpt", {"position": "none"}),
    ("pgpt", {"position": "rope", "use_bias": True}),
    ("lgpt", {"position": "alibi", "compress_last_stage": False, "stage_heads": "scaled"}),
    ("cgpt", {"position": "rope"}),
]
each_variant = pytest.mark.parametrize("architecture, fields", VARIANTS)


def random_tokens(model, batch=2, time=None, seed=0):
    shape = (batch, time or model.config.context_length)
    return jax.random.randint(jax.random.key(seed), shape, 0, model.config.vocab_size)


@pytest.mark.parametrize("architecture, parameters", [
    ("gpt", 163_007_232), ("pgpt", 164_188_417), ("lgpt", 59_293_248), ("cgpt", 59_293_248)])
def test_paper_parameter_counts(architecture, parameters):
    assert models.num_parameters(models.build(**load_config(architecture, "paper").model)) == parameters


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("d_model, num_layers", [(64, 4), (768, 4)])
def test_initial_loss_is_that_of_a_uniform_guess(architecture, d_model, num_layers):
    model = build(architecture, d_model=d_model, num_layers=num_layers, vocab_size=4096)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), random_tokens(model)))
    tokens = random_tokens(model, 16, seed=1)
    targets = random_tokens(model, 16, seed=2)
    log_probabilities = jax.nn.log_softmax(jax.jit(model.apply)(params, tokens))
    loss = -jnp.mean(jnp.take_along_axis(log_probabilities, targets[..., None], -1))
    assert abs(float(loss) - math.log(4096)) < 0.1


def test_gpt2_initialisation():
    config = load_config("gpt").model
    config.d_model, config.num_layers, config.use_bias = 256, 8, True
    model = models.build(**config)
    params = nn.unbox(model.init(jax.random.key(0), random_tokens(model)))["params"]
    block = params["trunk"]["blocks"]
    for weight in (params["token_embedding"], params["position_embedding"], params["head"],
                   block["attention"]["qkv"]["kernel"], block["mlp"]["up"]["kernel"]):
        assert np.std(weight) == pytest.approx(0.02, rel=0.03)
    for weight in (block["attention"]["out"]["kernel"], block["mlp"]["down"]["kernel"]):
        assert np.std(weight) == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.03)
    assert not any(np.any(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
                   if path[-1].key == "bias")
    # Every layer has weights of its own.
    assert np.std(block["mlp"]["up"]["kernel"][0] - block["mlp"]["up"]["kernel"][1]) > 0.02


@each_variant
def test_no_position_sees_a_later_one(architecture, fields):
    model = build(architecture, **fields)
    params = init(model)
    time, width = 12, model.config.d_model
    # Each token once, so that its embedding is that of a place, and not 7, which may be a row of the head.
    tokens_T = 8 + jax.random.permutation(jax.random.key(0), 500)[:time]
    table = params["token_embedding"]

    @jax.jit
    @jax.grad
    def influence_on(change_TxD, t):
        """Of what is added to each position's embedding on one logit at position t, (T, D)."""
        changed = {**params, "token_embedding": table.at[tokens_T].add(change_TxD)}
        return model.apply({"params": changed}, tokens_T[None])[0, t, 7]

    no_change = jnp.zeros((time, width))
    influence_TxS = np.stack([np.abs(influence_on(no_change, t)).max(axis=1) for t in range(time)])
    assert not influence_TxS[np.triu_indices(time, k=1)].any()
    assert influence_TxS[np.tril_indices(time)].all()


def test_kernel_of_one_makes_cgpt_lgpt():
    lgpt, cgpt = build("lgpt"), build("cgpt", conv_kernel=1)
    params = init(cgpt)
    trunk = {
        name: {**layer, "kernel": layer["kernel"][0]} if name.startswith("compress") else layer
        for name, layer in params["trunk"].items()}
    tokens = random_tokens(cgpt)
    np.testing.assert_allclose(
        forward(lgpt, {**params, "trunk": trunk}, tokens),
        forward(cgpt, params, tokens), rtol=1e-5, atol=1e-5)


@each_variant
def test_logits_are_those_of_the_formulas(architecture, fields):
    """Against the same model written out in NumPy, float64, one sequence and one head at a time."""
    model = build(architecture, **fields)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), init(model))
    tokens = random_tokens(model, 2, time=24)
    expected = np.stack([plain_logits(model.config, params, row) for row in np.asarray(tokens)])
    logits = forward(model, jax.tree.map(jnp.float32, params), tokens)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


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
    x = plain_norm(config, params["final_norm"], x)
    return x @ params["token_embedding" if config.tie_embeddings else "head"].T


def plain_layers(stack):
    """The parameters of each block of a stack, the first one first."""
    if "mlp" in stack:
        length = len(stack["mlp_norm"]["scale"])
        return [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(length)]
    parts = [plain_layers(stack[name]) for name in sorted(stack)]  # in turns
    return [part[i] for i in range(len(parts[0])) for part in parts]


def plain_blocks(config, stack, x, num_heads=None, first=0):
    num_heads = num_heads or config.num_heads
    windows = config.attention_windows or (0,)
    for number, block in enumerate(plain_layers(stack), start=first):
        window = windows[number % len(windows)] or len(x)
        h = plain_norm(config, block["attention_norm"], x)
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
                q, k = plain_rotation(q), plain_rotation(k)
            scores = q @ k.T / math.sqrt(q.shape[1])
            for i, j in np.ndindex(scores.shape):
                if config.position == "alibi":
                    scores[i, j] -= 2 ** (-8 * (head + 1) / num_heads) * (i - j)
                if j > i or j <= i - window:
                    scores[i, j] = -np.inf
            x = x + softmax(scores, axis=1) @ v @ block["attention"]["out"]["kernel"][head]
        x = x + block["attention"]["out"].get("bias", 0)
        h = plain_norm(config, block["mlp_norm"], x)
        mlp = {name: h @ layer["kernel"] + layer.get("bias", 0)
               for name, layer in block["mlp"].items() if name != "down"}
        if config.mlp == "gated":
            h = mlp["gate"] / (1 + np.exp(-mlp["gate"])) * mlp["up"] if config.activation == "silu" else (
                mlp["gate"] * 0.5 * (1 + erf(mlp["gate"] / math.sqrt(2))) * mlp["up"])
        else:
            h = mlp["up"] * 0.5 * (1 + erf(mlp["up"] / math.sqrt(2)))
        x = x + h @ block["mlp"]["down"]["kernel"] + block["mlp"]["down"].get("bias", 0)
    return x


def plain_rotation(x_TxK):
    """Su et al.'s R_t·x_t: each pair of entries is a complex number, multiplied with exp(i·t·θ)."""
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


rotated = functools.partial(layers.apply_rope, base=10_000.0)


def test_rotation_is_that_of_llama():
    torch, llama = (pytest.importorskip(name) for name in ("torch", "transformers.models.llama.modeling_llama"))
    x = np.random.default_rng(0).standard_normal((2, 3, 40, 24)).astype(np.float32)
    places = np.stack([np.arange(40), np.arange(700, 740)])
    rotary = llama.LlamaRotaryEmbedding(llama.LlamaConfig(
        hidden_size=72, num_attention_heads=3, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}))
    expected, _ = llama.apply_rotary_pos_emb(
        torch.tensor(x), torch.tensor(x), *rotary(torch.tensor(x), torch.tensor(places)))
    found = rotated(jnp.array(x), jnp.array(places))
    np.testing.assert_allclose(found, expected, atol=5e-4)
    assert np.abs(found - x).max() > 1
    # In bfloat16 only what goes in and what comes out is rounded.
    coarse = jnp.array(x, "bfloat16")
    exact = rotated(coarse.astype("float32"), jnp.array(places))
    assert np.array_equal(rotated(coarse, jnp.array(places)), exact.astype("bfloat16"))


def test_rotated_scores_depend_on_the_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 2, 5, 16))
    scores = [rotated(jnp.array(q), at) @ jnp.swapaxes(rotated(jnp.array(k), at), 2, 3)
              for at in (jnp.arange(5)[None], 300 + jnp.arange(5)[None], 2 * jnp.arange(5)[None])]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)
    assert np.abs(scores[0] - scores[2]).max() > 0.5


def test_alibi_slopes_are_those_of_the_paper():
    """Section 3: for 8 heads 1/2, 1/4, … 1/256, for 16 heads 1/√2, 1/2, 1/(2√2), …"""
    assert layers.alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    np.testing.assert_allclose(layers.alibi_slopes(16), [0.5 ** (i / 2) for i in range(1, 17)], rtol=1e-6)
    np.testing.assert_allclose(layers.alibi_slopes(12), [0.5 ** (i / 1.5) for i in range(1, 13)], rtol=1e-6)


@pytest.mark.parametrize("architecture, fields", [
    ("gpt", {"position": "rope"}), ("pgpt", {"position": "alibi"}), ("lgpt", {"position": "none"}),
    ("cgpt", {"position": "rope"})])
def test_without_position_embedding_a_longer_context_needs_no_other_weights(architecture, fields):
    model = build(architecture, **fields)
    params = init(model)
    assert "position_embedding" not in params
    longer = models.LanguageModel(dataclasses.replace(model.config, context_length=128))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, nn.unbox(models.abstract_params(longer)))
    tokens = random_tokens(longer)
    logits = jax.jit(longer.apply)({"params": params}, tokens)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[:, :64], jax.jit(model.apply)({"params": params}, tokens[:, :64]),
                               atol=2e-5, rtol=1e-4)


def test_two_paths_are_joined_as_in_the_paper():
    model = build("pgpt")
    params = init(model)
    params["trunk"]["path_logits"] = jnp.array([0.5])
    tokens = random_tokens(model)

    def trunk_output(logit):
        changed = {**params, "trunk": {**params["trunk"], "path_logits": jnp.array([logit])}}
        _, captured = model.apply(
            {"params": changed}, tokens, capture_intermediates=lambda m, _: m.name == "trunk")
        return captured["intermediates"]["trunk"]["__call__"][0]

    first, second = trunk_output(100.0), trunk_output(-100.0)
    sigmoid = 1 / (1 + math.exp(-0.5))
    np.testing.assert_allclose(
        trunk_output(0.5), sigmoid * first + (1 - sigmoid) * second, rtol=1e-5, atol=1e-5)


def test_the_derivative_of_gelu_is_right():
    x = jnp.linspace(-6, 6, 201)
    expected = [jax.grad(lambda v: jax.nn.gelu(v, approximate=False))(v) for v in x]
    np.testing.assert_allclose(
        jax.vmap(jax.grad(gelu))(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scanned_and_unrolled_layers_agree(architecture):
    scanned, unrolled = (build(architecture, scan_layers=scan) for scan in (True, False))
    params = init(scanned)
    tokens = random_tokens(scanned)
    np.testing.assert_allclose(
        forward(scanned, params, tokens), forward(unrolled, params, tokens),
        rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_stays_near_float32(architecture):
    exact, rounded = (build(architecture, dtype=dtype) for dtype in ("float32", "bfloat16"))
    params = init(exact)
    tokens = random_tokens(exact)
    a, b = (np.asarray(forward(m, params, tokens)) for m in (exact, rounded))
    assert b.dtype == np.float32
    assert 0 < np.sqrt(np.mean((a - b)**2)) < 0.03 * np.std(a)


def test_dropout_is_for_training_only():
    model = build("gpt", dropout=0.5)
    params = init(model)
    tokens = random_tokens(model)

    def hidden(train, seed):
        return np.asarray(model.apply({"params": params}, tokens, Context(train=train), method="hidden",
                                      rngs={"dropout": jax.random.key(seed)}))

    assert np.array_equal(hidden(False, 0), hidden(False, 1))
    assert np.array_equal(hidden(True, 0), hidden(True, 0))
    assert not np.allclose(hidden(True, 0), hidden(True, 1))


@pytest.mark.parametrize("architecture, fields, words", [
    ("gpt", {"num_heads": 3}, ["num_heads=3", "d_model=64"]),
    ("gpt", {"num_layers": 0}, ["num_layers=0", "at least 1"]),
    ("gpt", {"dropout": 1.0}, ["dropout=1.0"]),
    ("gpt", {"dtype": "float16"}, ["dtype='float16'", "bfloat16"]),
    ("gpt", {"position": "rotary"}, ["position='rotary'", "learned, rope, alibi, none"]),
    ("gpt", {"position": "rope", "d_model": 60}, ["position='rope'", "width 60 have 15"]),
    ("lgpt", {"position": "rope", "num_heads": 32}, ["position='rope'", "width 32 have 1;"]),
    ("cgpt", {"position": "rope", "d_model": 96, "num_heads": 16}, ["position='rope'", "width 48 have 3;"]),
    ("gpt", {"num_paths": 2}, ["num_paths=2", "gpt has no such field"]),
    ("gpt", {"architecture": "pgpt"}, ["num_paths: pgpt needs a value"]),
    ("gpt", {"architecture": "pgtp"}, ["'pgtp'", "did you mean 'pgpt'"]),
    ("pgpt", {"num_paths": 3}, ["num_paths=3", "num_layers=4"]),
    ("pgpt", {"num_paths": 0}, ["num_paths=0", "at least 1"]),
    ("gpt", {"path_weights": "equal"}, ["path_weights='equal'", "gpt has no such field"]),
    ("pgpt", {"path_weights": "best"}, ["path_weights='best'", "'learned' or 'equal'"]),
    ("lgpt", {"blocks_per_stage": 3}, ["blocks_per_stage=3", "num_layers=4"]),
    ("lgpt", {"blocks_per_stage": 0}, ["blocks_per_stage=0"]),
    ("lgpt", {"stage_heads": "many"}, ["stage_heads='many'", "'scaled'"]),
    ("lgpt", {"d_model": 4, "num_heads": 1, "blocks_per_stage": 1}, ["d_model=4", "halved 4 times"]),
    ("lgpt", {"d_model": 96, "num_heads": 32}, ["num_heads=32"]),
    ("lgpt", {"num_heads": 1, "stage_heads": "scaled"}, ["num_heads=1", "2^1=2 must divide"]),
    ("lgpt", {"blocks_per_stage": 1, "num_heads": 4, "stage_heads": "scaled"}, ["2^3=8 must divide"]),
    ("lgpt", {"d_model": 64, "num_heads": 64}, ["num_heads=64", "must divide 32"]),
    ("gpt", {"architecture": None}, ["architecture=None", "must be one of"]),
    ("lgpt", {"tie_embeddings": True}, ["tie_embeddings=True", "width 16"]),
    ("gpt", {"num_layer": 3}, ["num_layer=3", "did you mean 'num_layers'"]),
    ("gpt", {"num_kv_heads": 3}, ["num_kv_heads=3", "must divide config.model.num_heads=4"]),
    ("gpt", {"num_kv_heads": -1}, ["num_kv_heads=-1"]),
    ("lgpt", {"num_kv_heads": 1, "stage_heads": "scaled"}, ["num_kv_heads=1", "2^1=2 must divide"]),
    ("gpt", {"attention_windows": (4, -1)}, ["attention_windows=(4, -1)"]),
    ("gpt", {"norm": "batch"}, ["norm='batch'", "layer, rms"]),
    ("gpt", {"mlp": "moe"}, ["mlp='moe'", "dense, gated"]),
    ("gpt", {"norm_epsilon": 0.0}, ["norm_epsilon=0.0", "above 0"]),
    ("gpt", {"architecture": "no_such_package.module:Class"}, ["no module 'no_such_package'", "PYTHONPATH"]),
    ("gpt", {"architecture": "math:Class"}, ["math has no 'Class'"]),
    ("gpt", {"architecture": "math:pi"}, ["needs a class attribute Config"]),
    ("cgpt", {"conv_kernel": 0}, ["conv_kernel=0"]),
    ("cgpt", {"conv_kernel": 65}, ["conv_kernel=65", "context_length=64"]),
])
def test_impossible_sizes_are_refused(architecture, fields, words):
    with pytest.raises(UserError) as error:
        build(architecture, **fields)
    assert all(word in str(error.value) for word in words), str(error.value)
