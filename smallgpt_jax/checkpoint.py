"""Checkpoints: orbax's, written while training goes on, the newest few kept, each one checked.

A checkpoint of step N is the state after N updates, and with it the position in the data, which is
the step number. Parameters and optimiser state are separate items, so that whoever only wants the
model reads only that. A third item holds a sum of the bits of every array: file systems and
networks lose and flip some, and not every file has a checksum of its own.
"""

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import absl.logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from smallgpt_jax import processes
from smallgpt_jax.errors import UserError
from smallgpt_jax.step import TrainState

DAMAGED_FOLDER = "damaged_checkpoints"  # beside the folder of the good ones
UNFINISHED = "*.orbax-checkpoint-tmp*"


class Checkpoints:
    """The checkpoints in a folder.

    `keep`: as many of the newest will stay; None: they are only read. `say` is called with a line
    about what went wrong and does not end a run.
    """

    def __init__(self, folder: Path, keep: int | None = None, say: Callable[[str], None] = print):
        self.folder, self._say = folder.absolute(), say
        report_once()
        self._manager = ocp.CheckpointManager(
            self.folder, item_names=("params", "opt_state", "check"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=keep is not None, cleanup_tmp_directories=keep is not None))

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState) -> None:
        """Starts to write `state`; returns when it has been copied from the devices. What fails, now or
        later, is told: the checkpoint is then not there, and the next one is tried as usual."""
        self.finish()
        try:
            self._manager.save(step, args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.StandardSave(state.opt_state),
                check=ocp.args.JsonSave({"params": bit_sums(state.params),
                                         "opt_state": bit_sums(state.opt_state)})))
        except Exception as error:
            self._failed(error)

    def finish(self) -> None:
        """Waits until what is being written is there."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # of all kinds: from the file system, from tensorstore, from orbax
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError):  # not the disk's trouble
            raise error
        if processes.is_first():
            for path in self.folder.glob(UNFINISHED):  # it may be what fills the disk
                shutil.rmtree(path, ignore_errors=True)
        self._manager.reload()
        newest = self._manager.latest_step()
        self._say(f"a checkpoint could not be written: {reason(error)}. Training goes on; the newest one is "
                  + (f"that of step {newest}" if newest else "none"))

    def restore_newest(self, abstract: TrainState) -> TrainState | None:
        """The newest state that can be read and is what was saved, None if there is no checkpoint.

        `abstract` holds its shapes and where each part is to lie. Newer checkpoints that are damaged
        are named and put aside. Raises UserError if none is left.
        """
        damaged: dict[str, str] = {}
        for name in sorted((path.name for path in self.folder.iterdir() if path.name.isdecimal()), key=int,
                           reverse=True):
            try:
                state, why = self._restore(int(name), abstract), ""
            except Exception as error:  # of all kinds, see above
                state, why = None, reason(error)
            if processes.any_of_them(state is None):
                damaged[name] = why or "damaged for another process"
                continue
            processes.first(lambda: self._put_aside(damaged))
            self._manager.reload()
            return state
        if damaged:
            listed = "; ".join(f"{name}: {why}" for name, why in damaged.items())
            raise UserError(f"{self.folder}: no checkpoint in it can be read ({listed}).\nThey are left as "
                            "they are; to begin anew, use another --workdir")
        return None

    def _restore(self, step: int, abstract: TrainState) -> TrainState:
        items = dict(params=abstract.params, opt_state=abstract.opt_state)
        restored = self._restore_items(step, items)
        position = jax.device_put(jnp.int32(step), abstract.step.sharding)
        return TrainState(position, restored["params"], restored["opt_state"])

    def restore_params(self, step: int, abstract_params):
        """The parameters alone. Raises UserError if they are damaged."""
        try:
            return self._restore_items(step, {"params": abstract_params})["params"]
        except Exception as error:  # of all kinds, see above
            raise UserError(
                f"{self.folder / str(step)}: this checkpoint is damaged ({reason(error)}). Continue the run "
                "with smallgpt_jax.main, which goes back to an older one") from None

    def _restore_items(self, step: int, abstract: dict) -> dict:
        args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        restored = self._manager.restore(
            step, args=ocp.args.Composite(**args, check=ocp.args.JsonRestore()))
        for item in abstract:
            saved, found = restored["check"][item], bit_sums(restored[item])
            if wrong := [name for name in found if saved.get(name) != found[name]]:
                raise ValueError(f"{item}{wrong[0]} is not what was saved")
        return restored

    def _put_aside(self, damaged: dict[str, str]) -> None:
        for name, why in damaged.items():
            target = self.folder.with_name(DAMAGED_FOLDER) / name
            while target.exists():
                target = target.with_name(target.name + "'")
            target.parent.mkdir(exist_ok=True)
            (self.folder / name).rename(target)
            self._say(f"the checkpoint of step {name} is damaged ({why}): put aside as {target}")

    def close(self) -> None:
        self.finish()
        self._manager.close()


def report_once() -> None:
    """Of a write that fails orbax raises an error, which is told; this keeps it from being logged too, and
    tensorstore from printing, with a traceback each, that nobody waits for the other writes any more."""
    absl.logging.get_absl_logger().addFilter(lambda record: "/orbax/" not in record.pathname)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def reason(error: Exception) -> str:
    """The gist of what a library says of a failure."""
    text = str(error).strip() or type(error).__name__
    if code := re.search(r"os_error_code='(\d+)'", text):
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return text.splitlines()[0][:160]


def bit_sums(tree) -> dict[str, int]:
    """A number for each array that changes with any of its bits: Σ bits · (2·place + 1) modulo 2³².

    It does not depend on where on a mesh the parts of an array lie. (Odd factors: a single changed bit
    changes the sum for certain.)
    """
    sums = jax.device_get(_bit_sums(tree))
    return {jax.tree_util.keystr(path): int(x) for path, x in jax.tree_util.tree_leaves_with_path(sums)}


@jax.jit
def _bit_sums(tree):
    def bit_sum(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        factors = jnp.ones(bits.shape, jnp.uint32)
        stride = 2
        for axis in reversed(range(bits.ndim)):
            factors += jnp.uint32(stride % 2**32) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            stride *= bits.shape[axis]
        return jnp.sum(bits * factors, dtype=jnp.uint32)

    return jax.tree.map(bit_sum, tree)
