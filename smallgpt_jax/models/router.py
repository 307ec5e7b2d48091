"""The router of a mixture of experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax import sharding
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.initializers import INIT_STD, normal

ROUTER_AXES = ("embed", "router")


class Router(nn.Module):
    """Chooses K = `experts_per_token` of the E routed experts for each token, as in DeepSeek-V3 (arXiv 2412.19437).

    Expert i has the score s_i = sigmoid(x·e_i), computed in float32, where e_i is a learned vector. The K experts with
    the largest s_i + b_i are chosen. The gate of a chosen expert is its score divided by the sum of the K scores
    (equations 13 to 16).

    The biases b balance the experts without an auxiliary loss (section 2.1.2). After each update, b_i grows by
    `expert_bias_rate` if expert i got fewer tokens than the mean, and shrinks by this rate if it got more. The state
    `load` counts the tokens of each expert in an update, over all microbatches. The new biases are computed from it at
    the start of the next update, and also in evaluation and decoding.

    With `balance_loss` α, the loss α·Σ f_i·P_i per sequence is added (equations 17 to 20; see `sequence_balance`). For
    balanced experts, it is α.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        """Returns the chosen experts, (B, T, K) int32, and their gates times `expert_scale`, (B, T, K) float32."""
        c = self.config
        scores_BxTxE = nn.sigmoid(self.products(x_BxTxD))
        bias_E, load_E = self.balance(context)
        experts_BxTxK = self.choose(jax.lax.stop_gradient(scores_BxTxE) + bias_E[None, None])
        chosen_BxTxE = jnp.sum(jax.nn.one_hot(experts_BxTxK, c.num_experts), axis=2)
        self.count(chosen_BxTxE, bias_E, load_E)
        if c.balance_loss:
            self.sow("losses", "expert_balance", c.balance_loss * sequence_balance(scores_BxTxE, chosen_BxTxE))
        gates_BxTxK = jnp.take_along_axis(scores_BxTxE, experts_BxTxK, axis=-1)
        return experts_BxTxK, c.expert_scale * gates_BxTxK / jnp.sum(gates_BxTxK, axis=-1, keepdims=True)

    def products(self, x_BxTxD):
        """Returns the product of each token with the vector of each expert, (B, T, E) float32."""
        kernel_DxE = sharding.gather_fsdp(
            self.param("kernel", normal(INIT_STD, *ROUTER_AXES), (x_BxTxD.shape[-1], self.config.num_experts)),
            ROUTER_AXES)
        x_RxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1]).astype(jnp.float32)
        return jnp.dot(x_RxD, kernel_DxE, precision="highest").reshape(*x_BxTxD.shape[:2], -1)

    def choose(self, biased_BxTxE):
        """Returns the experts with the largest biased scores, (B, T, K) int32."""
        def on_one_device(biased_BxTxE):
            return jax.lax.top_k(biased_BxTxE, self.config.experts_per_token)[1]

        # The compiler does not partition top_k. Without `per_device`, it would gather the scores of all devices.
        return sharding.per_device(on_one_device, (("batch", "time", None),))(biased_BxTxE)

    def balance(self, context: Context):
        """Returns the biases, (E,), and the number of tokens that each expert has got so far in this update, (E,)."""
        shape = (self.config.num_experts,)
        bias_E = self.variable("state", "bias", jnp.zeros, shape).value
        load_E = self.variable("state", "load", jnp.zeros, shape).value
        moved_E = move_biases(bias_E, load_E, self.config.expert_bias_rate)
        begins = context.begins_update
        return jnp.where(begins, moved_E, bias_E), jnp.where(begins, 0, load_E)

    def count(self, chosen_BxTxE, bias_E, load_E) -> None:
        """In training, stores the biases and the loads, and logs the load of each expert relative to the mean load."""
        counts_E = jnp.sum(chosen_BxTxE, axis=(0, 1))
        if self.is_mutable_collection("state") and not self.is_initializing():
            self.put_variable("state", "bias", bias_E)
            self.put_variable("state", "load", load_E + counts_E)
        relative_E = counts_E / jnp.mean(counts_E)
        self.sow("metrics", "expert_load_max", jnp.max(relative_E))
        self.sow("layer_metrics", "expert_load", relative_E)


def move_biases(bias_E, load_E, rate: float):
    """Returns the biases that follow an update, (E,), from the biases and the load of the update."""
    return bias_E + rate * jnp.sign(jnp.mean(load_E) - load_E)


def sequence_balance(scores_BxTxE, chosen_BxTxE):
    """Returns Σ f_i·P_i over the experts, averaged over sequences (arXiv 2412.19437, equations 17 to 20).

    f_i is the share of tokens that chose expert i, divided by its value for balanced experts, K/E. P_i is the score of
    expert i divided by the sum of the token's scores, averaged over tokens.
    """
    share_BxE = jnp.mean(chosen_BxTxE, axis=1)
    f_BxE = share_BxE / jnp.mean(share_BxE, axis=-1, keepdims=True)
    p_BxE = jnp.mean(scores_BxTxE / jnp.sum(scores_BxTxE, axis=-1, keepdims=True), axis=1)
    return jnp.mean(jnp.sum(f_BxE * p_BxE, axis=-1))
