"""Options of blocks that our comparisons tried beside the paper's form (docs/results.md)."""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from smallgpt_jax.models.block import Block
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.convolution import ShortConvolution, at_taps
from smallgpt_jax.models.initializers import ones, zeros
from smallgpt_jax.models.layers import make_mlp, norm
from smallgpt_jax.models.mixers import make_mixer


def block_class(config: ModelConfig) -> type[Block]:
    """Returns the class that computes a block with the options of `config`."""
    is_variant = (
        config.norm_position != "pre"
        or config.input_mix
        or config.residual_scales
        or config.parallel_block
        or config.canon_taps > 0
    )
    return BlockVariant if is_variant else Block


class BlockVariant(Block):
    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        return apply_block(self, x_BxTxD, context)


class Ablation(NamedTuple):
    """Which parts of a block are computed; 1 or 0, which may be traced."""

    skips: float = 1.0  # x of x + f(norm(x))
    mlps: float = 1.0


def apply_block(block: nn.Module, x_BxTxD, context: Context, ablation: Ablation | None = None):
    """Returns the output of a `Block` or `BlockVariant`; call it in a compact method of the block."""
    c = block.config
    mixer, mlp = make_mixer(c), make_mlp(c)
    dropout = nn.Dropout(c.dropout, deterministic=not context.train)
    scales = block.param("residual_scales", ones("branch"), (2,)) if c.residual_scales else None

    def branch(number: int, y_BxTxD):
        if scales is not None:
            y_BxTxD = (scales[number] * y_BxTxD).astype(y_BxTxD.dtype)
        return dropout(y_BxTxD)

    def mixed(x_BxTxD):
        return branch(0, mixer(x_BxTxD, context))

    def transformed(x_BxTxD):
        return branch(1, mlp(x_BxTxD, context))

    def mixed_and_transformed(x_BxTxD):
        if ablation is None:
            return mixed(x_BxTxD) + transformed(x_BxTxD)
        return mixed(x_BxTxD) + ablation.mlps * transformed(x_BxTxD)

    if c.input_mix:
        mix_BxTxD = _mix_with_stack_input(block, x_BxTxD, context)  # a skip connection, too
        x_BxTxD = mix_BxTxD if ablation is None else jnp.where(ablation.skips, mix_BxTxD, x_BxTxD)
    if c.parallel_block:
        x_BxTxD = _residual(c, mixer.name, mixed_and_transformed, x_BxTxD, context, ablation)
    else:
        x_BxTxD = _residual(c, mixer.name, mixed, x_BxTxD, context, ablation)
        y_BxTxD = _residual(c, "mlp", transformed, x_BxTxD, context, ablation)
        x_BxTxD = y_BxTxD if ablation is None else jnp.where(ablation.mlps, y_BxTxD, x_BxTxD)
    x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))
    block.sow("features", "output", x_BxTxD)
    return x_BxTxD


def _residual(c: ModelConfig, name: str, f, x_BxTxD, context: Context, ablation: Ablation | None):
    """Returns x + f(norm(x)), norm(x + f(x)), or DeepNorm's norm(α·x + f(x))."""
    normalize = norm(c, f"{name}_norm")
    canon = Canon(c.canon_taps, name=f"{name}_canon") if c.canon_taps else None
    skip_BxTxD = x_BxTxD if ablation is None else ablation.skips * x_BxTxD
    if c.norm_position == "deepnorm":
        # α for decoder-only models of N blocks in sequence (Wang et al., arXiv 2203.00555)
        skip_BxTxD = (2 * c.blocks_in_sequence) ** 0.25 * skip_BxTxD
    if c.norm_position == "pre":
        x_BxTxD = normalize(x_BxTxD)
    if canon is not None:
        x_BxTxD = canon(x_BxTxD, context)
    y_BxTxD = skip_BxTxD + f(x_BxTxD)
    return y_BxTxD if c.norm_position == "pre" else normalize(y_BxTxD)


def _mix_with_stack_input(block: nn.Module, x_BxTxD, context: Context):
    """Returns a·x + b·x0 (github.com/KellerJordan/modded-nanogpt); at first, a is 1 and b is 0."""
    initial = nn.with_logical_partitioning(lambda *_: jnp.array([1.0, 0.0]), ("branch",))
    a, b = block.param("input_mix", initial)
    return (a * x_BxTxD + b * context.stack_input_BxTxD).astype(x_BxTxD.dtype)


class Canon(nn.Module):
    """x + conv(x), (B, T, D) → (B, T, D) (Canon layers: Allen-Zhu, arXiv 2512.17351)."""

    num_taps: int

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        convolution = ShortConvolution(self.num_taps, "channel", name="convolution")
        return (x_BxTxD + convolution(x_BxTxD, context)).astype(x_BxTxD.dtype)


class Smear(nn.Module):
    """x[t] + λ·sigmoid(w·x[t])·x[t − 1], λ = 0 at first (KellerJordan/modded-nanogpt)."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        w_D = self.param("gate", zeros("channel"), x_BxTxD.shape[-1:])
        strength = self.param("strength", zeros(), ())
        products_BxT = jnp.einsum("btd,d->bt", x_BxTxD.astype(jnp.float32), w_D)
        gate_BxT = strength * nn.sigmoid(products_BxT)
        previous_BxTxD, _ = at_taps(self, x_BxTxD, 2, context)
        return (x_BxTxD + gate_BxT[..., None] * previous_BxTxD).astype(x_BxTxD.dtype)
