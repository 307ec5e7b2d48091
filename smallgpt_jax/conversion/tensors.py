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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import Parameter
from smallgpt_jax.models.router import ROUTER_AXES
from smallgpt_jax.models.stacks import block_numbers, layer_configs

_MAX_LISTED = 3  # maximum number of tensor names in an error message
# parameters without a module of their own
_TABLES = ("token_embedding", "position_embedding", "value_embedding", "head")


class _TensorSlot(NamedTuple):
    """A tensor's place in the parameter tree.

    For example, trunk.paths.0.blocks.1.mlp.up.weight is at index (0, 1) of the array at
    ("trunk", "paths", "blocks", "mlp", "up", "kernel").
    """

    name: str
    path: tuple[str, ...]  # the array that contains the tensor, as a path in the parameter tree
    index: tuple[int, ...]  # the tensor's index in this array: (), (layer,) or (path, layer)
    axes: tuple[str, ...]
    shape: tuple[int, ...]  # shape of the tensor in this project's layout


def from_params(model: models.LanguageModel, params, model_state=None) -> dict[str, np.ndarray]:
    """Returns {name: float32 tensor}. `model_state` is needed for mixtures of experts."""
    return _read_slots(_tensor_slots(model), params) | _read_slots(
        _router_bias_slots(model), model_state or {}
    )


def _read_slots(slots: Iterable[_TensorSlot], tree) -> dict[str, np.ndarray]:
    arrays = flatten_dict(jax.device_get(tree))
    tensors = {}
    for slot in slots:
        x = np.asarray(arrays[slot.path][slot.index], np.float32)
        tensors[slot.name] = _to_torch(x, slot)
    return tensors


def shapes(model: models.LanguageModel) -> dict[str, tuple[int, ...]]:
    return {
        slot.name: _torch_shape(slot.path[-1], slot.axes, slot.shape)
        for slot in (*_tensor_slots(model), *_router_bias_slots(model))
    }


