"""Where a chip's memory goes in a training step: an account by hand, to hold beside the compiler's.

In the notation of Korthikanti et al. (arXiv 2205.05198), bytes a chip: B sequences on it at one time, S
positions, D width, F the MLP's inner width / D, H heads, L blocks, V vocabulary, N parameters, T parts by
`tensor`, e bytes of an activation. A model of N ≈ (4 + 2F)·L·D² + V·D parameters needs

    4·N weights, 4·N gradients and 8·N of Adam's moments (float32), each divided by fsdp · T; with fsdp
    also e·N/T for weights put together and kept from the forward to the backward pass, unless that
    computes its blocks again; and
    L·S·B·D·e·(4 + (4 + 2F)/T) for the backward pass of its blocks: 4 are what the LayerNorms and the
    projections after them read; queries, keys, values and what attention finds are 4/T; the MLP's GELU,
    its value and derivative, 2F/T. XLA's attention adds its weights, L·B·S·(S + Q)/2·H·e/T in parts of Q
    queries (`attention.QUERIES`) that read no later keys. Rematerialisation
    keeps less: "dots" L·S·B·D·e·(3 + (4 + F)/T), "full" L·S·B·D·e.
    S·B·V·(4 + e)/(T·chunks) for the logits.
"""

import dataclasses
import math
import re

import flax.linen as nn
import jax

from smallgpt_jax.models import LanguageModel, abstract_params, attention


def account(model: LanguageModel, mesh, state, sequences: float, loss_chunks: int,
            separate_documents: bool) -> dict[str, float]:
    """The account above, in bytes of one chip that holds `sequences` at one time. Weights and moments are
    those of `state` (shapes that know where they lie), whatever the optimiser and the mesh."""
    c = model.config
    tensor, element = mesh.shape["tensor"], 2 if c.dtype == "bfloat16" else 4
    positions = sequences * c.context_length
    kept = {"none": 4 + (4 + 2 * c.mlp_ratio) / tensor, "dots": 3 + (4 + c.mlp_ratio) / tensor, "full": 1}
    activations = 0
    for layers in attention_layers(model, mesh, separate_documents):
        activations += layers.count * positions * layers.width * element * kept[c.remat]
        if layers.backend == "xla" and c.remat == "none":
            keys = (c.context_length + min(c.context_length, attention.QUERIES)) / 2  # that a query reads, on average
            activations += layers.count * positions * keys * layers.heads * element / tensor
    weights = bytes_on_device(state.params)
    is_gathered = mesh.shape["fsdp"] > 1 and c.remat == "none"
    return {"weights": weights, "moments": bytes_on_device(state.opt_state), "gradients": weights,
            "gathered": weights * mesh.shape["fsdp"] * element / 4 if is_gathered else 0,
            "activations": activations,
            "logits": positions * c.vocab_size * (4 + element) / (tensor * loss_chunks)}


def bytes_on_device(tree) -> int:
    """Of arrays, or of shapes that know where they lie."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def is_exhausted(error: Exception) -> bool:
    """Whether a compiler or a device says that its memory is too small. A TPU's vmem and smem are not meant: what
    its kernels need there does not depend on the batch."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text and "memory space vmem" not in text and "memory space smem" not in text


def in_words(size: float) -> str:
    """3e6 → '2.9 MiB'; 3e9 → '2.79 GiB'."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


@dataclasses.dataclass(frozen=True)
class AttentionLayers:
    """`count` equal ones on each device; `backend` computes them, `why` if not the one asked for."""

    count: int
    width: int
    heads: int
    head_width: int
    backend: str
    why: str


def attention_layers(model: LanguageModel, mesh, separate_documents: bool) -> list[AttentionLayers]:
    """The attention layers of any architecture, told by the axes that their weights name."""
    found, c = [], model.config
    for box in jax.tree.leaves(abstract_params(model), is_leaf=lambda x: isinstance(x, nn.Partitioned)):
        sizes = dict(zip(box.names, box.value.shape))
        if "qkv" in sizes and "embed" in sizes:
            backend, why = attention.choose(
                c.attention, mesh.devices.flat[0].platform, time=c.context_length,
                head_width=sizes["head_width"], dtype=c.dtype, has_segments=separate_documents,
                has_alibi=c.position == "alibi")
            count = sizes.get("layers", 1) * sizes.get("path", 1) // mesh.shape["path"]
            found.append(AttentionLayers(
                count, sizes["embed"], sizes["heads"], sizes["head_width"], backend, why))
    return found


def components(model: LanguageModel) -> dict[str, int]:
    """Parameters by part of the model. Modules that are not built in have their own names, without number."""
    built_in = ("token embedding", "position embedding", "attention", "MLP", "head", "LayerNorms", "between blocks")
    counts = dict.fromkeys(built_in, 0)
    for path, x in jax.tree_util.tree_leaves_with_path(nn.unbox(abstract_params(model))):
        part = part_of([re.sub(r"_\d+$", "", key.key) for key in path])
        counts[part] = counts.get(part, 0) + x.size
    return {part: count for part, count in counts.items() if count}


def part_of(names: list[str]) -> str:
    """The part of the model that holds a parameter, from the names of its modules and its own."""
    parts = {"token_embedding": "token embedding", "position_embedding": "position embedding",
             "attention": "attention", "mlp": "MLP", "head": "head"}
    if part := next((parts[name] for name in names if name in parts), None):
        return part
    if any(name.endswith("_norm") or name == "LayerNorm" for name in names):
        return "LayerNorms"
    if not {"paths", "path_logits", "compress"}.isdisjoint(names):  # what pgpt, lgpt and cgpt add to the blocks
        return "between blocks"
    return next(name for name in names if name not in ("trunk", "blocks"))
