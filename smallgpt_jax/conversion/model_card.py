"""The README.md of an exported model: what it is, how it was trained, how to use it."""

import json
from pathlib import Path

from smallgpt_jax import models, workdir
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import in_millions
from smallgpt_jax.metrics import METRICS_FILE, read_lines

DESCRIPTIONS = {
    "gpt": "a GPT: {num_layers} blocks of width {d_model}",
    "pgpt": "a ParallelGPT: {num_paths} paths side by side, {num_layers} blocks of width {d_model} in all",
    "lgpt": "a LinearGPT: {num_layers} blocks, the width, {d_model} at first, halved after every "
            "{blocks_per_stage}",
    "cgpt": "a ConvGPT: {num_layers} blocks, the width, {d_model} at first, halved by convolutions of "
            "{conv_kernel} taps after every {blocks_per_stage}"}


def write(folder: Path, name: str, model: models.LanguageModel, step: int, is_gpt2: bool, paths: str) -> str:
    """The card of the model that a workdir had after `step` steps, or of some of its `paths`; `name` is the
    exported folder's."""
    config = model.config
    described = DESCRIPTIONS.get(config.architecture, "a {architecture}: {num_layers} blocks of width {d_model}")
    facts = training_facts(folder, step)
    if paths != "all":
        facts = [("paths of the trained model that are left", paths),
                 *(fact for fact in facts if fact[0] != "validation loss")]
    trust = "" if is_gpt2 else ", trust_remote_code=True"
    return "\n".join([
        "---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- smallgpt_jax", "---",
        "", f"# {name}", "",
        f"This is {described.format(**vars(config))}; {models.num_parameters(model):,} parameters, a context of "
        f"{config.context_length:,} tokens, a vocabulary of {config.vocab_size:,}. A language model trained on "
        "text alone: it continues text, it follows no instructions, and it says what its text said, false or "
        "not. Written by smallgpt_jax (arXiv 2404.14462 describes ParallelGPT, LinearGPT and ConvGPT).", "",
        "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})',
        f'model = AutoModelForCausalLM.from_pretrained("{name}"{trust})',
        'tokens = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50, do_sample=True)[0]))", "```", "",
        *(["| training | |", "|---|---|", *(f"| {what} | {value} |" for what, value in facts), ""]
          if facts else []),
        "In training an end-of-text token stood in front of every document; the tokenizer adds none, and treats "
        "`<|endoftext|>` in a text as text.", ""])


def training_facts(folder: Path, step: int) -> list[tuple[str, str]]:
    """What is known of how a workdir's model came about."""
    facts = []
    origin = folder / workdir.ORIGIN_FILE
    if origin.is_file():
        facts += [(f"weights from: {key}", str(value)) for key, value in json.loads(origin.read_text()).items()]
    try:
        config = workdir.read_config(folder)
        data, train, optimizer = config.data, config.train, config.optimizer
    except (UserError, AttributeError):  # an imported model that was not trained further
        return facts
    tokens = step * train.batch_size * config.model.context_length
    facts += [
        ("text", data.mixture or data.source), ("tokenizer", data.tokenizer),
        ("steps", f"{step:,} of {train.batch_size} × {config.model.context_length} tokens, "
         f"{in_millions(tokens)} in all"),
        ("packing", data.packing + (", documents apart" if data.separate_documents else "")),
        ("optimiser", f"{optimizer.name}, learning rate {optimizer.learning_rate:g} to "
         f"{optimizer.final_learning_rate:g}, weight decay {optimizer.weight_decay:g}"),
        ("products in", config.model.dtype), ("seed", str(train.seed))]
    evaluated = [line for line in read_lines(folder / METRICS_FILE)
                 if line["split"] == "eval" and line["step"] == step and line["loss"] is not None]
    if evaluated:
        facts.append(("validation loss", f"{evaluated[-1]['loss']:.4f} nats a token, "
                      f"{evaluated[-1]['bits_per_byte']:.4f} bits a byte"))
    return facts
