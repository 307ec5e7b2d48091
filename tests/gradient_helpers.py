"""Gradients against central differences."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest


def assert_gradients(
    gradients: Sequence, inputs: Sequence, total: Callable[[list], float], step: float = 1e-5
) -> None:
    """Compares the gradients of the float64 function `total`, one per input, in a random direction
    each.
    """
    rng = np.random.default_rng(4)
    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        higher, lower = (
            total([*inputs[:i], inputs[i] + sign * step * direction, *inputs[i + 1 :]])
            for sign in (1, -1)
        )
        assert np.sum(gradient * direction) == pytest.approx(
            (higher - lower) / (2 * step), rel=1e-4, abs=1e-4
        )
