"""Exports models to Hugging Face folders and imports models from them.

A gpt that is equal to a GPT-2, Llama or Qwen3 is exported as a native model (`NATIVE`). All other
models are exported with this project's PyTorch code (`exported/`), which transformers runs with
`trust_remote_code=True`.

A format is a module with these members:

- `MODEL_TYPES`: the values of `model_type` in config.json
- `CODE`: the files of PyTorch code that an export contains
- `supports(config)`: whether the format's model computes the same function as ours (only in
  `NATIVE`)
- `class_name`, `to_config`, `to_hugging_face`: the class, config.json and tensors of an exported
  model
- `from_config`, `from_hugging_face`, `hugging_face_name`: the fields, tensors and tensor names of
  an imported model
"""

import dataclasses
import json
import math
import reprlib
import sys
from importlib import resources
from pathlib import Path

import numpy as np

from smallgpt_jax import models
from smallgpt_jax.conversion import gpt2, llama, smallgpt, tensors, tokenizer_files
from smallgpt_jax.conversion.config_json import ConfigJson, require_fit
from smallgpt_jax.conversion.weight_files import open_weights
from smallgpt_jax.data import tokenizer_folder
from smallgpt_jax.data.chat_template import (
    TEMPLATE_FILE,
    ChatTemplate,
    own_template,
    save_template,
)
from smallgpt_jax.data.hugging_face_tokenizer import HuggingFaceTokenizer
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.run.workdir import ImportedModel
from smallgpt_jax.storage.atomic import current_umask
from smallgpt_jax.storage.json_files import OBJECT, read_json, read_json_or_none

NATIVE = (gpt2, llama)
# The normalizers and pre-tokenizers of the classes of tokenizers that transformers 5 builds anew.
_STEPS = {
    "GPT2Tokenizer": ["ByteLevel"],
    "Qwen2Tokenizer": ["NFC", "Split", "ByteLevel"],
    "LlamaTokenizer": ["Metaspace"],
}
# The class of a tokenizer whose settings name none, by the type of the model.
_DEFAULT_CLASSES = {"gpt2": "GPT2Tokenizer", "qwen3": "Qwen2Tokenizer"}
# The files of a model on the hub that an import reads.
_DOWNLOADED = [
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "vocab.json",
    "merges.txt",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
]
_FORMATS = {model_type: form for form in (*NATIVE, smallgpt) for model_type in form.MODEL_TYPES}


def find_format(config: models.ModelConfig):
    return next((form for form in NATIVE if form.supports(config)), smallgpt)


def export_folder(
    folder: Path,
    model: models.LanguageModel,
    params,
    tokenizer: Tokenizer | None,
    model_state=None,
    chat_template: str = "",
) -> None:
    """`model_state` is needed only for mixtures of experts."""
    config = model.config
    form = find_format(config)
    their_config = form.to_config(config)  # first, because it refuses unsupported models
    theirs = form.to_hugging_face(config, tensors.from_params(model, params, model_state))
    import_library("safetensors.numpy").save_file(
        {name: np.ascontiguousarray(x) for name, x in theirs.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},  # transformers 4 refuses files without it
    )
    (folder / "model.safetensors").chmod(0o666 & ~current_umask())  # safetensors ignores the umask
    begin = tokenizer.begin_of_text if tokenizer else None
    end = tokenizer.end_of_text if tokenizer else None
    # Training needs no padding; batches in transformers do.
    special = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    write_json(
        folder / "config.json", {**their_config, **special, "dtype": "float32", "use_cache": True}
    )
    if config.attention_mask != "bidirectional":  # an encoder does not generate
        generation = {
            **special,
            "eos_token_id": _ends_of_texts(tokenizer, chat_template),
            "max_length": config.context_length,  # without it, 20 tokens
        }
        # The embedding may have more rows than the tokenizer has ids; generation must not sample
        # the unused rows.
        if tokenizer and tokenizer.vocab_size < config.vocab_size:
            generation["suppress_tokens"] = list(range(tokenizer.vocab_size, config.vocab_size))
        write_json(folder / "generation_config.json", generation)
    for name in form.CODE:
        source = resources.files("smallgpt_jax.conversion.exported") / name
        (folder / name).write_text(source.read_text("utf-8"), "utf-8")
    if tokenizer:
        files = tokenizer_files.hugging_face_files(
            tokenizer, config.context_length, is_chat=bool(chat_template)
        )
        for name, content in files.items():
            (folder / name).write_text(content, "utf-8")
        tokenizer_folder.save(tokenizer, folder)  # the original files, which read_folder reads
        save_template(chat_template, folder)


