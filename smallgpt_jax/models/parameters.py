"""A model's parameters: their shapes and logical axes, which flax stores in boxes that only this
module opens.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.models.architectures import find_architecture
from smallgpt_jax.models.config import ModelConfig
from smallgpt_jax.models.custom_code import custom_classes
from smallgpt_jax.models.language_model import LanguageModel
from smallgpt_jax.models.layers import MLPS, NORMS
from smallgpt_jax.models.mixers import find_mixer
from smallgpt_jax.ops.activations import ACTIVATIONS

MODULE_STACKS = (
    "layers",
    "path",
)  # logical axes along which the weights of equal modules are stacked
# Axes that number matrices, such as those of routed experts, or vectors, such as taps of a
# convolution per channel.
STACKS = (*MODULE_STACKS, "expert", "tap")
WHOLE_INPUTS = ("embed", "rank", "lora_rank")  # axes that alone are a matrix's inputs
FLOAT32 = "router"  # an axis of the weights that are not cast, because routers compute in float32
TRACED_POSITIONS = 128


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter, or a variable of the model state, without its values. JAX traces it like a
    ShapeDtypeStruct.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]  # one logical name per axis; None for axes of flax's own layers

    @property
    def name(self) -> str:
        """Such as "kernel", "bias" and "scale"."""
        return self.path[-1]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def module_stacks(self) -> int:
        """The number of leading axes along which the weights of equal modules are stacked."""
        return len(list(itertools.takewhile(MODULE_STACKS.__contains__, self.axes)))

    @property
    def own_axes(self) -> tuple[int, ...]:
        return tuple(i for i, axis in enumerate(self.axes) if axis not in STACKS)

    @property
    def matrix_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of a matrix's inputs and outputs. Outputs are the last axis, or all axes after
        one in WHOLE_INPUTS.
        """
        axes = self.own_axes
        inputs = next(
            (n for n, i in enumerate(axes[:-1], start=1) if self.axes[i] in WHOLE_INPUTS),
            len(axes) - 1,
        )
        return axes[:inputs], axes[inputs:]

    @property
    def is_cast(self) -> bool:
        """Whether the model only reads it cast to its compute dtype: all weights except vectors and
        routers.
        """
        return len(self.own_axes) >= 2 and FLOAT32 not in self.axes

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of matrices, and neither a bias nor a scale."""
        return self.name not in ("bias", "scale") and len(self.own_axes) >= 2


def init_variables(model: LanguageModel, seed: int):
    """Returns {collection: tree of arrays}."""
    return nn.unbox(
        model.init(jax.random.key(seed), jnp.zeros((1, model.config.context_length), jnp.int32))
    )


def abstract_params(model: LanguageModel):
    return abstract_variables(model)["params"]


def abstract_model_state(model: LanguageModel):
    """Returns the collection "state", which is part of TrainState; {} for most models."""
    return abstract_variables(model)["state"]


def abstract_variables(model: LanguageModel):
    """Returns the collections "params" and "state" as trees of `Parameter`. Callers must not change
    them.
    """
    return trace_variables(model, named_parts(model.config))


def named_parts(config: ModelConfig) -> tuple:
    """Returns the classes and functions that the config's names refer to."""
    return (
        find_architecture(config.architecture),
        *map(find_mixer, config.mixers),
        NORMS[config.norm],
        MLPS[config.mlp],
        ACTIVATIONS[config.activation],
    )


@functools.cache
def trace_variables(model: LanguageModel, parts: tuple):
    """`parts` only distinguishes those that use the same name, one after the other, in one
    process.
    """
    # Trace built-in modules with few positions: their variables do not depend on this number. For
    # Qwen3-0.6B, with a context length of 40,960, this takes 0.5 s instead of 23 s.
    c = model.config
    time = c.context_length if custom_classes(c) else min(c.context_length, TRACED_POSITIONS)
    with nn.intercept_methods(name_axes):
        variables = jax.eval_shape(
            model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, time), jnp.int32)
        )
    return {
        collection: with_axes(variables.get(collection, {})) for collection in ("params", "state")
    }


def with_axes(tree):
    def opened(path, box) -> Parameter:
        return Parameter(
            tuple(jax.tree_util.keystr((key,), simple=True) for key in path),
            box.value.shape,
            box.value.dtype,
            tuple(box.names),
        )

    return jax.tree_util.tree_map_with_path(opened, boxed(tree), is_leaf=is_box)


def name_axes(call, arguments, keywords, method: nn.module.InterceptorContext):
    """Boxes parameters without axis names, so that `nn.scan` and `nn.vmap` record the axes that
    they add.
    """
    result, module = call(*arguments, **keywords), method.module
    own = module.variables.get("params", {}) if module.scope else {}
    for name, value in own.items():
        if not isinstance(value, Mapping) and not is_box(
            value
        ):  # a mapping contains the parameters of a submodule
            module.put_variable("params", name, boxed(value))
    return result


def boxed(tree):
    return jax.tree.map(
        lambda x: x if is_box(x) else PlainAxes(x, names=(None,) * x.ndim), tree, is_leaf=is_box
    )


def is_box(x) -> bool:
    return isinstance(x, nn.Partitioned)


class PlainAxes(nn.LogicallyPartitioned):
    """A box for a parameter without axis names. Unlike its base class, it accepts added axes
    without a name.
    """

    def add_axis(self, index: int, params: dict):
        return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

    def remove_axis(self, index: int, params: dict):
        return super().remove_axis(index, {nn.PARTITION_NAME: None, **params})


def require_factors(model: LanguageModel) -> None:
    """Custom architectures use `rank_ratio` only through the blocks or the dense layers of this
    package.
    """
    if model.config.rank_ratio and not any(
        "rank" in p.axes for p in jax.tree.leaves(abstract_params(model))
    ):
        model.config.refuse(
            "rank_ratio", f"no layer of {model.config.architecture} uses this field; set it to 0"
        )


def num_parameters(model: LanguageModel) -> int:
    return sum(p.size for p in jax.tree.leaves(abstract_params(model)))


def num_active_parameters(model: LanguageModel) -> int:
    """Returns the number of parameters that one token uses, without the experts not chosen for
    it.
    """
    c = model.config
    return sum(
        p.size * c.experts_per_token // c.num_experts if "expert" in p.axes else p.size
        for p in jax.tree.leaves(abstract_params(model))
    )
