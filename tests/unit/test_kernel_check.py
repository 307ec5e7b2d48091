"""Tests of the check of kernels before a run. The kernels run in interpret mode on CPUs."""

import types

import jax
import jax.numpy as jnp
import pytest
from conftest import init

from smallgpt_jax import models
from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import scoring
from smallgpt_jax.inference import loading
from smallgpt_jax.models.kernel_check import (
    check_attention_kernels,
    check_recurrence_kernels,
    recurrences,
)
from smallgpt_jax.ops import (
    attention,
    flash_attention,
    gated_delta,
    recurrence_kernel,
    state_space,
    xla_attention,
)
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.ops.chunks import RecurrenceInputs

FIELDS = dict(
    architecture="gpt",
    num_layers=1,
    num_heads=2,
    d_model=32,
    mlp_ratio=1,
    vocab_size=64,
    context_length=128,
    dropout=0.0,
    use_bias=False,
    tie_embeddings=False,
    dtype="bfloat16",
    scan_layers=False,
)


class MeshLabelled:
    """A mesh of CPU devices that claim to be of another platform."""

    def __init__(self, mesh, platform: str):
        self.mesh = mesh
        self.devices = types.SimpleNamespace(flat=[types.SimpleNamespace(platform=platform)])

    def __getattr__(self, name: str):
        return getattr(self.mesh, name)


@pytest.fixture
def check(monkeypatch):
    """Returns a function that checks the kernels of a model, as if its devices were TPUs."""

    def check(
        platform: str = "tpu",
        data: int = 1,
        tensor: int = 1,
        separate_documents: bool = False,
        **fields,
    ):
        mesh = sharding.make_mesh(
            sharding.MeshConfig(data=data, tensor=tensor), jax.devices()[: data * tensor]
        )
        model, mesh = models.build(**FIELDS | fields), MeshLabelled(mesh, platform)
        if model.config.mixers == ("attention",):
            check_attention_kernels(model, mesh, separate_documents)
        else:
            check_recurrence_kernels(model, mesh)

    use_mesh = sharding.use_mesh
    monkeypatch.setattr(sharding, "use_mesh", lambda mesh: use_mesh(mesh.mesh))
    return check


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {  # queries and keys have no gradient
            "attention": "flash",
            "data": 2,
            "tensor": 2,
            "num_heads": 4,
            "attention_windows": (1,),
        },
        {  # replicated heads
            "attention": "flash",
            "tensor": 2,
            "num_heads": 3,
            "num_kv_heads": 1,
            "d_model": 48,
            "attention_windows": (37,),
        },
        {
            "attention": "splash",
            "attention_windows": (37,),
            "d_model": 4,
            "attention_mask": "bidirectional",
        },
        {"attention": "splash", "separate_documents": True, "data": 2},
    ],
)
def test_correct_kernels_pass(check, fields):
    check(**fields)


def with_gradient_of_queries(kernel):
    """Returns a kernel whose queries get a gradient in a window of one position."""
    return lambda q, k, v, *options: (
        kernel(q, k, v, *options) + 0.01 * (q - jax.lax.stop_gradient(q))
    )


def first_head(kernel):
    """Returns a kernel that reads the first key–value head for all heads."""
    return lambda q, k, v, *options: kernel(
        q, *(jnp.broadcast_to(x[:, :1], x.shape) for x in (k, v)), *options
    )


def first_row(kernel):
    """Returns a kernel that reads the first row's keys and values for all rows."""
    return lambda q, k, v, *options: kernel(
        q, *(jnp.broadcast_to(x[:1], x.shape) for x in (k, v)), *options
    )


def longer_window(kernel):
    return lambda q, k, v, window, interpret: kernel(q, k, v, window + 1, interpret)


def neighbors_keys(kernel):
    """Returns a kernel that reads the keys of the other of two shards of heads."""

    def shifted(x):
        is_sharded = jax.sharding.get_abstract_mesh().size > 1
        return jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)]) if is_sharded else x

    return lambda q, k, v, *options: kernel(q, shifted(k), v, *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation, fields",
    [
        (first_head, {"data": 2, "tensor": 2, "num_heads": 4}),
        (first_row, {"data": 2}),
        (longer_window, {"context_length": 1152, "attention_windows": (1024,)}),
        (neighbors_keys, {"tensor": 2, "num_heads": 4}),
        (with_gradient_of_queries, {"attention_windows": (1,)}),
    ],
)
def test_mutated_kernels_are_refused(check, monkeypatch, mutation, fields):
    """In place of the kernel, which compiles slowly on CPUs, attention in plain JAX, in float32:
    CPUs without bfloat16 instructions do not run all mutations in bfloat16.
    """

    def in_plain_jax(q, k, v, window, interpret):
        q, k, v = (x.astype("float32") for x in (q, k, v))
        return xla_attention.reference(q, k, v, AttentionMask(window), None).astype("bfloat16")

    fields = {"num_heads": 2, **fields}
    monkeypatch.setattr(flash_attention, "flash_attention", mutation(in_plain_jax))
    with pytest.raises(UserError, match=r"relative error of [\d.]+;"):
        check(attention="flash", d_model=16 * fields["num_heads"], **fields)


@pytest.mark.slow
def test_a_kernel_that_separates_all_rows_like_the_first_is_refused(check, monkeypatch):
    splash = attention.splash

    def mutated(q, k, v, mask, slopes):
        ids = mask.segment_ids_BxT
        first = None if ids is None else jnp.broadcast_to(ids[:1], ids.shape)
        return splash(q, k, v, mask.replace(segment_ids_BxT=first), slopes)

    monkeypatch.setattr(attention, "splash", mutated)
    with pytest.raises(UserError, match="splash kernel"):
        check(attention="splash", separate_documents=True)


