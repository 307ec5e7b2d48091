"""Forward passes in which every block is called by itself, so that blocks can be observed, changed
or left out.

Blocks have the numbers of these calls, from 0 on: in a pgpt, those of path 0 come first; a block
that is applied twice has two numbers.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.errors import UserError, require_list
from smallgpt_jax.models import LanguageModel, abstract_variables
from smallgpt_jax.models.block import Block
from smallgpt_jax.models.context import EVALUATION, Context


@contextlib.contextmanager
def replaced_blocks(replacement: Callable):
    """In decoding, `replacement(number, block, x_BxTxD)` is computed in place of block(x_BxTxD)."""
    numbers = itertools.count()

    def intercept(call, arguments, keywords, method: nn.module.InterceptorContext):
        # all other modules are computed as they are
        if not isinstance(method.module, Block) or method.method_name != "__call__":
            return call(*arguments, **keywords)
        x_BxTxD, *others = arguments

        def block(x_BxTxD):
            return call(x_BxTxD, *others, **keywords)

        return replacement(next(numbers), block, x_BxTxD)

    with nn.intercept_methods(intercept):
        yield


def prefill(model: LanguageModel, variables, tokens_BxT, method="__call__", prefix_BxT=None):
    """Returns what `model.apply` with `method`, of (tokens, context), returns, up to rounding."""
    # Training scans over stacked blocks; decoding calls them one by one. So this decodes all tokens
    # at once, and drops the cache.
    batch, time = tokens_BxT.shape
    context = Context(
        cache_length=time,
        start_B=jnp.zeros(batch, jnp.int32),
        length_B=jnp.full(batch, time),
        prefix_BxT=prefix_BxT,
    )
    return model.apply(variables, tokens_BxT, context, method=method, mutable=["cache", "calls"])[0]


def num_blocks(model: LanguageModel) -> int:
    """Returns the number of calls of `models.block.Block`; other classes of blocks do not count."""
    calls = []
    # before the replacement, because initialization calls blocks, too
    variables = abstract_variables(model)

    def count(number, block, x_BxTxD):
        calls.append(number)
        return block(x_BxTxD)

    with replaced_blocks(count):
        tokens = jax.ShapeDtypeStruct((1, 1), "int32")
        jax.eval_shape(functools.partial(prefill, model), variables, tokens)
    return len(calls)


class _WithoutBlocks(LanguageModel):
    """A model without the blocks of these numbers, which need neither time nor a cache."""

    left_out: tuple[int, ...] = ()

    def hidden(self, tokens_BxT, context: Context = EVALUATION):
        if self.is_initializing():
            return super().hidden(tokens_BxT, context)
        if not context.decode:
            # Without a cache, the model scans over stacked blocks, of which none can be left out. A
            # prefill calls this method again with context.decode, and then block by block.
            if context.segment_ids_BxT is not None:
                raise ValueError("several documents in a row: a prefill has one text per row")
            return prefill(
                self.clone(parent=None), self.variables, tokens_BxT, "hidden", context.prefix_BxT
            )

        def skip(number, block, x_BxTxD):
            return x_BxTxD if number in self.left_out else block(x_BxTxD)

        with replaced_blocks(skip):
            return super().hidden(tokens_BxT, context)


def without_blocks(model: LanguageModel, numbers: Sequence[str | int]) -> LanguageModel:
    require_list("skip_blocks", numbers)
    if not numbers:
        return model
    chosen, count = {str(number).strip() for number in numbers}, num_blocks(model)
    unknown = sorted(chosen - set(map(str, range(count))))
    if unknown:
        remedy = f"choose from 0 to {count - 1}"
        if count == 0:
            remedy = "only models of this package's blocks can skip some"
        raise UserError(
            f"skip_blocks={','.join(map(str, numbers))}: no block {', '.join(unknown)}; {remedy}"
        )
    return _WithoutBlocks(model.config, tuple(sorted(map(int, chosen))))
