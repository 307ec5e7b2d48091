"""Tests of what `compare` measures of inference: sizes by formulas, and which steps are timed."""

import json

import jax
import numpy as np
import pytest
from conftest import build, init

from smallgpt_jax import inference
from smallgpt_jax.analysis.record import Inference
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.evaluation import inference_cost
from smallgpt_jax.inference import decoder, layout, timing
from smallgpt_jax.storage.json_files import find_mismatch
from smallgpt_jax.storage.typed_json import schema_of

SIZES = dict(d_model=16, num_heads=2, context_length=24, num_layers=2)


@pytest.mark.parametrize(
    "architecture, fields, per_token, full",
    [
        ("gpt", {}, 2 * 2 * 16 * 4, 24 * 2 * 2 * 16 * 4),
        ("gpt", {"num_kv_heads": 1, "dtype": "bfloat16"}, 2 * 2 * 8 * 2, 24 * 2 * 2 * 8 * 2),
        ("gpt", {"attention_windows": (5, 0)}, 2 * 2 * 16 * 4, (5 + 24) * 2 * 16 * 4),
        ("pgpt", {}, 2 * 2 * 16 * 4, 24 * 2 * 2 * 16 * 4),
        ("lgpt", {"blocks_per_stage": 1}, 2 * (16 + 8) * 4, 24 * 2 * (16 + 8) * 4),
        (
            "cgpt",
            {"blocks_per_stage": 1, "conv_kernel": 3},
            2 * (16 + 8) * 4,
            24 * 2 * (16 + 8) * 4 + 2 * (16 + 8) * 4,
        ),
    ],
)
def test_bytes_of_the_cache(architecture, fields, per_token, full):
    model = build(architecture, **SIZES, **fields)
    one, two, all_tokens = (decoder.num_cache_bytes(model, length) for length in (1, 2, 24))
    assert (two - one, all_tokens) == (per_token, full)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_the_weights(dtype):
    model = build("gpt", **SIZES, dtype=dtype, use_bias=True)
    params = init(model)
    expected = sum(x.nbytes for x in jax.tree.leaves(layout.pack(model, params)))
    assert layout.num_bytes(layout.packed_shapes(model)) == expected
    if dtype == "float32":
        assert expected == 4 * sum(x.size for x in jax.tree.leaves(params))


@pytest.fixture
def text_model():
    model = build("gpt", **{**SIZES, "num_layers": 1}, vocab_size=Bytes().vocab_size)
    return inference.TextModel(model, layout.pack(model, init(model)), Bytes())


@pytest.mark.slow
def test_which_steps_are_timed(text_model, monkeypatch):
    """With an empty cache, the first tokens; with a full one, the last: both with all texts. Then
    the cache is full.
    """
    timed = []

    def time_decoding(session, sampled_Bx1, steps):
        calls = original(session, sampled_Bx1, steps)
        cached, length = int(session._cached_B.min()), session._decoder.cache_length
        timed.append((len(session.ids), cached, steps, length))
        return calls

    original = timing.time_decoding
    monkeypatch.setattr(timing, "time_decoding", time_decoding)
    monkeypatch.setattr(inference_cost, "SESSIONS", 1)
    found = inference_cost.inference_cost(text_model, log=lambda message: None)
    assert find_mismatch(json.loads(json.dumps(found)), schema_of(Inference)) is None
    # Texts of 13 and 24 tokens are cached in the end. The first of two sessions is not counted.
    assert (
        timed
        == [(1, 13, 12, 16)] * 2
        + [(1, 24, 12, 24)] * 2
        + [(32, 13, 12, 16)] * 2
        + [(32, 24, 12, 24)] * 2
    )
    assert [(row["batch"], row["cache"], row["step_ms"]["count"]) for row in found["decoding"]] == [
        (1, "empty", 3),
        (1, "full", 3),
        (32, "empty", 3),
        (32, "full", 3),
    ]  # three calls of four steps
    assert found["prefill_ms"]["count"] == inference_cost.PREFILLS
    assert (
        found["prefill_ms"]["low"] <= found["prefill_ms"]["median"] <= found["prefill_ms"]["high"]
    )
    assert (found["dtype"], found["cache_bytes"], found["context_length"]) == (
        "float32",
        24 * 2 * 16 * 4,
        24,
    )


def test_what_does_not_fit_in_memory_is_left_out(text_model, monkeypatch):
    def time_steps(text_model, batch, cache):
        if batch == 32:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return [1.0, 2.0, 4.0, 9.0]

    monkeypatch.setattr(inference_cost, "time_steps", time_steps)
    monkeypatch.setattr(inference_cost, "time_prefills", lambda text_model: [1.0])
    messages = []
    found = inference_cost.inference_cost(text_model, log=messages.append)
    low, median, high = np.percentile([1, 2, 4, 9], (25, 50, 75))
    expected = {"median": median, "low": low, "high": high, "count": 4}
    assert [row["step_ms"] for row in found["decoding"]] == [expected] * 2
    assert messages[-1] == "decoding step, batch 32, full cache: does not fit in memory"
