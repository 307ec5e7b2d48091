"""Converts parameters to and from a flat dictionary of tensors, with the names and layouts of
PyTorch modules.

Stacked layers and paths become separate, numbered tensors (`trunk.paths.0.blocks.1.mlp.up.weight`).
Linear weights have the shape (outputs, inputs), and convolution weights the shape (outputs, inputs,
taps). The outputs of `attention.qkv` are, for each key–value head in turn, its query heads, its key
and its value. The matrices of routed experts keep their shape (experts, inputs, outputs). Of the
model state, only the routers' biases are converted.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import Parameter
from smallgpt_jax.models.router import ROUTER_AXES
from smallgpt_jax.models.stacks import block_numbers, layer_configs

_MAX_LISTED = 3  # maximum number of tensor names in an error message
_FLOATS = ("float16", "bfloat16", "float32", "float64")  # others are quantized, with scales
# parameters without a module of their own
_TABLES = ("token_embedding", "position_embedding", "value_embedding", "head")
Tensors = Mapping[str, np.ndarray]  # by name


class _TensorSlot(NamedTuple):
    """A tensor's place in the variables of a model.

    For example, trunk.paths.0.blocks.1.mlp.up.weight is at index (0, 1) of the array at
    ("params", "trunk", "paths", "blocks", "mlp", "up", "kernel").
    """

    name: str
    path: tuple[str, ...]  # the collection, "params" or "state", and the array's path in it
    index: tuple[int, ...]  # the tensor's index in this array: (), (layer,) or (path, layer)
    axes: tuple[str, ...]
    shape: tuple[int, ...]  # shape of the tensor in this project's layout


def from_params(model: models.LanguageModel, params, model_state=None) -> Tensors:
    """Returns {name: float32 tensor}. `model_state` is needed for mixtures of experts."""
    arrays = flatten_dict(jax.device_get({"params": params, "state": model_state or {}}))
    tensors = {}
    for slot in _tensor_slots(model):
        x = np.asarray(arrays[slot.path][slot.index], np.float32)
        tensors[slot.name] = _to_torch(x, slot)
    return tensors


def shapes(model: models.LanguageModel) -> dict[str, tuple[int, ...]]:
    shape_of = {}
    for slot in _tensor_slots(model):
        no_memory = np.broadcast_to(np.float32(0), slot.shape)
        shape_of[slot.name] = _to_torch(no_memory, slot).shape
    return shape_of


def to_variables(
    model: models.LanguageModel,
    tensors: Tensors,
    their_name: Callable[[str], str],
    where: str,
):
    """Inverts `from_params`. Errors name the file, `where`, and `their_name` of a tensor in it."""
    expected_shapes = shapes(model)
    problems = {
        "missing tensors": [their_name(name) for name in expected_shapes if name not in tensors],
        "unexpected tensors": [their_name(name) for name in tensors if name not in expected_shapes],
        "wrong shapes": [
            f"{their_name(name)} {tensors[name].shape}, expected {shape}"
            for name, shape in expected_shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
    }
    problems["tensors that are no floats"] = [
        f"{their_name(name)} {x.dtype}"
        for name, x in tensors.items()
        if x.dtype.name not in _FLOATS
    ]
    # The first kind alone: a tensor under a wrong name is missing and unexpected.
    for problem, names in problems.items():
        if names:
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            raise UserError(f"{where}: {problem}: {', '.join(names[:_MAX_LISTED])}{more}")
    abstract = flatten_dict(models.abstract_variables(model))
    # zeros, because the model state has more than the routers' biases
    arrays = {path: np.zeros(p.shape, p.dtype) for path, p in abstract.items()}
    for slot in _tensor_slots(model):
        arrays[slot.path][slot.index] = _from_torch(tensors[slot.name], slot)
    variables = unflatten_dict(arrays)
    return variables["params"], variables.get("state", {})


# cached, because an import asks for the slots of a model several times
@functools.cache
def _tensor_slots(model: models.LanguageModel) -> tuple[_TensorSlot, ...]:
    """Returns, for each exported tensor, its name and its place in the variables."""
    slots = []
    for p in jax.tree.leaves(models.abstract_params(model)):
        axes, shape = p.axes[p.module_stacks :], p.shape[p.module_stacks :]
        for index in np.ndindex(p.shape[: p.module_stacks]):
            name = _tensor_name(model.config, p, index)
            slots.append(_TensorSlot(name, ("params", *p.path), index, axes, shape))
    # block by block, and not each parameter of all blocks; zeros put block 2 before block 10
    slots.sort(key=lambda slot: re.sub(r"\d+", lambda number: number[0].zfill(6), slot.name))
    routers = [slot for slot in slots if slot.axes == ROUTER_AXES]
    return (*slots, *map(_router_bias_slot, routers))


def _router_bias_slot(router: _TensorSlot) -> _TensorSlot:
    # The path of the router's kernel, but in the model state, and with the last key "bias".
    return _TensorSlot(
        router.name.removesuffix("weight") + "bias",
        ("state", *router.path[1:-1], "bias"),
        router.index,
        router.axes[1:],
        router.shape[1:],
    )


def _tensor_name(config: models.ModelConfig, p: Parameter, index: tuple[int, ...]) -> str:
    """Returns trunk.paths.0.blocks.1.mlp.up.weight for trunk/paths/blocks/mlp/up/kernel at (0, 1)."""
    number = dict(zip(p.axes, index))  # by stacking axis, which is "path" or "layers"
    name = ".".join(p.path)
    if "path" in number:
        name = name.replace(".paths.", f".paths.{number['path']}.")
    # a stack of blocks; or one of several, as in trunk.stage_1.0.mlp.up.kernel
    stack = re.search(r"\.(blocks|stage_(\d+))\.(?:(\d+)\.)?", name)
    if stack:
        block = number["layers"]
        if stack[3]:  # the place in this stack → the place among all of them, see models/stacks.py
            length = getattr(config, "blocks_per_stage", 0)
            length = length or config.num_layers // getattr(config, "num_paths", 1)
            configs = layer_configs(config, length, first=int(stack[2] or 0) * length)
            block = block_numbers(configs)[int(stack[3])][block]
        name = name.replace(stack[0], f".{stack[1]}.{block}.")
    name = re.sub(r"_(?=\d)", ".", name)  # stage_1 → stage.1
    # PyTorch's names of kernels, scales and embedding tables end in `weight`.
    if p.name in _TABLES:
        return f"{name}.weight"
    if p.name in ("kernel", "scale"):
        return f"{name.removesuffix(p.name)}weight"
    return name


def _to_torch(x, slot: _TensorSlot):
    match slot.path[-1], slot.axes:
        case "bias", _:
            return x.reshape(-1)
        case "kernel", ("conv_time", *_):  # (taps, inputs, outputs)
            return x.T
        case "kernel", axes:  # (*inputs, *outputs)
            # The output projection has (heads, head width, embed), the QKV projection (embed, …).
            num_input_axes = len(axes) - 1 if axes[-1] == "embed" else 1
            return x.reshape(math.prod(x.shape[:num_input_axes]), -1).T
    return x


def _from_torch(x, slot: _TensorSlot):
    # The shape divides again what `_to_torch` has flattened, such as heads and their width.
    is_kernel = slot.path[-1] == "kernel"
    return (x.T if is_kernel else x).reshape(slot.shape)
