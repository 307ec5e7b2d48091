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
from collections.abc import Callable, Iterator, Mapping
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
    """A tensor's place in the variables of a model.

    For example, trunk.paths.0.blocks.1.mlp.up.weight is at index (0, 1) of the array at
    ("params", "trunk", "paths", "blocks", "mlp", "up", "kernel").
    """

    name: str
    path: tuple[str, ...]  # the collection, "params" or "state", and the array's path in it
    index: tuple[int, ...]  # the tensor's index in this array: (), (layer,) or (path, layer)
    axes: tuple[str, ...]
    shape: tuple[int, ...]  # shape of the tensor in this project's layout


def from_params(model: models.LanguageModel, params, model_state=None) -> dict[str, np.ndarray]:
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
    tensors: Mapping[str, np.ndarray],
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
        name = ".".join(path)
        slots += _subtree_slots(model.config, tree, ("params", *path), index=(), name=name)
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
    """Yields (number, stack, path of the stack, index in it) of each module stacked along `axis`."""
    # `tree` is usually one stack. If the blocks differ, it contains several: see models/stacks.py.
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
            # The output projection has (heads, head width, embed), the QKV projection (embed, …).
            num_input_axes = len(axes) - 1 if axes[-1] == "embed" else 1
            return x.reshape(math.prod(x.shape[:num_input_axes]), -1).T
    return x


def _from_torch(x, slot: _TensorSlot):
    # The shape divides again what `_to_torch` has flattened, such as heads and their width.
    is_kernel = slot.path[-1] == "kernel"
    return (x.T if is_kernel else x).reshape(slot.shape)
