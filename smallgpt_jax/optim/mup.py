"""Hyperparameter transfer by muP (Yang et al., arXiv 2203.03466) and CompleteP (Dey et al., arXiv
2505.01618, table 1; ε as corrected in arXiv 2512.22382).

The best learning rate of a small base model is close to the best one of a larger model. The table
in docs/optimizers.md has the rules, with m = (number of inputs of a matrix) / (the same in the base
model), and m_L = depth / base_depth. A matrix is hidden if its inputs and its outputs grow with the
width; of a router, only the inputs grow. A vector that all heads share, such as the scale of the
queries' norm, does not grow if the heads have a fixed width.

The model does not compute the factors of the forward pass. A weight w with a factor c is stored as
their product, which has c times the initial std and the rate of w, and 1/c times its decay and ε:
Adam's steps do not depend on the scale of the gradient (arXiv 2203.03466, section J.2.1). So
inference and exports need to know nothing about it.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import ModelConfig, Parameter
from smallgpt_jax.models.language_model import head_std
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.muon import uses_muon

# Logical axes of matrices whose initial std is 1/√inputs. Axes of flax's own layers have no names.
_SCALED_BY_INPUTS = {"path_embed", "embed_compressed", None}


class Multipliers(NamedTuple):
    """Of one parameter: numbers, or arrays with as many axes as the parameter. The product of rate
    and decay does not change, which is the rule for the decay.
    """

    init: Any = 1.0
    rate: Any = 1.0
    epsilon: Any = 1.0

    def with_factor(self, c):
        """Returns the multipliers of a weight that is stored as the product with c."""
        return Multipliers(self.init * c, self.rate * c, self.epsilon / c)


def base_config(model: ModelConfig, optimizer: OptimizerConfig) -> ModelConfig:
    """Returns the model config at the base width. Raises UserError if muP has no rules for it."""
    _refuse_models_without_rules(model, optimizer)
    width = optimizer.base_width or model.d_model
    fields = {**dataclasses.asdict(model), "d_model": width}
    # With heads of a fixed width, their number changes in proportion, otherwise their width does.
    for field in ("num_heads", "num_kv_heads") if model.head_dim else ():
        fields[field], rest = divmod(getattr(model, field) * width, model.d_model)
        if rest:
            optimizer.refuse(
                "base_width",
                f"the base model would have {getattr(model, field)} · {width} / "
                f"{model.d_model} heads, which is not an integer; change it, or set "
                f"config.model.{field}",
            )
    try:
        return models.make_config(**fields)
    except UserError as error:
        raise UserError(
            f"config.optimizer.base_width={width}: no such base model ({error}); change it"
        ) from None


def _refuse_models_without_rules(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    if model.rank_ratio:
        rule = "cannot be combined with config.optimizer.base_width or base_depth"
        model.refuse("rank_ratio", f"{rule}; set it to 0")
    without_rules = (
        ("smear", "base_width", False),
        ("input_mix", "base_depth", False),
        ("loops", "base_depth", 1),
    )
    for field, base, allowed in without_rules:
        if getattr(optimizer, base) and getattr(model, field) != allowed:
            rule = f"cannot be combined with config.optimizer.{base}"
            model.refuse(field, f"{rule}; set it to {allowed}")
    if optimizer.base_depth and model.norm_position != "pre":
        rule = "must be 'pre' with config.optimizer.base_depth"
        model.refuse("norm_position", f"{rule}; change it, or set base_depth to 0")
    if optimizer.base_width and model.tie_embeddings and model.ends_with_norm:
        position = f"config.model.norm_position={model.norm_position!r}"
        rule = f"cannot be combined with config.optimizer.base_width and {position}"
        model.refuse("tie_embeddings", f"{rule}; set it to False")


def multipliers(trained, base, model: ModelConfig, optimizer: OptimizerConfig):
    """Returns a tree of `Multipliers`; `trained` and `base` are trees of `models.Parameter`."""
    width_ratio = model.d_model / (optimizer.base_width or model.d_model)
    depth_ratio = model.depth / (optimizer.base_depth or model.depth)
    is_muon = optimizer.name == "muon"

    def of_parameter(p: Parameter, base: Parameter) -> Multipliers:
        usual = Multipliers(epsilon=1 / width_ratio)
        if p.path == ("head",):
            std = head_std(base.shape[1]) / head_std(p.shape[1])
            return usual._replace(init=std).with_factor(1 / width_ratio)
        if p.path[0] == "final_norm":  # with tied embeddings, it has the factor of the head
            return usual.with_factor(1 / width_ratio if model.tie_embeddings else 1.0)
        result = _of_matrix(usual, p, base, is_muon) if p.is_matrix else _of_vector(p, base)
        if "layers" in p.axes:
            result = in_block(result, p, depth_ratio)
        if p.path[-2:] == ("q_norm", "scale") or ("qkv" in p.axes and not model.qk_norm):
            result = result.with_factor(_query_factors(p, base))
        return result

    return jax.tree.map(of_parameter, trained, base)


def _of_matrix(usual: Multipliers, p: Parameter, base: Parameter, is_muon: bool) -> Multipliers:
    """Returns the multipliers of a matrix, but for what it gets as a part of a block.

    A dimension is as wide as in the base model (vocabulary, positions) or wider by the ratio of the
    widths: `inputs` and `outputs` are these ratios.
    """
    input_axes, output_axes = p.matrix_axes
    inputs = math.prod(p.shape[i] / base.shape[i] for i in input_axes)
    outputs = math.prod(p.shape[i] / base.shape[i] for i in output_axes)
    if inputs == 1:  # an embedding
        return usual
    if outputs == 1:  # like the head: few outputs of the wide state
        return usual.with_factor(1 / inputs)
    std = 1.0 if _SCALED_BY_INPUTS & set(p.axes) else inputs**-0.5
    # With m times the width, the singular values of Muon's updates grow as √m. Those of Adam's grow
    # as m, because its updates of a hidden matrix have a low rank (Yang et al., arXiv 2310.17813).
    rate = inputs**-0.5 if is_muon and uses_muon(p) else 1 / inputs
    return usual._replace(init=std, rate=rate)


def _of_vector(p: Parameter, base: Parameter) -> Multipliers:
    # The gradient of an entry is the sum over all outputs that it changes: over m times as many,
    # if there are not m times as many entries.
    return Multipliers(epsilon=base.size / p.size)


def in_block(outside: Multipliers, p: Parameter, depth_ratio: float) -> Multipliers:
    """Returns the multipliers of a parameter of a block, from those that it has outside of one."""
    inside = outside._replace(epsilon=outside.epsilon / depth_ratio)
    if p.axes[-1] != "embed" or "vocab" in p.axes:  # value embeddings are no residual branch
        return inside
    # The last matrix of a residual branch, or its bias, gets the factor 1/r with r times the blocks, and
    # so the std of the base model times 1/r. Its own std, 0.02/√(2N) for N blocks, is that of the
    # base model times 1/√r already: 1/√r is left.
    return inside.with_factor(1 / depth_ratio)._replace(init=inside.init / math.sqrt(depth_ratio))


def _query_factors(p: Parameter, base: Parameter) -> np.ndarray:
    """Returns √(K of the base model / K) for queries, 1 for keys and values, like `p`."""
    factor = math.sqrt(base.shape[-1] / p.shape[-1])
    shape = [1] * len(p.shape)
    if "qkv" not in p.axes:  # the scale of the queries' norm
        return np.full(shape, factor, np.float32)
    axis = p.axes.index("qkv")
    shape[axis] = p.shape[axis]
    factors = np.full(shape[axis], factor, np.float32)
    factors[-2:] = 1  # the last two entries are a key and a value
    return factors.reshape(shape)


def scale_initial(params, multipliers):
    """Returns the initial parameters with the std of the rules."""
    if not multipliers:
        return params
    return jax.tree.map(
        lambda x, m: x * m.init, params, {name: multipliers[name] for name in params}
    )


def with_multipliers(
    optimizer: optax.GradientTransformation, multipliers
) -> optax.GradientTransformationExtraArgs:
    """Multiplies ε by dividing the gradient: updates do not depend on its scale otherwise."""
    optimizer = optax.with_extra_args_support(optimizer)

    def update(gradients, state, params=None, **rates):
        scaled = jax.tree.map(lambda g, m: g / m.epsilon, gradients, multipliers)
        updates, state = optimizer.update(scaled, state, params, **rates)
        return jax.tree.map(lambda u, m: u * m.rate, updates, multipliers), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
