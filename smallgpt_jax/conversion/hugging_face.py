"""Folders that Hugging Face's libraries read and write: a model out, a model in.

A gpt of GPT-2's shape becomes a GPT2LMHeadModel; all others bring their own PyTorch code along
(`exported/`), which `trust_remote_code=True` runs. Weights are float32, in safetensors.
"""

import dataclasses
import json
from importlib import import_module, resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallgpt_jax import models
from smallgpt_jax.conversion import gpt2, tensors, tokenizer_files, torch_file
from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import current_umask
from smallgpt_jax.formatting import reason

CODE = ("configuration_smallgpt.py", "modeling_smallgpt.py")
ARCHITECTURES = ("gpt", "pgpt", "lgpt", "cgpt")  # that this code computes
# The only values of these fields that it computes.
FIXED = {"norm": "layer", "norm_epsilon": 1e-5, "mlp": "dense", "num_kv_heads": 0, "qk_norm": False,
         "attention_windows": (), "rope_base": 10_000.0}
ACTIVATIONS = ("gelu", "gelu_tanh")
SAME_FIELDS = (
    "architecture", "vocab_size", "context_length", "num_layers", "num_heads", "d_model", "mlp_ratio",
    "activation", "position", "use_bias")
OWN_FIELDS = (  # of single architectures; null in the files of the others
    "num_paths", "path_weights", "blocks_per_stage", "compress_last_stage", "stage_heads", "conv_kernel")
RENAMED_FIELDS = {"tie_embeddings": "tie_word_embeddings", "dtype": "training_dtype",
                  "dropout": "training_dropout"}  # ours: theirs


class Imported(NamedTuple):
    model: models.LanguageModel
    params: dict
    tokenizer: Tokenizer | None  # None: there is none with it


def export(folder: Path, model: models.LanguageModel, params, tokenizer: Tokenizer | None, card: str) -> None:
    """Writes a model into an empty folder; `card` is its README.md.

    Raises UserError if libraries are missing, the exported code does not know the architecture, or the
    tokenizer cannot be written.
    """
    config, is_gpt2 = model.config, gpt2.is_gpt2(model.config)
    if config.architecture not in ARCHITECTURES:
        raise UserError(f"config.model.architecture={config.architecture!r}: has no PyTorch code to bring along; "
                        "smallgpt_jax/conversion/exported/ computes " + ", ".join(ARCHITECTURES))
    for field, value in FIXED.items():
        if getattr(config, field) != value:
            config.refuse(field, f"the exported PyTorch code computes only {value!r}")
    if config.activation not in ACTIVATIONS:
        config.refuse("activation", f"the exported PyTorch code computes only {', '.join(ACTIVATIONS)}")
    ours = tensors.from_params(model, params)
    theirs = gpt2.to_hugging_face(config, ours) if is_gpt2 else ours
    library("safetensors.numpy").save_file(
        {name: np.ascontiguousarray(x) for name, x in theirs.items()}, folder / "model.safetensors",
        metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o666 & ~current_umask())  # which the library does not ask
    mark = tokenizer.end_of_text if tokenizer else None
    marks = {"bos_token_id": mark, "eos_token_id": mark, "pad_token_id": mark}
    described = gpt2.to_config(config) if is_gpt2 else own_config(config)
    write_json(folder / "config.json", {**described, **marks, "dtype": "float32", "use_cache": True})
    # The embedding may have more rows than the tokenizer ids.
    beyond = list(range(tokenizer.vocab_size, config.vocab_size)) if tokenizer else []
    write_json(folder / "generation_config.json", {
        **marks, "max_length": config.context_length, **({"suppress_tokens": beyond} if beyond else {})})
    if not is_gpt2:
        for name in CODE:
            source = resources.files("smallgpt_jax.conversion.exported") / name
            (folder / name).write_text(source.read_text())
    if tokenizer:
        for name, content in tokenizer_files.files(tokenizer, config.context_length).items():
            (folder / name).write_text(content)
        tokenizers.save(tokenizer, folder)  # its own files too: other programs, and we, read those
    (folder / "README.md").write_text(card)


