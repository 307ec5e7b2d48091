"""Loading a trained model from its workdir."""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.data import tokenizer_folder, tokenizers
from smallgpt_jax.data.chat_template import ChatTemplate, own_template
from smallgpt_jax.data.prompts import with_begin
from smallgpt_jax.devices import distributed, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import layout
from smallgpt_jax.inference.decoding_check import check_decoding
from smallgpt_jax.inference.single_blocks import without_blocks
from smallgpt_jax.inference.text_model import TextModel
from smallgpt_jax.models.kernel_check import check_recurrence_kernels
from smallgpt_jax.models.pgpt import PGPTConfig, path_weights, with_paths
from smallgpt_jax.optim import lora
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.checkpoint_folder import find_checkpoint
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, TOKENIZER_FOLDER
from smallgpt_jax.run.training_text import training_format
from smallgpt_jax.storage.object_storage import is_remote, require_bucket
from smallgpt_jax.storage.paths import as_path


def load(
    folder: str | Path,
    step: int | None = None,
    paths: str | Sequence[int] = "all",
    trust_custom_code: bool = False,
    skip_blocks: Sequence[str | int] = (),
) -> TextModel:
    """Returns the model of a workdir, on the default device.

    `step` is the checkpoint's; None: the newest. `paths` selects those of a pgpt: "all", "best"
    (with the largest weight), or indices such as "0,1". Custom modules must already be imported, or
    be trusted. `skip_blocks` are numbers of blocks to leave out (see `single_blocks`), in the
    chosen paths.
    """
    trained = load_trained(folder, step, trust_custom_code)
    text_model = trained.with_paths(paths).without_blocks(skip_blocks).text_model()
    return dataclasses.replace(text_model, load_template=partial(_load_chat_template, folder))


def build_text_model(
    model: models.LanguageModel, params, tokenizer: tokenizers.Tokenizer, model_state=None
) -> TextModel:
    """Checks custom parts and, on TPUs, recurrences first. `params` are in the training layout."""
    require_next_tokens(model)
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    check_recurrence_kernels(model, mesh)
    weights = layout.pack(model, params, model_state)
    # the tests of this package check its own parts
    if models.custom_classes(model.config):
        check_decoding(model, params, model_state)
    return TextModel(model, weights, tokenizer)


def require_next_tokens(model: models.LanguageModel) -> None:
    """Raises UserError for a masked language model."""
    if model.config.attention_mask == "bidirectional":
        raise UserError(
            "config.train.objective='masked': the model predicts masked tokens, not the next one, "
            "so it cannot generate or score text; export it as an encoder with "
            "smallgpt_jax.convert --to=hf"
        )


class TrainedModel(NamedTuple):
    model: models.LanguageModel
    params: Any  # in the training layout
    model_state: Any  # the variable collection "state"
    tokenizer: tokenizers.Tokenizer
    step: int

    def with_paths(self, paths: str | Sequence[int]) -> "TrainedModel":
        if paths == "all":
            return self
        indices = select_paths(self.model, self.params, paths)
        config = self.model.config
        assert isinstance(config, PGPTConfig)  # others have no paths to select
        config, params, model_state = with_paths(config, self.params, self.model_state, indices)
        model = models.LanguageModel(config)
        return self._replace(model=model, params=params, model_state=model_state)

    def without_blocks(self, numbers: Sequence[str | int]) -> "TrainedModel":
        if numbers:
            require_next_tokens(self.model)
        return self._replace(model=without_blocks(self.model, numbers))

    def with_dtype(self, dtype: str) -> "TrainedModel":
        # `clone`, because a model without some blocks is of another class
        model = self.model.clone(config=self.model.config.replace(dtype=dtype))
        return self._replace(model=model)

    def text_model(self) -> TextModel:
        return build_text_model(self.model, self.params, self.tokenizer, self.model_state)


