"""Tests of the rules for hyperparameters by size against numbers computed by hand from the sources'
formulas.
"""

import pytest

from smallgpt_jax.config.size_rules import Reference, nanochat, olmo, step_law


def test_olmo():
    # 8 · 108M parameters: a batch 8^⅔ = 4 times as large, and half the rate
    assert olmo(108_000_000) == (327_680, pytest.approx(0.00235), 108_000_000, 0.99)
    assert olmo(864_000_000) == (1_310_720, pytest.approx(0.001175), 864_000_000, 0.95)
    assert olmo(4_000_000).batch_tokens == 36_409  # 327,680 / 27^⅔ = 36,408.9


def test_step_law():
    # ln B = ln 0.58 + 0.571 · ln 1e10 = −0.54473 + 13.14776 = 12.60303
    # ln rate = ln 1.79 − 0.713 · ln 1e9 + 0.307 · ln 1e10 = 0.58222 − 14.77562 + 7.06894 = −7.12446
    found = step_law(parameters=10**9, tokens=10**10)
    assert found.batch_tokens == pytest.approx(297_458, rel=1e-3)
    assert found.learning_rate == pytest.approx(8.0515e-4, rel=1e-3)


def test_nanochat():
    # 8 times the tokens: 8^0.383 = 2.2176, so twice the batch; the rate grows by √2, the decay is
    # 0.2 · √2/8
    found = nanochat(Reference(10**9, 2**19, 0.02, 0.2), tokens=8 * 10**9)
    assert found == (
        8 * 10**9,
        2**20,
        pytest.approx(0.0282843, rel=1e-5),
        pytest.approx(0.0353553, rel=1e-5),
    )
