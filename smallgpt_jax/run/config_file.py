"""config.json: the config of a run, or the model config of an imported model."""

import json
from collections.abc import Mapping
from pathlib import Path

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, CONFIG_FILE, ORIGIN_FILE, STORE_FILE
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import OBJECT, Optional, read_json

FORMAT = 1  # of the whole workdir: increase it if older workdirs cannot be read any more


def read_config(workdir: Path, trust_custom_code: bool = False) -> Config:
    """Returns the config in a workdir; of an imported model, all groups but `model` have their
    defaults. Raises UserError if it is missing or damaged, or names custom code without
    `trust_custom_code`.
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


def write_config(workdir: Path, groups: Mapping[str, Mapping]) -> None:
    content = json.dumps({"format": FORMAT, **groups}, indent=2)
    write_atomically(workdir / CONFIG_FILE, content + "\n")


def read_groups(workdir: Path) -> dict[str, dict]:
    """Returns all groups of a run, or only `model` of an imported model. Raises UserError."""
    path = workdir / CONFIG_FILE
    if not path.exists() and not (workdir / CHECKPOINT_FOLDER).exists():
        raise UserError(f"{workdir}: not a run, without {CONFIG_FILE}; give the workdir of a run")
    required = ("model",) if (workdir / ORIGIN_FILE).exists() else GROUPS
    schema = {name: OBJECT if name in required else Optional(OBJECT) for name in GROUPS}
    groups = read_json(path, schema, "restore the file, or use another run")
    if groups.pop("format", None) != FORMAT:
        raise UserError(
            f"{path}: was written by another version of this project; use that version, or "
            "another workdir"
        )
    return groups
