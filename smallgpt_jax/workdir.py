"""The folder of a run: what it was asked for and what it needs to stand alone.

`config.json` (the resolved config), `tokenizer/`, `store.json` (which text it is trained on), and
beside them what other modules write: `metrics.jsonl`, TensorBoard files, `checkpoints/`.
"""

import json
import os
from pathlib import Path

from ml_collections import ConfigDict

from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.store import METADATA_FILE, TokenStore
from smallgpt_jax.errors import UserError

CONFIG_FILE = "config.json"
STORE_FILE = "store.json"
TOKENIZER_FOLDER = "tokenizer"
CHECKPOINT_FOLDER = "checkpoints"
GROUPS = ("model", "data", "mesh", "optimizer", "train")

# What a continued run may have different: it changes how the steps are computed or watched, or how
# many there are, but not what any of them computes (but for rounding, and for which entries dropout
# draws if there are other microbatches).
MAY_CHANGE = {
    "train.steps", "train.log_every", "train.eval_every", "train.eval_steps",
    "train.checkpoint_every", "train.keep_checkpoints", "train.microbatches", "train.loss_chunks",
    "model.attention", "model.scan_layers", "model.remat", "mesh.data", "mesh.fsdp", "mesh.tensor",
    "mesh.path", "data.store",
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
    different = [field for field in sorted(before.keys() | now.keys())
                 if field not in MAY_CHANGE and before.get(field) != now.get(field)]
    if different:
        listed = "; ".join(
            f"{field} was {before.get(field)!r}, now {now.get(field)!r}" for field in different)
        raise UserError(f"--workdir={workdir}: belongs to a run with another config: {listed}.\n"
                        "Use the same settings to continue it, or another --workdir")


def begin(workdir: Path, config: ConfigDict, store: TokenStore) -> None:
    """Makes the workdir, or takes up the one that is there.

    Raises UserError if the text it was trained on so far is not the text in `store`.
    """
    metadata = (store.folder / METADATA_FILE).read_text()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--workdir={workdir}: cannot be made: {error.strerror}") from None
    if (workdir / STORE_FILE).exists():
        before, now = json.loads((workdir / STORE_FILE).read_text()), json.loads(metadata)
        kept = tokenizers.fingerprint(tokenizers.load(workdir / TOKENIZER_FOLDER))
        if before != now or kept != tokenizers.fingerprint(store.tokenizer):
            tokens = [m["splits"]["train"]["tokens"] for m in (before, now)]
            raise UserError(
                f"--workdir={workdir}: its text has changed since the run began ({tokens[0]:,} training "
                f"tokens then, {tokens[1]:,} now, or another tokenizer); use another --workdir")
    write_atomically(workdir / CONFIG_FILE, json.dumps(config.to_dict(), indent=2) + "\n")
    if not (workdir / STORE_FILE).exists():  # which is written last: all of it is there then
        tokenizers.save(store.tokenizer, workdir / TOKENIZER_FOLDER)
        write_atomically(workdir / STORE_FILE, metadata)


def read_config(workdir: Path) -> ConfigDict:
    """The resolved config of a run. Raises UserError if there is none."""
    path = workdir / CONFIG_FILE
    try:
        groups = json.loads(path.read_text())
        if not isinstance(groups, dict) or not all(isinstance(groups.get(name), dict) for name in GROUPS):
            raise ValueError(f"it has not the groups {', '.join(GROUPS)}")
        return ConfigDict(groups)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the config of a run ({error})") from None


def flat(config: ConfigDict) -> dict:
    """{"group.field": value}."""
    return {f"{group}.{field}": value
            for group, fields in config.to_dict().items() for field, value in fields.items()}


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file by `text`: afterwards it is the old one or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
