"""The router of a mixture of experts."""

from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.devices import sharding
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.initializers import INIT_STD, normal

ROUTER_AXES = ("embed", "router")


class Router(nn.Module):
    """Chooses K = `experts_per_token` of the E routed experts for each token (DeepSeek-V3, arXiv
    2412.19437).

    Expert i has the score s_i = sigmoid(x·e_i). The K experts with the largest s_i + b_i are
    chosen; the biases b are a state (see `move_biases`). Gates are the chosen scores divided by
    their sum (equations 13 to 16). If K is 1, the gate is the score itself: s / s would be 1, and
    the router would have no gradient.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        """Returns the chosen experts and their gates times `expert_scale`, (B, T, K)."""
        c = self.config
        scores_BxTxE = nn.sigmoid(self.products(x_BxTxD))
        # Biases only move the choice: the gates are of the scores without them.
        bias_E = self.variable("state", "bias", jnp.zeros, (c.num_experts,)).value
        experts_BxTxK = self.choose(jax.lax.stop_gradient(scores_BxTxE) + bias_E[None, None])
        mask_BxT = context.is_text_BxT
        # A sum over rows and exact, so that the loads of devices and microbatches can be added.
        loads_BxTxE = _masked(self.one_hot(experts_BxTxK), mask_BxT)
        self.sow("loads", "load", jnp.sum(loads_BxTxE, axis=(0, 1), dtype=jnp.int32))
        if c.balance_loss:
            in_top_k_BxTxE = self.one_hot(self.choose(jax.lax.stop_gradient(scores_BxTxE)))
            balance = _sequence_balance(scores_BxTxE, in_top_k_BxTxE, mask_BxT, c.experts_per_token)
            self.sow("losses", "expert_balance", c.balance_loss * balance)
        # The gradient of indexing would be a scatter, which is slow on TPUs.
        chosen_BxTxKxE = jax.nn.one_hot(experts_BxTxK, c.num_experts)
        gates_BxTxK = jnp.sum(chosen_BxTxKxE * scores_BxTxE[:, :, None], axis=-1)
        if c.experts_per_token > 1:
            gates_BxTxK /= jnp.sum(gates_BxTxK, axis=-1, keepdims=True)
        return experts_BxTxK, c.expert_scale * gates_BxTxK

    def products(self, x_BxTxD):
        """Returns x·kernel in float32, (B, T, E), also in models of bfloat16."""
        batch, time, width = x_BxTxD.shape
        shape = (width, self.config.num_experts)
        kernel_DxE = self.param("kernel", normal(INIT_STD, *ROUTER_AXES), shape)
        kernel_DxE = sharding.gather_weight(kernel_DxE, ROUTER_AXES)
        x_RxD = x_BxTxD.reshape(-1, width).astype(jnp.float32)
        y_RxE = jnp.dot(x_RxD, kernel_DxE, precision="highest")
        return y_RxE.reshape(batch, time, -1)

    def choose(self, biased_BxTxE):
        def on_one_device(biased_BxTxE):
            return jax.lax.top_k(biased_BxTxE, self.config.experts_per_token)[1]

        # The compiler does not partition top_k. Without `per_device`, it would gather the scores of
        # all devices.
        return sharding.per_device(on_one_device, (("batch", "time", None),))(biased_BxTxE)

    def one_hot(self, experts_BxTxK):
        return jnp.sum(jax.nn.one_hot(experts_BxTxK, self.config.num_experts), axis=2)


def _masked(x_BxTxE, mask_BxT):
    return x_BxTxE if mask_BxT is None else x_BxTxE * mask_BxT[:, :, None]


def move_biases(state, loads, rate: float):
    """Raises the bias of experts with less than the mean load by `rate`, and lowers the others'
    (arXiv 2412.19437, section 2.1.2). `loads` are numbers of tokens. They have a leading axis for
    microbatches, and one entry per time that a router is applied.
    """
    moved = flax.traverse_util.flatten_dict(state)
    for path, passes in flax.traverse_util.flatten_dict(loads).items():
        bias = (*path[:-1], "bias")
        load = sum(jnp.sum(x, axis=0) for x in passes)
        # The sign only: a bias moves as fast whether an expert has far too few tokens or few.
        moved[bias] += rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    return flax.traverse_util.unflatten_dict(moved)


def load_metrics(loads) -> dict[str, Any]:
    """Returns loads relative to a layer's mean: by path, and the mean of the layers' largest."""
    relative = {}
    for path, passes in flax.traverse_util.flatten_dict(loads).items():
        load = sum(jnp.sum(x, axis=0) for x in passes)
        mean = jnp.mean(load, axis=-1, keepdims=True)
        least = 1 / load.shape[-1]  # a mean is no less, unless there are no tokens
        relative["/".join(path[:-1])] = load / jnp.maximum(mean, least)
    if not relative:
        return {}
    largest = [jnp.max(load, axis=-1).ravel() for load in relative.values()]
    return {"expert_load": relative, "expert_load_max": jnp.mean(jnp.concatenate(largest))}


def _sequence_balance(scores_BxTxE, in_top_k_BxTxE, mask_BxT, experts_per_token: int):
    """Returns Σ f_i·P_i, averaged over sequences (arXiv 2412.19437, equations 17 to 20)."""

    def mean_BxE(x_BxTxE):
        if mask_BxT is None:
            return jnp.mean(x_BxTxE, axis=1)
        tokens_B = jnp.maximum(jnp.sum(mask_BxT, axis=1), 1)
        return jnp.sum(_masked(x_BxTxE, mask_BxT), axis=1) / tokens_B[:, None]

    num_experts = scores_BxTxE.shape[-1]
    f_BxE = mean_BxE(in_top_k_BxTxE) * (num_experts / experts_per_token)
    p_BxE = mean_BxE(scores_BxTxE / jnp.sum(scores_BxTxE, axis=-1, keepdims=True))
    balance_B = jnp.sum(f_BxE * p_BxE, axis=-1)
    return jnp.mean(balance_B)
