"""The number of parameters of each component of a model."""

import re

import jax

from smallgpt_jax.models import LanguageModel, Parameter, abstract_params
from smallgpt_jax.models.attention import Attention
from smallgpt_jax.models.attention_variants import AttentionVariant
from smallgpt_jax.models.structure import mixers

# in the order of the table that `plan` prints
_BUILT_IN = (
    "token embedding, position embedding, attention, MLP, head, LayerNorms, between blocks"
).split(", ")
# {name in a parameter's path: component}; the first that is in the path counts
_COMPONENT_OF = {
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
}
_BETWEEN_BLOCKS = {"paths", "path_logits", "compress"}  # of pgpt, lgpt and cgpt


def components(model: LanguageModel) -> dict[str, int]:
    """Returns {component: number of parameters}; custom modules have their own names."""
    custom = {}  # {path of a mixer: name of its class}
    for path, mixer in mixers(model).items():
        if type(mixer) not in (Attention, AttentionVariant):
            custom[path] = type(mixer).__name__
    counts = dict.fromkeys(_BUILT_IN, 0)
    for p in jax.tree.leaves(abstract_params(model)):
        component = _component_of(p, custom)
        counts[component] = counts.get(component, 0) + p.size
    return {component: count for component, count in counts.items() if count}


def _component_of(parameter: Parameter, custom: dict[tuple[str, ...], str]) -> str:
    path = parameter.path
    for mixer_path, name in custom.items():
        if path[: len(mixer_path)] == mixer_path:
            return name
    names = [re.sub(r"_\d+$", "", name) for name in path]  # LayerNorm_0, compress_1
    for name, component in _COMPONENT_OF.items():
        if name in names:
            return component
    # Custom blocks choose the names of their norms; only norms of `layers.norm` have the axis.
    if "norm" in parameter.axes or any(map(_is_norm, names)):
        return "LayerNorms"
    if not _BETWEEN_BLOCKS.isdisjoint(names):
        return "between blocks"
    # Numbers are those of stacks: blocks/0, blocks/1.
    own_names = (name for name in names if name not in ("trunk", "blocks") and not name.isdigit())
    return next(own_names, path[-1])


def _is_norm(name: str) -> bool:
    return name == "LayerNorm" or "norm" in name.split("_")
