"""Stacks of blocks, whose parameters are stacked along a leading `layers` axis:

- one stack, if all configs are equal: `blocks/mlp/up/kernel` has shape (L, D, F);
- P stacks, if the configs repeat with period P: `blocks/i` contains the blocks i, i + P, i + 2P, …;
- otherwise, one stack per run of consecutive blocks with equal configs: `blocks/0`, `blocks/1`, ….

Scanning and rematerialization do not change this layout.
"""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax

from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.variants import block_class
from smallgpt_jax.ops.flash_attention import OUTPUT

# Value of config.model.remat → policy. A policy selects the intermediate results that a block saves
# for the backward pass. The backward pass recomputes all other results.
REMAT = {
    "none": None,  # no rematerialization: saves everything
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(OUTPUT),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Variable collection → axis along which layers are stacked. "state" is part of TrainState. "losses"
# are added to the training loss. "metrics" are averaged over layers and logged; "layer_metrics" are
# logged per layer. "loads" of routers are sums over rows; they are logged, and move the biases.
# "features" are compared with those of a teacher.
PER_LAYER = dict.fromkeys("params state losses metrics layer_metrics loads features".split(), 0)


def layer_configs(config: ModelConfig, length: int, first: int = 0) -> list[ModelConfig]:
    """Returns the configs of `length` blocks from `first` on, by the repeated patterns."""
    mixers = config.mixers
    windows = config.attention_windows or (0,)
    tables = config.value_embeddings or (0,)
    configs = []
    for i in range(first, first + length):  # each pattern repeats with its own period
        window, table = windows[i % len(windows)], tables[i % len(tables)]
        block = config.replace(
            mixers=(mixers[i % len(mixers)],),
            # of several ways to say none, one, so that equal blocks have equal configs
            attention_windows=(window,) if window else (),
            value_embeddings=(1,) if table else (),
        )
        configs.append(block)
    return configs


def stack_blocks(
    configs: list[ModelConfig],
    context: Context,
    name: str = "blocks",
    block: type[nn.Module] | None = None,
) -> Callable:
    """Returns a function, (B, T, D) → (B, T, D), that applies all blocks `loops` times. Call it in
    a compact method. `block` is a class with a field `config`; None: `block_class`.
    """
    block = block or block_class(configs[0])
    period = _period_of(configs)
    if period == 1:
        stack = functools.partial(_apply_stack, block(configs[0], name=name), len(configs))
    elif period < len(configs):
        pattern = Pattern(tuple(configs[:period]), block, name=name)
        stack = functools.partial(_apply_stack, pattern, len(configs) // period)
    else:
        stack = BlockRuns(tuple(configs), block, name=name)

    def apply(x_BxTxD):
        blocks_context = context
        if configs[0].input_mix:
            blocks_context = context.replace(stack_input_BxTxD=x_BxTxD)
        # The first pass creates the weights, which the others share.
        for _ in range(configs[0].loops):
            x_BxTxD = stack(x_BxTxD, blocks_context)
        return x_BxTxD

    return apply


def block_numbers(configs: list[ModelConfig]) -> list[range]:
    """Returns the indices of the blocks in each stack, in the layout of this module's docstring."""
    period = _period_of(configs)
    if period < len(configs):
        return [range(start, len(configs), period) for start in range(period)]
    return [range(start, end) for start, end in _runs_of_equal_configs(configs)]


def _period_of(configs: Sequence[ModelConfig]) -> int:
    """Returns the period with which the configs repeat, or their number if they do not."""
    number = len(configs)
    for period in range(1, number):
        if number % period == 0 and configs == configs[:period] * (number // period):
            return period
    return number


def _runs_of_equal_configs(configs: Sequence[ModelConfig]) -> list[tuple[int, int]]:
    """Returns (start, end) of each run of consecutive equal configs."""
    starts = [i for i, config in enumerate(configs) if i == 0 or config != configs[i - 1]]
    return list(zip(starts, [*starts[1:], len(configs)]))


class Pattern(nn.Module):
    """One period of a repeating pattern of blocks."""

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


class BlockRuns(nn.Module):
    configs: tuple[ModelConfig, ...]
    block: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x_BxTxD, context: Context):
        for number, (start, end) in enumerate(_runs_of_equal_configs(self.configs)):
            block = self.block(self.configs[start], name=str(number))
            x_BxTxD = _apply_stack(block, end - start, x_BxTxD, context)
        return x_BxTxD


def _apply_stack(block: nn.Module, length: int, x_BxTxD, context: Context):
    """Applies `length` copies of `block`, stacked along `layers`."""
    if context.decode:
        for i in range(length):
            x_BxTxD = apply_slice(block, i, x_BxTxD, context)
        return x_BxTxD
    config = block.config

    def step(block, x_BxTxD):
        return block(x_BxTxD, context), None

    if config.remat != "none":
        # A loop keeps the two passes apart; unrolled, XLA would merge the recomputed operations with
        # those of the forward pass (CSE), and the memory would not be saved.
        step = nn.remat(step, policy=REMAT[config.remat], prevent_cse=not config.scan_layers)
    # Initialization runs only once, so unrolling it would only cost compile time.
    unroll = 1 if config.scan_layers or block.is_initializing() else length
    scanned = nn.scan(
        step,
        length=length,
        unroll=unroll,
        variable_axes=PER_LAYER,
        split_rngs={"params": True, "dropout": True},
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scanned(block, x_BxTxD)[0]


def apply_slice(module: nn.Module, i: int, x_BxTxD, context: Context):
    """Calls the module with slice i of its stacks, which are arrays or, in decoding, tuples with
    one array per slice (see `inference.layout`), because slicing an array would copy the weights
    for every token.
    """

    def is_stack(x) -> bool:
        return isinstance(x, tuple)

    def pick(variables):
        return jax.tree.map(lambda stack: stack[i], variables, is_leaf=is_stack)

    def call(module, x_BxTxD):
        return module(x_BxTxD, context)

    return nn.map_variables(call, ["params", "state"], trans_in_fn=pick)(module, x_BxTxD)
