"""Converts parameters to and from a flat dictionary of tensors, with the names and layouts of PyTorch modules.

Stacked layers and paths become separate, numbered tensors (`trunk.paths.0.blocks.1.mlp.up.weight`). Linear weights have
the shape (outputs, inputs), and convolution weights the shape (outputs, inputs, taps). The output axis of
`attention.qkv` is a flattened (heads, 3, head width), where the axis of length 3 is query, key and value.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import flax
import jax
import numpy as np
from flax import linen as nn

from smallgpt_jax import models
from smallgpt_jax.errors import UserError

MAX_LISTED = 3  # maximum number of tensor names in an error message
STACKED = ("layers", "path")
TABLES = ("token_embedding", "position_embedding", "head")  # parameters without a module of their own


class TensorSlot(NamedTuple):
    """Describes a tensor, and the place in the parameter tree where it is stored."""

    name: str
    path: tuple[str, ...]  # the place, in the parameter tree, of the array that contains the tensor
    index: tuple[int, ...]  # the tensor's index in this array: (), (layer,) or (path, layer)
    axes: tuple[str, ...]  # logical axis names of the tensor
    shape: tuple[int, ...]  # shape of the tensor in this project's layout


def from_params(model: models.LanguageModel, params) -> dict[str, np.ndarray]:
    """Returns all parameters of a model as {name: float32 tensor}, in PyTorch's layouts."""
    arrays = flax.traverse_util.flatten_dict(jax.device_get(params))
    return {slot.name: to_torch(np.asarray(arrays[slot.path][slot.index], np.float32), slot)
            for slot in tensor_slots(model)}


def shapes(model: models.LanguageModel) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of a model's tensors, in PyTorch's layouts."""
    return {slot.name: jax.eval_shape(lambda x, slot=slot: to_torch(x, slot),
                                      jax.ShapeDtypeStruct(slot.shape, "float32")).shape
            for slot in tensor_slots(model)}


def to_params(model: models.LanguageModel, tensors: Mapping[str, np.ndarray],
              their_name: Callable[[str], str] = str, where: str = ""):
    """Returns a model's parameter tree with the values of named tensors. Inverts `from_params`.

    Raises UserError for missing and unexpected tensors and for wrong shapes. The error message starts with `where`, the
    path of the imported file. `their_name` maps our tensor names to those in this file, for the message.
    """
    wanted = shapes(model)

    def refuse(what: str, names: list[str]):
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        raise UserError(f"{where}: {what}: {', '.join(names[:MAX_LISTED])}{more}")

    if missing := [their_name(name) for name in wanted if name not in tensors]:
        refuse("missing tensors", missing)
    if extra := [their_name(name) for name in tensors if name not in wanted]:
        refuse("unexpected tensors", extra)
    if misshapen := [f"{their_name(name)} {tensors[name].shape}, expected {shape}"
                     for name, shape in wanted.items() if tensors[name].shape != shape]:
        refuse("wrong shapes", misshapen)
    abstract = flax.traverse_util.flatten_dict(nn.unbox(models.abstract_params(model)))
    arrays = {path: np.empty(x.shape, np.float32) for path, x in abstract.items()}
    for slot in tensor_slots(model):
        arrays[slot.path][slot.index] = from_torch(np.asarray(tensors[slot.name], np.float32), slot)
    return flax.traverse_util.unflatten_dict(arrays)


def tensor_slots(model: models.LanguageModel) -> Iterator[TensorSlot]:
    """Yields a slot for every tensor of a model, in the order of its parameters."""
    for name, part in models.abstract_params(model).items():
        children = part.items() if name == "trunk" else [("", part)]
        for child, tree in children:
            yield from _tensor_slots(tree, tuple(filter(None, (name, child))), (), "")


def _tensor_slots(tree, path: tuple[str, ...], index: tuple[int, ...], prefix: str) -> Iterator[TensorSlot]:
    """Yields the slots of the subtree at `path` in the parameter tree.

    The leading axes of an array in this tree can be the layers, the parallel paths of a pgpt, or both. `index` has one
    entry for each of these axes: the index of the layer or path that the subtree belongs to. `prefix` is the dotted
    name of the module that contains the subtree. If `prefix` is "", the tensor names are derived from `path` alone.
    """
    boxes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    stacked = {box.names[len(index)] if len(box.names) > len(index) else None for box in boxes}
    name = ".".join(filter(None, (prefix, re.sub(r"_(?=\d)", ".", path[-1]) if prefix else dotted(path))))
    if len(stacked) == 1 and stacked <= set(STACKED):
        for i in range(boxes[0].value.shape[len(index)]):
            yield from _children(tree, path, (*index, i), f"{name}.{i}")
    else:
        yield from _children(tree, path, index, name)


def _children(tree, path, index, name) -> Iterator[TensorSlot]:
    if isinstance(tree, nn.Partitioned):
        yield TensorSlot(tensor_name(path[-1], name), path, index, tree.names[len(index):],
                         tree.value.shape[len(index):])
        return
    for child, part in tree.items():
        yield from _tensor_slots(part, (*path, child), index, name)


def dotted(path: tuple[str, ...]) -> str:
    """Returns the dotted name of a module. A trailing number becomes a part of its own: blocks_1 → blocks.1."""
    return ".".join(re.sub(r"_(?=\d)", ".", part) for part in path)


def tensor_name(leaf: str, name: str) -> str:
    """Returns the name that a parameter's tensor has in a PyTorch module.

    `name` is our dotted name of the parameter, and `leaf` is the last key of its path in the parameter tree. PyTorch's
    names of kernels, scales and embedding tables end in `weight`.
    """
    if leaf in TABLES:
        return f"{name}.weight"
    return f"{name.removesuffix(leaf)}weight" if leaf in ("kernel", "scale") else name


def to_torch(x, slot: TensorSlot):
    """Returns a parameter in PyTorch's layout."""
    match slot.path[-1], slot.axes:
        case "bias", _:
            return x.reshape(-1)
        case "kernel", ("conv_time", *_):
            return x.T
        case "kernel", axes:
            return x.reshape(math.prod(x.shape[:num_inputs(axes)]), -1).T
    return x


def from_torch(x, slot: TensorSlot):
    """Inverts `to_torch`."""
    is_kernel = slot.path[-1] == "kernel"
    return (x.T if is_kernel else x).reshape(slot.shape)


def num_inputs(axes: tuple[str, ...]) -> int:
    """Returns the number of input axes of a dense layer's kernel. The input axes precede the output axes."""
    return len(axes) - 1 if axes[-1] == "embed" else 1
