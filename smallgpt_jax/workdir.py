"""The folder of a run: what it was asked for and what it needs to stand alone.

`config.json` (the resolved config), `tokenizer/`, `store.json` (which text it is trained on),
`sessions.jsonl` (on what machine, with which versions), and beside them what other modules write:
`metrics.jsonl`, TensorBoard files, `checkpoints/`. Of a model that
was imported (`smallgpt_jax.convert`) there are its `model` group, its tokenizer, `origin.json` and a
checkpoint of step 0, until it is trained further.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
from ml_collections import ConfigDict

from smallgpt_jax import distributed, models
from smallgpt_jax.checkpoint import Checkpoints
from smallgpt_jax.data import Corpus, same_text, tokenizers
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import InTraining, UserError
from smallgpt_jax.files import InUse, locked, write_atomically
from smallgpt_jax.metrics import METRICS_FILE, read_lines

CONFIG_FILE = "config.json"
ORIGIN_FILE = "origin.json"  # where an imported model comes from
LOCK_FILE = ".lock"  # there while a run is training
STORE_FILE = "store.json"
SESSIONS_FILE = "sessions.jsonl"  # a line for each time the run was started or continued
TOKENIZER_FOLDER = "tokenizer"
CHECKPOINT_FOLDER = "checkpoints"
EVALUATION_FOLDER = "evaluations"  # what trained models were measured to do
GROUPS = ("model", "data", "mesh", "optimizer", "train")

# What a continued run may have different: it changes how the steps are computed or watched, or how
# many there are, but not what any of them computes (but for rounding, and for which entries dropout
# draws if there are other microbatches).
MAY_CHANGE = {
    "train.steps", "train.log_every", "train.eval_every", "train.eval_steps",
    "train.checkpoint_every", "train.keep_checkpoints", "train.microbatches", "train.loss_chunks",
    "model.attention", "model.scan_layers", "model.remat", "mesh.data", "mesh.fsdp", "mesh.tensor",
    "mesh.path", "data.store", "data.mixture", "data.workers", "train.on_nonfinite", "train.max_nonfinite",
}


def check(workdir: Path, config: ConfigDict) -> None:
    """Raises UserError if `workdir` cannot become, or is not, the workdir of `config`.

    Changes nothing.
    """
    if not os.path.exists(workdir):  # unlike Path.exists, also where one may not look
        parent = next(p for p in workdir.absolute().parents if os.path.exists(p))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"--workdir={workdir}: cannot be made, {parent} is not a folder that you "
                            "may write to")
        return
    if not workdir.is_dir() or not os.access(workdir, os.W_OK | os.X_OK):
        raise UserError(f"--workdir={workdir}: not a folder that you may write to")
    if not (workdir / CONFIG_FILE).exists():
        if any(not path.name.startswith(".") for path in workdir.iterdir()):
            raise UserError(f"--workdir={workdir}: holds files, but no run (no {CONFIG_FILE}); choose "
                            "an empty or a new folder")
        return
    before, now = flat(read_config(workdir)), flat(config)
    fields, may_change = before.keys() | now.keys(), MAY_CHANGE
    if not (workdir / STORE_FILE).exists():  # nothing was trained here yet: only the model is given
        fields = {field for field in fields if field.startswith("model.")}
        may_change = MAY_CHANGE | {"model.dtype", "model.dropout"}
        if before.get("model.position") != "learned":  # no parameter is as long as the context
            may_change |= {"model.context_length"}
    different = [field for field in sorted(fields)
                 if field not in may_change and before.get(field) != now.get(field)]
    if different:
        listed = "; ".join(
            f"{field} was {before.get(field)!r}, now {now.get(field)!r}" for field in different)
        longer = (", or take the model into another one with smallgpt_jax.convert --from=run: it can then be trained "
                  "at another context_length") if "model.context_length" in different and (
                      before.get("model.position") != "learned") else ""
        raise UserError(f"--workdir={workdir}: belongs to a run with another config: {listed}.\n"
                        f"Use the same settings to continue it, or another --workdir{longer}")
    reached = max((int(path.name) for path in (workdir / CHECKPOINT_FOLDER).glob("*") if path.name.isdecimal()),
                  default=0)
    if reached > config.train.steps:
        raise UserError(f"--workdir={workdir}: has been trained for {reached:,} steps, more than "
                        f"config.train.steps={config.train.steps}; ask for as many, or use another --workdir")


@contextlib.contextmanager
def taken(workdir: Path) -> Iterator[None]:
    """Keeps other runs out of `workdir`, which is made if it is not there.

    Raises InTraining if one is in it already.
    """
    def take():
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(workdir / LOCK_FILE))
        except InUse as other:
            raise InTraining(f"--workdir={workdir}: {other} is training in it; wait for it, or use another "
                             "--workdir", by=str(other)) from None
        except OSError as error:
            raise UserError(f"--workdir={workdir}: cannot be made or written to: {error.strerror}") from None

    with contextlib.ExitStack() as lock:
        distributed.first(take)
        yield


def begin(workdir: Path, config: ConfigDict, corpus: Corpus) -> None:
    """Writes down what the run is, or takes up the one that is there.

    Raises UserError if that was trained on another text; see `check_text`.
    """
    check_text(workdir, corpus)
    write_atomically(workdir / CONFIG_FILE, json.dumps(config.to_dict(), indent=2) + "\n")
    if not (workdir / STORE_FILE).exists():  # which is written last: all of it is there then
        tokenizers.save(corpus.tokenizer, workdir / TOKENIZER_FOLDER)
        write_atomically(workdir / STORE_FILE, json.dumps(corpus.description, indent=2) + "\n")


def check_text(workdir: Path, corpus: Corpus) -> None:
    """Raises UserError if what was trained in `workdir` so far, or imported, was with another text or tokenizer
    than `corpus` has."""
    now = corpus.description
    if (workdir / STORE_FILE).exists():
        try:
            before = json.loads((workdir / STORE_FILE).read_text())
        except ValueError as error:
            raise UserError(f"{workdir / STORE_FILE}: damaged ({error}); copy the metadata.json of the run's "
                            "token store there") from None
        kept = tokenizers.load(workdir / TOKENIZER_FOLDER)
        if not same_text(before, now) or tokenizers.fingerprint(kept) != tokenizers.fingerprint(corpus.tokenizer):
            raise UserError(
                f"--workdir={workdir}: its text has changed since the run began "
                f"({what_changed(before, now)}); use another --workdir, or the text of then")
    elif (workdir / ORIGIN_FILE).exists():
        given = tokenizers.load(workdir / TOKENIZER_FOLDER)
        if tokenizers.fingerprint(given) != tokenizers.fingerprint(corpus.tokenizer):
            raise UserError(f"--workdir={workdir}: its model was imported with another tokenizer than that of the "
                            f"text; set --config.data.tokenizer={workdir / TOKENIZER_FOLDER}")


def plant(workdir: Path, model: models.LanguageModel, params, model_state, tokenizer: Tokenizer, origin: dict) -> None:
    """Makes an empty folder the workdir of a model from elsewhere, which can be trained further."""
    tokenizers.save(tokenizer, workdir / TOKENIZER_FOLDER)
    write_atomically(workdir / ORIGIN_FILE, json.dumps(origin, indent=2) + "\n")
    checkpoints = Checkpoints(workdir / CHECKPOINT_FOLDER, keep=1)
    checkpoints.save_imported(params, model_state)
    checkpoints.close()
    write_atomically(workdir / CONFIG_FILE,
                     json.dumps({"model": dataclasses.asdict(model.config)}, indent=2) + "\n")


def is_finished(workdir: Path, config: ConfigDict, corpus: Corpus) -> bool:
    """Returns whether the workdir holds a run that has been trained for all steps of `config`, saved, and evaluated on
    the rows that `config` asks for."""
    steps = config.train.steps
    return ((workdir / CHECKPOINT_FOLDER / str(steps)).is_dir()
            and steps in evaluated_steps(workdir, config, corpus))


def evaluated_steps(workdir: Path, config: ConfigDict, corpus: Corpus) -> set[int]:
    """Returns the steps whose last evaluation was on the rows that `config` asks for, recognized by the number of
    targets.

    Older versions did not record that number: their rows are those of the workdir's own config.
    """
    lines = {line["step"]: line for line in read_lines(workdir / METRICS_FILE) if line["split"] == "eval"}
    if not lines:
        return set()
    wanted = num_validation_targets(
        corpus, config.data, context_length=config.model.context_length, batch_size=config.train.batch_size,
        eval_steps=config.train.eval_steps)
    unrecorded = wanted if read_config(workdir).train.eval_steps == config.train.eval_steps else None
    return {step for step, line in lines.items() if line.get("targets", unrecorded) == wanted}


def what_changed(before: dict, now: dict) -> str:
    """Returns, in words, the first entries that differ between two descriptions of a text."""
    def leaves(value, path=()):
        if isinstance(value, dict | list):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                yield from leaves(part, (*path, str(key)))
        else:
            yield path, value

    def shown(path, value):
        if value is None:  # there is no such entry
            return "0" if "skipped" in path else "none"
        return f"{value:,}" if type(value) is int else repr(value)

    then, later = dict(leaves(before)), dict(leaves(now))
    different = [path for path in sorted(then.keys() | later.keys())
                 if then.get(path) != later.get(path) and "fingerprints" not in path]
    listed = [f"{entry_name(path)}: from {shown(path, then.get(path))} to {shown(path, later.get(path))}"
              for path in different[:3]]
    return "; ".join(listed) + (f"; and {len(different) - 3} more" if len(different) > 3 else "") or (
        "its tokenizer" if same_text(before, now) else "other content of the same size")


def entry_name(path: tuple[str, ...]) -> str:
    """Returns how messages name an entry of a text's description."""
    match path:
        case ("mixture", number, *rest):
            return f"store {int(number) + 1}: {entry_name(tuple(rest))}"
        case ("made_from", field):
            return f"config.data.{field}"
        case ("skipped", reason):
            return f"items left out ({reason})"
        case ("splits", split, count):
            what = {"text_bytes": "bytes of text"}.get(count, count)
            return f"{what} for {'training' if split == 'train' else split}"
    return " ".join(path).replace("_", " ")