def load_trained(
    folder: str | Path,
    step: int | None = None,
    trust_custom_code: bool = False,
    merge_lora: bool = True,
) -> TrainedModel:
    """See `load`. The weights have LoRA's matrices merged, or are those from before the run."""
    # commands call this earlier; other programs that load a model do not
    distributed.skip_tpu_search()
    folder = as_path("--workdir", folder)
    if is_remote(folder):
        require_bucket("--workdir", folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the workdir of a run")
    config = read_config(folder, trust_custom_code)
    model = models.LanguageModel(config.model)
    abstract_params = models.abstract_params(model)
    # after the config, so that a folder that is no run gets that message
    step = find_checkpoint(folder, step)
    # step 0 is the checkpoint of an imported model, before LoRA adds its matrices
    is_adapted = step > 0 and config.optimizer.lora_rank > 0
    adapters = {}
    if is_adapted:
        rank, train_only = config.optimizer.lora_rank, config.optimizer.train_only
        adapters[lora.NAME] = lora.abstract_pairs(abstract_params, rank, train_only)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    # on one device, whatever mesh the checkpoint is from
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        (abstract_params, models.abstract_model_state(model), adapters),
    )
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER)
    params, model_state, adapters = checkpoints.restore_model(step, *abstract)
    if checkpoints.has_average(step):
        print(
            f"{folder}: step {step}, the moving average of the weights (config.train.ema)",
            file=sys.stderr,
        )
    checkpoints.close()
    if is_adapted and merge_lora:
        scale = config.optimizer.lora_scale
        params = lora.merge(abstract_params, params, adapters[lora.NAME], scale)
    tokenizer = tokenizer_folder.load(folder / TOKENIZER_FOLDER)
    return TrainedModel(model, params, model_state, tokenizer, step)


def _load_chat_template(folder: str | Path) -> ChatTemplate:
    """Raises UserError if the run has none; see `find_chat_template`."""
    template = find_chat_template(folder)
    if not template:
        raise UserError(
            f"{folder}: no chat template: the run did not train on conversations, and its tokenizer "
            "has none; train on conversations (config.data.format='messages'), or do without chat"
        )
    return template


def find_chat_template(folder: str | Path) -> ChatTemplate | None:
    """Returns the template of the run's conversations, or else of its tokenizer."""
    path = as_path("--workdir", folder)
    source = training_format(path).chat_template or own_template(path / TOKENIZER_FOLDER)
    if not source:
        return None
    try:
        return ChatTemplate(source, tokenizer_folder.load(path / TOKENIZER_FOLDER).special_tokens)
    except ValueError as error:
        raise UserError(
            f"{folder}: its chat template is no Jinja template ({error}); correct it"
        ) from None


def portable_chat_template(folder: str | Path, tokenizer: tokenizers.Tokenizer) -> str:
    """Returns the template for other programs, or ""."""
    path = as_path("--workdir", folder)
    trained = training_format(path).chat_template
    # they put no begin-of-text token before what it writes
    return with_begin(trained, tokenizer) if trained else own_template(path / TOKENIZER_FOLDER)


def select_paths(model: models.LanguageModel, params, paths: str | Sequence[int]) -> list[int]:
    c = model.config
    if c.architecture != "pgpt" or not isinstance(c, PGPTConfig):
        raise UserError(
            f"paths={paths!r}: only pgpt has paths, this model is a {c.architecture}; use 'all'"
        )
    if paths == "best":
        return [int(np.argmax(path_weights(params)))]
    numbers = paths.split(",") if isinstance(paths, str) else paths
    try:
        indices = [int(number) for number in numbers]
    except ValueError:
        indices = []
    # a path that is named twice would count double in the mean
    is_distinct = len(set(indices)) == len(indices)
    is_known = set(indices) <= set(range(c.num_paths))
    if not indices or not is_distinct or not is_known:
        raise UserError(
            f"paths={paths!r}: expected all, best, or distinct indices from 0 to "
            f"{c.num_paths - 1}, separated by commas"
        )
    return indices
