"""Checkpoints: orbax's, written while training goes on, the newest few kept, each one checked.

A checkpoint of step N is the state after N updates, and with it the position in the data, which is
the step number. That of step 0 is there only if the parameters came from elsewhere, and holds no
optimiser state. Parameters and optimiser state are separate items, so that whoever only wants the
model reads only that. A third item, JSON, holds a sum of the bits of every array (file systems and
networks lose and flip some, and not every file has a checksum of its own), and the losses of the steps
that no line of metrics.jsonl counts yet.
"""

import errno
import functools
import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import absl.logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from smallgpt_jax import distributed
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import reason, system_error
from smallgpt_jax.step import TrainState

DAMAGED_FOLDER = "damaged_checkpoints"  # beside the folder of the good ones
UNFINISHED = "*.orbax-checkpoint-tmp*"
# The machine's trouble, not the checkpoint's.
NOT_DAMAGE = {errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE,
              errno.ETIMEDOUT}


class Checkpoints:
    """The checkpoints in a folder.

    `keep`: as many of the newest will stay; None: they are only read. `say` is called with a line
    about what went wrong and does not end a run.
    """

    def __init__(self, folder: Path, keep: int | None = None, say: Callable[[str], None] = print):
        self.folder, self._say = folder.absolute(), say
        report_once()
        self._manager = ocp.CheckpointManager(
            self.folder, item_names=("params", "opt_state", "model_state", "check"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=keep is not None, cleanup_tmp_directories=keep is not None))

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, unlogged_losses: Sequence[float] = ()) -> None:
        """Starts to write `state`; returns when it has been copied from the devices. What fails, now or
        later, is told: the checkpoint is then not there, and the next one is tried as usual."""
        self.finish()
        items = {"params": state.params, "opt_state": state.opt_state}
        if state.model_state:
            items["model_state"] = state.model_state
        sums = {name: bit_sums(tree) for name, tree in items.items()}
        try:
            self._manager.save(step, args=ocp.args.Composite(
                **{name: ocp.args.StandardSave(tree) for name, tree in items.items()},
                check=ocp.args.JsonSave({**sums, "unlogged_losses": list(unlogged_losses)})))
        except Exception as error:
            self._failed(error)

    def save_imported(self, params, model_state) -> None:
        """Writes the variables of a model from elsewhere as the checkpoint of step 0. Raises what prevents it."""
        items = {"params": params} | ({"model_state": model_state} if model_state else {})
        self._manager.save(0, args=ocp.args.Composite(
            **{name: ocp.args.StandardSave(tree) for name, tree in items.items()},
            check=ocp.args.JsonSave({name: bit_sums(tree) for name, tree in items.items()})))
        self._manager.wait_until_finished()

    def newest_finished(self) -> int | None:
        """Waits for what is being written; returns the newest step that has a checkpoint."""
        self.finish()
        return max(self.steps(), default=None)

    def finish(self) -> None:
        """Waits until what is being written is there."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # of all kinds: from the file system, from tensorstore, from orbax
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError):  # not the disk's trouble
            raise error
        if distributed.is_first():
            self._remove_unfinished()
        self._manager.reload()
        newest = self._manager.latest_step()
        self._say(f"a checkpoint could not be written: {reason(error)}. Training goes on; the newest one is "
                  + (f"that of step {newest}" if newest else "none"))

    def _remove_unfinished(self) -> None:
        """It may be what fills the disk. Other writes of the same checkpoint may still be under way, and make
        its folder anew: it has to be gone for a moment."""
        gone = 0
        for _ in range(50):
            unfinished = list(self.folder.glob(UNFINISHED))
            gone = 0 if unfinished else gone + 1
            if gone == 4:
                return
            for path in unfinished:
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.1)

    def restore_newest(self, abstract: TrainState) -> TrainState | None:
        """The newest state that can be read and is what was saved, None if there is no checkpoint.

        `abstract` holds its shapes and where each part is to lie; of step 0 there is no optimiser state,
        None. Newer checkpoints that are damaged
        are named and put aside. Raises UserError if none is left.
        """
        damaged: dict[str, str] = {}
        for name in sorted((path.name for path in self.folder.iterdir() if path.name.isdecimal()), key=int,
                           reverse=True):
            saved, trouble = self._try_to_read(int(name), abstract)
            why = reason(trouble) if trouble else ""
            if distributed.any_of_them(trouble is not None and is_of_the_machine(trouble)):
                raise UserError(
                    f"{self.folder / name}: cannot be read ({why or 'by another process'}). Nothing has been "
                    "changed. If that stays so, move this folder away: the one before it is then used"
                ) from trouble
            if distributed.any_of_them(trouble is not None):
                damaged[name] = why or "damaged for another process"
                continue
            if changed := changed_array(saved):  # all processes compare, together
                damaged[name] = f"{changed} is not what was saved"
                continue
            distributed.first(lambda: self._put_aside(damaged))
            self._manager.reload()
            position = jax.device_put(jnp.int32(name), abstract.step.sharding)
            return TrainState(position, saved["params"], saved.get("opt_state"), saved.get("model_state", {}))
        if damaged:
            listed = "; ".join(f"{name}: {why}" for name, why in damaged.items())
            raise UserError(f"{self.folder}: no checkpoint in it can be read ({listed}).\nThey are left as "
                            "they are; to begin anew, use another --workdir")
        return None

    def unlogged_losses(self, step: int) -> list[float]:
        """The `unlogged_losses` that were saved with `step`; none in a checkpoint of an older version."""
        return self._read(step, {})["check"].get("unlogged_losses", [])

    def restore_model(self, step: int, abstract_params, abstract_model_state):
        """Returns parameters and model state. Raises UserError if they are damaged."""
        try:
            saved = self._read(step, {"params": abstract_params} | (
                {"model_state": abstract_model_state} if abstract_model_state else {}))
            if changed := changed_array(saved):
                raise ValueError(f"{changed} is not what was saved")
            return saved["params"], saved.get("model_state", {})
        except Exception as error:  # of all kinds, see above
            if is_of_the_machine(error):
                raise UserError(f"{self.folder / str(step)}: cannot be read ({reason(error)})") from None
            raise UserError(
                f"{self.folder / str(step)}: this checkpoint is damaged ({reason(error)}). Continue the run "
                "with smallgpt_jax.main, which goes back to an older one") from None

    def _try_to_read(self, step: int, abstract: TrainState) -> tuple[dict | None, Exception | None]:
        """What is saved, or what kept it from being read."""
        items = {"params": abstract.params} | ({"opt_state": abstract.opt_state} if step else {}) | (
            {"model_state": abstract.model_state} if abstract.model_state else {})
        try:
            return self._read(step, items), None
        except Exception as error:  # of all kinds, see above
            return None, error

    def _read(self, step: int, abstract: dict) -> dict:
        args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        return {item: saved for item, saved in self._manager.restore(
            step, args=ocp.args.Composite(**args, check=ocp.args.JsonRestore())).items()}

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


@functools.cache
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


def is_of_the_machine(error: Exception) -> bool:
    """Whether a checkpoint that could not be read may be a good one."""
    return isinstance(error, jax.errors.JaxRuntimeError) or system_error(error) in NOT_DAMAGE


def changed_array(saved: dict) -> str | None:
    """The name of an array of a checkpoint that is not what was saved, None if all are."""
    for item in sorted(saved.keys() - {"check"}):
        sums = bit_sums(saved[item])
        if changed := [name for name in sums if saved["check"][item].get(name) != sums[name]]:
            return item + changed[0]
    return None


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
