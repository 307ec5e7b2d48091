"""Measures of one window inside a model. Modules stay as they are: interceptors see their calls in
a prefill.

Shapes: B batch (1), T time, D width, H heads, G key–value heads, K head width or experts per token.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from smallgpt_jax.diagnosis import measures
from smallgpt_jax.inference.single_blocks import prefill, replaced_blocks
from smallgpt_jax.models import LanguageModel
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.block import Block
from smallgpt_jax.models.router import Router
from smallgpt_jax.models.variants import Ablation, BlockVariant, apply_block
from smallgpt_jax.ops.attention import attention

WHOLE = Ablation()  # the whole model: nothing is left out


@functools.partial(jax.jit, static_argnames="model")
def observe(model: LanguageModel, variables, tokens_T) -> list[dict]:
    """Returns all measures of each block: {"width": D, "input": {…}, "output": {…}} and, unless
    recurrent, "attention".
    """
    blocks = []
    for record in _run(model, variables, tokens_T, WHOLE):
        block = {
            "width": record["input"].shape[1],
            "input": _measure_stream(record["input"]),
            "output": _measure_stream(record["output"]),
        }
        if "attention" in record:
            block["attention"] = measure_attention(*record["attention"])
        blocks.append(block)
    return blocks


@functools.partial(jax.jit, static_argnames="model")
def observe_streams(model: LanguageModel, variables, tokens_T, ablation: Ablation) -> list[dict]:
    """Returns two measures of each block's output, with neither attention matrices nor the singular
    values of `observe`, which would take most of the time of a deep model.
    """
    blocks = []
    for record in _run(model, variables, tokens_T, ablation):
        of_stream = ("residual", "token_similarity")
        blocks.append({name: measures.STREAM[name](record["output"]) for name in of_stream})
    return blocks


@functools.partial(jax.jit, static_argnames="model")
def chosen_experts(model: LanguageModel, variables, tokens_T) -> list[jax.Array]:
    """Returns the experts of each token, (T, K), for each block with a router."""
    records = _run(model, variables, tokens_T, WHOLE)
    return [record["experts"] for record in records if "experts" in record]


def _run(model: LanguageModel, variables, tokens_T, ablation: Ablation) -> list[dict]:
    """Returns for each block {"input": (T, D), "output": (T, D), "attention": arrays and window,
    "experts": (T, K)}; the last two, where it has them. What the caller drops is not compiled.
    """
    # the records of the blocks that have begun; attention and routers write to the last one
    records = []

    def record_block(number, block, x_BxTxD):
        records.append({"input": x_BxTxD[0]})
        y_BxTxD = block(x_BxTxD)
        records[number]["output"] = y_BxTxD[0]
        return y_BxTxD

    def intercept(call, arguments, keywords, method):
        match method.module, method.method_name:
            # other classes compute in their own way, so nothing can be ablated in them
            case Block() as block, "__call__" if type(block) in (Block, BlockVariant):
                return apply_block(block, *arguments, ablation)
            # the call goes on below, so that later blocks get its result
            case Attention(), "attend_with_cache":
                q, k, _, mask, slopes_H = arguments[:5]
                records[-1]["attention"] = attention_weights(q, k, mask, slopes_H)
            case Router(), "__call__":
                experts_BxTxK, gates_BxTxK = call(*arguments, **keywords)
                records[-1]["experts"] = experts_BxTxK[0]
                return experts_BxTxK, gates_BxTxK
        return call(*arguments, **keywords)

    with (
        jax.default_matmul_precision("highest"),
        replaced_blocks(record_block),
        nn.intercept_methods(intercept),
    ):
        prefill(model, variables, tokens_T[None], "hidden")
    return records


def attention_weights(q_1xHxTxK, k_1xGxTxK, mask, slopes_H):
    """Returns (H, T, T), and the window."""
    _, groups, time, _ = k_1xGxTxK.shape
    # the attention to values that are the identity
    values = jnp.broadcast_to(jnp.eye(time, dtype=k_1xGxTxK.dtype), (1, groups, time, time))
    weights_1xHxTxT = attention(q_1xHxTxK, k_1xGxTxK, values, mask, slopes_H, backend="reference")
    return weights_1xHxTxT[0], mask.window


def _measure_stream(x_TxD) -> dict:
    return {name: measure(x_TxD.astype(jnp.float32)) for name, measure in measures.STREAM.items()}


def measure_attention(weights_HxTxT, window: int) -> dict:
    """Returns {measure: (H,)}."""
    by_head = {
        "entropy": functools.partial(measures.attention_entropy, window=window),
        "first_weight": measures.first_weight,
        "effective_rank": measures.effective_rank,
        "log_determinant": measures.log_determinant,
    }
    return {name: jax.lax.map(measure, weights_HxTxT) for name, measure in by_head.items()}
