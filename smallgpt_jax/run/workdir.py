"""Taking a workdir for a run: checks, lock, and the files that make the workdir self-contained."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.data import tokenizer_folder
from smallgpt_jax.data.chat_template import save_template
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.devices import distributed
from smallgpt_jax.devices.agreement import exchange
from smallgpt_jax.errors import LockHeldError, UserError, WorkdirBusyError
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.config_file import read_config, read_groups, saved_config, write_config
from smallgpt_jax.run.names import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    LOCK_FILE,
    ORIGIN_FILE,
    STORE_FILE,
    TOKENIZER_FOLDER,
)
from smallgpt_jax.run.sessions import read_sessions
from smallgpt_jax.run.training_text import check_same_text
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.object_storage import is_remote, is_request_error, require_bucket

# Network file systems can show a new file to other machines only after this time.
VISIBLE_SECONDS = 60.0


def config_in_workdir(config: ConfigDict, workdir: Path) -> Config:
    """Returns the config of a run that is started or resumed; see `Config.of`."""
    _require_same_classes(workdir, Config.of(config))
    return Config.of(config, saved_config(workdir))


def check_workdir(workdir: Path, config: Config) -> None:
    """Raises UserError for a workdir that is unusable or of another config. Writes nothing."""
    if is_remote(workdir):
        require_bucket("--workdir", workdir)
    else:
        _require_writable(workdir)
    refuse_patterns(workdir)
    # List the folder first: another run may start at this moment, and the config is its first
    # visible file.
    is_empty = not workdir.is_dir() or all(path.name.startswith(".") for path in workdir.iterdir())
    if not (workdir / CONFIG_FILE).exists():
        if not is_empty:
            raise UserError(
                f"--workdir={workdir}: folder is not empty and not a run (no {CONFIG_FILE}); "
                "choose another"
            )
        return
    _require_same_classes(workdir, config)
    _refuse_changes(workdir, config, changed_fields(workdir, config))
    reached = max(saved_steps(workdir / CHECKPOINT_FOLDER), default=0)
    if reached > config.train.steps:
        raise UserError(
            f"--workdir={workdir}: existing run of {reached:,} steps, more than "
            f"config.train.steps={config.train.steps}; increase the steps, or use another --workdir"
        )
    if not reached:
        _require_no_lost_checkpoints(workdir)


def _require_no_lost_checkpoints(workdir: Path) -> None:
    """Raises UserError if a run without checkpoints has had one. To train it again from the beginning
    would replace metrics.jsonl.
    """
    resumed = max((line.get("first_step", 0) for line in read_sessions(workdir)), default=0)
    if resumed:
        raise UserError(
            f"{workdir / CHECKPOINT_FOLDER}: its checkpoints are missing (the run has been resumed "
            f"from step {resumed:,}); restore them, or use another --workdir"
        )


def refuse_patterns(workdir: Path) -> None:
    """Raises UserError for a path that is a pattern of paths. Orbax finds the parts of a checkpoint by
    a glob of the whole path; if it finds none, it saves a checkpoint that cannot be read.
    """
    special = set("*?[\\") & set(str(workdir if is_remote(workdir) else workdir.absolute()))
    if special:
        raise UserError(
            f"--workdir={workdir}: checkpoints cannot be written to a path with "
            f"{' '.join(sorted(special))}; choose another"
        )


def _require_same_classes(workdir: Path, config: Config) -> None:
    """Raises UserError if the run in `workdir` has custom classes that `config` does not name."""
    # Before its config is read, which would import a module of somebody else, or ask whether to
    # trust it, to no purpose.
    if (workdir / CONFIG_FILE).exists():
        foreign = models.foreign_classes(read_groups(workdir)["model"], config.model)
        changes = {f"model.{field}": classes for field, classes in foreign.items()}
        _refuse_changes(workdir, config, changes)


def _refuse_changes(workdir: Path, config: Config, different: Mapping[str, tuple]) -> None:
    if not different:
        return
    listed = "; ".join(
        f"{field} was {before!r}, now {now!r}" for field, (before, now) in different.items()
    )
    advice = "Use the same settings to resume it, or another --workdir"
    if "model.context_length" in different and config.model.position != "learned":
        advice += (
            "; to train its model at another context_length, import it into a new workdir with "
            "smallgpt_jax.convert --from=run"
        )
    raise UserError(f"--workdir={workdir}: existing run with another config: {listed}.\n{advice}")


def changed_fields(workdir: Path, config: Config) -> dict[str, tuple]:
    # The weights of an untrained import fix only fields of `model`.
    before, now = read_config(workdir).flat(), config.flat()
    is_trained = (workdir / STORE_FILE).exists()
    fixed = set()
    for name in GROUPS:
        # the fields of the architecture, and of the group itself
        for group in (getattr(config, name), GROUPS[name]):
            fields = group.field_names(fixed_by="model")
            if is_trained:
                fields += group.field_names(fixed_by="run")
            fixed |= {f"{name}.{field}" for field in fields}
    if not is_trained:
        fixed.remove("model.attention_mask")  # further training may have another objective
        if config.model.position != "learned":  # no parameter depends on the context length
            fixed.remove("model.context_length")
    return {
        field: (before.get(field), now.get(field))
        for field in sorted(fixed)
        if before.get(field) != now.get(field)
    }


def _require_writable(workdir: Path) -> None:
    if not os.path.exists(workdir):  # unlike Path.exists, os.path.exists raises no PermissionError
        parent = next(p for p in workdir.absolute().parents if os.path.exists(p))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(
                f"--workdir={workdir}: cannot be created; {parent} is not a writable folder"
            )
    elif not workdir.is_dir() or not os.access(workdir, os.W_OK | os.X_OK):
        raise UserError(f"--workdir={workdir}: not a writable folder")


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Holds the lock of a workdir. Raises WorkdirBusyError if another process holds it."""

    def acquire():
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            held.enter_context(file_lock(workdir / LOCK_FILE))
        except LockHeldError as other:
            raise WorkdirBusyError(
                f"--workdir={workdir}: in use by {other}; wait for it, or use another --workdir",
                by=str(other),
            ) from None
        except Exception as error:
            if not isinstance(error, OSError) and not is_request_error(error):
                raise
            raise UserError(
                f"--workdir={workdir}: cannot be created or written: {short_reason(error)}"
            ) from None

    with contextlib.ExitStack() as held:
        distributed.run_on_primary(acquire)
        # In folders of their own, processes would save parts of the state that nobody can join.
        require_shared(workdir)
        yield


