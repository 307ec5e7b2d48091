"""Rules of recurrences and their gradients, for tests of ops/gated_delta.py and ops/state_space.py."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

TIME = 767  # the kernel has three blocks of two chunks


@functools.partial(jax.jit, static_argnums=0)
def _with_gradients(rule, inputs, begins_1xT, state, dy, dlast):
    outputs, gradients = jax.vjp(
        lambda inputs, state: rule(*inputs, begins_1xT, state), inputs, state
    )
    return outputs, gradients((dy, dlast))


class PaddedRule:
    """A rule with its gradients. Inputs are padded to TIME positions, so that most tests share one
    compiled program per rule: compiling the kernel takes seconds.
    """

    def __init__(self, rule: Callable, padding: Sequence[float]):
        self.rule = rule
        self.padding = padding  # value of each input

    def run(self, inputs, begins_1xT, state, dy, dlast):
        """Returns (outputs, last state), (gradients of the inputs, gradient of the state)."""
        time = inputs[0].shape[1]
        (y, last), (gradients, dstate) = _with_gradients(
            self.rule,
            [_padded(x, value) for x, value in zip(inputs, self.padding)],
            _padded(begins_1xT, False),
            state,
            _padded(dy, 0),
            dlast,
        )
        return (y[:, :time], last), ([x[:, :time] for x in gradients], dstate)

    def __call__(self, inputs, begins_1xT, state):
        outputs, _ = self.run(
            inputs, begins_1xT, state, np.zeros_like(inputs[2]), np.zeros_like(state)
        )
        return outputs


def _padded(x, value):
    rest = [(0, 0)] * (x.ndim - 2)
    return np.pad(x, [(0, 0), (0, max(0, TIME - x.shape[1])), *rest], constant_values=value)
