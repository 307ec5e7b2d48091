"""A branch: a run that starts from a checkpoint of a longer run with the same config, its trunk.

With a warmup-stable-decay schedule, runs that differ only in their length have all steps in common
up to the start of the shorter one's decay. The checkpoint and the metrics of these steps are copied.
"""

import dataclasses
import json
from pathlib import Path

from smallgpt_jax.config.group import IN_DECAY
from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.optim.learning_rate import decay_start
from smallgpt_jax.run.checkpoint_folder import copy_checkpoint, saved_steps
from smallgpt_jax.run.config import GROUPS, Config
from smallgpt_jax.run.config_file import saved_config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE, ORIGIN_FILE
from smallgpt_jax.run.training_text import identity_of, read_identity, text_changes
from smallgpt_jax.run.workdir import changed_fields
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.paths import as_path


@dataclasses.dataclass(frozen=True)
class Branch:
    folder: Path  # of the trunk
    step: int  # of the checkpoint from which the run starts

    def check_text(self, corpus: Corpus) -> None:
        if changes := text_changes(read_identity(self.folder), identity_of(corpus)):
            raise UserError(
                f"config.train.trunk={str(self.folder)!r}: was trained on another text "
                f"({changes}); use the same text, or another trunk"
            )

    def copy_to(self, workdir: Path) -> None:
        if saved_steps(workdir / CHECKPOINT_FOLDER):
            return
        try:
            lines = [
                line for line in read_lines(self.folder / METRICS_FILE) if line["step"] <= self.step
            ]
            write_atomically(
                workdir / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines)
            )
            if (self.folder / ORIGIN_FILE).exists():
                write_atomically(workdir / ORIGIN_FILE, (self.folder / ORIGIN_FILE).read_bytes())
            # Last: without the checkpoint, the run starts again.
            copy_checkpoint(
                *(folder / CHECKPOINT_FOLDER / str(self.step) for folder in (self.folder, workdir))
            )
        except OSError as error:
            raise UserError(
                f"config.train.trunk={str(self.folder)!r}: step {self.step} could not be copied "
                f"({short_reason(error)}); rerun the same command"
            ) from None


def open_branch(workdir: Path, config: Config) -> Branch | None:
    """Returns where the run starts in its trunk; None if it has none, or has started already.
    Raises UserError for an unsuitable trunk.
    """
    # With a checkpoint, the run resumes like any other: the trunk may be gone.
    if not config.train.trunk or saved_steps(workdir / CHECKPOINT_FOLDER):
        return None
    step = decay_start(config.optimizer)
    if not 0 < step < config.train.steps:
        raise UserError(
            f"config.train.trunk={config.train.trunk!r}: the decay of this run would start at step "
            f"{step} of {config.train.steps}; set a smaller config.optimizer.decay_fraction, or no "
            "trunk"
        )
    folder = as_path("config.train.trunk", config.train.trunk)
    _require_trunk(folder, config, step)
    return Branch(folder, step)


def _require_trunk(folder: Path, config: Config, step: int) -> None:
    """Raises UserError unless `folder` has a run of the same config and a checkpoint of `step`."""
    where = f"config.train.trunk={config.train.trunk!r}"
    try:
        trunk = saved_config(folder)
    except UserError as error:
        raise UserError(f"config.train.trunk: {error}") from None
    if trunk is None:
        raise UserError(f"{where}: not a run; give the workdir of a run")
    # Fields that only affect the decay may differ: it comes after the steps that both runs share.
    of_decay = {
        f"{name}.{field}"
        for name, group in GROUPS.items()
        for field in group.field_names(**IN_DECAY)
    }
    different = [
        f"{field} is {theirs!r} there, but {ours!r} here"
        for field, (theirs, ours) in changed_fields(folder, config).items()
        if field not in of_decay
    ]
    if different:
        raise UserError(
            f"{where}: has another config: {'; '.join(different)}; use the same settings, or "
            "another trunk"
        )
    start = decay_start(trunk.optimizer)
    if start < step:
        raise UserError(
            f"{where}: its decay starts at step {start}, but the decay of this run at step "
            f"{step}; use a trunk with more steps"
        )
    saved = saved_steps(folder / CHECKPOINT_FOLDER)
    if step not in saved:
        raise UserError(
            f"{where}: has no checkpoint of step {step}, where the decay of this run starts (it "
            f"has steps {', '.join(map(str, saved)) or 'none'}); train the trunk with "
            f"config.train.kept_steps={step}"
        )
