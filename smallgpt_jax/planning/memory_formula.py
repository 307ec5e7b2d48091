"""Computes the memory of a training step by a formula, for comparison with the compiler's figures.

The symbols are similar to those of Korthikanti et al., arXiv 2205.05198:

    B  sequences per device at a time      L  blocks
    S  positions per sequence              V  vocabulary size
    D  model width                         N  parameters, ≈ (4 + 2F)·L·D² + V·D
    F  MLP width / D                       T  tensor-parallel shards
    H  heads                               e  bytes per activation
    Q  queries per chunk of XLA's attention

`fsdp` is the number of FSDP shards, Z the number of shards of the train state: fsdp or, if this is
1, `data`. `chunks` is config.train.loss_chunks.

A training step of a GPT needs these bytes per device:

    weights                4·N / (Z·T)
    gradients              4·N / (fsdp·T)
    Adam's moments         8·N / (Z·T)
    average of weights     4·N / (Z·T), with train.ema
    gathered weights       e·N / T, with Z > 1, but not with fsdp > 1 and rematerialization
    block activations      L·S·B·D·e·(4 + (4 + 2F)/T)
      with remat "dots"    L·S·B·D·e·(3 + (4 + F)/T)
      with remat "full"    L·S·B·D·e
    outputs of the first factors, with a rank_ratio
                           S·B·e·(sum of all ranks), without remat "full"
    attention weights      L·B·S·(S + Q)/2·H·e/T, with XLA's attention and without rematerialization
    logits                 S·B·V·(4 + e)/(T·chunks)

In the factor 4 + (4 + 2F)/T of the block activations, the first 4 stands for the inputs of
LayerNorms and projections, 4/T for queries, keys, values and attention outputs, and 2F/T for the
MLP's GELU and its derivative. A mixer other than attention has no 4/T: what it saves inside is
unknown.
"""

import math
import statistics

import jax

from smallgpt_jax.models import LanguageModel, ModelConfig, abstract_params
from smallgpt_jax.models.structure import AttentionLayers, attention_layers, other_mixers
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.ops.xla_attention import QUERIES_PER_CHUNK


def memory_breakdown(
    model: LanguageModel, mesh, state, sequences: float, loss_chunks: int, separate_documents: bool
) -> dict[str, float]:
    """Returns the terms of this module's formula, in bytes per device, for `sequences` at a time."""
    c = model.config
    tensor = mesh.shape["tensor"]
    element = 2 if c.dtype == "bfloat16" else 4  # bytes
    positions = sequences * c.context_length
    # the sizes of arrays are exact, for any optimizer and mesh
    weights, average = bytes_on_device(state.trained), bytes_on_device(state.ema)
    # The state is divided along "data" or "fsdp", never along both: gathering along the other axis
    # changes nothing. Gradients are whole along "data".
    whole = {axis: bytes_on_device(state.trained, gathered=axis) for axis in ("data", "fsdp")}
    # Rematerialization gathers the weights of one block at a time along "fsdp".
    gathered = max(whole["data"], whole["fsdp"] if c.remat == "none" else 0)
    return {
        "weights": weights,
        "moments": bytes_on_device(state.opt_state),
        "gradients": whole["data"],
        **({"average": average} if average else {}),
        # Gathered copies have the dtype of the activations, weights themselves are float32.
        "gathered": gathered * element / 4 if gathered > weights else 0,
        "activations": _activation_bytes(model, mesh, positions, separate_documents),
        "logits": positions * c.vocab_size * (4 + element) / (tensor * loss_chunks),
    }


def _activation_bytes(
    model: LanguageModel, mesh, positions: float, separate_documents: bool
) -> float:
    """Returns the bytes of activations that the backward pass needs."""
    c, tensor = model.config, mesh.shape["tensor"]
    element = 2 if c.dtype == "bfloat16" else 4  # bytes
    activations = 0.0
    for count, width in other_mixers(model, mesh):
        activations += count * positions * width * element * _saved_widths(c, tensor, qkv=0)
    for layers in attention_layers(model, mesh, separate_documents):
        # queries and attention outputs, keys and values
        per_head = 2 + 2 * c.kv_heads / c.num_heads
        qkv = per_head * layers.heads * layers.head_width / layers.width
        saved = _saved_widths(c, tensor, qkv)
        activations += layers.count * positions * layers.width * element * saved
        # Kernels do not save attention weights, and rematerialization computes them again.
        if layers.backend == "xla" and c.remat == "none":
            keys = _keys_per_query(c, layers)
            activations += layers.count * positions * keys * layers.heads * element / tensor
    if c.remat != "full":
        activations += positions * element * _sum_of_ranks(model) / mesh.shape["path"]
    return activations


def _saved_widths(c: ModelConfig, tensor: int, qkv: float) -> float:
    """Returns the saved activations per position and block, in model widths."""
    # `qkv` is the width of queries, keys, values and attention outputs; 0 without attention. Of an
    # MLP, input and output of the activation are saved; of a gated one, the up-projection and the
    # product, too. "none" also saves inputs and outputs of both norms, "dots" results of products
    # and what enters the block, "full" only the latter.
    inner = (4 if c.mlp == "gated" else 2) * c.mlp_ratio
    if c.remat == "full":
        return 1
    return 4 + (qkv + inner) / tensor if c.remat == "none" else 3 + (qkv + inner / 2) / tensor


def _keys_per_query(c: ModelConfig, layers: AttentionLayers) -> float:
    """Returns the mean number of keys that XLA's attention reads per query."""
    # with a prefix, all keys are read, as without a causal mask
    mask = AttentionMask(layers.window, is_causal=c.attention_mask == "causal")
    length = c.context_length
    counts = []
    for start in range(0, length, QUERIES_PER_CHUNK):
        keys = mask.keys(start, min(start + QUERIES_PER_CHUNK, length), length)
        counts.append(keys.stop - keys.start)
    return statistics.fmean(counts)


def _sum_of_ranks(model: LanguageModel) -> int:
    """Returns the sum of the ranks of all factored matrices."""
    params = jax.tree.leaves(abstract_params(model))
    first_factors = [p for p in params if p.axes[-1:] == ("rank",)]
    return sum(math.prod(p.shape[: p.module_stacks]) * p.shape[-1] for p in first_factors)


def bytes_on_device(tree, gathered: str = "") -> int:
    """Returns a device's bytes of abstract arrays, gathered along a mesh axis if one is named."""
    total = 0
    for x in jax.tree.leaves(tree):
        shard_bytes = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        shards = x.sharding.mesh.shape[gathered] if gathered in x.sharding.spec else 1
        total += shard_bytes * shards
    return total
