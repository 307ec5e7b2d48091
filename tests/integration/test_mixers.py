"""Tests of `model.mixers`: blocks with other mixers than attention, in a pattern over the
blocks.
"""

import importlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import build, forward, init, load_config
from flax import linen as nn
from jax import numpy as jnp
from random_models import check_decoding

from smallgpt_jax import inference, models
from smallgpt_jax.comparison import recipe
from smallgpt_jax.evaluation import inference_cost
from smallgpt_jax.inference import decoder
from smallgpt_jax.inference import layout as inference_layout
from smallgpt_jax.inference.sampling import Sampler, Sampling
from smallgpt_jax.models.components import components
from smallgpt_jax.models.context import Context, cache_variable
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.models.initializers import INIT_STD
from smallgpt_jax.models.layers import Dense
from smallgpt_jax.models.mixers import MIXERS
from smallgpt_jax.planning import memory_formula
from smallgpt_jax.training.build import build_program

PATTERN = ("previous", "attention")
SIZES = dict(d_model=16, num_heads=2, context_length=24, num_layers=4, vocab_size=64)
MODEL_SIZES = {f"model__{name}": size for name, size in SIZES.items()}


class Previous(nn.Module):
    """A projection of the previous token's activations; 0 at the first position."""

    config: models.ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c, time = self.config, x_BxTxD.shape[1]
        before_Bx1xD = jnp.zeros((len(x_BxTxD), 1, c.d_model), x_BxTxD.dtype)
        if context.decode:
            last, _ = cache_variable(self, "last", before_Bx1xD.shape, x_BxTxD.dtype)
            before_Bx1xD = last.value
        padded_BxSxD = jnp.concatenate([before_Bx1xD, x_BxTxD], axis=1)
        if context.decode:
            last.value = jnp.take_along_axis(padded_BxSxD, context.length_B[:, None, None], axis=1)
        previous_BxTxD = jnp.where(context.positions(time)[:, :, None] > 0, padded_BxSxD[:, :-1], 0)
        return Dense((c.d_model,), ("embed", "mlp"), INIT_STD, False, c.dtype, name="out")(
            previous_BxTxD, context
        )


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(MIXERS, "previous", Previous)


def random_tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (rows, length), np.int32)


def layout(tree) -> set[str]:
    """Returns the paths of the mixers in a tree of `Parameter`s, with their numbers of stacked
    layers.
    """
    kernels = {"/".join(path): mixer["out"]["kernel"] for path, mixer in mixers_in(tree)}
    return {
        f"{path} × {kernel.shape[kernel.axes.index('layers')]}" for path, kernel in kernels.items()
    }


def mixers_in(tree, path=()):
    for name, child in tree.items():
        if name in ("attention", "mixer"):
            yield (*path, name), child
        elif isinstance(child, dict):
            yield from mixers_in(child, (*path, name))


