"""FLOPs of a function's matrix products, counted exactly from its jaxpr, without running it."""

import dataclasses
import functools
import math

import jax
import optax
from flax import linen as nn
from jax.extend import core

from smallgpt_jax.models import LanguageModel, abstract_model_state, abstract_params

# Primitives with matrix products whose FLOPs cannot be counted. They raise an error instead of counting as zero.
OTHER_CONTRACTIONS = ("conv_general", "scaled_matmul", "custom_call", "pallas_call", "fft",
                      "triangular_solve")


def train_flops_per_token(model: LanguageModel, teacher: LanguageModel | None = None) -> float:
    """Returns the FLOPs per token of training. Only matrix products are counted.

    Training takes 3 times the FLOPs of the forward pass, because the backward pass computes two products for each
    product of the forward pass (Kaplan et al., arXiv 2001.08361, section 2.1). A `teacher` adds the FLOPs of its own
    forward pass, without the head.
    """
    return 3 * forward_flops_per_token(model) + (forward_flops_per_token(teacher, "hidden") if teacher else 0)


def forward_flops_per_token(model: LanguageModel, method: str = "__call__") -> float:
    """Returns the FLOPs per token of the model's `method`. Only matrix products are counted.

    The result is the same for all attention backends; see `ops.attention.counted`. It is also the same for all backends
    of the experts' products, because unused rows are not counted.
    """
    model = model.clone(config=dataclasses.replace(
        model.config, attention="counted", grouped_matmul="ragged", remat="none"))
    time = model.config.context_length
    tokens = jax.ShapeDtypeStruct((1, time), "int32")
    variables = {"params": abstract_params(model), "state": abstract_model_state(model)}
    return matmul_flops(functools.partial(model.apply, method=method), variables, tokens) / time


def update_flops(model: LanguageModel, optimizer: optax.GradientTransformation) -> int:
    """Returns the FLOPs of the optimizer's matrix products per update. Only Muon has matrix products."""
    params = nn.unbox(abstract_params(model))
    return matmul_flops(optimizer.update, params, jax.eval_shape(optimizer.init, params), params)


def matmul_flops(function, *arguments) -> int:
    """Returns the number of multiplications and additions in the matrix products of function(*arguments).

    The arguments may be `jax.ShapeDtypeStruct`s. The body of a loop is counted once per iteration. In a conditional,
    only the most expensive branch is counted. Raises ValueError for products in a loop of unknown length, and for
    products that are not a dot_general.
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation) -> int:
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)
    if equation.primitive.name == "ragged_dot_general":
        return _count_ragged_dot(equation)
    if any(word in equation.primitive.name for word in OTHER_CONTRACTIONS):
        raise ValueError(f"{equation.primitive.name}: its FLOPs cannot be counted; write the product as a dot_general")
    inner = [_count(_open(value)) for parameter in equation.params.values()
             for value in (parameter if isinstance(parameter, (tuple, list)) else [parameter])
             if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]
    if equation.primitive.name == "scan":
        return equation.params["length"] * sum(inner)
    if equation.primitive.name == "cond":
        return max(inner)
    if equation.primitive.name == "while" and sum(inner):
        raise ValueError("while: matrix products in a loop of unknown length cannot be counted; use jax.lax.scan")
    return sum(inner)


def _count_ragged_dot(equation) -> int:
    """Returns the FLOPs of a ragged_dot_general, which multiplies each row by the matrix of the row's group."""
    dimensions = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = dimensions.dot_dimension_numbers
    if set(dimensions.lhs_ragged_dimensions) & set(contracted):
        raise ValueError("ragged_dot_general: its FLOPs cannot be counted if the ragged dimension is contracted")
    left = equation.invars[0].aval.shape
    return 2 * equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)


def _open(jaxpr):
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
