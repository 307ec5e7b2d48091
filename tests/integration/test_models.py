"""Tests of every architecture: logits (compared with plain NumPy), longer contexts, bfloat16 and
dropout.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ARCHITECTURES, build, forward, init
from float64_model import plain_logits

from smallgpt_jax import models
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.mixers import MIXERS


def random_tokens(model, batch=2, time=None, seed=0):
    shape = (batch, time or model.config.context_length)
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, shape)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_match_the_formulas(architecture):
    """Logits match NumPy formulas that compute one sequence and one head at a time, in float64.

    No logit depends on a later token. Random models (test_random_models.py) have all options.
    """
    model = build(architecture)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), init(model))
    first, other = random_tokens(model, 2, time=24)
    tokens = np.stack([first, np.append(first[:12], other[12:])])
    logits = np.asarray(forward(model, jax.tree.map(jnp.float32, params), tokens))
    expected = np.stack([plain_logits(model.config, params, row) for row in tokens])
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
    assert np.array_equal(logits[0, :12], logits[1, :12]) and not np.allclose(
        logits[0, 12:], logits[1, 12:]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, fields", [("pgpt", {"position": "alibi"}), ("cgpt", {"position": "rope"})]
)
def test_weights_without_position_embedding_fit_any_context(architecture, fields):
    model = build(architecture, **fields)
    params = init(model)
    assert "position_embedding" not in params
    longer = models.LanguageModel(dataclasses.replace(model.config, context_length=128))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(
        jnp.shape, models.abstract_params(longer)
    )
    tokens = random_tokens(longer, 1)
    logits = forward(longer, params, tokens)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(
        logits[:, :64], forward(model, params, tokens[:, :64]), atol=2e-5, rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_stays_near_float32(architecture):
    exact, rounded = (build(architecture, dtype=dtype) for dtype in ("float32", "bfloat16"))
    params, tokens = init(exact), random_tokens(exact, 2, time=24)
    a, b = (np.asarray(forward(m, params, tokens)) for m in (exact, rounded))
    assert b.dtype == np.float32
    assert 0 < np.sqrt(np.mean((a - b) ** 2)) < 0.03 * np.std(a)


def test_dropout_applies_in_training_only():
    model = build("gpt", dropout=0.5, num_layers=1)
    params, tokens = init(model), random_tokens(model)

    @jax.jit
    def hidden(seed):
        return [
            model.apply(
                {"params": params},
                tokens,
                Context(train=train),
                method="hidden",
                rngs={"dropout": jax.random.key(seed)},
            )
            for train in (True, False)
        ]

    (train_0, eval_0), (again_0, _), (train_1, eval_1) = hidden(0), hidden(0), hidden(1)
    assert np.array_equal(eval_0, eval_1) and np.array_equal(train_0, again_0)
    assert not np.allclose(train_0, train_1)


@pytest.mark.parametrize(
    "fields",
    [
        # gpt's attention is among the mixers, and cgpt has lgpt's stages.
        *({"name": name} for name in ARCHITECTURES if name not in ("gpt", "lgpt")),
        {"name": "gpt", "mixers": tuple(sorted(MIXERS)), "num_layers": len(MIXERS)},
        {
            "name": "gpt",
            "mlp": "moe",
            "num_experts": 4,
            "num_shared_experts": 1,
            "expert_mlp": "gated",
            "norm": "rms",
            "position": "rope",
            "qk_norm": True,
            "num_kv_heads": 2,
            "value_embeddings": (1,),
            "canon_taps": 2,
            "attention_gate": True,
            "smear": True,
        },
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_weights_that_are_cast_are_read_only_in_the_compute_dtype(fields):
    """Steps on several devices, and decoding, cast them before the model does. So rounding them
    does not change the logits.
    """
    model = build(**fields, dtype="bfloat16")
    params, abstract = init(model), models.abstract_params(model)

    def round_if_cast(p, x):
        x = np.asarray(x)
        return x.astype(jnp.bfloat16).astype(np.float32) if p.is_cast else x

    rounded = jax.tree.map(round_if_cast, abstract, params)
    assert {p.is_cast for p in jax.tree.leaves(abstract)} == {False, True}
    tokens = random_tokens(model, 2, time=24)
    state = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), models.abstract_model_state(model))
    assert np.array_equal(
        forward(model, rounded, tokens, state), forward(model, params, tokens, state)
    )
