"""Blocks, and stacks of blocks.

The checkpoint layout of a stack is decided here and nowhere else:

- Equal blocks are stacked along a leading `layers` axis, under the name of the stack: `blocks/mlp/up/kernel` is
  (L, D, F).
- Blocks in a repeating pattern have one stack per position in the pattern, `blocks/0`, `blocks/1`, …, each of
  L / (length of the pattern) blocks.
- Other blocks have one stack per run of equal consecutive blocks, `blocks/0`, `blocks/1`, ….

Scanning and rematerialization do not change the parameters.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax

from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.layers import MLPS, norm
from smallgpt_jax.ops.attention import OUTPUT

REMAT = {  # what a block's forward pass saves; the backward pass recomputes the rest
    "none": None,  # everything
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(OUTPUT)),
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Collections and their layer axis. "state" is carried from step to step; what is sown into "losses" is added to the
# training loss, into "metrics" to metrics.jsonl.
PER_LAYER = {"params": 0, "state": 0, "losses": 0, "metrics": 0}


class Block(nn.Module):
    """A pre-norm block: x + mixer(norm(x)), then x + MLP(norm(x)).

    `mixer` is the class of the module that moves information between positions. It has the field `config` and is called
    with (B, T, D) activations and the context.
    """

    config: ModelConfig
    mixer: Callable[..., nn.Module] = Attention

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        c = self.config
        dropout = nn.Dropout(c.dropout, deterministic=not context.train)
        x_BxTxD += dropout(self.mixer(c, name="attention")(norm(c, "attention_norm")(x_BxTxD), context))
        x_BxTxD += dropout(MLPS[c.mlp](c, name="mlp")(norm(c, "mlp_norm")(x_BxTxD), context))
        return nn.with_logical_constraint(x_BxTxD, ("batch", "time", "embed_activation"))


def layer_configs(config: ModelConfig, length: int, first: int = 0) -> list[ModelConfig]:
    """Returns the configs of `length` blocks, starting with block `first` of the model.

    They differ in their attention windows: `attention_windows` is tiled over the depth.
    """
    windows = config.attention_windows or (0,)
    own = [windows[i % len(windows)] for i in range(first, first + length)]
    return [dataclasses.replace(config, attention_windows=(window,) if window else ()) for window in own]


def stack_blocks(configs: list[ModelConfig], context: Context, name: str = "blocks", block=Block):
    """Returns a function (B, T, D) → (B, T, D): one block per config, in sequence.

    `block` is a module class with the field `config`, called like `Block`. `config.scan_layers` loops over equal blocks
    (compile time flat in depth); otherwise they are unrolled. Call it in a module's compact method.
    """
    pattern = next(p for p in range(1, len(configs) + 1)
                   if len(configs) % p == 0 and configs == configs[:p] * (len(configs) // p))
    if pattern == 1:
        return stack_equal_blocks(block(configs[0], name=name), len(configs), context)
    if pattern < len(configs):
        return stack_equal_blocks(Pattern(tuple(configs[:pattern]), block, name=name), len(configs) // pattern, context)
    runs = Runs(tuple(configs), block, name=name)
    return lambda x_BxTxD: runs(x_BxTxD, context)


class Pattern(nn.Module):
    """Different blocks in sequence."""

    configs: tuple[ModelConfig, ...]
    block: Callable[..., nn.Module]

    @property
    def config(self) -> ModelConfig:
        return self.configs[0]

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        for i, config in enumerate(self.configs):
            x_BxTxD = self.block(config, name=str(i))(x_BxTxD, context)
        return x_BxTxD


class Runs(nn.Module):
    """Runs of equal blocks in sequence, each run stacked."""

    configs: tuple[ModelConfig, ...]
    block: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        starts = [i for i, config in enumerate(self.configs) if i == 0 or config != self.configs[i - 1]]
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(self.configs)])):
            run = self.block(self.configs[start], name=str(number))
            x_BxTxD = stack_equal_blocks(run, end - start, context)(x_BxTxD)
        return x_BxTxD


def stack_equal_blocks(block: nn.Module, length: int, context: Context):
    """Returns a function (B, T, D) → (B, T, D): `length` copies of `block`, variables stacked on a `layers` axis."""
    if context.decode:
        return lambda x_BxTxD: functools.reduce(
            lambda x_BxTxD, i: apply_slice(block, i, x_BxTxD, context), range(length), x_BxTxD)
    config = block.config

    def step(block, x_BxTxD):
        return block(x_BxTxD, context), None

    if config.remat != "none":
        step = nn.remat(step, policy=REMAT[config.remat], prevent_cse=not config.scan_layers)
    scanned = nn.scan(
        step, length=length, unroll=1 if config.scan_layers else length,
        variable_axes=PER_LAYER, split_rngs={"params": True, "dropout": True},
        metadata_params={nn.PARTITION_NAME: "layers"})
    return lambda x_BxTxD: scanned(block, x_BxTxD)[0]


def apply_slice(module: nn.Module, i: int, x_BxTxD, context: Context):
    """Returns module(x) with the i-th slice of the stacked parameters and state.

    A stack is an array with a leading axis, or a tuple of arrays. Slicing an array copies the weights per token, so
    `inference.layout` splits stacks once.
    """
    def pick(variables):
        return jax.tree.map(lambda stack: stack[i], variables, is_leaf=lambda x: isinstance(x, tuple))

    return nn.map_variables(
        lambda module, x: module(x, context), ["params", "state"], trans_in_fn=pick)(module, x_BxTxD)
