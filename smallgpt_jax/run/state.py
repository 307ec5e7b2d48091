"""The train state: step, parameters, optimizer state, model state, moving average."""

from typing import Any, NamedTuple

import jax
import optax

from smallgpt_jax.optim import lora


class TrainState(NamedTuple):
    step: jax.Array
    params: Any  # of the model
    opt_state: optax.OptState
    model_state: Any = {}  # noqa: RUF012 — the variable collection "state"; {} for most models
    # Parameters that the objective trains beside the model's, {name of the term: tree}; {} for most
    # objectives.
    heads: Any = {}  # noqa: RUF012
    ema: Any = {}  # noqa: RUF012 — moving average of `params`; {} without config.train.ema

    @property
    def evaluated(self) -> dict:
        """The parameters that validation reads: the model's or their average, and LoRA's."""
        lora_pairs = {name: tree for name, tree in self.heads.items() if name == lora.NAME}
        return {**(self.ema or self.params), **lora_pairs}

    @property
    def trained(self) -> dict:
        """The parameters of model and heads in one tree, which gradients and optimizer share."""
        return {**self.params, **self.heads}
