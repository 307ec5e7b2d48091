"""Saves orbax checkpoints asynchronously, and restores the newest one that is not damaged, as its
checksums show. Only the newest few and given steps are kept.

The checkpoint of step N is the state after N updates. The position in the data is not stored: it
follows from the step number. Only imported models have a checkpoint of step 0; it has no optimizer
state.

A checkpoint has these items:

- `params`, `opt_state`, `model_state`, `heads`, `ema`: separate items, so that inference reads only
  what it needs.
- `check`: JSON with a checksum per array, and with the `LoopMemory`. Checksums are needed because
  orbax does not checksum every file.
"""

import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, NoReturn

import absl.logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from smallgpt_jax.devices import distributed
from smallgpt_jax.devices.agreement import Agreement, exchange
from smallgpt_jax.errors import LockLostError, UserError
from smallgpt_jax.formatting import root_cause, short_reason
from smallgpt_jax.run.checkpoint_folder import (
    remove_checkpoint,
    remove_unfinished,
    saved_steps,
    unfinished,
)
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.run.damage import find_changed_array, find_other_shape, is_damage
from smallgpt_jax.run.names import CONFIG_FILE, DAMAGED_FOLDER
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import remove_folder, sync_tree
from smallgpt_jax.storage.json_files import LOSS, Each, Optional, find_mismatch, integer
from smallgpt_jax.storage.locks import require_locks
from smallgpt_jax.storage.object_storage import is_remote

# Orbax's time-outs use the system's clock, which can be set while a run saves. The watchdog, which
# does not, limits the time of a save.
_NO_TIMEOUT = 10**9  # seconds
# Orbax waits for all processes before and after process 0 commits a checkpoint.
_COMMIT_PHASES = 2


class LoopMemory(NamedTuple):
    """What a resumed run needs besides its `TrainState`."""

    unlogged_losses: Sequence[float] = ()  # of steps that are not in metrics.jsonl yet
    nonfinite: int = 0  # non-finite updates in a row