@pytest.mark.parametrize(
    "architecture, fields, expected",
    [
        ("gpt", {}, {"blocks/0/mixer × 2", "blocks/1/attention × 2"}),
        (
            "gpt",
            {"num_layers": 3},
            {"blocks/0/mixer × 1", "blocks/1/attention × 1", "blocks/2/mixer × 1"},
        ),
        ("gpt", {"mixers": ("previous",)}, {"blocks/mixer × 4"}),
        (
            "gpt",
            {"attention_windows": (5, 5, 0, 0)},
            {
                "blocks/0/mixer × 1",
                "blocks/1/attention × 1",
                "blocks/2/mixer × 1",
                "blocks/3/attention × 1",
            },
        ),
        ("pgpt", {}, {"paths/blocks/0/mixer × 1", "paths/blocks/1/attention × 1"}),
        (
            "lgpt",
            {"blocks_per_stage": 1, "num_layers": 2},
            {"stage_0/mixer × 1", "stage_1/attention × 1"},
        ),
        (
            "lgpt",
            {"scan_layers": True},
            {f"stage_{i}/{name} × 1" for i in range(2) for name in ("0/mixer", "1/attention")},
        ),
        (
            "cgpt",
            {"position": "rope"},
            {f"stage_{i}/{name} × 1" for i in range(2) for name in ("0/mixer", "1/attention")},
        ),
    ],
)
def test_layout(architecture, fields, expected):
    """Blocks have their own mixer in the order of the pattern."""
    model = build(architecture, **{**SIZES, "mixers": PATTERN, **fields})
    assert layout(models.abstract_params(model)["trunk"]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("architecture, mixers", [("lgpt", PATTERN), ("gpt", ("previous",))])
def test_cached_decoding(architecture, mixers):
    """Cached logits equal those of the full forward pass."""
    model = build(architecture, **{**SIZES, "mixers": mixers})
    params, tokens = init(model), random_tokens(2, SIZES["context_length"])
    logits = forward(model, params, tokens)
    check_decoding(model, params, {}, tokens, logits)
    # Without attention, a token affects only as many later positions as there are blocks.
    if architecture == "gpt":
        other = np.array(tokens)
        other[:, 3] += 1
        changed = np.any(np.asarray(logits != forward(model, params, other % 64)), axis=(0, 2))
        assert np.flatnonzero(changed).tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("mixer", ["delta", "mamba", "conv"])
def test_decoding_costs_the_same_at_any_position(mixer):
    """A token's program does not depend on the length of the cache."""
    sizes = dict(
        SIZES, num_layers=1, context_length=16384, mixers=(mixer,), position="none", mamba_state=5
    )
    model, texts = build("gpt", **sizes), set()
    weights = inference_layout.pack(model, init(model))
    for length in (1024, 16384):
        cache = decoder.cache_shapes(model, weights, 1, length)
        texts.add(
            decoder.decode_step.lower(
                decoder.Decoder(model, 64, cache_length=length),
                weights,
                decoder.DecodeState(cache, None),
                decoder.NewTokens(np.ones((1, 1), np.int32), np.int32([length - 1]), np.int32([1])),
                Sampler(np.uint32(0), np.zeros((1, 2), np.uint32), Sampling(temperature=None)),
            ).as_text()
        )
    assert len(texts) == 1


def test_a_cache_that_does_not_grow():
    """`compare` measures its bytes, which are those of the last activations."""
    model = build("gpt", **{**SIZES, "num_layers": 1, "mixers": ("previous",)})
    assert [decoder.num_cache_bytes(model, length) for length in (1, 2, 24)] == [16 * 4] * 3
    text_model = inference.TextModel(
        model, inference_layout.pack(model, init(model)), SimpleNamespace(vocab_size=64)
    )
    assert len(inference_cost.time_steps(text_model, 32, "full")) == inference_cost.SESSIONS * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, widths, paths",
    [("pgpt", [16] * 4, 2), ("lgpt", [16, 16, 8, 8], 1)],
)
def test_plan_counts_every_mixer(architecture, widths, paths):
    """Parameters, FLOPs and the formula of memory count each block's own mixer."""
    length, others = SIZES["context_length"], {}
    for pattern in (PATTERN, ("attention",)):
        model = build(architecture, **SIZES, mixers=pattern)
        parts = components(model)
        own = widths[::2] if pattern == PATTERN else []
        attended = widths[1::2] if pattern == PATTERN else widths
        assert parts.pop("Previous", 0) == sum(w**2 for w in own)
        assert parts.pop("attention") == sum(4 * w**2 for w in attended)
        products = (
            train_flops_per_token(model)
            - 6 * sum(w**2 for w in own)
            - sum(24 * w**2 + 12 * length * w for w in attended)
        )
        assert others.setdefault("all other components", (parts, products)) == (parts, products)


def test_memory_of_a_pattern():
    """The formula counts norms and MLP of each block, 12·D per position, and queries, keys and
    values of attention.
    """
    activations = {}
    for pattern in (("previous",), PATTERN, ("attention",)):
        program = build_program(
            load_config("gpt", model__mixers=pattern, **MODEL_SIZES), jax.devices()[:1]
        )
        activations[pattern] = memory_formula.memory_breakdown(
            program.model, program.mesh, program.abstract_state, 2, 1, False
        )["activations"]
    positions = 2 * SIZES["context_length"]
    scores = positions * SIZES["context_length"] * SIZES["num_heads"]
    assert activations[("previous",)] == 4 * positions * 16 * 4 * 12
    assert activations[("attention",)] == 4 * (positions * 16 * 4 * 16 + 4 * scores)
    assert activations[PATTERN] == (activations[("previous",)] + activations[("attention",)]) / 2


def test_a_comparison_with_a_pattern(tmp_path):
    """At equal FLOPs, a model with cheaper mixers is trained for more steps."""
    comparison = importlib.import_module("configs.compare.base").comparison(
        load_config("gpt", train__steps=1000),
        {"gpt": {}, "own": {"model": {"mixers": PATTERN}}},
        budget="flops",
    )
    steps = {
        run.name: run.config.train.steps
        for run in recipe.make_comparison(comparison, tmp_path).runs({})
    }
    rest, attention = 6 * (4 * 8 * 64**2 + 64 * 512), 24 * 64**2 + 12 * 64 * 64
    assert steps == {
        "gpt": 1000,
        "own": round(1000 * (rest + 4 * attention) / (rest + 2 * attention + 12 * 64**2)),
    }
