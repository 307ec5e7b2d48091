"""Memory layout of weights for decoding.

`pack` keeps the tree structure and names of the training parameters. It makes three changes, each to speed up matrix
products with few rows:

- The weights of layers and paths are stacked in training. Here each stack becomes a tuple with one array per layer or
  path, because slicing a stack would copy the weights for every generated token.
- All arrays except vectors and routers are cast to the compute dtype once, instead of for every token.
- The output head is stored transposed: (W, V) instead of (V, W), where V is the vocabulary size and W the head's input
  width. The product of one row with the head then takes 0.68× as long for V = 50,304 and W = 768, and 0.85× as long for
  V = 8,192 and W = 256 (two-core Intel Xeon, jax 0.10.2, float32, 2026-11-22). A column-major physical layout
  (`jax.experimental.layout`) takes 8 to 20 times as long as (V, W), because XLA's CPU compiler copies the head.
"""

import functools

import jax

from smallgpt_jax import models

FLOAT32 = "router"  # weights with this axis stay float32, because routers compute in float32


def pack(model: models.LanguageModel, params, model_state=None):
    """Returns the variables of a model, {"params": …, "state": …}, in the layout for decoding."""
    # One program compiles faster than one program per array.
    pack_all = jax.jit(functools.partial(_pack, abstract=models.abstract_variables(model), dtype=model.config.dtype))
    return pack_all({"params": params, "state": model_state or {}})


def _pack(variables, abstract, dtype: str):
    packed = {collection: jax.tree.map(lambda p, x: unstack(x, p.module_stacks), abstract[collection], tree)
              for collection, tree in variables.items()}

    def cast(p, stack):
        return jax.tree.map(lambda x: x if x.ndim < 2 or FLOAT32 in p.axes else x.astype(dtype), stack)

    params = jax.tree.map(cast, abstract["params"], packed["params"])
    if "head" in params:
        params["head"] = params["head"].T
    return {**packed, "params": params}


def unpack(packed):
    """Returns packed variables in the layout that the model's modules read.

    The head is transposed back to (V, W), and the modules transpose it again. Call `unpack` inside a jitted function,
    where the compiler removes both transpositions.
    """
    params = packed["params"]
    return {**packed, "params": {**params, "head": params["head"].T} if "head" in params else params}


def unstack(x, stacks: int):
    """Splits an array along its first `stacks` axes, and returns a (nested) tuple of arrays."""
    return tuple(unstack(part, stacks - 1) for part in x) if stacks else x
