"""The optimizer: gradient clipping, one of OPTIMIZERS, weight decay, learning rate."""

import jax
import optax

from smallgpt_jax.run.config import OptimizerConfig
from smallgpt_jax.training.learning_rate import learning_rate_schedule
from smallgpt_jax.training.muon import muon
from smallgpt_jax.training.transfer import with_multipliers

# {name: function (tree of `models.Parameter`, config) → transformation of gradients into updates}. The transformation's
# state may contain arrays of any shapes; `sharding.optimizer_shardings` shards them.
OPTIMIZERS = {
    "adamw": lambda _, config: optax.scale_by_adam(config.beta1, config.beta2),
    "lion": lambda _, config: optax.scale_by_lion(config.beta1, config.beta2),
    "muon": muon,
}


def make_optimizer(params, config: OptimizerConfig, multipliers=None) -> optax.GradientTransformation:
    """`params` is a tree of `models.Parameter`; `multipliers` is that of `transfer.multipliers`. Weight decay applies
    only to matrices.
    """
    config.validate_choice("name", OPTIMIZERS)
    directions = OPTIMIZERS[config.name](params, config)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        with_multipliers(directions, multipliers) if multipliers else directions,
        optax.add_decayed_weights(config.weight_decay, jax.tree.map(lambda p: p.is_matrix, params)),
        optax.scale_by_learning_rate(learning_rate_schedule(config)))
