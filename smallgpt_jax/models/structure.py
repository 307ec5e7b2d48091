"""Which layers a model has: found in its weights and by tracing it, for any architecture."""

import dataclasses
import functools

import flax.linen as nn
import jax

from smallgpt_jax.models import LanguageModel, abstract_params, named_parts
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.ops.attention import AttentionShape, select_backend
from smallgpt_jax.ops.attention_mask import AttentionMask


@dataclasses.dataclass(frozen=True)
class AttentionLayers:
    """Identical attention layers."""

    count: int  # per device
    width: int
    heads: int
    kv_heads: int
    head_width: int
    window: int
    backend: str
    fallback_reason: str  # "" unless `backend` is a fallback


def attention_layers(model: LanguageModel, mesh, separate_documents: bool) -> list[AttentionLayers]:
    """Returns the attention layers, recognized by the axis names of their weights."""
    c = model.config
    shape_1xT = 1, c.context_length
    segment_ids = jax.ShapeDtypeStruct(shape_1xT, "int32") if separate_documents else None
    prefixes = jax.ShapeDtypeStruct(shape_1xT, "bool") if c.attention_mask == "prefix" else None
    windows = {}
    for path, mixer in mixers(model).items():
        if isinstance(mixer, Attention):
            windows[path] = mixer.config.window
    layers = []
    for path, sizes in _axis_sizes(model).items():
        if "qkv" not in sizes or "embed" not in sizes:
            continue
        # the projection of queries, keys and values is a part of the mixer
        window = windows.get(path[:-1], 0)
        per_group = sizes["qkv"] - 2  # queries per key–value head
        backend, fallback_reason = select_backend(
            c.attention,
            mesh.devices.flat[0].platform,
            AttentionShape(c.context_length, sizes["head_width"], c.dtype, per_group),
            AttentionMask(window, segment_ids, prefixes, c.attention_mask != "bidirectional"),
            has_alibi=c.position == "alibi",
        )
        layers.append(
            AttentionLayers(
                count=_count_per_device(model, mesh, sizes),
                width=sizes["embed"],
                heads=sizes["heads"] * per_group,
                kv_heads=sizes["heads"],
                head_width=sizes["head_width"],
                window=window,
                backend=backend,
                fallback_reason=fallback_reason,
            )
        )
    return layers


def other_mixers(model: LanguageModel, mesh) -> list[tuple[int, int]]:
    """Returns (number per device, width) of each group of mixers other than attention."""
    if set(model.config.mixers) == {"attention"}:  # tracing long contexts takes seconds
        return []
    groups, params = [], jax.tree.leaves(abstract_params(model))
    for path, mixer in mixers(model).items():
        if isinstance(mixer, Attention):
            continue
        # The mixer may have no weights, so the weights of the whole block show how many are
        # stacked.
        weight = next(p for p in params if p.path[: len(path) - 1] == path[:-1])
        sizes = dict(zip(weight.axes, weight.shape))
        groups.append((_count_per_device(model, mesh, sizes), mixer.config.d_model))
    return groups


def mixers(model: LanguageModel) -> dict[tuple[str, ...], nn.Module]:
    """Returns {module path: mixer}. Callers must not change it."""
    return _trace_mixers(model, named_parts(model.config))


@functools.cache
def _trace_mixers(model: LanguageModel, parts: tuple):
    """Traces, because weights show neither windows nor classes; `parts`: `trace_variables`."""
    traced = {}

    def note_mixer(call, arguments, keywords, method):
        module = method.module
        *outer, name = module.path or ("",)  # the path of the model itself is empty
        # a custom mixer may have parts that are also called so
        if isinstance(module, Attention) or (name == "mixer" and "mixer" not in outer):
            traced[module.path] = module.clone(parent=None)  # without variables, which are tracers
        return call(*arguments, **keywords)

    tokens = jax.ShapeDtypeStruct((1, model.config.context_length), "int32")
    with nn.intercept_methods(note_mixer):
        jax.eval_shape(model.init, jax.random.key(0), tokens)
    return traced


def _axis_sizes(model: LanguageModel) -> dict[tuple[str, ...], dict[str, int]]:
    """Returns {path of a module: {axis of a weight: size}}."""
    modules: dict[tuple, dict[str, int]] = {}
    for p in jax.tree.leaves(abstract_params(model)):
        modules.setdefault(p.path[:-1], {}).update(zip(p.axes, p.shape))
    return modules


def _count_per_device(model: LanguageModel, mesh, sizes: dict[str, int]) -> int:
    """Returns how often a module with these axes is applied; each loop counts."""
    stacked = sizes.get("layers", 1) * sizes.get("path", 1)
    return model.config.loops * stacked // mesh.shape["path"]
