"""The layers that blocks are made of: dense layers, norms, MLPs, positions.

Shapes stand in names: B batch, T time (positions), D model width, H heads, G heads of keys and values, K width of a
head, F width of the MLP, L layers, V vocabulary. Every weight here names its axes; `sharding.py` maps the names onto
the mesh. Flax's own layers (nn.Dense, nn.RMSNorm), which name none, work as well: each device then has the whole
weight. Weights are float32; products are computed in `config.dtype`.

NORMS and MLPS are looked up by `config.model.norm` and `config.model.mlp`. A norm is a function (config, name) →
module; an MLP is a module with the field `config`, called with (B, T, D) activations and the context.
"""

import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from smallgpt_jax import sharding
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.ops.activations import ACTIVATIONS
from smallgpt_jax.ops.matmul import matmul

INIT_STD = 0.02  # GPT-2's: every weight normal(0, 0.02), residual projections scaled down


def normal(std: float, *axes: str):
    """Returns the initializer of a weight: normal(0, std), its axes named."""
    return nn.with_logical_partitioning(nn.initializers.normal(std), axes)


def zeros(*axes: str):
    """Returns the initializer of a bias, its axes named."""
    return nn.with_logical_partitioning(nn.initializers.zeros, axes)


def residual_std(config: ModelConfig) -> float:
    """Returns the initial scale of what is added to the residual stream: 0.02/√(2N), N the model's blocks.

    The sum of the 2N projections then starts with the variance of one (GPT-2 report, section 2.3).
    """
    return INIT_STD / math.sqrt(2 * config.num_layers)


class Dense(nn.Module):
    """x·W (+ b) on (B, T, *inputs) → (B, T, *features); kernel (*inputs, *features).

    `axes` names the kernel's axes. The product is of two-dimensional arrays: around a three-dimensional one XLA fuses
    into slower loops on CPUs.
    """

    features: tuple[int, ...]
    axes: tuple[str, ...]
    init_std: float
    use_bias: bool
    dtype: str

    @nn.compact
    def __call__(self, x, context: Context):
        batch_and_time, inputs = x.shape[:2], x.shape[2:]
        kernel_IxO = self.kernel(inputs).reshape(math.prod(inputs), -1)
        x_RxI = x.reshape(-1, len(kernel_IxO)).astype(self.dtype)
        # Without a gradient to come, and few rows, the plain product.
        y_RxO = jnp.dot(x_RxI, kernel_IxO) if context.decode else matmul(x_RxI, kernel_IxO)
        return self.with_bias(y_RxO.reshape(*batch_and_time, *self.features))

    def kernel(self, inputs: tuple[int, ...]):
        weight = self.param("kernel", normal(self.init_std, *self.axes), inputs + self.features)
        return sharding.gather_fsdp(weight.astype(self.dtype), self.axes)

    def with_bias(self, y_BxTxO):
        if not self.use_bias:
            return y_BxTxO
        bias = self.param("bias", zeros(*self.axes[-len(self.features):]), self.features)
        return y_BxTxO + bias[None, None].astype(self.dtype)


def layer_norm(config: ModelConfig, name: str | None) -> nn.LayerNorm:
    """LayerNorm over the last axis, a bias only if the model has biases.

    The variance is E[x²] − E[x]², in float32: one pass where E[(x − E[x])²] takes two.
    """
    return nn.LayerNorm(
        epsilon=config.norm_epsilon, use_bias=config.use_bias, dtype=config.dtype,
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("norm",)),
        bias_init=zeros("norm"), name=name)


def rms_norm(config: ModelConfig, name: str | None) -> nn.RMSNorm:
    """RMSNorm over the last axis, x/√(mean x² + ε)·γ (Zhang & Sennrich, arXiv 1910.07467), computed in float32."""
    return nn.RMSNorm(
        epsilon=config.norm_epsilon, dtype=config.dtype,
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("norm",)), name=name)


NORMS = {"layer": layer_norm, "rms": rms_norm}


def norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    """Returns the norm that `config.norm` names."""
    return NORMS[config.norm](config, name)


class MLP(nn.Module):
    """Two dense layers with an activation between them: a(x·W_up)·W_down."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        h_BxTxF = Dense((c.mlp_width,), ("embed", "mlp"), INIT_STD, c.use_bias, c.dtype, name="up")(x_BxTxD, context)
        return Dense((c.d_model,), ("mlp", "embed"), residual_std(c), c.use_bias, c.dtype, name="down")(
            ACTIVATIONS[c.activation](h_BxTxF), context)


class GatedMLP(nn.Module):
    """(a(x·W_gate) ⊙ x·W_up)·W_down (Shazeer, arXiv 2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        gate_BxTxF, up_BxTxF = (
            Dense((c.mlp_width,), ("embed", "mlp"), INIT_STD, c.use_bias, c.dtype, name=name)(x_BxTxD, context)
            for name in ("gate", "up"))
        return Dense((c.d_model,), ("mlp", "embed"), residual_std(c), c.use_bias, c.dtype, name="down")(
            ACTIVATIONS[c.activation](gate_BxTxF) * up_BxTxF, context)


MLPS = {"dense": MLP, "gated": GatedMLP}


def apply_rope(x_BxHxTxK, positions_BxT, base: float):
    """Returns queries or keys turned by their positions, in their own type: a score then depends on the distance.

    Rotary embedding (Su et al., arXiv 2104.09864, equation 34): entries i and i + K/2 are a point that is turned by
    position · base^(−2i/K), computed in float32. The paper pairs neighbours instead, which is this with the entries in
    another order; most published models pair halves.
    """
    half = x_BxHxTxK.shape[-1] // 2
    frequencies = np.float32(base ** (-np.arange(half) / half))
    angles_Bx1xTxI = positions_BxT[:, None, :, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angles_Bx1xTxI), jnp.sin(angles_Bx1xTxI)
    first, second = jnp.split(x_BxHxTxK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxHxTxK.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns what each head's scores lose per position of distance, (H,) float32: 2^(−8/H), 2^(−16/H), …, 2^−8.

    Press et al., arXiv 2108.12409, section 3; the same sequence where H is no power of two.
    """
    return np.float32(2.0 ** (-8 * np.arange(1, heads + 1) / heads))
