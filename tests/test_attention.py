"""Every attention backend against one plain formula in float64, alone and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallgpt_jax import sharding
from smallgpt_jax.models import attention
from smallgpt_jax.models.attention import causal_attention, choose

TIME = 256


def oracle(q, k, v, segments, slopes=(0, 0)):
    """softmax over the positions of the same document up to each one's own, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("bhtk,bhsk->bhts", q, k) / np.sqrt(q.shape[-1])
    scores += np.multiply.outer(slopes, np.subtract.outer(np.arange(TIME), np.arange(TIME)) * -1.0)
    may_see = np.tril(np.ones((TIME, TIME), bool))[None]
    if segments is not None:
        may_see = may_see & (segments[:, :, None] == segments[:, None])
    scores = np.where(may_see[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhts,bhsk->bhtk", weights / weights.sum(axis=-1, keepdims=True), v)


def inputs(batch=2, heads=2, head_width=16):
    return jax.random.normal(jax.random.key(0), (4, batch, heads, TIME, head_width))


def documents(batch: int) -> np.ndarray:
    """Rows of several documents, cut at different places, one of a single token."""
    cuts = [[100], [1, 2, 255], [128]]
    return np.array([np.searchsorted(cuts[i % 3], np.arange(TIME), side="right") for i in range(batch)])


def value_and_gradients(q, k, v, weights, segments, **options):
    def total(q, k, v):
        y = causal_attention(q, k, v, segments, **options)
        return jnp.sum(y * weights), y

    gradients, y = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return [y, *gradients]


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("backend, head_width", [
    ("xla", 16), ("splash", 2), ("splash", 16), ("splash", 128)])
def test_backends_compute_the_formula(backend, head_width, has_segments):
    q, k, v, weights = inputs(head_width=head_width)
    segments = documents(2) if has_segments else None
    y, *gradients = value_and_gradients(q, k, v, weights, segments, backend=backend)
    np.testing.assert_allclose(y, oracle(q, k, v, segments), rtol=1e-4, atol=1e-5)
    # The gradients against those of the formula in JAX, whose value has just been checked.
    expected = value_and_gradients(q, k, v, weights, segments, backend="xla")[1:]
    for found, wanted in zip(gradients, expected):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend, has_segments", [("xla", False), ("splash", True)])
def test_alibi_is_the_formula(backend, has_segments):
    q, k, v, _ = inputs()
    segments, slopes = documents(2) if has_segments else None, np.float32([0.3, 0.01])
    y = causal_attention(q, k, v, segments, slopes, backend=backend)
    np.testing.assert_allclose(y, oracle(q, k, v, segments, slopes), rtol=1e-4, atol=1e-5)
    assert np.abs(y - oracle(q, k, v, segments)).max() > 0.1


def test_gradient_of_plain_attention_is_the_slope_of_the_formula():
    q, k, v, weights = inputs()
    segments = documents(2)
    gradients = value_and_gradients(q, k, v, weights, segments, backend="xla")[1:]
    direction = np.asarray(jax.random.normal(jax.random.key(1), (3, *q.shape)), np.float64)
    arguments, step = [np.asarray(x, np.float64) for x in (q, k, v)], 1e-5
    above, below = (
        np.sum(np.asarray(weights) * oracle(*(a + sign * step * d for a, d in zip(arguments, direction)),
                                            segments))
        for sign in (1, -1))
    slope = sum(np.sum(g * d) for g, d in zip(gradients, direction))
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-4)


def test_kernel_on_a_mesh():
    """Rows over two axes, heads over another: each device runs the kernel on its own part."""
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2, path=1)
    q, k, v, weights = inputs(batch=4)
    with sharding.context(mesh):
        found = value_and_gradients(q, k, v, weights, documents(4), backend="splash")
    expected = value_and_gradients(q, k, v, weights, documents(4), backend="xla")
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("asked, platform, change, name, why", [
    ("auto", "cpu", {}, "xla", ""),
    ("auto", "tpu", {}, "splash", ""),
    ("auto", "gpu", {}, "cudnn", ""),
    ("splash", "cpu", {}, "splash", ""),
    ("xla", "tpu", {}, "xla", ""),
    ("auto", "tpu", {"time": 100}, "xla", "multiples of 128"),
    ("auto", "gpu", {"head_width": 4}, "xla", "multiples of 8"),
    ("auto", "gpu", {"head_width": 256}, "xla", "up to 128"),
    ("auto", "gpu", {"dtype": "float32"}, "xla", "bfloat16"),
    ("auto", "gpu", {"has_segments": True}, "xla", "documents"),
    ("cudnn", "cpu", {}, "xla", "NVIDIA"),
    ("splash", "gpu", {}, "xla", "TPUs"),
    ("auto", "tpu", {"has_alibi": True}, "xla", "splash attention has no ALiBi"),
    ("cudnn", "gpu", {"has_alibi": True}, "xla", "cuDNN's attention has no ALiBi"),
    ("auto", "cpu", {"has_alibi": True}, "xla", ""),
])
def test_choice(asked, platform, change, name, why):
    shape = {"time": 1024, "head_width": 64, "dtype": "bfloat16", **change}
    assert choose(asked, platform, **shape)[0] == name
    assert why in choose(asked, platform, **shape)[1]
    assert bool(why) == bool(choose(asked, platform, **shape)[1])


@pytest.mark.parametrize("platform, called", [("tpu", "splash"), ("gpu", "cudnn"), ("cpu", "xla")])
def test_attention_is_chosen_for_what_is_compiled_for(monkeypatch, platform, called):
    calls = []
    for name in ("xla", "splash", "cudnn"):
        monkeypatch.setattr(attention, name, lambda q, *_, name=name: calls.append(name) or q)
    monkeypatch.setattr(attention.sharding, "platform", lambda: platform)
    q, k, v, _ = inputs().astype("bfloat16")
    causal_attention(q, k, v)
    assert calls == [called]
