"""The README.md of an exported model, which describes its architecture, usage and training."""

import re
from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax import models
from smallgpt_jax.conversion.hugging_face import find_format
from smallgpt_jax.data.datasets import DATASETS
from smallgpt_jax.data.source import names_of
from smallgpt_jax.formatting import escape_markdown, millions
from smallgpt_jax.models.naming import variants
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.config_file import saved_config
from smallgpt_jax.run.metrics import read_evaluations
from smallgpt_jax.run.names import ORIGIN_FILE
from smallgpt_jax.storage.json_files import OBJECT, read_json

_DESCRIPTIONS = {
    "gpt": "a GPT{variants}: {num_layers} blocks of width {d_model}",
    "pgpt": "a ParallelGPT{variants}: {num_layers} blocks of width {d_model} on {num_paths} "
    "parallel paths",
    "lgpt": "a LinearGPT{variants}: {num_layers} blocks, with a width of {d_model} that dense "
    "layers halve after every {blocks_per_stage}",
    "cgpt": "a ConvGPT{variants}: {num_layers} blocks, with a width of {d_model} that convolutions "
    "of kernel size {conv_kernel} halve after every {blocks_per_stage}",
}
_URL = re.compile(r"\w+://")
_PATH_ROWS = ("text", "tokenizer")  # rows whose values may be local paths


def format_model_card(
    name: str,
    model: models.LanguageModel,
    facts: Sequence[tuple[str, str]],
    adds_begin: bool = False,
    is_chat: bool = False,
    splits_special_tokens: bool | None = True,
) -> str:
    """`facts`: of `training_facts`. `adds_begin`: whether the tokenizer begins texts by itself.
    `splits_special_tokens`: of its tokenizer_config.json; None without a tokenizer.
    """
    config = model.config
    is_encoder = config.attention_mask == "bidirectional"
    lines = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {'fill-mask' if is_encoder else 'text-generation'}",
        "tags:",
        "- smallgpt_jax",
        "---",
        "",
        f"# {name}",
        "",
        f"This is {_description(config)}; {models.num_parameters(model):,} parameters, context "
        f"length {config.context_length:,}, vocabulary size {config.vocab_size:,}. "
        f"{_use(is_encoder, is_chat)} reproduces the errors and biases of its training text. "
        "Trained with smallgpt_jax (ParallelGPT, LinearGPT and ConvGPT: arXiv 2404.14462).",
        "",
        "```python",
        "import torch",
        *_example(name, config, adds_begin),
        "```",
        "",
        *_table(facts),
        " ".join(_notes(adds_begin, splits_special_tokens)),
        "",
    ]
    return "\n".join(lines)


def _description(config: models.ModelConfig) -> str:
    usual = "a {architecture}{variants}: {num_layers} blocks of width {d_model}"
    form = _DESCRIPTIONS.get(config.architecture, usual)
    return form.format(**vars(config), variants=variants(config))


def _use(is_encoder: bool, is_chat: bool) -> str:
    """Returns the beginning of a sentence."""
    if is_encoder:
        return "An encoder, trained to predict masked tokens. It"
    if is_chat:
        return "A language model, fine-tuned on conversations. It"
    return "A base language model: it continues text, does not follow instructions, and"


def _table(facts: Sequence[tuple[str, str]]) -> list[str]:
    if not facts:
        return []
    rows = [f"| {escape_markdown(key)} | {escape_markdown(value)} |" for key, value in facts]
    return ["| training | |", "|---|---|", *rows, ""]


def _notes(adds_begin: bool, splits_special_tokens: bool | None) -> list[str]:
    notes = []
    if splits_special_tokens is None:
        notes.append("The tokenizer is not included; the example needs its files in this folder.")
    if not adds_begin:
        notes.append(
            "In training, an end-of-text token precedes every document. The tokenizer does not add "
            "this token, so the example adds it."
        )
    if splits_special_tokens:
        # a user who relies on the usual special token would get other tokens than in training
        notes.append("The tokenizer encodes `<|endoftext|>` in a text as ordinary text.")
    return notes


