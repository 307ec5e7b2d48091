"""Imports models of all four architectures from `.pt` files of the paper's released code
(SkAndMl/gpt-variations).

A file contains a dictionary with the keys "model" (the tensors), "config" (an instance of the
released code's class models.GPTConfig), "step" and "val_loss". The number of heads is read from the
config, because no tensor's shape depends on it. All other sizes are inferred from the tensors: the
config of an lgpt or cgpt has the wrong width, because the released code overwrites the width with
that of the last stage.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallgpt_jax import models
from smallgpt_jax.conversion import gpt2, tensors, torch_file
from smallgpt_jax.conversion.config_json import require_fit
from smallgpt_jax.errors import UserError

_CONFIG_CLASS = "models.GPTConfig"


class Checkpoint(NamedTuple):
    model: models.LanguageModel
    params: dict
    facts: dict  # step and validation loss, if the file has them


def read_checkpoint(path: Path) -> Checkpoint:
    saved = torch_file.read_torch_file(path, classes=(_CONFIG_CLASS,))
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise UserError(f"{path}: not a checkpoint of the paper's code (no 'model' entry)")
    arrays = torch_file.to_arrays(saved["model"], path)
    # torch.compile puts a prefix before all names
    theirs = {name.removeprefix("_orig_mod."): x for name, x in arrays.items()}
    config = saved.get("config")
    num_heads = getattr(config, "n_head", None)
    # `type`, because True is an instance of int
    if not isinstance(config, torch_file.Attributes) or type(num_heads) is not int:
        raise UserError(f"{path}: not a checkpoint of the paper's code (no n_head in its config)")
    try:
        config = models.make_config(**_model_fields(theirs, num_heads, path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    require_fit(config, {name: x.shape for name, x in theirs.items()}, path)
    model = models.LanguageModel(config)
    their_names = {name: _gpt_variations_name(name, config) for name in tensors.shapes(model)}
    our_names = {their_name: name for name, their_name in their_names.items()}
    ours = {}
    for their_name, x in theirs.items():
        # `to_variables` refuses what has no name of ours
        name = our_names.get(their_name, their_name)
        ours[name] = _to_our_layout(name, x, num_heads)
    params, _ = tensors.to_variables(
        model, ours, lambda name: their_names.get(name, name), str(path)
    )
    facts = {
        name: saved[name]
        for name in ("step", "val_loss")
        if isinstance(saved.get(name), int | float)
    }
    return Checkpoint(model, params, facts)


def _model_fields(theirs: dict[str, np.ndarray], num_heads: int, path: Path) -> dict:
    try:
        vocab_size, width = theirs["transformer.wte.weight"].shape
        context_length, _ = theirs["transformer.wpe.weight"].shape
        first_mlp = next(x for name, x in theirs.items() if name.endswith(".mlp.c_fc.weight"))
        mlp_ratio = first_mlp.shape[0] / first_mlp.shape[1]
        # the first stage of a cgpt ends with a convolution; other models have none
        num_taps = theirs.get("transformer.h.0.conv_layer.weight", np.zeros((1, 1, 1))).shape[2]
    except (KeyError, ValueError, IndexError, ZeroDivisionError, StopIteration):
        raise UserError(
            f"{path}: not a checkpoint of the paper's code (no transformer.wte, transformer.wpe or "
            "MLP tensor)"
        ) from None
    num_layers = sum(name.endswith(".ln_1.weight") for name in theirs)  # one per block
    return dict(
        _architecture_fields(theirs, num_layers, num_taps),
        vocab_size=vocab_size,
        context_length=context_length,
        d_model=width,
        mlp_ratio=mlp_ratio,
        num_heads=num_heads,
        num_layers=num_layers,
        dropout=0.0,
        use_bias=False,
        tie_embeddings=False,
        activation="gelu",
        position="learned",
        dtype="float32",
        scan_layers=False,
    )


def _architecture_fields(theirs: Collection[str], num_layers: int, num_taps: int) -> dict:
    """Returns the architecture and its own fields, by the names of the tensors."""

    def count(pattern: str) -> int:
        """Returns the number of modules whose names match."""
        matches = filter(None, (re.match(pattern, name) for name in theirs))
        return len({match[0] for match in matches})

    if "transformer.wt" in theirs:
        num_paths = count(r"transformer\.lin_\d+")
        return dict(architecture="pgpt", num_paths=num_paths, path_weights="learned")
    # An lgpt is one list of blocks, and of a dense layer after each stage of blocks. So the index of
    # the first dense layer, which is a module without children, is the number of blocks per stage.
    dense_layers = [name for name in theirs if re.fullmatch(r"transformer\.h\.\d+\.weight", name)]
    num_convolutions = count(r"transformer\.h\.\d+\.conv_layer")
    if dense_layers:
        num_compressions = len(dense_layers)
        blocks_per_stage = min(int(name.split(".")[2]) for name in dense_layers)
        fields = dict(architecture="lgpt")
    elif num_convolutions:
        num_compressions = num_convolutions
        blocks_per_stage = count(r"transformer\.h\.0\.blocks\.\d+")
        fields = dict(architecture="cgpt", conv_kernel=num_taps)
    else:
        return dict(architecture="gpt")
    return dict(
        fields,
        blocks_per_stage=blocks_per_stage,
        stage_heads="fixed",
        compress_last_stage=num_compressions * blocks_per_stage == num_layers,
    )


def _gpt_variations_name(name: str, config: models.ModelConfig) -> str:
    if name in gpt2.OTHER_NAMES:
        return gpt2.OTHER_NAMES[name]
    if name == "trunk.path_logits":
        return "transformer.wt"
    # trunk.paths.1.blocks.0.mlp.up.weight → "paths.1.blocks.0", "mlp.up", "weight"
    place, part, leaf = re.fullmatch(
        r"trunk\.([a-z]+(?:\.\d+)+(?:\.blocks\.\d+)?)\.?(.*)\.(\w+)", name
    ).groups()
    # paths.1.blocks.0 → "paths", [1, 0]
    kind, *numbers = re.findall(r"[a-z]+|\d+", place.replace(".blocks", ""))
    numbers = [int(number) for number in numbers]
    per_stage = getattr(config, "blocks_per_stage", 0)
    # In an lgpt, a list of all layers: the blocks of a stage, then its dense layer.
    module = {
        ("gpt", "blocks"): lambda i: f"h.{i}",
        ("pgpt", "paths"): lambda p, *i: f"h_{p + 1}.{i[0]}" if i else f"lin_{p + 1}",
        ("lgpt", "stage"): lambda s, i: f"h.{s * (per_stage + 1) + i}",
        ("lgpt", "compress"): lambda s: f"h.{s * (per_stage + 1) + per_stage}",
        ("cgpt", "stage"): lambda s, i: f"h.{s}.blocks.{i}",
        ("cgpt", "compress"): lambda s: f"h.{s}.conv_layer",
    }[config.architecture, kind](*numbers)
    if part not in gpt2.BLOCK_NAMES:  # a layer outside the blocks, as the dense layer of a stage
        return f"transformer.{module}.{leaf}"
    return f"transformer.{module}.{gpt2.BLOCK_NAMES[part]}.{leaf}"


def _to_our_layout(name: str, x: np.ndarray, num_heads: int) -> np.ndarray:
    """`name` is the tensor's name in our model."""
    if name == "trunk.path_logits":
        return x.reshape(-1)
    if ".qkv." in name and x.ndim and len(x) % (3 * num_heads) == 0:
        return gpt2.heads_first(x, num_heads)
    return x