def _ends_of_texts(tokenizer: Tokenizer | None, chat_template: str) -> int | list[int] | None:
    """Returns the ids at which generation stops, in the form of generation_config.json."""
    if not tokenizer:
        return None
    if chat_template:
        end_of_turn = ChatTemplate(chat_template, tokenizer.special_tokens).end_of_turn
        if end_of_turn not in (None, tokenizer.end_of_text):
            return [tokenizer.end_of_text, end_of_turn]
    return tokenizer.end_of_text


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def read_folder(
    source: str, with_tokenizer: bool = True, trust_custom_code: bool = False
) -> ImportedModel:
    """`source` is a local folder, or a name on the hub."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        folder = _download_folder(source)
    path = folder / "config.json"
    their_config = read_json(path, OBJECT, "expected a model config")
    model_type = their_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FORMATS:
        raise UserError(
            f"{path}: model_type={reprlib.repr(model_type)}: not supported; must be one of "
            + ", ".join(_FORMATS)
        )
    form = _FORMATS[model_type]
    files = open_weights(folder)
    # Shapes first: they show whether the config can be true, before it makes anything large.
    num_weights = sum(math.prod(shape) for shape in files.shapes.values())
    fields = dict(dropout=0.0, dtype="float32", scan_layers=False)
    fields |= form.from_config(ConfigJson(their_config, path, num_weights))
    models.refuse_custom_code(fields, path, trust_custom_code)
    try:
        config = models.make_config(**fields)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    require_fit(config, files.shapes, path)
    weights = files.read()
    if config.tie_embeddings and _has_head(form, weights):
        config = dataclasses.replace(config, tie_embeddings=False)
    model = models.LanguageModel(config)
    try:
        weights = form.from_hugging_face(model.config, tensors.shapes(model), weights)
    except UserError as error:
        raise UserError(f"{files.path}: {error}") from None
    params, model_state = tensors.to_variables(
        model, weights, form.hugging_face_name, str(files.path)
    )
    tokenizer = read_tokenizer(folder) if with_tokenizer else None
    return ImportedModel(model, params, tokenizer, model_state, own_template(folder))


def _has_head(form, weights: tensors.Tensors) -> bool:
    # transformers uses a head that is another matrix than the embedding even if config.json says
    # that they are one.
    head = weights.get(form.hugging_face_name("head.weight"))
    name = form.hugging_face_name("token_embedding.weight")
    short_name = name.partition(".")[2]  # without "transformer." or "model.", in old files
    embedding = weights.get(name, weights.get(short_name))
    return head is not None and not np.array_equal(head, embedding)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Returns None for a folder without a tokenizer. Raises UserError for one that is not supported."""
    if not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab.*", "merges.txt")):
        return None
    try:
        tokenizer = tokenizer_folder.load(folder)
    except UserError as error:
        raise UserError(
            f"{folder}: unsupported tokenizer ({error}); name an equivalent tokenizer with "
            "--tokenizer"
        ) from None
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _warn_of_replaced_steps(tokenizer, folder)
    return tokenizer


def _warn_of_replaced_steps(tokenizer: HuggingFaceTokenizer, folder: Path) -> None:
    """Prints if transformers would split texts by other steps than those in the tokenizer.json."""
    settings = read_json_or_none(folder / "tokenizer_config.json", OBJECT) or {}
    config = read_json_or_none(folder / "config.json", OBJECT) or {}
    name = settings.get("tokenizer_class") or _DEFAULT_CLASSES.get(config.get("model_type"))
    name = str(name).removesuffix("Fast")
    steps = tokenizer.step_types()
    # a LlamaTokenizer on bytes, as of Llama 3, keeps its steps
    is_replaced = name in _STEPS and not (name == "LlamaTokenizer" and "ByteLevel" in steps)
    if is_replaced and _STEPS[name] != steps:
        print(
            f"{folder}: the tokenizer.json splits texts by {', '.join(steps) or 'nothing'}, but "
            f"transformers 5 reads it as a {name}, which does so by {', '.join(_STEPS[name])}; here, "
            "the tokenizer.json is followed",
            file=sys.stderr,
        )


def _download_folder(name: str) -> Path:
    hub = import_library("huggingface_hub")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=_DOWNLOADED))
        # the same weights, usually beside safetensors: not downloaded twice
        if not any(folder.glob("*.safetensors")):
            hub.snapshot_download(name, allow_patterns=["pytorch_model.bin"])
        return folder
    except Exception as error:  # errors of the hub or the network
        raise UserError(
            f"--input={name}: not a local folder, and cannot be downloaded from the Hugging Face "
            f"hub ({short_reason(error)})"
        ) from None
