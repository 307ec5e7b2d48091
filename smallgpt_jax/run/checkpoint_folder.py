"""The folder of a run's checkpoints, one folder per step: which are finished, removal, copies.

On a local disk, orbax writes a checkpoint to a temporary folder and renames this folder. In object
storage, orbax writes the file _COMMIT_FILE last; a folder without this file is not a checkpoint.
"""

import shutil
import tempfile
import time
from pathlib import Path

import orbax.checkpoint as ocp

from smallgpt_jax.errors import UserError
from smallgpt_jax.run.names import CHECKPOINT_FOLDER
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import remove_folder, rename, sync_tree
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.object_storage import is_remote

_COMMIT_FILE = "commit_success.txt"
_UNFINISHED = ".orbax-checkpoint-tmp"  # at the end of the name of a folder that is no checkpoint
UNFINISHED_PATTERN = f"*{_UNFINISHED}*"


def saved_steps(folder: Path) -> list[int]:
    """Returns the sorted steps of the finished checkpoints; [] if the folder does not exist."""
    paths = ocp.utils.checkpoint_steps_paths(folder)
    # not copies such as backup_5000
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def unfinished(folder: Path) -> list[Path]:
    """Returns the folders of checkpoints that are being written or removed, or were left so."""
    if not is_remote(folder):
        return list(folder.glob(UNFINISHED_PATTERN))
    if not folder.exists():
        return []
    finished = set(map(str, saved_steps(folder)))
    return [
        path for path in folder.iterdir() if path.name.isdecimal() and path.name not in finished
    ]


def remove_unfinished(folder: Path, step: int) -> None:
    # Pending writes may create a removed folder again, so the search must find nothing four times
    # in a row.
    names = (str(step), f"{step}{_UNFINISHED}")  # in object storage; on a local disk
    num_empty = 0
    for _ in range(50):
        try:
            remains = [path for path in unfinished(folder) if path.name in names]
        except Exception:  # the service cannot be reached
            return
        num_empty = 0 if remains else num_empty + 1
        if num_empty == 4:
            return
        for path in remains:
            remove_folder(path)
        time.sleep(0.1)


def remove_checkpoint(path: Path) -> None:
    # The mark of a finished checkpoint goes first: after an interruption, the rest is unfinished, and
    # is not restored.
    if is_remote(path):
        (path / _COMMIT_FILE).unlink(missing_ok=True)
        path.rmtree()
        return
    removed = path.with_name(f"{path.name}{_UNFINISHED}-removed")
    if path.exists():
        rename(path, removed)
    shutil.rmtree(removed)


def find_checkpoint(workdir: Path, step: int | None = None) -> int:
    """Returns `step`, by default the newest one. Raises UserError without such a checkpoint."""
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such folder; give the workdir of a run")
    steps = saved_steps(workdir / CHECKPOINT_FOLDER)
    if not steps:
        raise UserError(f"{workdir}: the run has no checkpoint yet; train it first")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise UserError(
            f"{workdir}: no checkpoint of step {step}; choose from {', '.join(map(str, steps))}"
        )
    return step


def copy_checkpoint(source: Path, target: Path) -> None:
    """Copies the folder of one step. After an interruption, `target` is no checkpoint."""
    files = local_copy(source)
    if is_remote(target):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(files, folder, dirs_exist_ok=True)
            (Path(folder) / _COMMIT_FILE).touch()
            object_storage.upload_folder(Path(folder), target, _COMMIT_FILE)
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    shutil.copytree(files, partial)
    sync_tree(partial)
    rename(partial, target)