_NOTHING = LoopMemory()


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """The checkpoints in a folder: the newest `keep` and those of `kept_steps` are kept. With
    `keep` None, the folder is opened read-only. All methods but `steps` and `has_average` are
    collective.
    """

    folder: Path
    keep: int | None = None
    log: Callable[[str], None] = print
    before_save: Callable[[], None] = lambda: None
    kept_steps: Sequence[int] = ()

    def __post_init__(self):
        if not is_remote(self.folder):
            self.folder = self.folder.absolute()
        self.memory = _NOTHING  # of the restored checkpoint
        self._saving: int | None = None  # the step of the last save
        self._agreement: Agreement | None = None  # of its processes
        self._saved: Future | None = None  # its result, until `wait_until_finished` has read it
        self._is_failing = False
        self._unremovable: set[int] = set()  # steps whose removal has failed
        _silence_duplicate_errors()
        self._checkpointer = self._open_checkpointer()
        if self.keep is not None:
            distributed.run_on_primary(self._prepare_folder)
        steps = distributed.run_on_primary(lambda: saved_steps(self.folder))
        self._steps: list[int] = distributed.from_primary(steps)

    def _open_checkpointer(self) -> ocp.AsyncCheckpointer:
        # Each process writes and reads its own shards. Orbax would wait for all of them at its
        # barriers, and a process that fails does not reach them. So here orbax works as if each
        # process were alone, and an `Agreement` decides whether a checkpoint is complete.
        alone = ocp.options.MultiprocessingOptions(active_processes={jax.process_index()})
        options = ocp.options.AsyncOptions(
            timeout_secs=_NO_TIMEOUT,
            barrier_sync_fn=lambda **_: self._agreement.complete_phase(),
            # In the background, one failed mkdir would let all other writes wait for five minutes.
            create_directories_asynchronously=False,
        )
        items = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(
                multiprocessing_options=alone, async_options=options
            )
        )
        return ocp.AsyncCheckpointer(items, async_options=options, multiprocessing_options=alone)

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in unfinished(self.folder):
            remove_folder(path)

    def steps(self) -> list[int]:
        # As of the last save: does not read the folder, which may be slow.
        return list(self._steps)

    def save(self, step: int, state: TrainState, memory: LoopMemory = _NOTHING) -> None:
        """Returns as soon as `state` is copied from the devices. If writing fails, even later,
        removes the unfinished checkpoint. Of failures in a row, logs only the first.
        """
        self.wait_until_finished()
        # Uploads the metrics up to this step: a resumed run would not write these lines again. If
        # that fails, the checkpoint is saved nevertheless.
        self.before_save()
        if step in self._steps:
            return
        content = _checkpoint_content(state, memory)
        self._saving = step
        self._agreement = Agreement(_COMMIT_PHASES)
        error = None
        if distributed.is_primary():  # first, because it creates the folders
            error = self._start_saving(content)
        has_started = not distributed.any_process(error is not None)
        if has_started and not distributed.is_primary():
            error = self._start_saving(content)
        self._saved = _run_in_thread(functools.partial(self._finish_saving, error))
        # If a process could not start, nothing is written in the background: report it now.
        if distributed.any_process(error is not None):
            self.wait_until_finished()

    def _start_saving(self, content: ocp.args.Composite) -> Exception | None:
        try:
            # orbax and tensorstore do not do this
            require_locks(self.folder)
            object_storage.writer.require_locks()
            # removes what is left of an earlier attempt
            self._checkpointer.save(self.folder / str(self._saving), args=content, force=True)
        except Exception as error:  # of many types
            return error

    def _finish_saving(self, error: Exception | None) -> None:
        """Waits for orbax, and removes old checkpoints. `error`: from the start of the save."""
        try:
            if error:
                raise error
            self._checkpointer.wait_until_finished()
            if distributed.is_primary():
                # Before older ones are removed, the new one must survive a power loss.
                sync_tree(self.folder / str(self._saving))
        except Exception as failure:
            self._agreement.fail(short_reason(root_cause(failure)))
            raise
        if distributed.is_primary():
            self._remove_old()

    def _kept(self, steps: Iterable[int]) -> list[int]:
        """Returns, sorted, those of `steps` whose checkpoints are kept."""
        steps = sorted(steps)
        return [step for step in steps if step in steps[-self.keep :] or step in self.kept_steps]

    def _remove_old(self) -> None:
        require_locks(self.folder)
        steps = {*self._steps, self._saving}
        old = steps - set(self._kept(steps))
        for step in sorted(old | self._unremovable):
            path = self.folder / str(step)
            try:
                remove_checkpoint(path)
                self._unremovable.discard(step)
            except Exception as error:  # the next save tries again
                if step not in self._unremovable:
                    self.log(f"{path}: could not be removed: {short_reason(error)}")
                self._unremovable.add(step)

    def save_imported(self, params, model_state) -> None:
        """Writes the checkpoint of step 0. Raises an exception on failure."""
        content = _checkpoint_content(TrainState(0, params, None, model_state), _NOTHING)
        self._checkpointer.save(self.folder / "0", args=content, force=True)
        self._checkpointer.wait_until_finished()

    def latest_finished(self) -> int | None:
        self.wait_until_finished()
        return max(self._steps, default=None)

    def wait_until_finished(self) -> None:
        if self._saved is None:
            return
        error = self._saved.exception()
        self._saved = None
        # from the devices or the other processes, not from the disk
        if isinstance(error, jax.errors.JaxRuntimeError | LockLostError):
            raise error
        if distributed.any_process(error is not None):
            self._report_failure(error)
            return
        self._steps = self._kept([*self._steps, self._saving])
        if self._is_failing:
            self.log(f"checkpoints can be written again; newest checkpoint: step {self._saving}")
        self._is_failing = False

    def _report_failure(self, error: Exception | None) -> None:
        if distributed.is_primary():
            remove_unfinished(self.folder, self._saving)
        newest = f"step {self._steps[-1]}" if self._steps else "none"
        reason = short_reason(root_cause(error)) if error else "another process failed"
        if not self._is_failing:
            self.log(
                f"could not write a checkpoint: {reason}. Training continues; newest checkpoint: "
                f"{newest}"
            )
        self._is_failing = True

    def restore_latest(self, abstract: TrainState) -> TrainState | None:
        """Returns the newest undamaged state, or None if there is no checkpoint. Moves newer, damaged
        checkpoints to DAMAGED_FOLDER. At step 0, `opt_state` is None, and `heads` and `ema` are {}.

        Raises UserError if all checkpoints are damaged, or if the machine fails to read one.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self._steps):
            saved, reason = self._read_or_explain(step, abstract)
            if reason:
                damaged[step] = reason
                continue
            # Only beside a sound checkpoint: otherwise, a user may still mend what is wrong.
            distributed.run_on_primary(lambda: self._quarantine(damaged))
            self._steps = [kept for kept in self._steps if kept not in damaged]
            remembered = saved["check"].keys() & LoopMemory._fields
            self.memory = LoopMemory(**{name: saved["check"][name] for name in remembered})
            return TrainState(
                jax.device_put(jnp.int32(step), abstract.step.sharding),
                saved["params"],
                saved.get("opt_state"),
                saved.get("model_state", {}),
                saved.get("heads", {}),
                saved.get("ema", {}),
            )
        if damaged:
            self._refuse_all(damaged, abstract)
        return None

    def _refuse_all(self, damaged: dict[int, str], abstract: TrainState) -> NoReturn:
        # if the model in config.json was edited, sound checkpoints cannot be read as its arrays
        newest = self.folder / str(self._steps[-1])
        other = max(exchange(find_other_shape(newest / "params", abstract.params)))
        if other:
            raise UserError(self._other_model(newest, other))
        listed = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"{self.folder}: all checkpoints are damaged ({listed}).\nNothing was changed; use "
            "another --workdir to start from scratch"
        )

    def _read_or_explain(self, step: int, abstract: TrainState) -> tuple[dict, str]:
        """Returns (items, ""), or ({}, why the checkpoint is damaged). Raises UserError for errors
        of the machine. All processes do the same.
        """
        if step == 0:  # an imported model, which has nothing else
            abstract = abstract._replace(opt_state=None, heads={}, ema={})
        error = None
        reason = ""
        try:
            saved = self._read(step, abstract)
        except jax.errors.JaxRuntimeError:  # from the devices or the other processes
            raise
        except Exception as failure:  # tensorstore and orbax raise many types of exceptions
            error = failure
            reason = short_reason(root_cause(failure))
        # A process that could read its shards must also know that another one could not.
        machine_error = max(exchange(reason if error and not is_damage(error) else ""))
        if machine_error:
            raise UserError(
                f"{self.folder / str(step)}: cannot be read ({machine_error}); nothing was "
                "changed. If this persists, move the folder away to resume from the previous "
                "checkpoint"
            ) from error
        damage = max(exchange(reason))
        if damage:
            return {}, damage
        changed = find_changed_array(saved)
        if changed:
            return {}, f"checksum of {changed} differs"
        return saved, ""

    def restore_model(self, step: int, abstract_params, abstract_model_state, abstract_heads=None):
        """Returns the moving average or, without one, the parameters; the model state; the heads.

        Raises UserError if the step is damaged, unreadable, or removed by a run that is training.
        """
        path = self.folder / str(step)
        try:
            item = "ema" if self.has_average(step) else "params"
            abstract = TrainState(step, {}, None, abstract_model_state, abstract_heads)
            saved = self._read(step, abstract._replace(**{item: abstract_params}))
            if item == "params" and "ema" in saved["check"]:
                raise ValueError("the moving average of the weights, ema, is missing")
            changed = find_changed_array(saved)
            if changed:
                raise ValueError(f"checksum of {changed} differs")
        except Exception as error:  # tensorstore and orbax raise many types of exceptions
            reason = short_reason(root_cause(error))
            if not is_damage(error):
                raise UserError(f"{path}: cannot be read ({reason})") from None
            if step not in saved_steps(self.folder):
                raise UserError(
                    f"{path}: removed while it was read, because the run keeps only its newest "
                    "checkpoints (config.train.keep_checkpoints); rerun the same command"
                ) from None
            other = find_other_shape(path / item, abstract_params)
            if other:
                raise UserError(self._other_model(path, other)) from None
            raise UserError(
                f"{path}: damaged checkpoint ({reason}); continue the run with smallgpt_jax.main, "
                "which resumes from an older checkpoint"
            ) from None
        return saved[item], saved.get("model_state", {}), saved.get("heads", {})

    def _other_model(self, checkpoint: Path, difference: str) -> str:
        return (
            f"{self.folder.with_name(CONFIG_FILE)}: does not describe the model in {checkpoint} "
            f"({difference}); restore the file as the run wrote it"
        )

    def has_average(self, step: int) -> bool:
        return (self.folder / str(step) / "ema").exists()

    def _read(self, step: int, abstract: TrainState) -> dict:
        """Returns {item: content} of the items that `abstract` has."""
        items = _items_of(abstract)
        arrays = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
        content = ocp.args.Composite(**arrays, check=ocp.args.JsonRestore())
        saved = dict(self._checkpointer.restore(self.folder / str(step), args=content).items())
        schema = dict.fromkeys(items, Each(integer(0, 2**32 - 1)))  # checksums by array
        schema["unlogged_losses"] = Optional([LOSS])
        schema["nonfinite"] = Optional(integer(0))
        mismatch = find_mismatch(saved["check"], schema, "check")
        if mismatch:
            raise ValueError(mismatch)
        return saved

    def _quarantine(self, damaged: dict[int, str]) -> None:
        for step, reason in damaged.items():
            path = self.folder / str(step)
            target = self.folder.with_name(DAMAGED_FOLDER) / path.name
            while target.exists():
                target = target.with_name(target.name + "'")
            if is_remote(target):  # an interruption leaves each object in one of the folders
                object_storage.file_system().mv(str(path), str(target), recursive=True)
            else:
                target.parent.mkdir(exist_ok=True)
                path.rename(target)
            self.log(f"damaged checkpoint of step {step} ({reason}): moved to {target}")

    def close(self) -> None:
        self.wait_until_finished()
        self._checkpointer.close()


def _run_in_thread(function: Callable[[], None]) -> Future:
    # Unlike the thread of an executor, this one does not keep Python from exiting.
    result = Future()

    def run():
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return result


def _items_of(state: TrainState) -> dict:
    """Returns {item: tree} of the items that a checkpoint of `state` has. The step is its name."""
    return {name: tree for name, tree in state._asdict().items() if name != "step" and tree}


def _checkpoint_content(state: TrainState, memory: LoopMemory) -> ocp.args.Composite:
    items = _items_of(state)
    arrays = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    check = {name: bit_checksums(tree) for name, tree in items.items()}
    check |= memory._asdict()
    return ocp.args.Composite(**arrays, check=ocp.args.JsonSave(check))


@functools.cache
def _silence_duplicate_errors() -> None:
    # `Checkpoints` reports failed reads and writes; orbax and tensorstore print them several times.
    absl.logging.get_absl_logger().addFilter(lambda record: "/orbax/" not in record.pathname)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def hook(unraisable):
        # a read that orbax has abandoned because another one has failed
        code = getattr(unraisable.object, "cr_code", None)
        is_of_orbax = code is not None and "/orbax/" in code.co_filename
        if not is_of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            default_hook(unraisable)

    sys.unraisablehook = hook
