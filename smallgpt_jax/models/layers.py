"""The layers of blocks: dense layers, norms, MLPs.

Suffixes of variable names are shapes: B batch, T time (positions), D model width, H heads, G
key–value heads, K head width, F MLP width, L layers, V vocabulary. Weights are float32; matrix
products are computed in `config.dtype`. Weights without logical axes, as of flax's nn.Dense, are
replicated.

An entry of NORMS is a function (config, name) → module, which is called with activations. An entry
of MLPS is a module class with a field `config`, called with (B, T, D) activations and a `Context`.
"""

import math
from collections.abc import Callable

import flax.linen as nn

from smallgpt_jax.devices import sharding
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.custom_code import find_module
from smallgpt_jax.models.initializers import (
    INIT_STD,
    deepnorm_gain,
    normal,
    ones,
    residual_std,
    zeros,
)
from smallgpt_jax.models.router import Router
from smallgpt_jax.ops.activations import ACTIVATIONS
from smallgpt_jax.ops.grouped_matmul import ExpertWeights, grouped_experts
from smallgpt_jax.ops.matmul import matmul


def factor_rank(rank_ratio: float, inputs: int, outputs: int) -> int:
    """Returns r = ⌊rank_ratio·m·n/(m + n)⌋, at least 1 (PELA, arXiv 2310.10700)."""
    return max(1, math.floor(rank_ratio * inputs * outputs / (inputs + outputs)))


def project(x, kernel, context: Context):
    """(B, T, *inputs) activations and a (*inputs, *features) kernel → (B, T, *features)."""
    batch, time, *inputs = x.shape
    features = kernel.shape[len(inputs) :]
    kernel_IxO = kernel.reshape(math.prod(inputs), -1)
    x_BxTxI = x.reshape(batch, time, len(kernel_IxO)).astype(kernel.dtype)
    y_BxTxO = matmul(x_BxTxI, kernel_IxO, context.decode)
    return y_BxTxO.reshape(batch, time, *features)


class Dense(nn.Module):
    """(B, T, *inputs) → (B, T, *features), with a kernel (*inputs, *features) whose axes have the
    logical names `axes`. With a `rank_ratio`, `kernel_in` (*inputs, r) and `kernel_out` (r,
    *features) replace it; see `factor_rank`.
    """

    features: tuple[int, ...]
    axes: tuple[str, ...]
    init_std: float
    use_bias: bool
    dtype: str
    rank_ratio: float = 0.0

    @nn.compact
    def __call__(self, x, context: Context):
        for kernel in self.kernels(x.shape[2:]):
            x = project(x, kernel, context)
        return self.with_bias(x)

    def kernels(self, inputs: tuple[int, ...]) -> list:
        """Returns [kernel] or [kernel_in, kernel_out], in the compute dtype."""
        if not self.rank_ratio:
            initializer = self.kernel_init(self.init_std, self.axes)
            return [self.weight("kernel", initializer, inputs + self.features, self.axes)]
        rank = factor_rank(self.rank_ratio, math.prod(inputs), math.prod(self.features))
        # Entries of the product have the variance rank·std⁴ = init_std².
        std = math.sqrt(self.init_std / math.sqrt(rank))
        axes_in = (*self.axes[: len(inputs)], "rank")
        axes_out = ("rank", *self.axes[len(inputs) :])
        initial_in, initial_out = normal(std, *axes_in), self.kernel_init(std, axes_out)
        return [
            self.weight("kernel_in", initial_in, (*inputs, rank), axes_in),
            self.weight("kernel_out", initial_out, (rank, *self.features), axes_out),
        ]

    def weight(self, name: str, initializer, shape: tuple[int, ...], axes: tuple[str, ...]):
        weight = self.param(name, initializer, shape).astype(self.dtype)
        return sharding.gather_weight(weight, axes)

    def kernel_init(self, std: float, axes: tuple[str, ...]):
        """Returns the initializer of the kernel, or of its second factor."""
        return normal(std, *axes)

    def with_bias(self, y_BxTxO):
        if not self.use_bias:
            return y_BxTxO
        bias = self.param("bias", zeros(*self.axes[-len(self.features) :]), self.features)
        return y_BxTxO + bias[None, None].astype(self.dtype)


def block_dense(
    c: ModelConfig, name: str, features: tuple[int, ...], axes: tuple[str, ...], std: float
) -> Dense:
    return Dense(features, axes, std, c.use_bias, c.dtype, c.rank_ratio, name=name)