def _example(name: str, config: models.ModelConfig, adds_begin: bool) -> list[str]:
    is_encoder = config.attention_mask == "bidirectional"
    trust = ", trust_remote_code=True" if find_format(config).CODE else ""
    kind = "AutoModelForMaskedLM" if is_encoder else "AutoModelForCausalLM"
    begin = "" if adds_begin else "tokenizer.eos_token_id, "
    lines = [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})',
        f'model = {kind}.from_pretrained("{name}"{trust})',
        f'tokens = torch.tensor([[{begin}*tokenizer.encode("Once upon a time")]])',
    ]
    if is_encoder:  # the mask token has an id, but no text
        return [
            *lines,
            "tokens[0, 2] = model.config.mask_token_id",
            "print(tokenizer.decode(model(tokens).logits[0, 2].argmax()))",
        ]
    return [
        *lines,
        "print(tokenizer.decode(model.generate(tokens, max_length=50, do_sample=True)[0]))",
    ]


def training_facts(workdir: Path, step: int, paths: str = "all") -> list[tuple[str, str]]:
    """Returns (name, value) of the rows of the card's table. `paths` is the value of --paths."""
    facts = _facts_of_origin(workdir)
    if paths != "all":
        facts.insert(0, ("exported paths of the trained model", paths))
    config = saved_config(workdir)
    if not config:  # an imported model that has not been trained
        return facts
    facts += _facts_of_config(config, step)
    if paths == "all":  # the validation loss is that of all paths
        facts += _facts_of_validation(workdir, step)
    return facts


def _facts_of_origin(workdir: Path) -> list[tuple[str, str]]:
    """Returns where the weights of an imported model come from; [] for other models."""
    path = workdir / ORIGIN_FILE
    if not path.is_file():
        return []
    facts = []
    for key, value in read_json(path, OBJECT, "replace it by {}").items():
        # may have been written with whole paths
        is_path = key.split(": ")[-1] in _PATH_ROWS
        value = _without_folders(str(value)) if is_path else str(value)
        facts.append((f"weights from: {key}", value))
    return facts


def _facts_of_config(config: Config, step: int) -> list[tuple[str, str]]:
    data, train, optimizer = config.data, config.train, config.optimizer
    tokens = step * config.inputs_per_step
    rate = f"{optimizer.learning_rate:g}"
    if optimizer.schedule != "constant":
        rate += f" to {optimizer.final_learning_rate:g} at step {optimizer.decay_steps:,}"
    facts = [
        ("text", _without_folders(data.mixture or data.source)),
        ("tokenizer", _without_folders(data.tokenizer)),
        (
            "steps",
            f"{step:,} of {train.batch_size} × {config.model.context_length} tokens, "
            f"{millions(tokens)} in total",
        ),
        ("packing", data.packing + (", documents separated" if data.separate_documents else "")),
        (
            "optimizer",
            f"{optimizer.name}, learning rate {rate} ({optimizer.schedule}), "
            f"weight decay {optimizer.weight_decay:g}",
        ),
        ("compute dtype", config.model.dtype),
        ("seed", str(train.seed)),
    ]
    if config.model.rank_ratio:
        facts.append(("rank ratio", f"{config.model.rank_ratio:g}"))
    return facts


def _facts_of_validation(workdir: Path, step: int) -> list[tuple[str, str]]:
    evaluations = [
        line
        for line in read_evaluations(workdir)
        if line["step"] == step
        # null: not finite; without bits per byte: the bytes of the text are not known
        and None not in (line["loss"], line.get("bits_per_byte"))
    ]
    if not evaluations:
        return []
    newest = evaluations[-1]  # a resumed run may have evaluated the step twice
    loss = f"{newest['loss']:.4f} nats per token, {newest['bits_per_byte']:.4f} bits per byte"
    return [("validation loss", loss)]


def _without_folders(sources: str) -> str:
    """Returns sources, separated by commas, with only the last component of local paths: a card is
    often public, and a path names its author's account and folders.
    """
    return ",".join(map(_without_folder, names_of(sources)))


def _without_folder(name: str) -> str:
    if name.startswith(tuple(DATASETS)) or _URL.match(name):
        return name
    return Path(name).name or name
