"""The teacher of a run: a trained model whose features the model of the run imitates.

The teacher's variables are restored from its own workdir in each session; the run's checkpoints do
not have them.
"""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp

from smallgpt_jax import models
from smallgpt_jax.config.group import AT_START
from smallgpt_jax.data import tokenizer_folder, tokenizers
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.flops import forward_operations
from smallgpt_jax.objectives.objective import Examples, Outputs, Term
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.checkpoint_folder import find_checkpoint
from smallgpt_jax.run.config import TrainConfig
from smallgpt_jax.run.config_file import read_config, read_groups
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, TOKENIZER_FOLDER
from smallgpt_jax.storage.paths import local_path

# The collection that blocks sow their outputs into; collected only for a teacher
_FEATURES = "features"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher(Term):
    """Has constants {"params", "state"}. Only `constants` allocates memory."""

    sown: ClassVar = (_FEATURES,)

    model: models.LanguageModel
    folder: Path
    step: int

    def constants(self):
        """Raises UserError if the checkpoint cannot be read."""
        checkpoints = Checkpoints(self.folder / CHECKPOINT_FOLDER)
        params, state, _ = checkpoints.restore_model(
            self.step, self.abstract_constants["params"], self.abstract_constants["state"]
        )
        checkpoints.close()
        return {"params": params, "state": state}

    def __call__(self, outputs: Outputs, variables, examples: Examples, weights_BxT) -> jax.Array:
        """Returns the mean-square distance of the outputs of all blocks (PELA: Guo et al., arXiv
        2310.10700): squares are averaged over the width, weighted by `weights_BxT`, summed over
        positions, averaged over blocks.
        """
        context = examples.context().replace(loss_mask_BxT=None)
        # Only the features are mutable: the teacher's state stays as it was restored.
        _, collections = self.model.apply(
            variables, examples.inputs_BxT, context, method="hidden", mutable=[_FEATURES]
        )

        def distances(x, y):
            """(…, B, T, D) → (L,), per block. Stacked blocks have leading axes."""
            squares = jnp.square(x.astype(jnp.float32) - y.astype(jnp.float32))
            squares_LxBxT = jnp.mean(squares, axis=-1).reshape(-1, *weights_BxT.shape)
            return jnp.sum(squares_LxBxT * weights_BxT[None], axis=(1, 2))

        ours, theirs = outputs.collections[_FEATURES], collections[_FEATURES]
        by_stack = jax.tree.leaves(jax.tree.map(distances, ours, theirs))
        return jnp.mean(jnp.concatenate(by_stack))

    def train_products(self, student: models.LanguageModel) -> int:
        """Returns the FLOPs of the teacher's forward pass, without the head."""
        # nothing that is trained leads to the teacher's outputs: no backward pass
        return forward_operations(self.model, "hidden").products

    def check_tokenizer(self, tokenizer: tokenizers.Tokenizer) -> None:
        theirs = tokenizer_folder.load(self.folder / TOKENIZER_FOLDER)
        if tokenizers.fingerprint(theirs) != tokenizers.fingerprint(tokenizer):
            raise UserError(
                f"config.train.teacher={str(self.folder)!r}: has another tokenizer ({theirs.kind}, "
                f"{theirs.vocab_size:,} entries) than this run ({tokenizer.kind}, "
                f"{tokenizer.vocab_size:,} entries); set "
                f"--config.data.tokenizer={self.folder / TOKENIZER_FOLDER}"
            )


def open_teacher(
    train: TrainConfig, student: models.LanguageModel, mesh: jax.sharding.Mesh
) -> Teacher | None:
    """Reads only the teacher's config, and finds its newest checkpoint if none is named."""
    if not train.teacher:
        return None
    folder = local_path("config.train.teacher", train.teacher)
    try:
        newest = train.teacher_step == AT_START
        step = find_checkpoint(folder, None if newest else train.teacher_step)
        config = _read_teacher(folder, student.config)
        if read_config(folder).optimizer.lora_rank:
            raise UserError(
                f"{folder}: was trained with LoRA; merge it with smallgpt_jax.convert --from=run"
            )
    except UserError as error:
        raise UserError(f"config.train.teacher: {error}") from None
    # `_read_teacher` has compared the fields of the weights; the others, as of backends, are ours.
    model = models.LanguageModel(
        student.config.replace(rank_ratio=config.rank_ratio, dropout=0.0, remat="none")
    )
    variables = _abstract_variables(model, mesh)
    if not _has_features(model, variables):
        raise UserError(
            f"config.train.teacher={train.teacher!r}: the blocks of {config.architecture} have no "
            "features; use smallgpt_jax.models.block.Block in its blocks"
        )
    return Teacher(
        weight=train.feature_weight,
        abstract_constants=variables,
        model=model,
        folder=folder,
        step=step,
    )


def _abstract_variables(model: models.LanguageModel, mesh: jax.sharding.Mesh):
    params, state = models.abstract_params(model), models.abstract_model_state(model)
    shardings = {
        "params": sharding.param_shardings(mesh, params),
        "state": jax.tree.map(lambda _: sharding.replicated(mesh), state),
    }
    return jax.tree.map(
        lambda x, placement: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement),
        {"params": params, "state": state},
        shardings,
    )


def _has_features(model: models.LanguageModel, variables) -> bool:
    def hidden(variables, tokens):
        return model.apply(variables, tokens, method="hidden", mutable=[_FEATURES])

    tokens = jax.ShapeDtypeStruct((1, model.config.context_length), "int32")
    _, features = jax.eval_shape(hidden, variables, tokens)
    return bool(features)


def _read_teacher(folder: Path, student: models.ModelConfig) -> models.ModelConfig:
    """Raises UserError unless the teacher is the same model apart from its `rank_ratio`."""
    different = models.foreign_classes(read_groups(folder)["model"], student)
    if not different:
        teacher = read_config(folder).model  # imports no module that the student does not name
        different = changed_fields(teacher, student)
    if different:
        listed = "; ".join(
            f"config.model.{field} is {here!r} here, but {there!r} in the teacher"
            for field, (there, here) in different.items()
        )
        raise UserError(
            f"{folder}: {listed}; the teacher must be the same model, except for "
            "config.model.rank_ratio"
        )
    return teacher


def changed_fields(teacher: models.ModelConfig, student: models.ModelConfig) -> dict[str, tuple]:
    """Returns {field: (teacher's value, student's value)}."""
    there, here = dataclasses.asdict(teacher), dataclasses.asdict(student)
    fixed = {*teacher.field_names(fixed_by="model"), *student.field_names(fixed_by="model")} - {
        "rank_ratio"
    }
    return {
        field: (there.get(field), here.get(field))
        for field in here | there
        if field in fixed and there.get(field) != here.get(field)
    }
