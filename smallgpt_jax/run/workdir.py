"""The run directory: validation, lock, and the files that make it self-contained.

- `config.json`: the resolved config
- `tokenizer/`
- `store.json`: the description of the training text
- `sessions.jsonl`: the devices, versions and commit of each start or resumption

Other modules write `metrics.jsonl`, TensorBoard event files and `checkpoints/`.

`smallgpt_jax.convert` writes the workdir of an imported model: `tokenizer/`, `origin.json`, a checkpoint of step 0, and
a `config.json` with only the group `model`. Training adds the rest.
"""

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from smallgpt_jax import models
from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.corpus import DESCRIPTION, Corpus, same_text
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import LockHeldError, UserError, WorkdirBusyError
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.run.checkpoint import Checkpoints, saved_steps
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.metrics import METRICS_FILE, read_lines
from smallgpt_jax.run.provenance import software
from smallgpt_jax.storage.files import append_line, file_lock, write_atomically
from smallgpt_jax.storage.json_files import (
    NUMBER,
    OBJECT,
    TEXT,
    Each,
    Kind,
    Optional,
    integer,
    read_json,
    read_json_lines,
)
from smallgpt_jax.storage.object_storage import is_remote, is_request_error, require_bucket

CONFIG_FILE = "config.json"
ORIGIN_FILE = "origin.json"  # the source of an imported model
LOCK_FILE = ".lock"  # exists while the run is training
STORE_FILE = "store.json"
SESSIONS_FILE = "sessions.jsonl"  # one line per start, resumption or divergence
TOKENIZER_FOLDER = "tokenizer"
CHECKPOINT_FOLDER = "checkpoints"
EVALUATION_FOLDER = "evaluations"
FORMAT = 1  # of config.json; a config without it was written before version 0.1.0


def check_workdir(workdir: Path, config: Config) -> None:
    """Raises UserError if `workdir` cannot be created or belongs to another config. Writes nothing."""
    if is_remote(workdir):
        require_bucket("--workdir", workdir)
    else:
        require_writable(workdir)
    # List the folder first: another run may start at this moment, and the config is its first visible file.
    is_empty = not workdir.is_dir() or all(path.name.startswith(".") for path in workdir.iterdir())
    if not (workdir / CONFIG_FILE).exists():
        if not is_empty:
            raise UserError(f"--workdir={workdir}: folder is not empty and not a run (no {CONFIG_FILE}); choose "
                            "another")
        return
    different = changed_fields(workdir, config)
    if different:
        listed = "; ".join(f"{field} was {before!r}, now {now!r}" for field, (before, now) in different.items())
        longer = ("; to train its model at another context_length, import it into a new workdir with "
                  "smallgpt_jax.convert --from=run") if "model.context_length" in different and (
                      config.model.position != "learned") else ""
        raise UserError(f"--workdir={workdir}: existing run with another config: {listed}.\n"
                        f"Use the same settings to resume it, or another --workdir{longer}")
    reached = max(saved_steps(workdir / CHECKPOINT_FOLDER), default=0)
    if reached > config.train.steps:
        raise UserError(f"--workdir={workdir}: existing run of {reached:,} steps, more than "
                        f"config.train.steps={config.train.steps}; increase the steps, or use another --workdir")


def changed_fields(workdir: Path, config: Config) -> dict[str, tuple]:
    """Returns {"group.field": (saved value, value in `config`)} of the fields that may not change in this workdir.

    The weights of an imported model that has not been trained fix only fields of the group `model`.
    """
    before, now, is_trained = read_config(workdir).flat(), config.flat(), (workdir / STORE_FILE).exists()
    fixed = {f"{name}.{field}" for name in GROUPS for group in (getattr(config, name), GROUPS[name])
             for by in (("model", "run") if is_trained else ("model",)) for field in group.names(fixed_by=by)}
    if not is_trained and config.model.position != "learned":  # no parameter depends on the context length
        fixed.remove("model.context_length")
    return {field: (before.get(field), now.get(field)) for field in sorted(fixed)
            if before.get(field) != now.get(field)}


def require_writable(workdir: Path) -> None:
    """Raises UserError if a local folder is not writable, or if it is missing and cannot be created."""
    if not os.path.exists(workdir):  # unlike Path.exists, os.path.exists raises no PermissionError
        parent = next(p for p in workdir.absolute().parents if os.path.exists(p))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"--workdir={workdir}: cannot be created; {parent} is not a writable folder")
    elif not workdir.is_dir() or not os.access(workdir, os.W_OK | os.X_OK):
        raise UserError(f"--workdir={workdir}: not a writable folder")


