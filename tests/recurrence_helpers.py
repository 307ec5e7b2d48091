"""Rules of recurrences and their gradients, for tests of ops/gated_delta.py and ops/state_space.py."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from gradient_helpers import assert_gradients

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


def begins(time: int, *borders):
    """Returns where texts begin, (1, T): at 0 and at the borders."""
    return np.isin(np.arange(time), (0, *borders))[None]


def assert_gradients_through_the_state(rule: PaddedRule, inputs, no_state, expected_outputs):
    """Compares gradients with central differences of the recurrence in float64, in random directions.
    They pass through the state between two calls, each of which ends and begins a text.
    """
    borders, split, time = (130, 350), 300, inputs[0].shape[1]
    dy = np.random.default_rng(3).standard_normal(inputs[2].shape).astype(np.float32)
    is_begin = begins(time, *borders)

    def run(part, state, dlast):
        return rule.run([x[:, part] for x in inputs], is_begin[:, part], state, dy[:, part], dlast)

    first, second = slice(split), slice(split, None)
    (_, state), _ = run(first, no_state, no_state)
    _, (second_gradients, dstate) = run(second, state, no_state)
    _, (first_gradients, _) = run(first, no_state, dstate)
    assert_gradients(
        [np.concatenate(halves, axis=1) for halves in zip(first_gradients, second_gradients)],
        inputs,
        lambda inputs: np.sum(dy * expected_outputs(inputs, borders)),
    )
