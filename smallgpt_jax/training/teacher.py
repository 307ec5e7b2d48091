"""The teacher of a run: a trained model whose features the model of the run imitates.

The training step adds the distance between the features of both models to the loss, see `step.feature_distance`. The
teacher is constant: its variables are restored from its own workdir in each session, and are not in the checkpoints
of the run.
"""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax

from smallgpt_jax import models
from smallgpt_jax.config_group import AT_START
from smallgpt_jax.data import tokenizers
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.checkpoint import Checkpoints, find_checkpoint
from smallgpt_jax.run.config import Config, TrainConfig
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, TOKENIZER_FOLDER
from smallgpt_jax.storage.files import local_path
from smallgpt_jax.training.step import FEATURES


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A trained model in `folder`. Only `restore` allocates memory for its variables."""

    model: models.LanguageModel
    folder: Path
    step: int
    abstract_variables: Any  # {"params": shapes, "state": shapes}, with shardings

    def restore(self):
        """Returns the variables {"params", "state"}. Raises UserError if the checkpoint cannot be read."""
        checkpoints = Checkpoints(self.folder / CHECKPOINT_FOLDER)
        params, state = checkpoints.restore_model(
            self.step, self.abstract_variables["params"], self.abstract_variables["state"])
        checkpoints.close()
        return {"params": params, "state": state}

    def check_tokenizer(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises UserError if the teacher has another tokenizer."""
        own = tokenizers.load(self.folder / TOKENIZER_FOLDER)
        if tokenizers.fingerprint(own) != tokenizers.fingerprint(tokenizer):
            raise UserError(f"config.train.teacher={str(self.folder)!r}: has another tokenizer ({own.kind}, "
                            f"{own.vocab_size:,} entries) than this run ({tokenizer.kind}, {tokenizer.vocab_size:,} "
                            f"entries); set --config.data.tokenizer={self.folder / TOKENIZER_FOLDER}")


def with_teacher_step(config: Config) -> Config:
    """Returns the config with AT_START in `train.teacher_step` replaced by the teacher's newest step.

    Raises UserError if the teacher has no checkpoint of this step.
    """
    train = config.train
    if not train.teacher:
        if train.teacher_step != AT_START:
            raise UserError(f"config.train.teacher_step={train.teacher_step}: needs config.train.teacher")
        return config
    try:
        step = find_checkpoint(local_path("config.train.teacher", train.teacher),
                                       None if train.teacher_step == AT_START else train.teacher_step)
    except UserError as error:
        raise UserError(f"config.train.teacher: {error}") from None
    return config.replace(train={"teacher_step": step})


def open_teacher(train: TrainConfig, student: models.LanguageModel, mesh: jax.sharding.Mesh) -> Teacher | None:
    """Returns the teacher of a config's `train` group, or None if it has none. Reads only the teacher's config.

    Raises UserError if the teacher's config cannot be read, if the teacher is another model, apart from its
    `rank_ratio`, or if the student's architecture does not provide features.
    """
    if not train.teacher:
        return None
    folder = local_path("config.train.teacher", train.teacher)
    try:
        own = read_config(folder).model  # the student's architecture is imported already
    except UserError as error:
        raise UserError(f"config.train.teacher: {error}") from None
    fields, student_fields = dataclasses.asdict(own), dataclasses.asdict(student.config)
    fixed = {*own.names(fixed_by="model"), *student.config.names(fixed_by="model")} - {"rank_ratio"}
    different = [f"config.model.{field} is {student_fields.get(field)!r} here, but {fields.get(field)!r} in the teacher"
                 for field in student_fields | fields
                 if field in fixed and fields.get(field) != student_fields.get(field)]
    if different:
        raise UserError(f"config.train.teacher={train.teacher!r}: {'; '.join(different)}; the teacher must be the same "
                        "model, except for config.model.rank_ratio")
    model = models.LanguageModel(dataclasses.replace(
        student.config, rank_ratio=own.rank_ratio, dropout=0.0, remat="none"))
    params = models.abstract_params(model)
    shardings = {"params": sharding.param_shardings(mesh, params),
                 "state": jax.tree.map(lambda _: sharding.replicated(mesh), models.abstract_model_state(model))}
    variables = jax.tree.map(
        lambda x, placement: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement),
        {"params": nn.unbox(params), "state": models.abstract_model_state(model)}, shardings)
    tokens = jax.ShapeDtypeStruct((1, own.context_length), "int32")
    if not jax.eval_shape(lambda variables, tokens: model.apply(
            variables, tokens, method="hidden", mutable=[FEATURES]), variables, tokens)[1]:
        raise UserError(f"config.train.teacher={train.teacher!r}: the blocks of {own.architecture} have no features; "
                        "use smallgpt_jax.models.block.Block in its blocks")
    return Teacher(model, folder, train.teacher_step, variables)