def require_shared(workdir: Path) -> None:
    """Raises UserError in all processes if one does not see process 0's lock (collective)."""
    if distributed.is_single_process():
        return
    # The lock's content is unique, so an equal file is the same file.
    expected = distributed.from_primary(_read_lock(workdir) if distributed.is_primary() else "")
    end = time.monotonic() + VISIBLE_SECONDS
    while _read_lock(workdir) != expected and time.monotonic() < end:
        time.sleep(0.5)
    seen = exchange("" if _read_lock(workdir) == expected else "missing")
    if any(seen):
        raise UserError(
            f"--workdir={workdir}: process {seen.index('missing')} does not see the files of process "
            "0; use a folder that all processes share"
        )


def _read_lock(workdir: Path) -> str:
    try:
        return (workdir / LOCK_FILE).read_text("utf-8")
    except FileNotFoundError:
        return ""


@contextlib.contextmanager
def open_workdir(workdir: Path, config: Config, corpus: Corpus) -> Iterator[None]:
    """Locks a workdir, and writes the files that the run needs."""

    def start():
        check_workdir(workdir, config)  # again: another run may have come first
        initialize_workdir(workdir, config, corpus)

    with lock_workdir(workdir):
        distributed.run_on_primary(start)
        yield


def initialize_workdir(workdir: Path, config: Config, corpus: Corpus) -> None:
    """Writes the files of a new run, or updates the config of an existing one."""
    check_same_text(workdir, corpus)
    write_config(workdir, config.to_dict())
    # store.json is written last: if it exists, the other files exist too
    if not (workdir / STORE_FILE).exists():
        tokenizer_folder.save(corpus.tokenizer, workdir / TOKENIZER_FOLDER)
        write_atomically(workdir / STORE_FILE, json.dumps(corpus.description, indent=2) + "\n")


class ImportedModel(NamedTuple):
    model: models.LanguageModel
    params: dict
    tokenizer: Tokenizer | None
    model_state: Any = {}  # noqa: RUF012 — the variable collection "state"
    chat_template: str = ""  # "" if the model has none


def write_imported(workdir: Path, imported: ImportedModel, origin: dict) -> None:
    """Writes an imported model to an empty workdir, in which training can continue. `origin`: where
    the model comes from.
    """
    tokenizer_folder.save(imported.tokenizer, workdir / TOKENIZER_FOLDER)
    save_template(imported.chat_template, workdir / TOKENIZER_FOLDER)
    write_atomically(workdir / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
    checkpoints = Checkpoints(workdir / CHECKPOINT_FOLDER, keep=1)
    checkpoints.save_imported(imported.params, imported.model_state)
    checkpoints.close()
    # last, because a folder without it is no workdir
    write_config(workdir, {"model": dataclasses.asdict(imported.model.config)})
