"""Tests that compare attention backends with a plain formula in float64, on one device and on a
mesh.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smallgpt_jax.devices import sharding
from smallgpt_jax.ops import attention as ops
from smallgpt_jax.ops.attention import AttentionShape, attention, select_backend
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.ops.key_value_cache import CachedKeys, cached_attention

TIME = 256


def oracle(q, k, v, segments=None, slopes=None, **options):
    """Returns attention outputs, computed in float64."""
    weights, _, _, v = attention_weights(q, k, v, segments, slopes, **options)
    return weights @ v


def oracle_gradients(q, k, v, dy, segments=None, **options):
    """Returns the gradients of q, k and v for the gradient `dy` of the outputs, in float64."""
    groups, dy = k.shape[1], np.asarray(dy, np.float64)
    weights, q, k, v = attention_weights(q, k, v, segments, **options)
    dweights = dy @ np.swapaxes(v, 2, 3)
    dscores = weights * (dweights - np.sum(weights * dweights, axis=-1, keepdims=True))
    dscores /= np.sqrt(q.shape[-1])
    by_head = np.swapaxes(dscores, 2, 3) @ q, np.swapaxes(weights, 2, 3) @ dy
    # Heads that share keys add their gradients.
    dk, dv = (x.reshape(len(x), groups, -1, *x.shape[2:]).sum(axis=2) for x in by_head)
    return dscores @ k, dk, dv


def attention_weights(q, k, v, segments=None, slopes=None, window=0, prefix=None, causal=True):
    """Returns the attention weights, (B, H, T, T), and q, k and v, each with all heads, in float64.
    Applies the rules of the mask one by one.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, per_group = q.shape[1], q.shape[1] // k.shape[1]
    k, v = (np.stack([x[:, h // per_group] for h in range(heads)], axis=1) for x in (k, v))
    scores = q @ np.swapaxes(k, 2, 3) / np.sqrt(q.shape[-1])
    time = q.shape[2]
    distances = np.subtract.outer(np.arange(time), np.arange(time))
    if slopes is not None:
        scores -= np.multiply.outer(slopes, np.abs(distances))
    may_see = ((distances >= 0) | (not causal)) & (np.abs(distances) < (window or time))
    may_see = np.repeat(may_see[None], len(q), axis=0)
    for row, length in zip(may_see, [0] * len(q) if prefix is None else prefix):
        row[:length, :length] = True
    if segments is not None:
        may_see = may_see & (segments[:, :, None] == segments[:, None])
    scores = np.where(may_see[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True), q, k, v


def inputs(batch=2, heads=2, head_width=16, groups=None, time=TIME):
    """Returns random queries, keys and values, and random weights for a weighted sum of the
    attention outputs.
    """
    shape = (4, batch, heads, time, head_width)
    q, k, v, weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return q, k[:, :groups], v[:, :groups], weights


def documents(batch: int) -> np.ndarray:
    """Returns the segment ids of rows with documents of different lengths; one document is a single
    token.
    """
    cuts = [[100], [1, 2, 255], [128]]
    return np.array(
        [np.searchsorted(cuts[i % 3], np.arange(TIME), side="right") for i in range(batch)]
    )


def in_prefix(lengths) -> np.ndarray:
    return np.arange(TIME) < np.array(lengths)[:, None]


def value_and_gradients(q, k, v, weights, mask, **options):
    def total(q, k, v):
        y = attention(q, k, v, mask, **options)
        return jnp.sum(y * weights), y

    gradients, y = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return [y, *gradients]


@pytest.mark.parametrize(
    "backend, head_width, groups, window, has_segments, is_causal",
    [
        ("xla", 16, 2, 0, False, True),
        ("xla", 16, 1, 0, True, True),
        ("xla", 16, 2, 1, True, True),
        ("xla", 16, 1, 130, False, True),
        ("xla", 16, 1, 0, True, False),
        ("xla", 16, 2, 37, False, False),
        ("reference", 16, 1, 3, True, True),
        pytest.param("splash", 2, 2, 0, True, True, marks=pytest.mark.slow),
        pytest.param("splash", 128, 2, 0, False, True, marks=pytest.mark.slow),
        ("splash", 16, 1, 0, True, False),
        ("splash", 16, 2, 37, False, True),
    ],
)
def test_backends_match_the_formula(backend, head_width, groups, window, has_segments, is_causal):
    """The outputs and gradients match the formulas.

    Covers keys shared by two query heads, and attention windows shorter and longer than a chunk of
    queries.
    """
    q, k, v, weights = inputs(head_width=head_width, groups=groups)
    segments = documents(2) if has_segments else None
    mask = AttentionMask(window, segments, is_causal=is_causal)
    y, *gradients = value_and_gradients(q, k, v, weights, mask, backend=backend)
    np.testing.assert_allclose(
        y, oracle(q, k, v, segments, window=window, causal=is_causal), rtol=1e-4, atol=1e-5
    )
    expected = oracle_gradients(q, k, v, weights, segments, window=window, causal=is_causal)
    for found, gradient in zip(gradients, expected):
        np.testing.assert_allclose(found, gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_width, heads, groups, window, time",
    [
        (2, 2, 2, 0, 384),
        (64, 2, 1, 0, 128),
        (16, 2, 1, 128, 384),
        (16, 1, 1, 130, 384),
        (16, 2, 1, 256, 768),
        (16, 1, 1, 512, 1024),
        (16, 1, 1, 520, 1024),
        pytest.param(20, 4, 2, 0, 1024, marks=pytest.mark.slow),
    ],
)
def test_flash_attention_matches_the_formula(head_width, heads, groups, window, time):
    """Rows of 384 positions have blocks of 128. Longer rows have blocks of 512, or of 256 with a
    short window.

    A window of 128 positions touches at most two blocks of 128. A window of 130 touches up to
    three. With windows of 256 and 512, some blocks need no mask. A window of 520 is not short.
    """
    q, k, v, weights = inputs(heads=heads, head_width=head_width, groups=groups, time=time)
    y, *gradients = value_and_gradients(q, k, v, weights, AttentionMask(window), backend="flash")
    np.testing.assert_allclose(y, oracle(q, k, v, window=window), rtol=1e-4, atol=1e-5)
    expected = oracle_gradients(q, k, v, weights, window=window)
    for found, gradient in zip(gradients, expected):
        np.testing.assert_allclose(found, gradient, rtol=1e-3, atol=1e-4)


def test_flash_attention_of_large_scores_is_finite():
    """Outputs and gradients are finite for scores of ±1000, although the exponentials of these
    scores overflow.
    """
    q, k, v, weights = inputs(heads=1, time=384)
    q, k = 1000 * jnp.sign(q), jnp.sign(k)
    y, *gradients = value_and_gradients(q, k, v, weights, AttentionMask(), backend="flash")
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    np.testing.assert_allclose(y, oracle(q, k, v), rtol=1e-4, atol=1e-4)


def test_a_window_of_the_whole_row_equals_full_attention_bit_for_bit():
    q, k, v, weights = inputs()
    full, wide = (
        value_and_gradients(q, k, v, weights, AttentionMask(window)) for window in (0, TIME)
    )
    assert all(np.array_equal(a, b) for a, b in zip(full, wide))


def value(q, k, v, mask, slopes=None, **options):
    return jax.jit(lambda q, k, v: attention(q, k, v, mask, slopes, **options))(q, k, v)


@pytest.mark.parametrize("backend, window", [("xla", 0), ("xla", 20), ("reference", 0)])
def test_positions_of_a_prefix_see_each_other(backend, window):
    q, k, v, _ = inputs()
    y = value(q, k, v, AttentionMask(window, prefix_BxT=in_prefix([0, 150])), backend=backend)
    expected = oracle(q, k, v, prefix=[0, 150], window=window)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - oracle(q, k, v, window=window))[1].max() > 0.1


def test_rows_without_a_prefix_are_causal_bit_for_bit():
    """Of one chunk of queries; with more chunks, causal attention computes fewer keys, and sums in
    another order.
    """
    q, k, v, weights = inputs(time=128)
    prefix = np.arange(128) < np.array([[0], [70]])
    found, causal = (
        value_and_gradients(q, k, v, weights, AttentionMask(prefix_BxT=mask), backend="xla")
        for mask in (prefix, None)
    )
    assert all(
        np.array_equal(a[0], b[0]) and not np.allclose(a[1], b[1]) for a, b in zip(found, causal)
    )


def test_documents_have_prefixes_of_their_own():
    q, k, v, _ = inputs(batch=1)
    segments = documents(1)  # 100 and 156 positions
    prefix = np.isin(np.arange(TIME), [*range(30), *range(100, 150)])[None]
    y = value(q, k, v, AttentionMask(0, segments, prefix), backend="xla")
    first, second = (
        oracle(*(x[:, :, part] for x in (q, k, v)), prefix=[length])
        for part, length in ((slice(100), 30), (slice(100, None), 50))
    )
    np.testing.assert_allclose(y, np.concatenate([first, second], axis=2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_segments, prefix", [(False, None), (True, None), (False, [0, 150])])
def test_alibi_matches_the_formula(has_segments, prefix):
    """Far positions get lower scores than near ones, also those after the query in a prefix."""
    q, k, v, _ = inputs()
    segments, slopes = documents(2) if has_segments else None, np.float32([0.3, 0.01])
    mask = AttentionMask(
        segment_ids_BxT=segments, prefix_BxT=None if prefix is None else in_prefix(prefix)
    )
    y = value(q, k, v, mask, slopes, backend="xla")
    np.testing.assert_allclose(
        y, oracle(q, k, v, segments, slopes, prefix=prefix), rtol=1e-4, atol=1e-5
    )
    assert np.abs(y - oracle(q, k, v, segments, prefix=prefix)).max() > 0.1


@pytest.mark.parametrize(
    "groups, window, has_slopes, time",
    [(2, 0, False, 1), (1, 0, True, 1), (1, 5, True, 4), (2, 3, False, 4)],
)
def test_cached_attention_matches_the_last_rows_of_the_formula(groups, window, has_slopes, time):
    q, k, v, _ = inputs(groups=groups)
    slopes = np.float32([0.3, 0.01]) if has_slopes else None
    expected = oracle(q, k, v, slopes=slopes, window=window)

    @jax.jit
    def cached(q, keys, values, start):
        positions = jnp.tile(start + jnp.arange(time), (2 * groups, 1))
        return cached_attention(
            q,
            CachedKeys(keys, values),
            positions,
            AttentionMask(window),
            None if slopes is None else np.tile(slopes, 2).reshape(2 * groups, -1),
        )

    for start in (0, 100):
        rows = slice(start, start + time)
        found = cached(
            q[:, :, rows].reshape(2 * groups, 2 // groups, time, -1),
            *(x.reshape(2 * groups, TIME, -1) for x in (k, v)),
            start,
        )
        np.testing.assert_allclose(
            found.reshape(2, 2, time, -1), expected[:, :, rows], rtol=1e-4, atol=1e-5
        )


def test_reference_gradients_match_finite_differences_of_the_formula():
    q, k, v, weights = inputs()
    segments = documents(2)
    gradients = value_and_gradients(
        q, k, v, weights, AttentionMask(segment_ids_BxT=segments), backend="reference"
    )[1:]
    direction = np.asarray(jax.random.normal(jax.random.key(1), (3, *q.shape)), np.float64)
    arguments, step = [np.asarray(x, np.float64) for x in (q, k, v)], 1e-5
    above, below = (
        np.sum(
            np.asarray(weights)
            * oracle(*(a + sign * step * d for a, d in zip(arguments, direction)), segments)
        )
        for sign in (1, -1)
    )
    slope = sum(np.sum(g * d) for g, d in zip(gradients, direction))
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backend, groups", [("splash", 2), ("splash", 1), ("flash", 1)])
def test_kernel_on_a_mesh(backend, groups):
    """On a mesh, the kernels give the outputs and gradients of the formulas.

    Rows are sharded over the mesh axes `data` and `fsdp`, and heads are sharded over `tensor`.
    Covers a single key head, which cannot be sharded over the two devices of `tensor`.
    """
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2, path=1))
    q, k, v, weights = inputs(batch=4, heads=4, groups=groups)
    segments = documents(4) if backend == "splash" else None
    mask = AttentionMask(segment_ids_BxT=segments)
    expected = oracle(q, k, v, segments), *oracle_gradients(q, k, v, weights, segments)
    with sharding.use_mesh(mesh):
        found = value_and_gradients(q, k, v, weights, mask, backend=backend)
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "requested, platform, change, name, reason",
    [
        ("auto", "cpu", {}, "xla", ""),
        ("auto", "tpu", {}, "flash", ""),
        ("auto", "tpu", {"time": 4096}, "flash", ""),
        ("auto", "tpu", {"time": 4096, "dtype": "float32"}, "splash", ""),
        ("auto", "tpu", {"time": 8192}, "splash", ""),
        ("auto", "tpu", {"time": 4096, "per_group": 2}, "splash", ""),
        ("auto", "tpu", {"time": 32768, "head_width": 2}, "splash", ""),
        ("auto", "tpu", {"mask": AttentionMask(segment_ids_BxT=documents(1))}, "splash", ""),
        ("flash", "tpu", {"time": 8192, "mask": AttentionMask(window=100)}, "splash", ""),
        ("auto", "gpu", {}, "cudnn", ""),
        ("splash", "cpu", {}, "splash", ""),
        ("xla", "tpu", {}, "xla", ""),
        ("auto", "tpu", {"time": 100}, "xla", "multiple of 128"),
        ("auto", "gpu", {"head_width": 4}, "xla", "multiple of 8"),
        ("auto", "gpu", {"head_width": 256}, "xla", "up to 128"),
        ("auto", "gpu", {"dtype": "float32"}, "xla", "bfloat16"),
        ("auto", "gpu", {"mask": AttentionMask(segment_ids_BxT=documents(1))}, "xla", "documents"),
        (
            "auto",
            "gpu",
            {"mask": AttentionMask(prefix_BxT=in_prefix([1]))},
            "xla",
            "does not support prefixes",
        ),
        (
            "auto",
            "tpu",
            {"mask": AttentionMask(prefix_BxT=in_prefix([1]))},
            "xla",
            "does not support prefixes",
        ),
        ("auto", "tpu", {"mask": AttentionMask(is_causal=False)}, "splash", ""),
        ("auto", "gpu", {"mask": AttentionMask(is_causal=False)}, "cudnn", ""),
        (
            "auto",
            "gpu",
            {"mask": AttentionMask(9, is_causal=False)},
            "xla",
            "does not support bidirectional windows",
        ),
        ("auto", "tpu", {"mask": AttentionMask(window=100)}, "flash", ""),
        ("auto", "gpu", {"mask": AttentionMask(window=100)}, "cudnn", ""),
        ("cudnn", "cpu", {}, "xla", "NVIDIA"),
        ("splash", "gpu", {}, "xla", "TPUs"),
        ("auto", "tpu", {"has_alibi": True}, "xla", "flash attention does not support ALiBi"),
        ("cudnn", "gpu", {"has_alibi": True}, "xla", "cuDNN's attention does not support ALiBi"),
        ("auto", "cpu", {"has_alibi": True}, "xla", ""),
    ],
)
def test_selected_backend(requested, platform, change, name, reason):
    mask = change.get("mask", AttentionMask())
    sizes = {key: change[key] for key in change if key in AttentionShape._fields}
    shape = AttentionShape(1024, 64, "bfloat16")._replace(**sizes)
    backend, fallback_reason = select_backend(
        requested, platform, shape, mask, change.get("has_alibi", False)
    )
    assert backend == name
    assert reason in fallback_reason and bool(reason) == bool(fallback_reason)


@pytest.mark.parametrize(
    "platform, called", [("tpu", "flash"), ("gpu", "cudnn"), ("cpu", "chunked")]
)
def test_backend_follows_the_platform_compiled_for(monkeypatch, platform, called):
    calls = []
    for name in ("chunked", "flash", "splash", "cudnn"):
        monkeypatch.setattr(ops, name, lambda q, *_, name=name: calls.append(name) or q)
    monkeypatch.setattr(ops, "platform", lambda: platform)
    q, k, v, _ = (x.astype("bfloat16") for x in inputs())
    attention(q, k, v, AttentionMask())
    assert calls == [called]


@pytest.mark.parametrize("window, mask_type", [(0, "CAUSAL"), (37, "CAUSAL"), (0, "NO_MASK")])
def test_cudnn_is_lowered_for_cuda(monkeypatch, window, mask_type):
    """The program for CUDA calls cuDNN's kernels, forward and backward, with the mask, the scale
    and grouped heads.

    Only the lowering is tested, because the kernels need a GPU. Lowering asks for the version of
    cuDNN, so the test fakes one.
    """
    kernels = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91000)
    q, k = (jax.ShapeDtypeStruct((2, heads, TIME, 64), jnp.bfloat16) for heads in (4, 2))

    def total(q, k, v):
        return jnp.sum(
            ops.cudnn(q, k, v, AttentionMask(window, is_causal=mask_type == "CAUSAL"), None).astype(
                jnp.float32
            )
        )

    text = (
        jax.jit(jax.grad(total, (0, 1, 2)))
        .trace(q, k, k)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    calls = [line.replace("\\22", '"') for line in text.splitlines() if "@__cudnn" in line]
    assert [re.search(r"@(\S+)\(", call)[1] for call in calls] == [
        "__cudnn$fmhaSoftmax",
        "__cudnn$fmhaSoftmaxBackward",
    ]
    for call in calls:
        assert f'"mask_type": "{mask_type}"' in call and '"fmha_scale": 1.0' in call
        assert f'"sliding_window_length": {window}' in call
        assert f"tensor<2x{TIME}x4x64xbf16>, tensor<2x{TIME}x2x64xbf16>" in call