def own_config(config: models.ModelConfig) -> dict:
    fields = dataclasses.asdict(config)
    return {
        "model_type": "smallgpt", "architectures": ["SmallGPTForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_smallgpt.SmallGPTConfig",
                     "AutoModelForCausalLM": "modeling_smallgpt.SmallGPTForCausalLM"},
        **{name: fields.get(name) for name in (*SAME_FIELDS, *OWN_FIELDS)},
        **{theirs: fields[ours] for ours, theirs in RENAMED_FIELDS.items()}}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def read(source: str, finds_tokenizer: bool = True) -> Imported:
    """The model in a folder, or by its name on the hub: a GPT-2, or what `export` has written.

    Raises UserError for any other, for files that are missing, damaged or do not fit together, and for
    a tokenizer of another kind than ours.
    """
    folder = Path(source).expanduser()
    folder = folder if folder.is_dir() else download(source)
    path = folder / "config.json"
    try:
        described = json.loads(path.read_text())
        kind = described.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: not the config of a model ({reason(error)})") from None
    if kind == "gpt2":
        fields = dict(dropout=0.0, dtype="float32", scan_layers=False) | gpt2.from_config(described, str(path))
    elif kind == "smallgpt":
        described = models.upgrade_fields(described)
        if missing := [name for name in (*SAME_FIELDS, *RENAMED_FIELDS.values()) if name not in described]:
            raise UserError(f"{path}: {', '.join(missing)} missing: not written by this project, or damaged")
        fields = {name: described[name] for name in (*SAME_FIELDS, *OWN_FIELDS) if name in described} | {
            ours: described[theirs] for ours, theirs in RENAMED_FIELDS.items()} | dict(scan_layers=False)
    else:
        raise UserError(f"{path}: a model of the type {kind!r}; gpt2 and smallgpt can be read")
    try:
        model = models.build(**fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    weights, where = read_weights(folder)
    if kind == "gpt2":
        names = tensors.shapes(model)
        weights = gpt2.from_hugging_face(model.config, names, weights)
        params = tensors.to_params(model, weights, gpt2.their_name, where)
    else:
        if model.config.tie_embeddings:
            weights.pop("head.weight", None)
        params = tensors.to_params(model, weights, where=where)
    return Imported(model, params, read_tokenizer(folder) if finds_tokenizer else None)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a folder, None if there are no files of one. Raises UserError if it is not of a kind
    that we have."""
    if not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab.*", "merges.txt")):
        return None
    try:
        return tokenizers.load(folder)
    except UserError as error:
        raise UserError(f"{folder}: its tokenizer cannot be read here ({error}). Name the one that it is with "
                        "--tokenizer") from None


def read_weights(folder: Path) -> tuple[dict[str, np.ndarray], str]:
    """All tensors of a folder, in one file or several, and which file that is."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise UserError(f"{index}: damaged") from None
    elif not (folder / names[0]).is_file():
        old = folder / "pytorch_model.bin"
        if old.is_file():
            return torch_file.tensors_only(torch_file.read(old), old), str(old)
        raise UserError(f"{folder}: no weights in it: neither model.safetensors nor pytorch_model.bin")
    weights = {}
    for name in names:
        try:
            weights |= library("safetensors.numpy").load_file(folder / name)
        except UserError:
            raise
        except Exception as error:  # SafetensorError, OSError
            raise UserError(f"{folder / name}: damaged, or not in the safetensors format ({reason(error)})"
                            ) from None
    return weights, str(folder / names[0] if len(names) == 1 else index)


def download(name: str) -> Path:
    """The folder that a model of the hub is in, from the cache if it is there."""
    hub = library("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=[
            "config.json", "*.safetensors", "*.safetensors.index.json", "vocab.json", "merges.txt",
            "tokenizer*"]))
        if not any(folder.glob("*.safetensors")):
            hub.snapshot_download(name, allow_patterns=["pytorch_model.bin"])
        return folder
    except Exception as error:  # of the hub, of the network
        raise UserError(f"--input={name}: neither a folder here, nor a model that could be fetched from the "
                        f"Hugging Face hub ({reason(error)})") from None


def library(name: str):
    try:
        return import_module(name)
    except ImportError:
        raise UserError("this needs more libraries: pip install -e '.[hf]'") from None
