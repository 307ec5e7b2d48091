"""Tests of the Llama recipe: logits (compared with transformers), sizes and cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import forward, init, load_config

from smallgpt_jax import models
from smallgpt_jax.inference import decoder
from smallgpt_jax.models.flops import train_flops_per_token


def llama(qk_norm: bool = False):
    """Returns the tiny model of configs/llama.py with two layers, four query heads and two
    key-value heads.
    """
    return models.build(**{**load_config("llama").model, "qk_norm": qk_norm, "num_layers": 2})


def llama_state_dict(theirs, params, qk_norm: bool) -> dict:
    """Returns our parameters as a state dict of the transformers model `theirs`."""
    import torch

    state = {
        "model.embed_tokens.weight": params["token_embedding"],
        "lm_head.weight": params["head"],
        "model.norm.weight": params["final_norm"]["scale"],
    }
    blocks = params["trunk"]["blocks"]
    for i in range(theirs.config.num_hidden_layers):
        block, name = jax.tree.map(lambda x, i=i: np.asarray(x[i]), blocks), f"model.layers.{i}."
        qkv_DxGxJxK = block["attention"]["qkv"]["kernel"]
        width = qkv_DxGxJxK.shape[0]
        parts = {
            "q": qkv_DxGxJxK[:, :, :-2],
            "k": qkv_DxGxJxK[:, :, -2],
            "v": qkv_DxGxJxK[:, :, -1],
        }
        for part, columns in parts.items():
            state[f"{name}self_attn.{part}_proj.weight"] = columns.reshape(width, -1).T
        state[f"{name}self_attn.o_proj.weight"] = (
            block["attention"]["out"]["kernel"].reshape(-1, width).T
        )
        if qk_norm:
            for part in "qk":
                state[f"{name}self_attn.{part}_norm.weight"] = block["attention"][f"{part}_norm"][
                    "scale"
                ]
        for part in ("gate", "up", "down"):
            state[f"{name}mlp.{part}_proj.weight"] = block["mlp"][part]["kernel"].T
        state[f"{name}input_layernorm.weight"] = block["attention_norm"]["scale"]
        state[f"{name}post_attention_layernorm.weight"] = block["mlp_norm"]["scale"]
    return {name: torch.tensor(np.asarray(x)) for name, x in state.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_logits_match_transformers(name):
    """Qwen3's model is like Llama's model, but it normalizes queries and keys (`qk_norm`)."""
    torch, transformers = (pytest.importorskip(library) for library in ("torch", "transformers"))
    model = llama(qk_norm=name == "Qwen3")
    params, c = init(model), model.config
    theirs = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=c.mlp_width,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_width,
            max_position_embeddings=c.context_length,
            rms_norm_eps=c.norm_epsilon,
            hidden_act="silu",
            attention_bias=False,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        )
    ).eval()
    missing = theirs.load_state_dict(llama_state_dict(theirs, params, c.qk_norm), strict=True)
    assert not missing.missing_keys
    tokens = np.random.default_rng(0).integers(0, c.vocab_size, (2, 40))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(forward(model, params, jnp.asarray(tokens)), expected, atol=1e-4)


def test_parameters_and_flops_at_full_size():
    """The numbers of parameters and FLOPs follow from the shapes of the matrices.

    A layer has query and output matrices of width 768, key and value matrices of a third of this
    width, and three MLP matrices of width 2048.
    """
    model = models.build(**load_config("llama", "paper").model)
    width, layers, vocabulary = 768, 12, 50_304
    multiplied = (
        layers * (2 * width**2 + 2 * width * width // 3 + 3 * width * 2048) + vocabulary * width
    )
    assert models.num_parameters(model) == multiplied + vocabulary * width + 25 * width
    assert train_flops_per_token(model) == 6 * multiplied + 12 * 1024 * layers * width


def test_the_cache_has_the_key_value_heads():
    """They are half as many as the query heads, and so are the bytes."""
    model = llama()
    keys_and_values, context, heads, width = 2, 64, 2, 16
    assert decoder.num_cache_bytes(model, 64) == (
        model.config.num_layers * keys_and_values * context * heads * width * 4
    )
