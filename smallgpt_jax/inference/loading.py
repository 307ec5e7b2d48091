"""Loading a trained model from its workdir."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.data import tokenizers
from smallgpt_jax.devices import distributed
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import layout
from smallgpt_jax.inference.decoding_check import check_decoding
from smallgpt_jax.inference.text_model import TextModel
from smallgpt_jax.models.pgpt import path_weights, with_paths
from smallgpt_jax.run.checkpoint import Checkpoints, find_checkpoint
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, TOKENIZER_FOLDER
from smallgpt_jax.storage.object_storage import is_remote, require_bucket
from smallgpt_jax.storage.paths import as_path


def load(folder: str | Path, step: int | None = None, paths: str | Sequence[int] = "all",
         trust_custom_code: bool = False) -> TextModel:
    """Returns the model of a workdir, on the default device.

    `step` is the checkpoint's; None: the newest. `paths` selects paths of a pgpt: "all", "best" (the one with the
    largest weight), or indices such as "0,1". Without `trust_custom_code`, custom modules must already be imported.
    """
    trained = load_trained(folder, step, trust_custom_code).with_paths(paths)
    return build_text_model(trained.model, trained.params, trained.tokenizer, trained.model_state)


def build_text_model(model: models.LanguageModel, params, tokenizer: tokenizers.Tokenizer,
                     model_state=None) -> TextModel:
    """`params` and `model_state` are in the training layout. Checks the decoding of custom architectures and mixers."""
    weights = layout.pack(model, params, model_state)
    if models.custom_classes(model.config):
        check_decoding(model, params, model_state)
    return TextModel(model, weights, tokenizer)


class TrainedModel(NamedTuple):
    model: models.LanguageModel
    params: Any  # in the training layout
    model_state: Any  # the variable collection "state"
    tokenizer: tokenizers.Tokenizer
    step: int

    def with_paths(self, paths: str | Sequence[int]) -> "TrainedModel":
        """Returns the model with the chosen paths of a pgpt; see `load`."""
        if paths == "all":
            return self
        config, params, model_state = with_paths(
            self.model.config, self.params, self.model_state, select_paths(self.model, self.params, paths))
        return self._replace(model=models.LanguageModel(config), params=params, model_state=model_state)


def load_trained(folder: str | Path, step: int | None = None, trust_custom_code: bool = False) -> TrainedModel:
    """Returns the model of a workdir in the training layout. See `load` for the arguments."""
    distributed.skip_tpu_search()  # commands call this earlier; other programs that load a model do not
    folder = as_path("--workdir", folder)
    if is_remote(folder):
        require_bucket("--workdir", folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the workdir of a run")
    model = models.LanguageModel(read_config(folder, trust_custom_code).model)
    step = find_checkpoint(folder, step)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        (models.abstract_params(model), models.abstract_model_state(model)))
    checkpoints = Checkpoints(folder / CHECKPOINT_FOLDER)
    params, model_state = checkpoints.restore_model(step, *abstract)
    if checkpoints.has_average(step):
        print(f"{folder}: step {step}, the moving average of the weights (config.train.ema)", file=sys.stderr)
    checkpoints.close()
    return TrainedModel(model, params, model_state, tokenizers.load(folder / TOKENIZER_FOLDER), step)


def select_paths(model: models.LanguageModel, params, paths: str | Sequence[int]) -> list[int]:
    c = model.config
    if c.architecture != "pgpt":
        raise UserError(f"paths={paths!r}: only pgpt has paths, this model is a {c.architecture}; use 'all'")
    if paths == "best":
        return [int(np.argmax(path_weights(params)))]
    try:
        indices = [int(index) for index in (paths.split(",") if isinstance(paths, str) else paths)]
    except ValueError:
        indices = []
    if not indices or len(set(indices)) < len(indices) or not set(indices) <= set(range(c.num_paths)):
        raise UserError(f"paths={paths!r}: expected all, best, or distinct indices from 0 to {c.num_paths - 1}, "
                        "separated by commas")
    return indices
