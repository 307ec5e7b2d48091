"""Learning-rate schedules: a linear warmup from 0, then one of SCHEDULES. A schedule is a function
of the steps before an update, skipped ones included: the decay ends with the run.
"""

import jax.numpy as jnp
import optax

from smallgpt_jax.config.lookup import find_named
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.optim.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    where = f"config.optimizer.schedule={short_repr(config.schedule)}"
    after_warmup = find_named(config.schedule, SCHEDULES, where, ("config",))(config)
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def cosine(config: OptimizerConfig) -> optax.Schedule:
    steps = config.decay_steps - config.warmup_steps
    # optax wants the final rate as a fraction of the peak
    floor = config.final_learning_rate / config.learning_rate if config.learning_rate else 0.0
    return optax.cosine_decay_schedule(config.learning_rate, steps, floor)


def linear(config: OptimizerConfig) -> optax.Schedule:
    steps = config.decay_steps - config.warmup_steps
    return optax.linear_schedule(config.learning_rate, config.final_learning_rate, steps)


def decay_start(config: OptimizerConfig) -> int:
    """Returns the number of steps before the decay of a warmup-stable-decay schedule.

    Up to there, the rates do not depend on decay_steps and decay_fraction. Raises UserError for
    other schedules.
    """
    if config.schedule not in DECAYS:
        config.refuse(
            "schedule",
            f"the runs of a trunk need a schedule with a constant phase: {' or '.join(DECAYS)}",
        )
    return config.decay_steps - _decay_length(config)


def _decay_length(config: OptimizerConfig) -> int:
    """Raises UserError for a decay that lowers no rate: its first step has the peak rate."""
    length = min(
        round(config.decay_fraction * config.decay_steps), config.decay_steps - config.warmup_steps
    )
    if length < 2:
        config.refuse(
            "decay_fraction",
            f"the decay would have {length} steps (config.optimizer.decay_steps="
            f"{config.decay_steps}, warmup_steps={config.warmup_steps}), but needs 2 or more; "
            "increase it or config.train.steps, or set config.optimizer.schedule='constant'",
        )
    return length


def _warmup_stable_decay(shape):
    """Returns a schedule that decays by shape(x), x from 0 to 1, over the last decay_fraction."""

    def schedule(config: OptimizerConfig) -> optax.Schedule:
        steps, length = config.decay_steps - config.warmup_steps, _decay_length(config)
        peak, final = config.learning_rate, config.final_learning_rate

        def rate(count):
            # 0 until the decay, the last `length` of the steps after the warmup
            x = jnp.clip((count - (steps - length)) / length, 0.0, 1.0)
            return final + (peak - final) * shape(x)

        return rate

    return schedule


# {name: factor of the decay, from 1 at x = 0 to 0 at x = 1}
DECAYS = {
    "wsd": lambda x: 1 - jnp.sqrt(x),  # Hägele et al., arXiv 2405.18392
    "wsd_linear": lambda x: 1 - x,
}
# {name: function of the config → learning rate as a function of the steps after the warmup}
SCHEDULES = {
    "cosine": cosine,
    "linear": linear,
    **{name: _warmup_stable_decay(shape) for name, shape in DECAYS.items()},
    "constant": lambda config: optax.constant_schedule(config.learning_rate),
}
