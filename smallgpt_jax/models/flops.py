"""FLOPs of functions, counted exactly from their jaxprs, without running them.

Matrix products and convolutions count as FLOPs, as in model FLOPs utilization (Chowdhery et al.,
arXiv 2204.02311, appendix B). Other arithmetic, such as that of norms, softmax and recurrences, is
counted apart.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from smallgpt_jax.models import LanguageModel, ModelConfig, abstract_variables

# Primitives whose FLOPs cannot be counted. They raise an error instead of counting as zero.
_UNKNOWN = (
    "scaled_matmul custom_call ffi_call pallas_call pure_callback fft triangular_solve".split()
)
# Arithmetic besides products: one operation per element of the result, or, for a reduction, of the
# input.
_ELEMENTWISE = set(
    "add add_any sub mul div neg max min abs sign exp exp2 expm1 log log1p tanh logistic erf "
    "erf_inv sqrt rsqrt cbrt square pow integer_pow sin cos tan".split()
)
_REDUCTIONS = set(
    "reduce_sum reduce_max reduce_min reduce_prod cumsum cumprod cummax cummin cumlogsumexp".split()
)
# On other devices, recurrent mixers compute states with more products.
_CPU = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice("cpu", None, "cpu")
)


class UnknownFlops(ValueError):
    """The FLOPs of a function cannot be counted. The message names the operation."""


class Operations(NamedTuple):
    """Numbers of operations in products, and of other operations on real numbers."""

    products: int = 0
    others: int = 0


class Cost(NamedTuple):
    """The cost of training a model on one token."""

    flops: float | None  # None if they cannot be counted
    # other arithmetic operations of the forward pass, per FLOP of the forward pass
    uncounted: float | None
    problem: str = ""  # why the FLOPs cannot be counted


def train_cost(model: LanguageModel, terms: Iterable = ()) -> Cost:
    """Returns the cost of training: 3 times the FLOPs of the forward pass, because the backward
    pass computes two products for each of its products (Kaplan et al., arXiv 2001.08361, section
    2.1); and those of further `terms` of the loss, see `objectives.objective.Term.train_products`.
    """
    try:
        forward = forward_operations(model)
        of_terms = sum(term.train_products(model) for term in terms)
    except UnknownFlops as error:
        return Cost(None, None, str(error))
    products = 3 * forward.products + of_terms
    return Cost(products / model.config.context_length, forward.others / forward.products)


def train_flops_per_token(model: LanguageModel, terms: Iterable = ()) -> float | None:
    return train_cost(model, terms).flops


def forward_operations(model: LanguageModel, method: str = "__call__") -> Operations:
    """Returns the operations on context_length tokens, equal for all attention backends."""
    model = model.clone(config=counted_config(model.config))
    tokens = jax.ShapeDtypeStruct((1, model.config.context_length), "int32")
    variables = abstract_variables(model)
    return count_operations(functools.partial(model.apply, method=method), variables, tokens)


def counted_config(config: ModelConfig) -> ModelConfig:
    """Returns a config whose modules compute the products that count, on every platform."""
    return config.replace(attention="counted", grouped_matmul="ragged", remat="none")


def update_flops(params, optimizer: optax.GradientTransformation) -> int:
    """Returns the FLOPs of products per update, which only Muon has."""
    update = functools.partial(
        optax.with_extra_args_support(optimizer).update, learning_rate=0.0, weight_decay=0.0
    )
    state = jax.eval_shape(optimizer.init, params)
    return count_operations(update, params, state, params).products  # `params` as gradients


def count_operations(function, *arguments) -> Operations:
    """Returns the operations of function(*arguments), which may be `jax.ShapeDtypeStruct`s.

    The body of a loop is counted once per iteration, or once if their number is unknown; of a
    conditional, the most expensive branch. Raises UnknownFlops.
    """
    with jax.sharding.use_abstract_mesh(_CPU):
        return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr) -> Operations:
    return _sum(map(_count_equation, jaxpr.eqns))


def _count_equation(equation) -> Operations:
    name, inputs = equation.primitive.name, equation.invars
    result = equation.outvars[0].aval if equation.outvars else None
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return _matrix_product(inputs[0].aval, contracted, result)
    if name == "ragged_dot_general":
        dimensions = equation.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = dimensions.dot_dimension_numbers
        if set(dimensions.lhs_ragged_dimensions) & set(contracted):
            raise UnknownFlops(
                "the FLOPs of a ragged_dot_general that contracts the ragged dimension cannot be "
                "counted"
            )
        return _matrix_product(inputs[0].aval, contracted, result)
    if name == "conv_general_dilated":
        # Each output is a product with one output channel's kernel; zeros count too.
        channels = inputs[1].aval.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return Operations(2 * result.size * inputs[1].aval.size // channels)
    if any(word in name for word in _UNKNOWN):
        raise UnknownFlops(f"the FLOPs of {name} cannot be counted")
    if name in _ELEMENTWISE | _REDUCTIONS:
        array = inputs[0].aval if name in _REDUCTIONS else result
        is_real = jnp.issubdtype(array.dtype, jnp.inexact)
        return Operations(0, array.size if is_real else 0)
    inner = [_count(jaxpr) for jaxpr in _inner_jaxprs(equation)]
    if name == "scan":
        return Operations(*(equation.params["length"] * number for number in _sum(inner)))
    if name == "cond":  # the dearest branch, by its products
        return max(inner)
    if name == "while" and _sum(inner).products:
        raise UnknownFlops(
            "matrix products in a loop of unknown length (while) cannot be counted; use "
            "jax.lax.scan"
        )
    return _sum(inner)


def _matrix_product(operand, contracted: Iterable[int], result) -> Operations:
    # A multiplication and an addition for each element of the result and of the contracted axes.
    return Operations(2 * result.size * math.prod(operand.shape[i] for i in contracted))


def _inner_jaxprs(equation) -> list:
    """Returns those of a loop's body, of the branches of a conditional, of a called function."""
    jaxprs = []
    for parameter in equation.params.values():
        for value in parameter if isinstance(parameter, (tuple, list)) else [parameter]:
            if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
                jaxprs.append(getattr(value, "jaxpr", value))
    return jaxprs


def _sum(operations) -> Operations:
    return Operations(*map(sum, zip(Operations(), *operations)))
