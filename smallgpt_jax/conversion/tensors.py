"""Our parameters as a flat dictionary of tensors, laid out as PyTorch's modules have theirs.

Layers and paths lie apart, numbered (`trunk.paths.0.blocks.1.mlp.up.weight`); the weight of a linear
layer is (outputs, inputs), of a convolution (outputs, inputs, taps). The outputs of `attention.qkv`
are ordered by head, then queries, keys, values, then width: (H, 3, K).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

import flax
import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder

MOST_LISTED = 3  # names in a message
# Of linear layers and the head (inputs, outputs); of convolutions (taps, inputs, outputs).
TRANSPOSED = ("matrix", "head_matrix", "kernel")


def from_params(model: models.LanguageModel, params) -> dict[str, np.ndarray]:
    """All parameters of a model as it is trained, in float32."""
    return jax.tree.map(np.asarray, _tensors(model, params))


def shapes(model: models.LanguageModel) -> dict[str, tuple[int, ...]]:
    """The names of a model's tensors, and their shapes."""
    abstract = flax.linen.unbox(models.abstract_params(model))
    return {name: x.shape for name, x in jax.eval_shape(lambda p: _tensors(model, p), abstract).items()}


def to_params(model: models.LanguageModel, tensors: Mapping[str, np.ndarray],
              their_name: Callable[[str], str] = str, where: str = ""):
    """The inverse of `from_params`.

    Raises UserError if tensors are missing, too many, or of another shape than the model's; `where` is
    the file, and `their_name` turns a name of ours into the one in it.
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
    abstract = _decoding_shapes(model)
    apart = {path: _from_torch(path[-1], np.asarray(tensors[_name(path)], np.float32)).reshape(x.shape)
             for path, x in flax.traverse_util.flatten_dict(abstract).items()}
    return _stacked(flax.traverse_util.unflatten_dict(apart),
                    flax.linen.unbox(models.abstract_params(model)))


def _tensors(model: models.LanguageModel, params) -> dict:
    apart = decoder.unstacked(_float32(model), params)
    return {_name(path): _to_torch(path[-1], x)
            for path, x in flax.traverse_util.flatten_dict(apart).items()}


def _float32(model: models.LanguageModel) -> models.LanguageModel:
    return models.LanguageModel(dataclasses.replace(model.config, dtype="float32"))


def _decoding_shapes(model: models.LanguageModel):
    return flax.linen.unbox(decoder.decoding_shapes(_float32(model), rows=1, cache_length=1)["params"])


def _name(path: tuple[str, ...]) -> str:
    *modules, leaf = path
    leaf = {"matrix": "weight", "kernel": "weight", "scale": "weight",
            "token_embedding": "token_embedding.weight", "head_matrix": "head.weight",
            "position_embedding": "position_embedding.weight"}.get(leaf, leaf)
    return ".".join([*(re.sub(r"_(?=\d)", ".", module) for module in modules), leaf])


def _to_torch(leaf: str, x):
    if leaf == "bias":
        return x.reshape(-1)
    return x.T if leaf in TRANSPOSED else x


def _from_torch(leaf: str, x):
    return x.T if leaf in TRANSPOSED else x


def _stacked(apart, wanted):
    """The inverse of `decoder.unstacked`: what it lays apart, as `wanted` has it."""
    if not isinstance(wanted, dict):
        return apart.reshape(wanted.shape)
    params = {}
    for name, shape in wanted.items():
        if name in apart:
            params[name] = _stacked(apart[name], shape)
        elif name == "kernel":
            params[name] = apart["matrix"].reshape(shape.shape)
        elif name == "head":
            params[name] = apart["head_matrix"].T
        else:
            length = jax.tree.leaves(shape)[0].shape[0]
            layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shape)
            params[name] = jax.tree.map(
                lambda *layers: np.stack(layers),
                *(_stacked(apart[f"{name}_{i}"], layer) for i in range(length)))
    return params