def layer_norm(config: ModelConfig, name: str | None) -> nn.LayerNorm:
    """The variance is E[x²] − E[x]², one pass over x; E[(x − E[x])²] would take two."""
    return nn.LayerNorm(
        epsilon=config.norm_epsilon,
        use_bias=config.use_bias,
        dtype=config.dtype,
        scale_init=ones("norm"),
        bias_init=zeros("norm"),
        name=name,
    )


def rms_norm(config: ModelConfig, name: str | None) -> nn.RMSNorm:
    """x/√(mean(x²) + ε)·γ in float32 (Zhang & Sennrich, arXiv 1910.07467)."""
    return nn.RMSNorm(
        epsilon=config.norm_epsilon, dtype=config.dtype, scale_init=ones("norm"), name=name
    )


NORMS = {"layer": layer_norm, "rms": rms_norm}


def find_norm(name: str) -> Callable[..., nn.Module]:
    return find_module("norm", name, NORMS, arguments=("x",))


def norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    return find_norm(config.norm)(config, name=name)


class MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        h_BxTxF = self.inner(x_BxTxD, context)
        down = block_dense(c, "down", (c.d_model,), ("mlp", "embed"), residual_std(c))
        return down(h_BxTxF, context)

    def inner(self, x_BxTxD, context: Context):
        return ACTIVATIONS[self.config.activation](self.expand("up", x_BxTxD, context))

    def expand(self, name: str, x_BxTxD, context: Context):
        c = self.config
        std = INIT_STD * deepnorm_gain(c)
        return block_dense(c, name, (c.mlp_width,), ("embed", "mlp"), std)(x_BxTxD, context)


class GatedMLP(MLP):
    """(a(x·W_gate) ⊙ x·W_up)·W_down (Shazeer, arXiv 2002.05202)."""

    def inner(self, x_BxTxD, context: Context):
        gate_BxTxF = self.expand("gate", x_BxTxD, context)
        up_BxTxF = self.expand("up", x_BxTxD, context)
        return ACTIVATIONS[self.config.activation](gate_BxTxF) * up_BxTxF


class MixtureOfExperts(nn.Module):
    """y = scale · Σ gate_i · expert_i(x) + shared(x) (DeepSeek-V3, arXiv 2412.19437, equation 12).
    No token is dropped. Tensor parallelism splits the width of each expert, so all devices have
    equal work.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        experts_BxTxK, gates_BxTxK = Router(c, name="router")(x_BxTxD, context)
        std = INIT_STD * deepnorm_gain(c)
        names = ("gate", "up") if c.expert_mlp == "gated" else ("up",)
        shape, axes = (c.d_model, c.mlp_width), ("embed", "mlp")
        into = [self.weights(name, shape, axes, std) for name in names]
        out = self.weights("down", (c.mlp_width, c.d_model), ("mlp", "embed"), residual_std(c))
        y_BxTxD = grouped_experts(
            x_BxTxD.astype(c.dtype),
            experts_BxTxK,
            gates_BxTxK,
            ExpertWeights(into, out),
            ACTIVATIONS[c.activation],
            c.grouped_matmul,
        )
        if not c.num_shared_experts:
            return y_BxTxD
        # All shared experts are one MLP, as wide as they are together.
        shared_ratio = c.num_shared_experts * c.mlp_width / c.d_model
        shared = c.replace(mlp=c.expert_mlp, mlp_ratio=shared_ratio)
        return y_BxTxD + MLPS[c.expert_mlp](shared, name="shared")(x_BxTxD, context)

    def weights(self, name: str, shape: tuple[int, int], axes: tuple[str, str], std: float):
        """Returns the stacked matrices (E, *shape) of the routed experts, in the compute dtype."""
        axes = ("expert", *axes)
        weight = self.param(name, normal(std, *axes), (self.config.num_experts, *shape))
        return sharding.gather_weight(weight.astype(self.config.dtype), axes)


MLPS = {"dense": MLP, "gated": GatedMLP, "moe": MixtureOfExperts}


def find_mlp(name: str) -> type[nn.Module]:
    return find_module("mlp", name, MLPS)


def make_mlp(config: ModelConfig) -> nn.Module:
    return find_mlp(config.mlp)(config, name="mlp")