@pytest.mark.slow
def test_message_for_wrong_kernels(check, monkeypatch):
    """A kernel that ignores the attention window is refused, and so is one whose results are not
    numbers.
    """
    monkeypatch.setattr(
        attention,
        "flash",
        lambda q, k, v, mask, slopes: xla_attention.reference(q, k, v, AttentionMask(), slopes),
    )
    with pytest.raises(
        UserError, match=r"config.model.attention=flash.*flash kernel for heads of width 16.*=xla"
    ):
        check(attention="flash", attention_windows=(37,))
    check(
        platform="cpu", attention="flash", attention_windows=(37,)
    )  # runs on CPUs are not checked
    monkeypatch.setattr(attention, "splash", lambda q, *_: q * jnp.nan)
    with pytest.raises(UserError, match="relative error of nan"):
        check(attention="splash")


@pytest.mark.slow
@pytest.mark.parametrize("error, is_refused", [(0.005, False), (0.015, True)])
def test_the_largest_error_that_passes(check, monkeypatch, error, is_refused):
    def almost(q, k, v, mask, slopes):
        return (1 + error) * xla_attention.reference(q, k, v, mask, slopes)

    monkeypatch.setattr(attention, "flash", almost)
    if not is_refused:
        return check(attention="flash", dtype="float32")
    with pytest.raises(UserError, match=r"relative error of 0.015;"):
        check(attention="flash", dtype="float32")


RECURRENT = dict(position="none", d_model=16, num_heads=4, mamba_state=8)


@pytest.mark.slow
def test_correct_kernels_of_recurrences_pass(check):
    """The heads of mamba share their keys, also the two of a device. The kernel of delta, which
    compiles slowly, is that of unit/test_recurrences.py.
    """
    check(**RECURRENT, mixers=("mamba",), data=2, tensor=2)


def test_recurrences_are_checked_before_decoding_and_scoring(monkeypatch):
    model = models.build(**FIELDS | {"mixers": ("mamba",), "position": "none"})
    params = init(model)

    def refuse(checked, mesh):
        assert checked == model and mesh.devices.flat[0] == jax.devices()[0]
        raise UserError("wrong")

    for module in (loading, scoring):
        monkeypatch.setattr(module, "check_recurrence_kernels", refuse)
    with pytest.raises(UserError, match="wrong"):
        loading.build_text_model(model, params, Bytes())
    with pytest.raises(UserError, match="wrong"):
        scoring.Scorer(model, params)


def test_kernels_of_all_stages_are_checked():
    """The second stage of an lgpt has half the width."""
    model = models.build(
        architecture="lgpt",
        mixers=("delta", "mamba"),
        position="none",
        d_model=32,
        num_heads=2,
        num_layers=2,
        blocks_per_stage=1,
        vocab_size=64,
        context_length=16,
        mamba_state=8,
    )
    assert recurrences(model) == {
        ("delta", 2, 16, 32),
        ("mamba", 2, 8, 16),
    }


def keys_of_first_head(rule, q, k, *others):
    return rule(q, jnp.broadcast_to(k[:, :, :1], k.shape), *others)


def constant_keys(rule, q, k, *others):
    return rule(q, jax.lax.stop_gradient(k), *others)


def no_last_state(rule, *inputs):
    y, last = rule(*inputs)
    return y, jnp.zeros_like(last)


def no_first_state(rule, *inputs):
    return rule(*inputs[:-1], jnp.zeros_like(inputs[-1]))


def no_state_between_blocks(rule, *inputs):
    """As a kernel that loses what it carries from the first 512 positions to the others."""
    *by_position, state = inputs
    (y_1, _), (y_2, last) = (
        rule(*(x if x is None else x[:, block] for x in by_position), first)
        for block, first in ((slice(512), state), (slice(512, None), jnp.zeros_like(state)))
    )
    return jnp.concatenate([y_1, y_2], axis=1), last


def in_plain_jax(monkeypatch, mixer, mutated):
    """Replaces the kernel, which compiles slowly on CPUs, by its mutated formulas in plain JAX."""
    formulas = {"delta": gated_delta, "mamba": state_space}[mixer].in_plain_jax

    def rule(*arguments):
        *inputs, begins_BxT, state = arguments
        return formulas(RecurrenceInputs(*inputs), begins_BxT, state)

    def in_kernel(inputs, *others):
        return mutated(rule, *(x for x in inputs if x is not None), *others)

    monkeypatch.setattr(recurrence_kernel, "in_kernel", in_kernel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixer, mutated, width, part",
    [
        ("delta", keys_of_first_head, 4, "gradients of [a-zβ]+|outputs"),
        ("mamba", constant_keys, 8, "gradients of keys"),
        ("mamba", no_last_state, 8, "last state"),
        ("mamba", no_first_state, 8, "gradients of [a-zβ]+|outputs"),
        ("mamba", no_state_between_blocks, 8, "gradients of [a-zβ]+|outputs"),
    ],
)
def test_wrong_kernels_of_recurrences_are_refused(check, monkeypatch, mixer, mutated, width, part):
    in_plain_jax(monkeypatch, mixer, mutated)
    wrong = RECURRENT | {"mixers": (mixer,)}
    with pytest.raises(
        UserError,
        match=rf"kernel of '{mixer}' for keys of width {width} has .* error of [\d.]+ in the "
        rf"({part}); set --config.model.attention=xla",
    ):
        check(**wrong)
    check(**wrong, platform="cpu")
    check(**wrong, attention="xla")
    check(**wrong, context_length=64)  # too short for the kernel
