"""The optimizer: gradient clipping, one of OPTIMIZERS, weight decay, learning rate."""

import jax
import optax

from smallgpt_jax.config.lookup import find_named
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.optim.config import OptimizerConfig
from smallgpt_jax.optim.muon import muon
from smallgpt_jax.optim.mup import with_multipliers

# {name: function (tree of `models.Parameter`, config) → transformation of gradients into updates}.
# The transformation's state may contain arrays of any shapes; `sharding.optimizer_shardings` shards
# them.
OPTIMIZERS = {
    "adamw": lambda _, config: optax.scale_by_adam(config.beta1, config.beta2),
    "lion": lambda _, config: optax.scale_by_lion(config.beta1, config.beta2),
    "muon": muon,
}


def find_optimizer(name: str):
    where = f"config.optimizer.name={short_repr(name)}"
    return find_named(name, OPTIMIZERS, where, ("params", "config"))


def make_optimizer(
    params, config: OptimizerConfig, multipliers=None
) -> optax.GradientTransformationExtraArgs:
    """`params` is a tree of `models.Parameter`; `multipliers` are those of `optim.mup`. `update`
    needs the keywords `learning_rate` and `weight_decay`, which may be traced.
    """
    directions = find_optimizer(config.name)(params, config)
    is_matrix = jax.tree.map(lambda p: p.is_matrix, params)

    # Made anew for each update, because the rates are traced: a rate that were a constant would
    # compile the step again when a resumed run changes it.
    def chain(learning_rate, weight_decay) -> optax.GradientTransformationExtraArgs:
        return optax.chain(
            optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
            with_multipliers(directions, multipliers) if multipliers else directions,
            optax.add_decayed_weights(weight_decay, is_matrix),
            optax.scale_by_learning_rate(lambda count: learning_rate),
        )

    def update(gradients, state, params=None, *, learning_rate, weight_decay):
        return chain(learning_rate, weight_decay).update(gradients, state, params)

    return optax.GradientTransformationExtraArgs(chain(0.0, 0.0).init, update)
