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

import dataclasses
import functools
import math
import re

import flax.linen as nn
import jax

from smallgpt_jax.models import LanguageModel, abstract_params, named_parts
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.attention_variants import AttentionVariant
from smallgpt_jax.ops.attention import select_backend
from smallgpt_jax.ops.attention_mask import AttentionMask
from smallgpt_jax.ops.xla_attention import QUERIES


def memory_breakdown(
    model: LanguageModel, mesh, state, sequences: float, loss_chunks: int, separate_documents: bool
) -> dict[str, float]:
    """Returns the terms of this module's formula, in bytes per device.

    `sequences` is the number of sequences that a device computes at a time. `state` contains shapes
    with shardings. The sizes of weights, gradients and moments are computed from it, so they are
    exact for any optimizer and mesh.
    """
    c = model.config
    tensor, element = mesh.shape["tensor"], 2 if c.dtype == "bfloat16" else 4
    positions = sequences * c.context_length

    def kept(qkv: float) -> float:
        """Returns the saved activations per position and block, in model widths; `qkv` is 0 without
        attention.
        """
        inner = (
            4 if c.mlp == "gated" else 2
        ) * c.mlp_ratio  # gated: also the up-projection and the product
        return {
            "none": 4 + (qkv + inner) / tensor,
            "dots": 3 + (qkv + inner / 2) / tensor,
            "full": 1,
        }[c.remat]

    activations = sum(
        count * positions * width * element * kept(0) for count, width in other_mixers(model, mesh)
    )
    for layers in attention_layers(model, mesh, separate_documents):
        qkv = (2 + 2 * c.kv_heads / c.num_heads) * layers.heads * layers.head_width / layers.width
        activations += layers.count * positions * layers.width * element * kept(qkv)
        if layers.backend == "xla" and c.remat == "none":
            mask, length = (
                AttentionMask(layers.window, is_causal=c.attention_mask == "causal"),
                c.context_length,
            )
            chunks = [
                mask.keys(start, min(start + QUERIES, length), length)
                for start in range(0, length, QUERIES)
            ]
            keys = sum(chunk.stop - chunk.start for chunk in chunks) / len(
                chunks
            )  # average number of keys per query
            activations += layers.count * positions * keys * layers.heads * element / tensor
    if c.remat != "full":
        ranks = sum(
            math.prod(p.shape[: p.module_stacks]) * p.shape[-1]
            for p in jax.tree.leaves(abstract_params(model))
            if p.axes[-1:] == ("rank",)
        )
        activations += positions * element * ranks / mesh.shape["path"]
    weights, average = bytes_on_device(state.trained), bytes_on_device(state.ema)
    whole = {axis: bytes_on_device(state.trained, gathered=axis) for axis in ("data", "fsdp")}
    gathered = max(whole["data"], whole["fsdp"] if c.remat == "none" else 0)
    return {
        "weights": weights,
        "moments": bytes_on_device(state.opt_state),
        "gradients": whole["data"],
        **({"average": average} if average else {}),
        "gathered": gathered * element / 4 if gathered > weights else 0,
        "activations": activations,
        "logits": positions * c.vocab_size * (4 + element) / (tensor * loss_chunks),
    }