@functools.cache
def _torch_shape(leaf: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    # The layers of a model share these arguments, so that this traces once and not per layer.
    slot = _TensorSlot("", (leaf,), (), axes, shape)
    return jax.eval_shape(
        lambda x: _to_torch(x, slot), jax.ShapeDtypeStruct(shape, "float32")
    ).shape


def to_params(
    model: models.LanguageModel,
    tensors: Mapping[str, np.ndarray],
    their_name: Callable[[str], str] = str,
    where: str = "",
):
    """Inverts `from_params`. Errors name the file, `where`, and `their_name` of a tensor in it."""
    expected_shapes = shapes(model)

    def refuse(what: str, names: list[str]):
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        raise UserError(f"{where}: {what}: {', '.join(names[:_MAX_LISTED])}{more}")

    missing = [their_name(name) for name in expected_shapes if name not in tensors]
    if missing:
        refuse("missing tensors", missing)
    extra = [their_name(name) for name in tensors if name not in expected_shapes]
    if extra:
        refuse("unexpected tensors", extra)
    misshapen = [
        f"{their_name(name)} {tensors[name].shape}, expected {shape}"
        for name, shape in expected_shapes.items()
        if tensors[name].shape != shape
    ]
    if misshapen:
        refuse("wrong shapes", misshapen)
    abstract = flatten_dict(models.abstract_params(model))
    arrays = {path: np.empty(x.shape, np.float32) for path, x in abstract.items()}
    for slot in _tensor_slots(model):
        arrays[slot.path][slot.index] = _from_torch(
            np.asarray(tensors[slot.name], np.float32), slot
        )
    return unflatten_dict(arrays)


def to_model_state(model: models.LanguageModel, tensors: Mapping[str, np.ndarray]):
    """`tensors` must have passed `to_params`."""
    abstract = flatten_dict(models.abstract_model_state(model))
    arrays = {path: np.zeros(x.shape, x.dtype) for path, x in abstract.items()}
    for slot in _router_bias_slots(model):
        arrays[slot.path][slot.index] = tensors[slot.name]
    return unflatten_dict(arrays)


def _router_bias_slots(model: models.LanguageModel) -> tuple[_TensorSlot, ...]:
    # The path of the router's kernel, but in the model state, and with the last key "bias".
    return tuple(
        _TensorSlot(
            slot.name.removesuffix("weight") + "bias",
            (*slot.path[:-1], "bias"),
            slot.index,
            slot.axes[1:],
            slot.shape[1:],
        )
        for slot in _tensor_slots(model)
        if slot.axes == ROUTER_AXES
    )


@functools.cache
def _tensor_slots(model: models.LanguageModel) -> tuple[_TensorSlot, ...]:
    """Returns, for each exported tensor, its name and its place in the parameters."""
    subtrees = {}  # by path
    for name, tree in models.abstract_params(model).items():
        if name != "trunk":
            subtrees[name,] = tree
            continue
        # `_subtree_slots` would take a trunk of nothing but stacked blocks for a stack of trunks.
        for child, subtree in tree.items():
            subtrees[name, child] = subtree
    slots = []
    for path, tree in subtrees.items():
        slots += _subtree_slots(model.config, tree, path, index=(), name=".".join(path))
    return tuple(slots)


def _subtree_slots(
    config, tree, path: tuple[str, ...], index: tuple[int, ...], name: str
) -> Iterator[_TensorSlot]:
    """Yields the slots at `path`. `index` selects a layer or path along each leading axis."""
    # The tree is a stack of modules if the next axis of every parameter is the same stacking axis,
    # such as `layers`. A pgpt's path is none: its blocks are stacked, its dense layer is not.
    axis = len(index)
    next_axes = {p.axes[axis] if axis < p.module_stacks else None for p in jax.tree.leaves(tree)}
    is_stack = len(next_axes) == 1 and None not in next_axes
    # A number after "_" becomes a part of its own: blocks_1 → blocks.1.
    name = re.sub(r"_(?=\d)", ".", name)
    if is_stack:
        for number, stack, stack_path, i in _stacked_modules(config, tree, path, axis):
            yield from _children(config, stack, stack_path, (*index, i), f"{name}.{number}")
    else:  # a parameter or module, or stacks that begin further down in the tree
        yield from _children(config, tree, path, index, name)


def _children(
    config, tree, path: tuple[str, ...], index: tuple[int, ...], name: str
) -> Iterator[_TensorSlot]:
    if isinstance(tree, Parameter):
        axes, shape = tree.axes[len(index) :], tree.shape[len(index) :]
        yield _TensorSlot(_tensor_name(path[-1], name), path, index, axes, shape)
        return
    for child, subtree in tree.items():
        yield from _subtree_slots(config, subtree, (*path, child), index, f"{name}.{child}")


def _stacked_modules(
    config, tree, path, axis: int
) -> Iterator[tuple[int, Any, tuple[str, ...], int]]:
    """Yields (number, stack, path of the stack, index in the stack) of each module that is stacked
    along `axis`.

    `tree` is usually one stack. If blocks have different attention windows, it contains several;
    see models/stacks.py.
    """
    if not all(child.isdigit() for child in tree):  # one stack, of modules such as attention, mlp
        for i in range(jax.tree.leaves(tree)[0].shape[axis]):
            yield i, tree, path, i
        return
    # several stacks, named 0, 1, …
    length = sum(jax.tree.leaves(stack)[0].shape[axis] for stack in tree.values())
    # path[-1] is stage_0, stage_1, … in an lgpt or cgpt, whose stages have equally many blocks
    stage = re.search(r"_(\d+)$", path[-1])
    first_block = int(stage[1]) * length if stage else 0
    configs = layer_configs(config, length, first=first_block)
    for child, numbers in enumerate(block_numbers(configs)):
        for i, number in enumerate(numbers):
            yield number, tree[str(child)], (*path, str(child)), i


def _tensor_name(leaf: str, name: str) -> str:
    """PyTorch's names of kernels, scales and embedding tables end in `weight`."""
    if leaf in _TABLES:
        return f"{name}.weight"
    if leaf in ("kernel", "scale"):
        return f"{name.removesuffix(leaf)}weight"
    return name


def _to_torch(x, slot: _TensorSlot):
    match slot.path[-1], slot.axes:
        case "bias", _:
            return x.reshape(-1)
        case "kernel", ("conv_time", *_):  # (taps, inputs, outputs)
            return x.T
        case "kernel", axes:  # (*inputs, *outputs)
            num_inputs = math.prod(x.shape[: _num_input_axes(axes)])
            return x.reshape(num_inputs, -1).T
    return x


def _from_torch(x, slot: _TensorSlot):
    is_kernel = slot.path[-1] == "kernel"
    return (x.T if is_kernel else x).reshape(slot.shape)


def _num_input_axes(axes: tuple[str, ...]) -> int:
    # The output projection has (heads, head width, embed), the QKV projection (embed, …).
    return len(axes) - 1 if axes[-1] == "embed" else 1