@contextlib.contextmanager
def lock(workdir: Path) -> Iterator[None]:
    """Locks `workdir` against other runs; creates it if necessary.

    Raises WorkdirBusyError if another process holds the lock.
    """
    def acquire():
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            lock.enter_context(file_lock(workdir / LOCK_FILE))
        except LockHeldError as other:
            raise WorkdirBusyError(f"--workdir={workdir}: in use by {other}; wait for it, or use another --workdir",
                                   by=str(other)) from None
        except Exception as error:
            if not isinstance(error, OSError) and not is_request_error(error):
                raise
            raise UserError(f"--workdir={workdir}: cannot be created or written: {short_reason(error)}") from None

    with contextlib.ExitStack() as lock:
        distributed.run_on_primary(acquire)
        yield


def write_config(workdir: Path, config: Config) -> None:
    write_atomically(workdir / CONFIG_FILE, json.dumps({"format": FORMAT, **config.to_dict()}, indent=2) + "\n")


def initialize(workdir: Path, config: Config, corpus: Corpus) -> None:
    """Writes the files of a new run, or updates the config of an existing run.

    Raises UserError if the existing run was trained on a text other than `corpus`; see `check_same_text`.
    """
    check_same_text(workdir, corpus)
    write_config(workdir, config)
    if not (workdir / STORE_FILE).exists():  # store.json is written last: if it exists, the other files exist too
        tokenizers.save(corpus.tokenizer, workdir / TOKENIZER_FOLDER)
        write_atomically(workdir / STORE_FILE, json.dumps(corpus.description, indent=2) + "\n")


def check_same_text(workdir: Path, corpus: Corpus) -> None:
    """Raises UserError if the existing run was trained on a text other than `corpus`, or with another tokenizer.

    For an imported model that has not been trained, compares only the tokenizer.
    """
    now = corpus.description
    if (workdir / STORE_FILE).exists():
        before = read_description(workdir)
        kept = tokenizers.load(workdir / TOKENIZER_FOLDER)
        if not same_text(before, now) or tokenizers.fingerprint(kept) != tokenizers.fingerprint(corpus.tokenizer):
            raise UserError(
                f"--workdir={workdir}: the training text has changed since the run started "
                f"({describe_changes(before, now)}); restore the original text, or use another --workdir")
    elif (workdir / ORIGIN_FILE).exists():
        given = tokenizers.load(workdir / TOKENIZER_FOLDER)
        if tokenizers.fingerprint(given) != tokenizers.fingerprint(corpus.tokenizer):
            raise UserError(f"--workdir={workdir}: config.data.tokenizer is not the imported model's tokenizer; set "
                            f"--config.data.tokenizer={workdir / TOKENIZER_FOLDER}")


def read_description(workdir: Path) -> dict:
    """Returns the `Corpus.description` of a run's training text. Raises UserError if it is missing or damaged."""
    return read_json(workdir / STORE_FILE, DESCRIPTION, "replace it by the metadata.json of the run's token store")


