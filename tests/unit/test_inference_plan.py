"""Tests of `plan --inference`: formulas written from the papers' sizes, and the compiled program's
memory.
"""

import json

import jax
import pytest
from conftest import ROOT, call, load_config

from smallgpt_jax import models
from smallgpt_jax.devices import chips
from smallgpt_jax.planning import inference, topologies

V, T, D, L, H = 4096, 256, 128, 2, 4
SIZES = dict(
    model__vocab_size=V,
    model__context_length=T,
    model__d_model=D,
    model__num_layers=L,
    model__num_heads=H,
)
BLOCKS = 12 * L * D**2


def estimate(monkeypatch, device_kind: str, batch: int, architecture: str = "gpt", **fields):
    monkeypatch.setattr(inference, "compiled_bytes", lambda *_: 1)
    model = models.build(**load_config(architecture, "paper", **SIZES | fields).model)
    device = type("Device", (), {"device_kind": device_kind})
    return inference.estimate_inference(model, device, batch)


def test_gpt_on_a_v5e(monkeypatch):
    found = estimate(monkeypatch, "TPU v5 lite", 8)
    weights, text = 2 * (BLOCKS + 2 * V * D + T * D) + 4 * (2 * L + 1) * D, 2 * L * D * 2 * T
    assert (found.weight_bytes, found.cache_bytes_per_token, found.cache_bytes_per_text) == (
        weights,
        text // T,
        text,
    )
    assert found.formula_bytes == weights + 8 * text
    flops = 2 * (BLOCKS + V * D) + 4 * L * D * T
    assert found.decode_flops_full == flops and found.decode_flops_empty == flops - 4 * L * D * (
        T - 1
    )
    # The prefill computes the scores of each chunk of 128 queries with all keys up to its end, and
    # one row of logits.
    scores = sum(128 * keys for keys in range(128, T + 1, 128))
    assert found.prefill_flops == 2 * BLOCKS * T + 4 * L * D * scores + 2 * V * D
    read = weights - 2 * D * (V + T - 8) + 8 * text
    assert found.intensity == pytest.approx(8 * flops / read)
    assert found.seconds == pytest.approx(read / 819e9)
    assert found.ridge == pytest.approx(197e12 / 819e9)
    empty = 2 * L * D * 2
    batch = next(
        b
        for b in range(1, 10_000)
        if b * found.decode_flops_empty
        >= found.ridge * (weights - 2 * D * max(0, V + T - b) + b * empty)
    )
    assert found.compute_bound_batch_empty == batch and found.compute_bound_batch_full is None
    largest = int((0.9 * 16 * 2**30 - weights) / text)
    assert (found.largest_batch, found.largest_tokens) == (largest, largest * T)


@pytest.mark.slow
def test_windows_groups_states_and_stages(monkeypatch):
    monkeypatch.setattr(inference, "count_flops", lambda *_: 1.0)  # tracing takes seconds
    windows = estimate(
        monkeypatch, "cpu", 1, model__attention_windows=(64, 0), model__num_kv_heads=2
    )
    assert windows.cache_bytes_per_token == 2 * L * 2 * 32 * 2
    assert windows.cache_bytes_per_text == 2 * 2 * 32 * 2 * (64 + T)
    assert (
        windows.seconds
        is windows.ridge
        is windows.largest_batch
        is windows.compute_bound_batch_empty
        is None
    )
    stages = estimate(monkeypatch, "cpu", 1, "lgpt", model__blocks_per_stage=1)
    assert stages.cache_bytes_per_token == sum(2 * (D // 2**i) * 2 for i in range(2))
    delta = estimate(
        monkeypatch, "NVIDIA H200", 1, model__mixers=("delta",), model__position="none"
    )
    assert delta.cache_bytes_per_token == 0
    assert delta.cache_bytes_per_text == L * (4 * 32 * 64 * 4 + 3 * 4 * (2 * 32 + 64) * 2)
    assert delta.ridge == pytest.approx(989e12 / 4800e9)


@pytest.mark.slow
def test_value_embeddings_are_read_by_row(monkeypatch):
    found, without = (
        estimate(monkeypatch, "TPU v5 lite", 8, model__value_embeddings=tables)
        for tables in ((1,), ())
    )
    assert found.weight_bytes - without.weight_bytes == 2 * L * V * D
    assert found.seconds - without.seconds == pytest.approx(2 * L * 8 * D / 819e9)


@pytest.mark.slow
def test_experts_that_a_batch_reads(monkeypatch):
    """Of 16 experts, of which each token uses 3, four tokens read the fraction 1 − (13/16)⁴."""
    found = estimate(monkeypatch, "TPU v5 lite", 4, "moe")
    routed = L * 16 * 2 * D * D
    read = (
        found.weight_bytes
        - 2 * D * (V + T - 4)
        - 2 * routed * (13 / 16) ** 4
        + 4 * found.cache_bytes_per_text
    )
    assert found.intensity == pytest.approx(4 * found.decode_flops_full / read)
    assert found.decode_flops_full == pytest.approx(
        2 * L * (4 * D**2 + 4 * 2 * D**2 + 16 * D) + 2 * V * D + 4 * L * D * T
    )


@pytest.mark.slow
def test_the_command(monkeypatch):
    """The formula is within a tenth of the compiled program's memory. The device is one of this
    process.
    """
    monkeypatch.setattr(topologies, "topology_devices", lambda text: jax.devices()[:1])
    arguments = (
        f"--config={ROOT}/configs/lgpt.py:tiny",
        "--config.model.num_layers=2",
        "--topology=cpu:1",
        "--inference",
    )
    found = json.loads(call("plan", *arguments, "--batch=3", "--json").stdout)
    assert (
        found["formula_bytes"] == pytest.approx(found["compiled_bytes"], rel=0.1)
        and found["batch"] == 3
    )
    assert found["model"] == "lgpt"
    failed = call("plan", *arguments, "--search")
    assert failed.returncode == 1 and "--search: is about training" in failed.stderr


def test_bandwidths():
    assert {
        inference.find_bandwidth(name)
        for name, chip in chips.CHIPS.items()
        if name.startswith("TPU")
    } == {1.2e12, 819e9, 2765e9, 1.6e12}
    assert (
        inference.find_bandwidth("NVIDIA L4") == 300e9 and inference.find_bandwidth("cpu") is None
    )
