"""Checkpoints: orbax's, written while training goes on, the newest few kept.

A checkpoint of step N is the state after N updates, and with it the position in the data, which is
the step number. Parameters and optimiser state are separate items, so that whoever only wants the
model reads only that.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from smallgpt_jax.step import TrainState


def open_checkpoints(folder: Path, keep: int | None = None) -> ocp.CheckpointManager:
    """The checkpoints in `folder`, made if it is not there; only the newest `keep` will stay."""
    return ocp.CheckpointManager(
        folder.absolute(), item_names=("params", "opt_state"),
        options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True))


def save(checkpoints: ocp.CheckpointManager, step: int, state: TrainState) -> None:
    """Starts to write `state`; returns when it has been copied from the devices."""
    checkpoints.save(step, args=ocp.args.Composite(
        params=ocp.args.StandardSave(state.params),
        opt_state=ocp.args.StandardSave(state.opt_state)))


def restore(checkpoints: ocp.CheckpointManager, step: int, abstract: TrainState) -> TrainState:
    """The state after `step` updates; `abstract` holds its shapes and where each part is to lie."""
    restored = checkpoints.restore(step, args=ocp.args.Composite(
        params=ocp.args.StandardRestore(abstract.params),
        opt_state=ocp.args.StandardRestore(abstract.opt_state)))
    position = jax.device_put(jnp.int32(step), abstract.step.sharding)
    return TrainState(position, restored["params"], restored["opt_state"])


def restore_params(checkpoints: ocp.CheckpointManager, step: int, abstract_params):
    """The parameters alone."""
    args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract_params))
    return checkpoints.restore(step, args=args)["params"]
