"""Tests of the measures of `diagnose` against formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from smallgpt_jax.data.tokenizers import Bytes
from smallgpt_jax.diagnosis import experts, losses, measures, windows
from smallgpt_jax.diagnosis.observation import attention_weights, measure_attention
from smallgpt_jax.errors import UserError
from smallgpt_jax.ops.attention_mask import AttentionMask

RNG = np.random.default_rng(0)
X = RNG.standard_normal((7, 5)) + 2.0


def test_measures_of_a_stream():
    pairs = [(s, t) for s in range(7) for t in range(7) if s != t]
    cosine = {(s, t): X[s] @ X[t] / math.sqrt((X[s] @ X[s]) * (X[t] @ X[t])) for s, t in pairs}
    values = np.sqrt(np.linalg.eigvalsh(X.T @ X))
    p = values / values.sum()

    def norm(a):  # arXiv 2103.03404, section 2.1
        return math.sqrt(
            max(sum(abs(a[:, j])) for j in range(5)) * max(sum(abs(a[i])) for i in range(7))
        )

    expected = {
        "residual": norm(X - X.mean(axis=0)) / norm(X),
        "token_similarity": sum(cosine.values()) / len(pairs),
        "neighbour_similarity": sum(cosine[t, t + 1] for t in range(6)) / 6,
        "effective_rank": math.exp(-sum(p * np.log(p))),
    }
    found = jax.jit(lambda x: {name: measure(x) for name, measure in measures.STREAM.items()})(
        jnp.float32(X)
    )
    assert jax.tree.map(float, found) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("window, has_alibi", [(0, False), (3, True)])
def test_measures_of_attention(window, has_alibi):
    """Four heads share two key heads."""
    time, width = 6, 8
    q, k = RNG.standard_normal((4, time, width)), RNG.standard_normal((2, time, width))
    slopes = np.float32([0.5, 0.25, 0.125, 0.0625]) if has_alibi else None
    found = jax.jit(
        lambda q, k: attention_weights(q[None], k[None], AttentionMask(window), slopes)[0]
    )(jnp.float32(q), jnp.float32(k))
    measured = jax.jit(lambda weights: measure_attention(weights, window))(found)
    for head in range(4):
        weights = np.zeros((time, time))
        for t in range(time):
            keys = [s for s in range(t + 1) if not window or s > t - window]
            weights[t, keys] = softmax(
                [
                    q[head, t] @ k[head // 2, s] / math.sqrt(width)
                    - (slopes[head] * (t - s) if has_alibi else 0)
                    for s in keys
                ]
            )
        np.testing.assert_allclose(found[head], weights, atol=2e-6)
        entropies = [
            -sum(weights[t, s] * math.log(weights[t, s]) for s in range(time) if weights[t, s])
            / math.log(min(t + 1, window or time))
            for t in range(1, time)
        ]
        values = np.sqrt(np.linalg.eigvalsh(weights.T @ weights))
        p = values / values.sum()
        assert {name: float(values[head]) for name, values in measured.items()} == pytest.approx(
            {
                "entropy": np.mean(entropies),
                "first_weight": weights[1:, 0].mean(),
                "effective_rank": math.exp(-sum(p * np.log(p))),
                "log_determinant": math.log(np.linalg.det(weights)),
            },
            rel=1e-4,
        )


def test_in_context_score():
    losses_NxT = RNG.standard_normal((5, 40))
    scores = [row[36:40].mean() - row[2:6].mean() for row in losses_NxT]
    error = math.sqrt(sum((score - np.mean(scores)) ** 2 for score in scores) / 4 / 5)
    assert losses.in_context_score(losses_NxT) == pytest.approx((np.mean(scores), error))


def test_load_of_experts():
    chosen = np.array([[[0, 1], [2, 1], [0, 1]]])
    assert experts.load_by_text({"a": chosen, "b": chosen[:, :1]}, 3) == {
        "a": pytest.approx([2 / 6, 3 / 6, 1 / 6]),
        "b": [0.5, 0.5, 0],
    }
    tokens = np.array([7] * 20 + [9] * 30 + [3] * 19)
    choices = np.array([[0]] * 15 + [[1]] * 5 + [[1]] * 30 + [[0]] * 19)
    assert experts.load_by_token(tokens, choices, 2) == [
        [(7, 0.75), (9, 0.0)],
        [(9, 1.0), (7, 0.25)],
    ]


def test_windows_do_not_cross_documents():
    """Documents of 3, 9 and 5 tokens have 0, 2 and 1 windows of four tokens and their next
    token.
    """
    found = windows.cut(np.arange(17), np.array([0, 3, 12]), np.array([3, 12, 17]), 4, 10)
    assert found.tolist() == [[3, 4, 5, 6, 7], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]
    assert windows.cut(np.arange(17), np.array([0, 3, 12]), np.array([3, 12, 17]), 4, 2)[
        :, 0
    ].tolist() == [3, 12]


def test_texts_that_have_no_window(tmp_path):
    short, latin = tmp_path / "short.txt", tmp_path / "latin.txt"
    short.write_text("the cat")
    latin.write_bytes("café".encode("latin-1"))
    assert windows.windows_of_file(short, Bytes(), 7, 5).tolist() == [[256, *b"the cat"]]
    for path, message in (
        (short, "short.txt: has 8 tokens with the first, fewer than a window of 9; give"),
        (latin, "latin.txt: cannot be read as UTF-8 text"),
        (tmp_path / "none.txt", "none.txt: cannot be read as UTF-8 text"),
    ):
        with pytest.raises(UserError, match=message) as error:
            windows.windows_of_file(path, Bytes(), 8, 5)
        assert "\n" not in str(error.value)
