"""Parameters as a flat dictionary of tensors, with the names and layouts of PyTorch's modules.

Stacked layers and paths are apart, numbered (`trunk.paths.0.blocks.1.mlp.up.weight`); the weight of a linear layer is
(outputs, inputs), of a convolution (outputs, inputs, taps). The outputs of `attention.qkv` are ordered by head, then
queries, keys, values, then width: (H, 3, K).
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

MOST_LISTED = 3  # names in a message
STACKED = ("layers", "path")
TABLES = ("token_embedding", "position_embedding", "head")  # weights that are no module's of their own


class Place(NamedTuple):
    """Where a tensor is in the parameters."""

    name: str  # of the tensor
    path: tuple[str, ...]  # of the array that holds it
    index: tuple[int, ...]  # in that array: its layer, or its path and its layer
    axes: tuple[str, ...]  # of the tensor, as the model names them
    shape: tuple[int, ...]  # of the tensor in the model


def from_params(model: models.LanguageModel, params) -> dict[str, np.ndarray]:
    """Returns all parameters of a model as it is trained, in float32."""
    arrays = flax.traverse_util.flatten_dict(jax.device_get(params))
    return {place.name: to_torch(np.asarray(arrays[place.path][place.index], np.float32), place)
            for place in places(model)}


def shapes(model: models.LanguageModel) -> dict[str, tuple[int, ...]]:
    """Returns the names of a model's tensors, and their shapes."""
    return {place.name: jax.eval_shape(lambda x, place=place: to_torch(x, place),
                                       jax.ShapeDtypeStruct(place.shape, "float32")).shape for place in places(model)}


def to_params(model: models.LanguageModel, tensors: Mapping[str, np.ndarray],
              their_name: Callable[[str], str] = str, where: str = ""):
    """Returns the parameters that these tensors are: the inverse of `from_params`.

    Raises UserError if tensors are missing, too many, or of another shape than the model's; `where` is the file, and
    `their_name` turns a name of ours into the one in it.
    """
    wanted = shapes(model)

    def refuse(what: str, names: list[str]):
        more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
        raise UserError(f"{where}: {what}: {', '.join(names[:MOST_LISTED])}{more}")

    if missing := [their_name(name) for name in wanted if name not in tensors]:
        refuse("tensors are missing", missing)
    if extra := [their_name(name) for name in tensors if name not in wanted]:
        refuse("there are tensors that such a model has not", extra)
    if misshapen := [f"{their_name(name)} is {tensors[name].shape}, not {shape}"
                     for name, shape in wanted.items() if tensors[name].shape != shape]:
        refuse("tensors have other shapes than the model's", misshapen)
    abstract = flax.traverse_util.flatten_dict(nn.unbox(models.abstract_params(model)))
    arrays = {path: np.empty(x.shape, np.float32) for path, x in abstract.items()}
    for place in places(model):
        arrays[place.path][place.index] = from_torch(np.asarray(tensors[place.name], np.float32), place)
    return flax.traverse_util.unflatten_dict(arrays)


def places(model: models.LanguageModel) -> Iterator[Place]:
    """Yields every tensor of a model, in the order of its parameters."""
    for name, part in models.abstract_params(model).items():
        children = part.items() if name == "trunk" else [("", part)]
        for child, tree in children:
            yield from _places(tree, tuple(filter(None, (name, child))), (), "")


def _places(tree, path: tuple[str, ...], index: tuple[int, ...], prefix: str) -> Iterator[Place]:
    """Yields the tensors of a part of the parameters. `index` is that of the stacks it is in, `prefix` the name of the
    innermost of them."""
    boxes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    stacked = {box.names[len(index)] if len(box.names) > len(index) else None for box in boxes}
    name = ".".join(filter(None, (prefix, re.sub(r"_(?=\d)", ".", path[-1]) if prefix else dotted(path))))
    if len(stacked) == 1 and stacked <= set(STACKED):
        for i in range(boxes[0].value.shape[len(index)]):
            yield from _children(tree, path, (*index, i), f"{name}.{i}")
    else:
        yield from _children(tree, path, index, name)


def _children(tree, path, index, name) -> Iterator[Place]:
    if isinstance(tree, nn.Partitioned):
        yield Place(tensor_name(path[-1], name), path, index, tree.names[len(index):],
                    tree.value.shape[len(index):])
        return
    for child, part in tree.items():
        yield from _places(part, (*path, child), index, name)


def dotted(path: tuple[str, ...]) -> str:
    """Returns the name of a module: numbers at the end of names are parts of their own."""
    return ".".join(re.sub(r"_(?=\d)", ".", part) for part in path)


def tensor_name(leaf: str, name: str) -> str:
    if leaf in TABLES:
        return f"{name}.weight"
    return f"{name.removesuffix(leaf)}weight" if leaf in ("kernel", "scale") else name


def to_torch(x, place: Place):
    """Returns a parameter as PyTorch has it."""
    match place.path[-1], place.axes:
        case "bias", _:
            return x.reshape(-1)
        case "kernel", ("conv_time", *_):
            return x.T
        case "kernel", axes:
            return x.reshape(math.prod(x.shape[:num_inputs(axes)]), -1).T
    return x


def from_torch(x, place: Place):
    """Returns the inverse of `to_torch`."""
    is_kernel = place.path[-1] == "kernel"
    return (x.T if is_kernel else x).reshape(place.shape)


def num_inputs(axes: tuple[str, ...]) -> int:
    """Returns how many of the leading axes of a dense layer's kernel are inputs."""
    return len(axes) - 1 if axes[-1] == "embed" else 1
