"""Learning-rate schedules: a linear warmup from 0, then one of SCHEDULES."""

import jax.numpy as jnp
import optax

from smallgpt_jax.run.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    config.validate_choice("schedule", SCHEDULES)
    return optax.join_schedules(
        [optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps), SCHEDULES[config.schedule](config)],
        [config.warmup_steps])


def cosine(config: OptimizerConfig) -> optax.Schedule:
    steps = config.decay_steps - config.warmup_steps
    floor = config.final_learning_rate / config.learning_rate if config.learning_rate else 0.0
    return optax.cosine_decay_schedule(config.learning_rate, steps, floor)


def linear(config: OptimizerConfig) -> optax.Schedule:
    steps = config.decay_steps - config.warmup_steps
    return optax.linear_schedule(config.learning_rate, config.final_learning_rate, steps)


def warmup_stable_decay(shape):
    """Returns a schedule that decays by shape(x), x from 0 to 1, over the last decay_fraction."""
    def schedule(config: OptimizerConfig) -> optax.Schedule:
        steps = config.decay_steps - config.warmup_steps
        length = min(round(config.decay_fraction * config.decay_steps), steps)

        def rate(count):
            x = jnp.clip((count - (steps - length)) / max(length, 1), 0.0, 1.0)
            return config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * shape(x)

        return rate

    return schedule


# {name: function of the config → learning rate as a function of the updates after the warmup}
SCHEDULES = {
    "cosine": cosine,
    "linear": linear,
    "wsd": warmup_stable_decay(lambda x: 1 - jnp.sqrt(x)),  # Hägele et al., arXiv 2405.18392
    "wsd_linear": warmup_stable_decay(lambda x: 1 - x),
    "constant": lambda config: optax.constant_schedule(config.learning_rate),
}
