"""Tests of the mixer `conv` (gated short convolution) in models. Random models
(test_random_models.py) compare it with float64 formulas, packed, cached and sharded.
"""

import flax.linen as nn
import jax
import numpy as np
import pytest
from conftest import build

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder
from smallgpt_jax.models.components import components
from smallgpt_jax.models.context import EVALUATION
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.gated_convolution import GatedConvolution
from smallgpt_jax.optim.muon import uses_muon

SIZES = dict(
    d_model=16, num_heads=2, context_length=24, num_layers=4, vocab_size=64, mixers=("conv",)
)


@pytest.mark.slow
def test_transformers_has_the_same_layer():
    """The layer equals that of LFM2, in PyTorch, with our weights."""
    torch = pytest.importorskip("torch")
    lfm2 = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    config = build("gpt", **SIZES).config
    mixer, x = (
        GatedConvolution(config),
        np.random.default_rng(0).standard_normal((2, 20, 16)).astype(np.float32),
    )
    params = jax.device_get(
        nn.unbox(jax.jit(mixer.init)(jax.random.key(0), x, EVALUATION)["params"])
    )
    params = jax.tree.map(lambda x: 20 * x, params)
    theirs = lfm2.Lfm2ShortConv(
        lfm2.Lfm2Config(
            hidden_size=16,
            conv_L_cache=3,
            conv_bias=False,
            num_hidden_layers=1,
            layer_types=["conv"],
        ),
        0,
    ).eval()
    kernels = [params[name]["kernel"] for name in ("input_gate", "output_gate", "value")]
    state = {
        "in_proj.weight": np.concatenate(kernels, axis=1).T,
        "out_proj.weight": params["out"]["kernel"].T,
        "conv.weight": params["convolution"]["taps"].T[:, None],
    }
    theirs.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    assert expected.std() > 0.1
    found = jax.jit(lambda params, x: mixer.apply({"params": params}, x, EVALUATION))(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_sizes_and_flops():
    """The cache has the last two inputs of each convolution; FLOPs do not depend on the context."""
    model = build("gpt", **SIZES)
    assert [decoder.num_cache_bytes(model, length) for length in (1, 2, 24)] == [4 * 4 * 2 * 16] * 3
    rest = 6 * (4 * 8 * 16**2 + 16 * 64)
    for length in (64, 256):
        flops = train_flops_per_token(
            build("gpt", **{**SIZES, "context_length": length, "position": "none"})
        )
        assert flops - rest == 6 * 4 * 4 * 16**2
    assert components(model)["GatedConvolution"] == 4 * (4 * 16**2 + 3 * 16)


def test_muon_updates_the_matrices():
    leaves = jax.tree.leaves(
        models.abstract_params(build("gpt", **SIZES))["trunk"]["blocks"]["mixer"]
    )
    assert {p.path[-2] for p in leaves if uses_muon(p)} == {
        "value",
        "input_gate",
        "output_gate",
        "out",
    }


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"conv_taps": 1}, "conv_taps=1: must be at least 2"),
        ({"attention": "splash"}, "attention='splash': only attention uses it"),
        ({"position": "alibi"}, "position='alibi': only attention uses it"),
        ({"mixers": ("cnov",)}, "did you mean 'conv'"),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(UserError, match=message):
        build("gpt", **{**SIZES, **fields})
