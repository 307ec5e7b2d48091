"""A model's parameters: shapes and logical axes. Only this module opens flax's boxes."""

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
from smallgpt_jax.models.layers import find_mlp, find_norm
from smallgpt_jax.models.mixers import find_mixer
from smallgpt_jax.ops.activations import ACTIVATIONS

# logical axes along which the weights of equal modules are stacked
MODULE_STACKS = ("layers", "path")
# Axes that number matrices, such as those of routed experts, or vectors, such as taps of a
# convolution per channel.
STACKS = (*MODULE_STACKS, "expert", "tap")
_WHOLE_INPUTS = ("embed", "rank", "lora_rank")  # axes that alone are a matrix's inputs
_FLOAT32 = "router"  # an axis of the weights that are not cast, because routers compute in float32
_TRACED_POSITIONS = 128


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter or variable of the state, without values, like a ShapeDtypeStruct."""

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
        """The axes of a matrix's inputs and outputs: the last, or those after _WHOLE_INPUTS."""
        # (embed, heads, head_width) has one input axis, (heads, head_width, embed) one output axis.
        axes = self.own_axes
        for n, i in enumerate(axes[:-1], start=1):
            if self.axes[i] in _WHOLE_INPUTS:
                return axes[:n], axes[n:]
        return axes[:-1], axes[-1:]

    @property
    def is_cast(self) -> bool:
        """Whether the model only reads it in its compute dtype: not vectors, not routers."""
        return len(self.own_axes) >= 2 and _FLOAT32 not in self.axes

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of matrices, and neither a bias nor a scale."""
        return self.name not in ("bias", "scale") and len(self.own_axes) >= 2


def init_variables(model: LanguageModel, seed: int):
    """Returns {collection: tree of arrays}."""
    tokens_1xT = jnp.zeros((1, model.config.context_length), jnp.int32)
    return nn.unbox(model.init(jax.random.key(seed), tokens_1xT))


def abstract_params(model: LanguageModel):
    return abstract_variables(model)["params"]


def abstract_model_state(model: LanguageModel):
    """Returns the collection "state", which is part of TrainState; {} for most models."""
    return abstract_variables(model)["state"]


def abstract_variables(model: LanguageModel):
    """Returns "params" and "state" as trees of `Parameter`. Callers must not change them."""
    return trace_variables(model, named_parts(model.config))


def named_parts(config: ModelConfig) -> tuple:
    """Returns the classes and functions that the config's names refer to."""
    return (
        find_architecture(config.architecture),
        *map(find_mixer, config.mixers),
        find_norm(config.norm),
        find_mlp(config.mlp),
        ACTIVATIONS[config.activation],
    )


@functools.cache
def trace_variables(model: LanguageModel, parts: tuple):
    """`parts` distinguishes classes that have had the same name in this process."""
    # Trace built-in modules with few positions: their variables do not depend on this number. For
    # Qwen3-0.6B, with a context length of 40,960, this takes 0.5 s instead of 23 s.
    c = model.config
    time = c.context_length if custom_classes(c) else min(c.context_length, _TRACED_POSITIONS)
    tokens_1xT = jax.ShapeDtypeStruct((1, time), jnp.int32)
    with nn.intercept_methods(name_axes):
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens_1xT)
    return {name: with_axes(variables.get(name, {})) for name in ("params", "state")}


def with_axes(tree):
    """Returns a tree of `Parameter`, from a tree of flax's boxes or of arrays."""

    def opened(path, box) -> Parameter:
        names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        return Parameter(names, box.value.shape, box.value.dtype, tuple(box.names))

    return jax.tree_util.tree_map_with_path(opened, _boxed(tree), is_leaf=_is_box)


def name_axes(call, arguments, keywords, method: nn.module.InterceptorContext):
    """An interceptor for the initialization (`nn.intercept_methods`): puts each parameter that has
    no names of its axes into a box with empty ones, in which `nn.scan` and `nn.vmap` record the axes
    that they add.
    """
    result = call(*arguments, **keywords)
    module = method.module
    params = module.variables.get("params", {}) if module.scope else {}
    for name, value in params.items():
        is_submodule = isinstance(value, Mapping)
        if not is_submodule and not _is_box(value):
            module.put_variable("params", name, _boxed(value))
    return result


def _boxed(tree):
    def box(x):
        return x if _is_box(x) else _PlainAxes(x, names=(None,) * x.ndim)

    return jax.tree.map(box, tree, is_leaf=_is_box)


def _is_box(x) -> bool:
    return isinstance(x, nn.Partitioned)


class _PlainAxes(nn.LogicallyPartitioned):
    """A box without axis names; unlike its base class, it accepts added axes without one."""

    # `nn.scan` and `nn.vmap` in the modules of users need not name the axes that they add.
    def add_axis(self, index: int, params: dict):
        return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

    def remove_axis(self, index: int, params: dict):
        return super().remove_axis(index, {nn.PARTITION_NAME: None, **params})


def require_factors(model: LanguageModel) -> None:
    """Custom architectures use `rank_ratio` only through this package's layers."""
    if not model.config.rank_ratio:
        return
    if not any("rank" in p.axes for p in jax.tree.leaves(abstract_params(model))):
        model.config.refuse(
            "rank_ratio", f"no layer of {model.config.architecture} uses this field; set it to 0"
        )


def num_parameters(model: LanguageModel) -> int:
    return sum(p.size for p in jax.tree.leaves(abstract_params(model)))


def num_active_parameters(model: LanguageModel) -> int:
    """Returns the number of parameters that a token uses: not those of other experts."""
    c, total = model.config, 0
    for p in jax.tree.leaves(abstract_params(model)):
        is_routed = "expert" in p.axes
        total += p.size * c.experts_per_token // c.num_experts if is_routed else p.size
    return total