def bytes_on_device(tree, gathered: str = "") -> int:
    """With `gathered`, as if the arrays were gathered along this mesh axis."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape))
        * x.dtype.itemsize
        * (x.sharding.mesh.shape[gathered] if gathered in x.sharding.spec else 1)
        for x in jax.tree.leaves(tree)
    )


def format_bytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


@dataclasses.dataclass(frozen=True)
class AttentionLayers:
    """Identical attention layers. `count` is per device; `fallback_reason` is "" unless `backend`
    is a fallback.
    """

    count: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    window: int
    backend: str
    fallback_reason: str


def attention_layers(model: LanguageModel, mesh, separate_documents: bool) -> list[AttentionLayers]:
    """Returns the attention layers of a model of any architecture, recognized by the axis names of
    their weights.
    """
    found, c = [], model.config
    windows = {
        path: mixer.config.window
        for path, mixer in mixers(model).items()
        if isinstance(mixer, Attention)
    }
    segment_ids = (
        jax.ShapeDtypeStruct((1, c.context_length), "int32") if separate_documents else None
    )
    prefixes = (
        jax.ShapeDtypeStruct((1, c.context_length), "bool")
        if c.attention_mask == "prefix"
        else None
    )
    modules: dict[tuple, dict[str, int]] = {}  # {path of a module: {axis of a weight: size}}
    for p in jax.tree.leaves(abstract_params(model)):
        modules.setdefault(p.path[:-1], {}).update(zip(p.axes, p.shape))
    for path, sizes in modules.items():
        if "qkv" not in sizes or "embed" not in sizes:
            continue
        window = windows.get(path[:-1], 0)
        backend, fallback_reason = select_backend(
            c.attention,
            mesh.devices.flat[0].platform,
            time=c.context_length,
            head_width=sizes["head_width"],
            dtype=c.dtype,
            mask=AttentionMask(window, segment_ids, prefixes, c.attention_mask != "bidirectional"),
            has_alibi=c.position == "alibi",
            per_group=sizes["qkv"] - 2,
        )
        count = c.loops * sizes.get("layers", 1) * sizes.get("path", 1) // mesh.shape["path"]
        heads = sizes["heads"] * (sizes["qkv"] - 2)
        found.append(
            AttentionLayers(
                count,
                sizes["embed"],
                heads,
                sizes["heads"],
                sizes["head_width"],
                window,
                backend,
                fallback_reason,
            )
        )
    return found


def other_mixers(model: LanguageModel, mesh) -> list[tuple[int, int]]:
    """Returns (number per device, model width) for each group of identical mixers other than
    attention.
    """
    if set(model.config.mixers) == {"attention"}:  # tracing long contexts takes seconds
        return []
    found, params = [], jax.tree.leaves(abstract_params(model))
    for path, mixer in mixers(model).items():
        if isinstance(mixer, Attention):
            continue
        # The mixer may have no weights, so the weights of the whole block show how many are
        # stacked.
        weight = next(p for p in params if p.path[: len(path) - 1] == path[:-1])
        sizes = dict(zip(weight.axes, weight.shape))
        count = (
            model.config.loops * sizes.get("layers", 1) * sizes.get("path", 1) // mesh.shape["path"]
        )
        found.append((count, mixer.config.d_model))
    return found


def mixers(model: LanguageModel) -> dict[tuple[str, ...], nn.Module]:
    """Returns {module path: mixer}. Callers must not change it."""
    return trace_mixers(model, named_parts(model.config))


@functools.cache
def trace_mixers(model: LanguageModel, parts: tuple):
    """Traces the model, because the weights show neither windows nor classes. For `parts`, see
    `trace_variables`.
    """
    found = {}

    def record(call, arguments, keywords, method):
        *outer, name = method.module.path or ("",)
        if isinstance(method.module, Attention) or (name == "mixer" and "mixer" not in outer):
            found[method.module.path] = method.module.clone(
                parent=None
            )  # without its variables, which are tracers
        return call(*arguments, **keywords)

    tokens = jax.ShapeDtypeStruct((1, model.config.context_length), "int32")
    with nn.intercept_methods(record):
        jax.eval_shape(model.init, jax.random.key(0), tokens)
    return found


def components(model: LanguageModel) -> dict[str, int]:
    """Returns {component: number of parameters}; custom modules are listed under their own
    names.
    """
    built_in = (
        "token embedding",
        "position embedding",
        "attention",
        "MLP",
        "head",
        "LayerNorms",
        "between blocks",
    )
    counts = dict.fromkeys(built_in, 0)
    custom = {
        path: type(mixer).__name__
        for path, mixer in mixers(model).items()
        if type(mixer) not in (Attention, AttentionVariant)
    }
    for p in jax.tree.leaves(abstract_params(model)):
        mixer = next(
            (name for prefix, name in custom.items() if p.path[: len(prefix)] == prefix), None
        )
        component = mixer or component_of([re.sub(r"_\d+$", "", name) for name in p.path])
        counts[component] = counts.get(component, 0) + p.size
    return {component: count for component, count in counts.items() if count}


def component_of(names: list[str]) -> str:
    components = {
        "value_embedding": "value embeddings",
        "residual_scales": "scalars of blocks",
        "input_mix": "scalars of blocks",
        "attention_canon": "convolutions",
        "mixer_canon": "convolutions",
        "mlp_canon": "convolutions",
        "smear": "smear",
        "token_embedding": "token embedding",
        "position_embedding": "position embedding",
        "attention": "attention",
        "mlp": "MLP",
        "head": "head",
    }  # the first that is in `names`
    if component := next(
        (component for name, component in components.items() if name in names), None
    ):
        return component
    if any(name.endswith("_norm") or name == "LayerNorm" for name in names):
        return "LayerNorms"
    if not {"paths", "path_logits", "compress"}.isdisjoint(names):  # of pgpt, lgpt and cgpt
        return "between blocks"
    return next(name for name in names if name not in ("trunk", "blocks"))
