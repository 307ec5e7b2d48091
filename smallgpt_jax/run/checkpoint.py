"""Orbax checkpoints, written asynchronously and verified by checksums. Only the newest few and
given steps are kept.

On a local disk, orbax writes a checkpoint to a temporary folder and renames this folder. In object
storage, orbax writes the file COMMIT_FILE last; a folder without this file is not a checkpoint.

The checkpoint of step N is the state after N updates. The position in the data is not stored: it
follows from the step number. Only imported models have a checkpoint of step 0; it has no optimizer
state.

A checkpoint has these items:

- `params`, `opt_state`, `model_state`, `heads`, `ema`: separate items, so that inference reads only
  what it needs.
- `check`: JSON with a checksum per array, and with the losses of steps that are not in
  metrics.jsonl yet. Checksums are needed because orbax does not checksum every file.
"""

import contextlib
import errno
import functools
import logging
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import absl.logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import find_errno, short_reason
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, DAMAGED_FOLDER
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import remove_folder, rename
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.json_files import LOSS, Each, Optional, find_mismatch, integer
from smallgpt_jax.storage.object_storage import is_remote

COMMIT_FILE = "commit_success.txt"
UNFINISHED_PATTERN = "*.orbax-checkpoint-tmp*"
REMOVAL_SECONDS = 0.3  # a process that removes a checkpoint removes one more file within this time
# Held while orbax starts a save. It numbers the saves of a process, and two threads that start one
# at the same time would wait for each other's signals until a timeout.
STARTING = threading.Lock()
# These errors come from the machine; the checkpoint itself may be undamaged.
MACHINE_ERRORS = {
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


class Checkpoints:
    """The checkpoints in a folder: the newest `keep` and those of `kept_steps` are kept. With
    `keep` None, the folder is opened read-only.

    `before_save` uploads the metrics of the saved steps, which could otherwise be lost if the run
    is killed. If it fails, the checkpoint is saved nevertheless.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        log: Callable[[str], None] = print,
        before_save: Callable[[], None] = lambda: None,
        kept_steps: Sequence[int] = (),
    ):
        self.folder = folder if is_remote(folder) else folder.absolute()
        self._log, self._before_save = log, before_save
        silence_duplicate_errors()
        policies = ocp.checkpoint_managers
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_names=(*TrainState._fields[1:], "check"),
            options=ocp.CheckpointManagerOptions(
                create=keep is not None,
                cleanup_tmp_directories=keep is not None,
                preservation_policy=policies.AnyPreservationPolicy(
                    [policies.LatestN(keep), policies.CustomSteps(kept_steps)]
                ),
            ),
        )
        self._saving: int | None = None  # the newest step to be saved
        self._failed_steps: set[int] = (
            set()
        )  # since the folder was last listed; orbax lists them as saved
        self._is_failing = False

    def steps(self) -> list[int]:
        """Does not read the folder."""
        return sorted(set(self._manager.all_steps()) - self._failed_steps)

    def save(self, step: int, state: TrainState, unlogged_losses: Sequence[float] = ()) -> None:
        """Returns as soon as `state` is copied from the devices. If writing fails, even later,
        removes the unfinished checkpoint. Of failures in a row, logs only the first.
        """
        self.wait_until_finished()
        self._before_save()
        content = checkpoint_content(state, unlogged_losses)
        try:
            object_storage.writer.require_locks()  # tensorstore's requests do not do this
            if self._failed_steps:
                self._reload()
            self._saving = step
            with STARTING:
                self._manager.save(step, args=content)
        except Exception as error:
            self._failed(error)

    def save_imported(self, params, model_state) -> None:
        """Writes the checkpoint of step 0. Raises an exception on failure."""
        self._manager.save(0, args=checkpoint_content(TrainState(0, params, None, model_state)))
        self._manager.wait_until_finished()

    def latest_finished(self) -> int | None:
        self.wait_until_finished()
        return max(self.steps(), default=None)

    def wait_until_finished(self) -> None:
        try:
            self._manager.wait_until_finished()
        except (
            Exception
        ) as error:  # the file system, tensorstore and orbax raise many types of exceptions
            self._failed(error)
        if self._is_failing and self._saving in self.steps():
            self._is_failing = False
            self._log(f"checkpoints can be written again; newest checkpoint: step {self._saving}")

    def _failed(self, error: Exception) -> None:
        if isinstance(
            error, jax.errors.JaxRuntimeError
        ):  # the error comes from the devices, not from the disk
            raise error
        if distributed.is_primary():
            self._remove_unfinished()
        self._failed_steps.add(self._saving)
        with contextlib.suppress(
            Exception
        ):  # the service cannot be reached; the next save tries again
            self._reload()
        newest = max(self.steps(), default=None)
        if not self._is_failing:
            self._log(
                f"could not write a checkpoint: {short_reason(error)}. Training continues; newest "
                "checkpoint: " + (f"step {newest}" if newest else "none")
            )
        self._is_failing = True

    def _reload(self) -> None:
        self._manager.reload()
        self._failed_steps.clear()

    def _remove_unfinished(self) -> None:
        """Pending writes may create a removed folder again, so the search must find nothing four
        times in a row.
        """
        gone = 0
        for _ in range(50):
            try:
                unfinished = self._unfinished()
            except Exception:  # the service cannot be reached
                return
            gone = 0 if unfinished else gone + 1
            if gone == 4:
                return
            for path in unfinished:
                remove_folder(path)
            time.sleep(0.1)

    def _unfinished(self) -> list[Path]:
        if not is_remote(self.folder):
            return list(self.folder.glob(UNFINISHED_PATTERN))
        finished = set(map(str, saved_steps(self.folder)))
        return [
            path
            for path in self.folder.iterdir()
            if path.name.isdecimal() and path.name not in finished
        ]

    def restore_latest(self, abstract: TrainState) -> TrainState | None:
        """Returns the newest undamaged state, or None if there is no checkpoint.

        At step 0, `opt_state` is None, and `heads` and `ema` are {}. Moves newer, damaged
        checkpoints to DAMAGED_FOLDER. Raises UserError if all checkpoints are damaged, or if the
        machine fails to read one.
        """
        damaged: dict[str, str] = {}
        for name in map(str, reversed(self.steps())):
            saved, error = self._try_to_read(int(name), abstract)
            reason = short_reason(error) if error else ""
            if distributed.any_process(error is not None and is_machine_error(error, self.folder)):
                raise UserError(
                    f"{self.folder / name}: cannot be read "
                    f"({reason or 'another process failed'}); nothing was changed. If this "
                    "persists, move the folder away to resume from the previous checkpoint"
                ) from error
            if distributed.any_process(error is not None):
                damaged[name] = reason or "another process could not read it"
                continue
            if changed := find_changed_array(
                saved
            ):  # every process must take part in computing the checksums
                damaged[name] = f"checksum of {changed} differs"
                continue
            distributed.run_on_primary(lambda: self._quarantine(damaged))
            self._reload()
            position = jax.device_put(jnp.int32(name), abstract.step.sharding)
            return TrainState(
                position,
                saved["params"],
                saved.get("opt_state"),
                saved.get("model_state", {}),
                saved.get("heads", {}),
                saved.get("ema", {}),
            )
        if damaged:
            listed = "; ".join(f"step {name}: {reason}" for name, reason in damaged.items())
            raise UserError(
                f"{self.folder}: all checkpoints are damaged ({listed}).\nNothing was changed; "
                "use another --workdir to start from scratch"
            )
        return None

    def unlogged_losses(self, step: int) -> list[float]:
        return self._read(step, TrainState(step, {}, None))["check"].get("unlogged_losses", [])

    def restore_model(self, step: int, abstract_params, abstract_model_state, abstract_heads=None):
        """Returns the moving average, if the checkpoint has one, or else the parameters; model
        state; heads.

        Raises UserError if the step is damaged, cannot be read, or is removed by a run that is
        training.
        """
        try:
            item = "ema" if self.has_average(step) else "params"
            abstract = TrainState(step, {}, None, abstract_model_state, abstract_heads)
            saved = self._read(step, abstract._replace(**{item: abstract_params}))
            if item == "params" and "ema" in saved["check"]:
                raise ValueError("the moving average of the weights, ema, is missing")
            if changed := find_changed_array(saved):
                raise ValueError(f"checksum of {changed} differs")
            return saved[item], saved.get("model_state", {}), saved.get("heads", {})
        except Exception as error:  # tensorstore and orbax raise many types of exceptions
            if is_machine_error(error, self.folder):
                raise UserError(
                    f"{self.folder / str(step)}: cannot be read ({short_reason(error)})"
                ) from None
            if self._is_being_removed(step):
                raise UserError(
                    f"{self.folder / str(step)}: removed while it was read, because the run keeps "
                    "only its newest checkpoints (config.train.keep_checkpoints); rerun the same "
                    "command"
                ) from None
            raise UserError(
                f"{self.folder / str(step)}: damaged checkpoint ({short_reason(error)}); continue "
                "the run with smallgpt_jax.main, which resumes from an older checkpoint"
            ) from None

    def has_average(self, step: int) -> bool:
        return (self.folder / str(step) / "ema").exists()

    def _is_being_removed(self, step: int) -> bool:
        """Another process may take a while to remove all files."""
        files, before = -1, None
        while files != before:
            before = files
            with contextlib.suppress(FileNotFoundError):  # removed while it is listed
                files = sum(1 for _ in (self.folder / str(step)).rglob("*"))
            time.sleep(REMOVAL_SECONDS)
        return step not in saved_steps(self.folder)

    def _try_to_read(self, step: int, abstract: TrainState) -> tuple[dict | None, Exception | None]:
        try:
            return self._read(
                step, abstract if step else abstract._replace(opt_state=None, heads={}, ema={})
            ), None
        except Exception as error:
            return None, error

    def _read(self, step: int, abstract: TrainState) -> dict:
        """Returns {item: content} of the items that `abstract` has."""
        args = {name: ocp.args.StandardRestore(tree) for name, tree in items_of(abstract).items()}
        saved = dict(
            self._manager.restore(
                step, args=ocp.args.Composite(**args, check=ocp.args.JsonRestore())
            ).items()
        )
        schema = {
            "unlogged_losses": Optional([LOSS]),
            **{name: Each(integer(0, 2**32 - 1)) for name in args},
        }
        if mismatch := find_mismatch(saved["check"], schema, "check"):
            raise ValueError(mismatch)
        return saved

    def _quarantine(self, damaged: dict[str, str]) -> None:
        for name, reason in damaged.items():
            target = self.folder.with_name(DAMAGED_FOLDER) / name
            while target.exists():
                target = target.with_name(target.name + "'")
            if is_remote(target):
                object_storage.move_folder(self.folder / name, target)
            else:
                target.parent.mkdir(exist_ok=True)
                (self.folder / name).rename(target)
            self._log(f"damaged checkpoint of step {name} ({reason}): moved to {target}")

    def close(self) -> None:
        self.wait_until_finished()
        self._manager.close()


def items_of(state: TrainState) -> dict:
    return {name: tree for name, tree in state._asdict().items() if name != "step" and tree}


def checkpoint_content(
    state: TrainState, unlogged_losses: Sequence[float] = ()
) -> ocp.args.Composite:
    items = items_of(state)
    return ocp.args.Composite(
        **{name: ocp.args.StandardSave(tree) for name, tree in items.items()},
        check=ocp.args.JsonSave(
            {
                **{name: bit_checksums(tree) for name, tree in items.items()},
                "unlogged_losses": list(unlogged_losses),
            }
        ),
    )


def saved_steps(folder: Path) -> list[int]:
    """Returns the sorted steps of the finished checkpoints; [] if the folder does not exist."""
    paths = ocp.utils.checkpoint_steps_paths(folder)
    return sorted(
        int(path.name) for path in paths if path.name.isdecimal()
    )  # ignores copies such as backup_5000


def find_checkpoint(workdir: Path, step: int | None = None) -> int:
    """Returns `step`, by default the newest one. Raises UserError if there is no such
    checkpoint.
    """
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such folder; give the workdir of a run")
    steps = saved_steps(workdir / CHECKPOINT_FOLDER)
    if not steps:
        raise UserError(f"{workdir}: the run has no checkpoint yet; train it first")
    if step not in (None, *steps):
        raise UserError(
            f"{workdir}: no checkpoint of step {step}; choose from {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copies the folder of one step. After an interruption, `target` is no checkpoint, and can be
    copied again.
    """
    files = local_copy(source)
    if is_remote(target):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(files, folder, dirs_exist_ok=True)
            (Path(folder) / COMMIT_FILE).touch()
            object_storage.upload_folder(Path(folder), target, COMMIT_FILE)
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(files, partial)
    rename(partial, target)


@functools.cache
def silence_duplicate_errors() -> None:
    """Lets only `Checkpoints` report a failed write; orbax and tensorstore would log it several
    times.
    """
    absl.logging.get_absl_logger().addFilter(lambda record: "/orbax/" not in record.pathname)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            default_hook(unraisable)

    sys.unraisablehook = hook


def is_machine_error(error: Exception, folder: Path) -> bool:
    """Any other error in reading a checkpoint means that the checkpoint is damaged."""
    return (
        isinstance(error, jax.errors.JaxRuntimeError)
        or find_errno(error) in MACHINE_ERRORS
        or (is_remote(folder) and object_storage.is_request_error(error))
    )


def find_changed_array(saved: dict) -> str | None:
    """Returns the first array in `saved` that does not match its saved checksum, or None."""
    for item in sorted(saved.keys() - {"check"}):
        sums = bit_checksums(saved[item])
        if changed := [name for name in sums if saved["check"][item].get(name) != sums[name]]:
            return item + changed[0]
    return None