def write_imported(workdir: Path, model: models.LanguageModel, params, model_state, tokenizer: Tokenizer,
                   origin: dict) -> None:
    """Writes an imported model to an empty folder, as a workdir in which training can continue."""
    tokenizers.save(tokenizer, workdir / TOKENIZER_FOLDER)
    write_atomically(workdir / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
    checkpoints = Checkpoints(workdir / CHECKPOINT_FOLDER, keep=1)
    checkpoints.save_imported(params, model_state)
    checkpoints.close()
    write_atomically(workdir / CONFIG_FILE,
                     json.dumps({"format": FORMAT, "model": dataclasses.asdict(model.config)}, indent=2) + "\n")


def is_finished(workdir: Path, config: Config, corpus: Corpus) -> bool:
    """Returns whether the run in `workdir` has saved and evaluated the last step of `config`.

    Evaluations on other validation rows do not count; see `evaluated_steps`.
    """
    steps = config.train.steps
    return (steps in saved_steps(workdir / CHECKPOINT_FOLDER)
            and steps in evaluated_steps(workdir, config, corpus))


def evaluated_steps(workdir: Path, config: Config, corpus: Corpus) -> set[int]:
    """Returns the steps whose last evaluation used the validation rows that `config` selects.

    The number of targets identifies the rows.
    """
    lines = {line["step"]: line for line in read_lines(workdir / METRICS_FILE) if line["split"] == "eval"}
    if not lines:
        return set()
    targets = num_validation_targets(
        corpus, config.data, context_length=config.model.context_length, batch_size=config.train.batch_size,
        eval_steps=config.train.eval_steps)
    return {step for step, line in lines.items() if line.get("targets") == targets}


def describe_changes(before: dict, now: dict) -> str:
    """Formats the first three differences between two `Corpus.description`s for an error message."""
    def flat_entries(value, path=()):
        if isinstance(value, dict | list):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                yield from flat_entries(part, (*path, str(key)))
        else:
            yield path, value

    def format_value(path, value):
        if value is None:  # this description lacks the entry
            return "0" if "skipped" in path else "none"
        return f"{value:,}" if type(value) is int else repr(value)

    entries_before, entries_now = dict(flat_entries(before)), dict(flat_entries(now))
    different = [path for path in sorted(entries_before.keys() | entries_now.keys())
                 if entries_before.get(path) != entries_now.get(path) and "fingerprints" not in path]
    listed = [f"{entry_name(path)}: from {format_value(path, entries_before.get(path))} "
              f"to {format_value(path, entries_now.get(path))}"
              for path in different[:3]]
    return "; ".join(listed) + (f"; and {len(different) - 3} more" if len(different) > 3 else "") or (
        "its tokenizer" if same_text(before, now) else "other content of the same size")


def entry_name(path: tuple[str, ...]) -> str:
    """Returns the name of an entry of `Corpus.description` for an error message."""
    match path:
        case ("mixture", number, *rest):
            return f"store {int(number) + 1}: {entry_name(tuple(rest))}"
        case ("made_from", field):
            return f"config.data.{field}"
        case ("skipped", reason):
            return f"skipped items ({reason})"
        case ("splits", split, count):
            what = {"text_bytes": "bytes of text"}.get(count, count)
            return f"{what} for {'training' if split == 'train' else split}"
    return " ".join(path).replace("_", " ")


def append_session(workdir: Path, facts: dict) -> None:
    """Appends `facts` about a start, resumption or divergence to sessions.jsonl. Ignores write errors."""
    if not distributed.is_primary():
        return
    line = {**facts, "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "processes": jax.process_count(), **software()}
    with contextlib.suppress(Exception):  # clients of object storage raise many types of exceptions
        append_line(workdir / SESSIONS_FILE, json.dumps(line))


# What the readers of sessions.jsonl rely on.
SESSION = {"time": TEXT, "device": TEXT, "devices": integer(1), "argument_bytes": integer(0), "temp_bytes": integer(0),
           "versions": Each(TEXT), "padding": Optional(Kind("a fraction", lambda x: NUMBER.accepts(x) and 0 <= x < 1))}


def read_sessions(workdir: Path) -> list[dict]:
    """Returns the lines of sessions.jsonl about a start or resumption, without those of older versions."""
    return read_json_lines(workdir / SESSIONS_FILE, SESSION)


def has_diverged(workdir: Path) -> bool:
    """Whether the run's last session ended in divergence."""
    sessions = read_json_lines(workdir / SESSIONS_FILE, {"time": TEXT})
    return bool(sessions) and "diverged" in sessions[-1]


def read_config(workdir: Path, trust_custom_code: bool = False) -> Config:
    """Returns the config of a run. In the config of an imported model, all groups but `model` have their defaults.

    Raises UserError if it is missing or damaged, and, unless `trust_custom_code`, if reading it would import the module
    of a custom architecture or mixer.
    """
    groups = read_groups(workdir)
    models.refuse_custom_code(groups["model"], workdir, trust_custom_code)
    try:
        return Config.of(groups)
    except UserError as error:
        raise UserError(f"{workdir / CONFIG_FILE}: {error}") from None


def saved_config(workdir: Path) -> Config | None:
    """Returns the config of the run in `workdir`, or None if no run has started there."""
    is_run = (workdir / CONFIG_FILE).exists() and (workdir / STORE_FILE).exists()
    return read_config(workdir) if is_run else None


def read_groups(workdir: Path) -> dict[str, dict]:
    """Returns the groups of config.json: all groups for a run, only `model` for an imported model.

    Raises UserError if the file is missing or damaged.
    """
    path, advice = workdir / CONFIG_FILE, "restore the file, or use another run"
    required = ("model",) if (workdir / ORIGIN_FILE).exists() else GROUPS
    groups = read_json(path, {name: OBJECT if name in required else Optional(OBJECT) for name in GROUPS}, advice)
    if groups.pop("format", None) != FORMAT:
        raise UserError(f"{path}: was written by another version of this project; use that version, or another workdir")
    return groups


def find_checkpoint(workdir: Path, step: int | None = None) -> int:
    """Returns the newest step that has a checkpoint, or `step` if it is given.

    Raises UserError if `workdir` or the checkpoint does not exist.
    """
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such folder; give the workdir of a run")
    folder, steps = workdir / CHECKPOINT_FOLDER, []
    if folder.is_dir():
        checkpoints = Checkpoints(folder)
        steps = checkpoints.steps()
        checkpoints.close()
    if not steps:
        raise UserError(f"{workdir}: the run has no checkpoint yet; train it first")
    if step not in (None, *steps):
        raise UserError(f"{workdir}: no checkpoint of step {step}; choose from {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step
