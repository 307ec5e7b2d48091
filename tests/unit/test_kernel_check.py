"""Tests of the check of attention kernels before a run. The kernels run in interpret mode on a CPU."""

import types

import jax.numpy as jnp
import pytest

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.kernel_check import check_attention_kernels
from smallgpt_jax.ops import attention
from smallgpt_jax.ops.attention import AttentionMask

FIELDS = dict(
    architecture="gpt", num_layers=1, num_heads=2, d_model=32, mlp_ratio=1, vocab_size=64, context_length=128,
    dropout=0.0, use_bias=False, tie_embeddings=False, dtype="bfloat16", scan_layers=False)


def check(platform: str, separate_documents: bool = False, **fields) -> None:
    """Checks the attention kernels of a program, as if its device were a `platform`. The kernels run on the CPU."""
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[device]), shape={"path": 1})
    data = types.SimpleNamespace(separate_documents=separate_documents)
    check_attention_kernels(types.SimpleNamespace(
        model=models.build(**FIELDS, **fields), mesh=mesh, config=types.SimpleNamespace(data=data)))


@pytest.mark.parametrize("fields", [
    {"attention": "flash", "num_kv_heads": 1, "attention_windows": (37,)},
    {"attention": "splash", "attention_windows": (37,)},
    {"attention": "splash", "separate_documents": True}])
def test_correct_kernels_pass(fields):
    check("tpu", **fields)


def test_wrong_kernels_are_refused(monkeypatch):
    """A kernel that ignores the attention window is refused, and so is one whose results are not numbers."""
    flash = attention.flash
    monkeypatch.setattr(attention, "flash", lambda q, k, v, mask, slopes: flash(q, k, v, AttentionMask(), slopes))
    with pytest.raises(UserError, match=r"config.model.attention=flash.*flash kernel for heads of width 16.*=xla"):
        check("tpu", attention="flash", attention_windows=(37,))
    check("cpu", attention="flash", attention_windows=(37,))  # runs on CPUs are not checked
    monkeypatch.setattr(attention, "splash", lambda q, *_: q * jnp.nan)
    with pytest.raises(UserError, match="relative error of nan"):
        check("tpu", attention="splash")
