"""Targets that copying predicts, and their loss in validation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, forward, init
from run_helpers import program_of
from scipy.special import log_softmax

from smallgpt_jax.data.packing import Batch
from smallgpt_jax.objectives.objective import Objective
from smallgpt_jax.ops.repeats import is_repeat
from smallgpt_jax.training.validation import eval_step

TOKENS = np.random.default_rng(0).integers(0, 4, (6, 33))
SEGMENTS = np.repeat([[0, 1, 2]], [5, 20, 7], axis=1).repeat(6, axis=0)


def searched(tokens, segments):
    """Looks for the last earlier occurrence of each pair in the same text."""
    expected = np.zeros((len(tokens), tokens.shape[1] - 1), bool)
    for row, texts, repeats in zip(tokens.tolist(), segments.tolist(), expected):
        for t in range(1, len(repeats)):
            earlier = [
                s
                for s in range(1, t)
                if row[s - 1 : s + 1] == row[t - 1 : t + 1]
                and {texts[s - 1], texts[s], texts[t - 1]} == {texts[t]}
            ]
            repeats[t] = bool(earlier) and row[max(earlier) + 1] == row[t + 1]
    return expected


def test_repeats_within_a_row():
    found = np.asarray(is_repeat(jnp.asarray(TOKENS)))
    assert (found == searched(TOKENS, 0 * SEGMENTS)).all() and 0 < found.mean() < 1


def test_repeats_within_a_text():
    found = np.asarray(is_repeat(jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)))
    assert (found == searched(TOKENS, SEGMENTS)).all()
    assert found.sum() < is_repeat(jnp.asarray(TOKENS)).sum()


@pytest.mark.slow
def test_loss_of_repeats_in_validation():
    model = build("gpt", vocab_size=4, context_length=32, num_layers=1, num_heads=1, d_model=8)
    params = init(model)
    mask_BxT = np.arange(32) < 25
    batch = Batch(jnp.asarray(TOKENS), None, jnp.broadcast_to(mask_BxT, (6, 32)), None)
    program = program_of(model, Objective(loss_chunks=2), microbatches=2, eval_repeats=True)
    sums = jax.jit(lambda params, batch: eval_step(program, params, {}, batch))(params, batch)
    losses_BxTxV = -log_softmax(forward(model, params, TOKENS[:, :-1]), axis=-1)
    losses_BxT = np.take_along_axis(losses_BxTxV, TOKENS[:, 1:, None], 2)[..., 0]
    is_counted_BxT = searched(TOKENS, 0 * SEGMENTS) & mask_BxT
    assert int(sums.repeats.counted) == is_counted_BxT.sum() > 10
    assert float(sums.repeats.loss) == pytest.approx(losses_BxT[is_counted_BxT].sum(), rel=1e-5)
    assert float(sums.loss) == pytest.approx(losses_BxT[:, :25].sum(), rel=1e-5)
