"""The train state."""

from typing import Any, NamedTuple

import jax
import optax


class TrainState(NamedTuple):
    """The state of a run after `step` steps."""

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    model_state: Any = {}  # noqa: RUF012 — the variable collection "state"; {} for most models
