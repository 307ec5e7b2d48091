"""The first state of a run or of a session: initialized, or restored from a checkpoint.

`program` is a `Program`.
"""

import functools

import jax
import jax.numpy as jnp

from smallgpt_jax.models import abstract_model_state, abstract_params, init_variables
from smallgpt_jax.optim.mup import scale_initial
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.state import TrainState


def init_state(program, seed) -> TrainState:
    """Returns the state before the first update: a pure function, which `Program.initial_state`
    compiles.
    """
    variables = init_variables(program.model, seed)
    params = scale_initial(variables["params"], program.multipliers)
    return _first_state(program, params, variables.get("state", {}), _init_heads(program, seed))


def abstract_state(program) -> TrainState:
    """Returns the shapes of `init_state`, without tracing the model again."""
    variables = (
        abstract_params(program.model),
        abstract_model_state(program.model),
        program.objective.abstract_heads(),
    )
    return jax.eval_shape(functools.partial(_first_state, program), *variables)


def _first_state(program, params, model_state, heads) -> TrainState:
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=program.optimizer.init({**params, **heads}),
        model_state=model_state,
        heads=heads,
        ema=jax.tree.map(jnp.copy, params) if program.config.train.ema else {},
    )


def _init_heads(program, seed):
    return scale_initial(program.objective.init_heads(seed), program.multipliers)


def restore_or_initialize(program, checkpoints: Checkpoints, seed: int) -> TrainState:
    state = checkpoints.restore_latest(program.abstract_state) or program.initial_state(seed)
    if state.opt_state is not None:
        return state
    # The checkpoint of an imported model has neither heads, optimizer state nor average.
    shardings = program.shardings
    heads = jax.jit(lambda: _init_heads(program, seed), out_shardings=shardings.heads)()
    state = state._replace(heads=heads)
    init_optimizer = jax.jit(program.optimizer.init, out_shardings=shardings.opt_state)
    state = state._replace(opt_state=init_optimizer(state.trained))
    if program.config.train.ema:
        state = state._replace(ema=jax.tree.map(jnp.copy, state.params))
    return state