def record(workdir: Path, facts: dict) -> None:
    """Adds to sessions.jsonl what happened to the run, now, here: it began, or went on, or diverged. A disk that has
    no room for that is no reason not to train."""
    if not distributed.is_first():
        return
    versions = {name: metadata.version(name) for name in ("jax", "flax", "optax", "grain", "orbax-checkpoint")}
    told = {**facts, "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "processes": jax.process_count(), "versions": {"python": platform.python_version(), **versions}}
    with contextlib.suppress(OSError), (workdir / SESSIONS_FILE).open("a") as file:
        file.write(json.dumps(told) + "\n")


def read_config(workdir: Path) -> ConfigDict:
    """The resolved config of a run. Raises UserError if there is none."""
    path = workdir / CONFIG_FILE
    try:
        groups = json.loads(path.read_text())
        wanted = ("model",) if (workdir / ORIGIN_FILE).exists() else GROUPS
        if not isinstance(groups, dict) or not all(isinstance(groups.get(name), dict) for name in wanted):
            raise ValueError(f"it has not the groups {', '.join(wanted)}")
        return ConfigDict({**groups, "model": models.upgrade_fields(groups["model"])})
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the config of a run ({error})") from None


def flat(config: ConfigDict) -> dict:
    """{"group.field": value}."""
    return {f"{group}.{field}": value
            for group, fields in config.to_dict().items() for field, value in fields.items()}
