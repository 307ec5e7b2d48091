"""Tests of the mixer `mamba` (Mamba-2) in models. Random models (test_random_models.py) compare it
with float64 formulas, packed, cached and sharded; test_recurrences.py tests its recurrence.
"""

import jax
import numpy as np
import pytest
from conftest import build
from run_helpers import draw_weights

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder
from smallgpt_jax.models.components import components
from smallgpt_jax.models.context import EVALUATION
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.mamba import Mamba2
from smallgpt_jax.optim.muon import uses_muon

SIZES = dict(
    d_model=16,
    num_heads=2,
    context_length=24,
    num_layers=4,
    vocab_size=64,
    mixers=("mamba",),
    mamba_state=5,
)


@pytest.mark.slow
def test_transformers_has_the_same_layer():
    """The layer equals that of Mamba2Model, in PyTorch, with our weights and without the
    convolution's bias.
    """
    torch = pytest.importorskip("torch")
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = build("gpt", **SIZES).config
    mixer, x = (
        Mamba2(config),
        np.random.default_rng(0).standard_normal((2, 70, 16)).astype(np.float32),
    )
    params = draw_weights(mixer, x)
    theirs = mamba2.Mamba2Mixer(
        mamba2.Mamba2Config(
            hidden_size=16,
            num_heads=2,
            head_dim=16,
            state_size=5,
            expand=2,
            n_groups=1,
            use_conv_bias=False,
            layer_norm_epsilon=config.norm_epsilon,
            num_hidden_layers=1,
            chunk_size=16,
        ),
        0,
    ).eval()
    kernels = [
        params[name]["kernel"].reshape(16, -1) for name in ("gate", "value", "key", "query", "step")
    ]
    taps = np.concatenate(
        [params[name]["taps"] for name in ("convolution", "key_query_convolution")], axis=1
    )
    state = {
        "in_proj.weight": np.concatenate(kernels, axis=1).T,
        "conv1d.weight": taps.T[:, None],
        "norm.weight": params["out_norm"]["scale"],
        "out_proj.weight": params["out"]["kernel"].reshape(-1, 16).T,
        **{name: params[name] for name in ("A_log", "dt_bias", "D")},
    }
    theirs.load_state_dict({name: torch.tensor(np.array(x)) for name, x in state.items()})
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    assert expected.std() > 0.1
    found = jax.jit(lambda params, x: mixer.apply({"params": params}, x, EVALUATION))(params, x)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_sizes_and_flops():
    """The cache has a state per head and three inputs of the convolutions; FLOPs do not depend on
    the context.
    """
    heads, state, value, chunk = 2, 5, 16, 64
    cache = heads * state * value + 3 * (heads * value + 2 * state)
    model = build("gpt", **SIZES)
    assert [decoder.num_cache_bytes(model, length) for length in (1, 2, 24)] == [4 * 4 * cache] * 3
    matrices = 16 * (3 * heads * value + 2 * state + heads)
    # Multiplications per chunk: C·Bᵀ once; per head, the sums of decays, the product with the
    # values, and two with the state.
    rule = chunk**2 * state + heads * (
        chunk**3 + 2 * chunk**2 + chunk**2 * value + 2 * chunk * state * value
    )
    rest = 6 * (4 * 8 * 16**2 + 16 * 64)
    for length, kind in ((2048, "cpu"), (2048, "tpu")):
        model = build("gpt", **{**SIZES, "context_length": length, "position": "none"})
        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh(
                (), (), abstract_device=jax.sharding.AbstractDevice(kind, None, kind)
            )
        ):
            flops = train_flops_per_token(model)
        assert flops - rest == 6 * 4 * (matrices + rule / chunk)
    assert components(model)["Mamba2"] == 4 * (
        matrices + 4 * (heads * value + 2 * state) + 3 * heads + heads * value
    )


def test_muon_updates_the_matrices():
    leaves = jax.tree.leaves(
        models.abstract_params(build("gpt", **SIZES))["trunk"]["blocks"]["mixer"]
    )
    assert {p.path[-2] for p in leaves if uses_muon(p)} == {
        "value",
        "gate",
        "key",
        "query",
        "step",
        "out",
    }


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mamba_state": 0}, "mamba_state=0: must be at least 1"),
        ({"mamba_expand": 0}, "mamba_expand=0: must be at least 1"),
        ({"attention": "cudnn"}, "attention='cudnn': only attention uses it"),
        ({"mixers": ("mamba2",)}, "did you mean 'mamba'"),
        ({"mixers": ("mamba,attention",)}, r"quote each name, as in \('mamba', 'attention'\)"),
    ],
)
def test_refuses(fields, message):
    with pytest.raises(UserError, match=message):
        build("gpt", **{**SIZES, **fields})
