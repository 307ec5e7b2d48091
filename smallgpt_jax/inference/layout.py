"""Memory layout of weights for decoding: products with few rows become faster."""

import math

import jax

from smallgpt_jax import models


def pack(model: models.LanguageModel, params, model_state=None):
    # One program compiles faster than one program per array.
    return jax.jit(_packer(model))({"params": params, "state": model_state or {}})


def packed_shapes(model: models.LanguageModel):
    abstract = models.abstract_variables(model)
    variables = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), abstract)
    return jax.eval_shape(_packer(model), variables)


def _packer(model: models.LanguageModel):
    """Returns the function that `pack` compiles."""
    abstract = models.abstract_variables(model)
    is_custom = bool(models.custom_classes(model.config))

    def unstack(p: models.Parameter, x):
        # Training stacks the weights of equal layers, and of a pgpt's parallel paths, along leading
        # axes. Slicing such a stack would copy the weights per token.
        return _unstack(x, p.module_stacks)

    def unstack_and_cast(p: models.Parameter, x):
        arrays = unstack(p, x)
        if not p.is_cast or is_custom:  # custom modules may compute in float32
            return arrays
        # once, instead of for every token
        return jax.tree.map(lambda array: array.astype(model.config.dtype), arrays)

    def pack_variables(variables):
        params = jax.tree.map(unstack_and_cast, abstract["params"], variables["params"])
        # The head as (W, V) instead of (V, W), for vocabulary size V and input width W: the product
        # of one row with it takes 0.68× as long for V = 50,304 and W = 768, and 0.85× as long for V
        # = 8,192 and W = 256 (two-core Intel Xeon, jax 0.10.2, float32, 2026-11-22). A column-major
        # physical layout (jax.experimental.layout) takes 8 to 20 times as long as (V, W), because
        # XLA's CPU compiler copies the head.
        if "head" in params:
            params["head"] = params["head"].T
        state = jax.tree.map(unstack, abstract["state"], variables["state"])
        return {"params": params, "state": state}

    return pack_variables


def num_bytes(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# Inside a jitted function, the compiler removes this transposition of the head and the modules'.
def unpack(packed):
    params = packed["params"]
    if "head" in params:
        params = {**params, "head": params["head"].T}
    return {**packed, "params": params}


# (P, L, …) with num_stacks=2, for paths of layers, becomes a tuple of P tuples of L arrays
def _unstack(x, num_stacks: int):
    return tuple(_unstack(entry, num_stacks - 1) for entry in x) if num_stacks else x
