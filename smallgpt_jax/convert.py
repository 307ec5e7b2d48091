"""Converts models to and from other formats.

    python -m smallgpt_jax.convert --to=hf --workdir=runs/pgpt --output=exported/pgpt
    python -m smallgpt_jax.convert --to=gguf --workdir=runs/llama --output=exported/llama.gguf
    python -m smallgpt_jax.convert --from=hf --input=gpt2 --workdir=runs/gpt2
    python -m smallgpt_jax.convert --from=gpt_variations --input=pgpt.pt --workdir=runs/released-pgpt
    python -m smallgpt_jax.convert --from=run --input=runs/pgpt --workdir=runs/pgpt-tuned
    python -m smallgpt_jax.convert --from=run --input=runs/pgpt --workdir=runs/pgpt-low-rank --rank_ratio=0.33

Formats:

    hf              a Hugging Face folder; --from=hf reads GPT-2, Llama and Qwen3 models and the exports of this
                    command, and also accepts the name of a model on the hub
    gguf            a file for llama.cpp (export only), of models with the block of Llama or Qwen3
    peft            an adapter for the library peft (export only), of a run with LoRA
    gpt_variations  a .pt file of the paper's released code
    run             another workdir, to train its model further on other text, or with matrices of low rank

With --from, this command writes a workdir. The workdir can be given to smallgpt_jax.generate,
smallgpt_jax.evaluate and smallgpt_jax.convert. To train its model further, run smallgpt_jax.main
with --config=run:WORKDIR.
"""

import datetime
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from absl import flags

from smallgpt_jax import cli, inference, models
from smallgpt_jax.conversion import (
    gguf_file,
    gpt_variations,
    hugging_face,
    low_rank,
    model_card,
    peft_adapter,
)
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError, command_line
from smallgpt_jax.run.config_file import read_config, read_groups
from smallgpt_jax.run.workdir import write_imported
from smallgpt_jax.storage.atomic import atomic_file, atomic_folder, removed_on_error
from smallgpt_jax.storage.object_storage import is_remote, list_files, require_bucket
from smallgpt_jax.storage.paths import as_path, local_path, resolve

_TO = flags.DEFINE_enum(
    "to", None, ["hf", "gguf", "peft"], "Export the model in --workdir to --output, in this format."
)
_FROM = flags.DEFINE_enum(
    "from",
    None,
    ["hf", "gpt_variations", "run"],
    "Import the model in --input to --workdir. The value names the format of --input.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "With --to: an existing run directory. With --from: a new one."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "With --to=hf or peft: the folder to create. With --to=gguf: the file."
)
_INPUT = flags.DEFINE_string(
    "input", None, "With --from: the folder or file to import, or the name of a model on the hub."
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    None,
    "With --from: the model's tokenizer, in the syntax of config.data.tokenizer. Default: the "
    "tokenizer in the input folder, else GPT-2's. With --to=hf: 'skip' exports without a "
    "tokenizer.",
)
_STEP = flags.DEFINE_integer(
    "step", None, "With --to or --from=run: step of the checkpoint. Default: the newest."
)
_PATHS = flags.DEFINE_string(
    "paths",
    "all",
    "With --to=hf, for a pgpt: which of the model's parallel paths to export: "
    "all, best (the path with the largest weight), or indices such as 0,1.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", list(gguf_file.DTYPES), "With --to=gguf: the dtype of matrices."
)
_RANK_RATIO = flags.DEFINE_float(
    "rank_ratio",
    None,
    "With --from=run: replace each matrix of attention and MLP by two factors, which together "
    "have at most this fraction (below 1) of its parameters. 0: multiply the factors of the run. "
    "Default: change no matrices.",
)
_TRUST = cli.define_trust()
flags.mark_flag_as_required("workdir")

FLAGS_BY_DIRECTION = {  # flags allowed in addition to --workdir
    "--to=hf": ("output", "tokenizer", "step", "paths"),
    "--to=gguf": ("output", "step", "dtype"),
    "--to=peft": ("output", "step"),
    "--from=hf": ("input", "tokenizer"),
    "--from=gpt_variations": ("input", "tokenizer"),
    "--from=run": ("input", "step", "rank_ratio"),
}


def main() -> None:
    if (_TO.value is None) == (_FROM.value is None):
        raise UserError("give either --to=hf|gguf|peft or --from=hf|gpt_variations|run; see --help")
    direction = f"--to={_TO.value}" if _TO.value else f"--from={_FROM.value}"
    for flag in (_INPUT, _OUTPUT, _TOKENIZER, _STEP, _PATHS, _DTYPE, _RANK_RATIO):
        if flag.present and flag.name not in FLAGS_BY_DIRECTION[direction]:
            raise UserError(f"--{flag.name}: cannot be combined with {direction}; see --help")
    if _TO.value and _TOKENIZER.value not in (None, "skip"):
        raise UserError(
            f"--tokenizer={_TOKENIZER.value}: an export contains the run's tokenizer; use "
            "--tokenizer=skip to export without it"
        )
    if _TO.value:
        form = EXPORTS[_TO.value]
        export_model(
            as_path("--workdir", _WORKDIR.value),
            form.new_output("--output", _OUTPUT.value),
            form.write,
        )
    else:
        if not _INPUT.value:
            raise UserError("--input: must be given; name the folder, file or model to import")
        as_path("--input", _INPUT.value)  # refuses URLs other than gs://; accepts names on the hub
        import_model(_INPUT.value, new_folder("--workdir", _WORKDIR.value))


def new_folder(flag: str, name: str | None) -> Path:
    """Raises UserError unless `name` is a new or empty folder other than the current one."""
    if not name:
        raise UserError(f"{flag}: must be given; name a new folder")
    folder = resolve(as_path(flag, name))
    if is_remote(folder):
        require_bucket(flag, folder)
        is_free = not list_files(folder)
    elif folder == Path.cwd():
        raise UserError(f"{flag}={name}: this is the current folder; choose another")
    else:
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free:
        raise UserError(f"{flag}={name}: folder is not empty; choose another")
    return folder


def new_file(flag: str, name: str | None) -> Path:
    """Raises UserError unless `name` is a new file whose name ends in .gguf."""
    if not name or not name.endswith(".gguf"):
        raise UserError(
            f"{flag}{f'={name}' if name else ''}: must be the name of a new file that ends in .gguf"
        )
    path = resolve(as_path(flag, name))
    if is_remote(path):
        require_bucket(flag, path)
    if list_files(path) if is_remote(path) else path.exists():
        raise UserError(f"{flag}={name}: exists; choose another name")
    return path


def export_model(source: Path, output: Path, write: Callable) -> None:
    # Before --trust_custom_code would be needed, because no format supports the model.
    for field, name in (
        models.custom_classes(read_groups(source)["model"]) if source.is_dir() else ()
    ):
        raise UserError(
            f"--workdir={source}: config.model.{field}={name!r} is not built in, and "
            f"--to={_TO.value} supports only built-in parts; use the model in Python, with "
            "smallgpt_jax.inference.load"
        )
    trained = inference.load_trained(source, _STEP.value, _TRUST.value).with_paths(_PATHS.value)
    rank_ratio = trained.model.config.rank_ratio
    if rank_ratio:
        model, params = low_rank.with_rank_ratio(trained.model, trained.params, 0.0)
        trained = trained._replace(model=model, params=params)
    written = write(source, output, trained)
    print(
        f"{_OUTPUT.value}: {trained.model.config.architecture} of step {trained.step}, "
        f"{models.num_parameters(trained.model):,} parameters, as {written}"
        + ("; its low-rank matrices are exported as full matrices" if rank_ratio else "")
    )


def write_hugging_face(source: Path, output: Path, trained: inference.TrainedModel) -> str:
    model, params, model_state, tokenizer, step = trained
    form = hugging_face.find_format(model.config)
    card = model_card.format_model_card(
        source,
        output.name,
        model,
        step,
        bool(form.CODE),
        _PATHS.value,
        adds_begin=tokenizer.begin_of_text != tokenizer.end_of_text,
    )
    tokenizer, template = (
        (None, "")
        if _TOKENIZER.value == "skip"
        else (tokenizer, inference.portable_chat_template(source, tokenizer))
    )
    with atomic_folder(output) as folder:
        hugging_face.export_folder(folder, model, params, tokenizer, card, model_state, template)
    return form.class_name(model.config) + (
        " with its own code (trust_remote_code=True)" if form.CODE else ""
    )


def write_gguf(source: Path, output: Path, trained: inference.TrainedModel) -> str:
    with atomic_file(output) as path:
        return gguf_file.write(
            path, output.stem, trained.model, trained.params, trained.tokenizer, _DTYPE.value
        )


def write_peft(source: Path, output: Path, trained: inference.TrainedModel) -> str:
    config = read_config(source, _TRUST.value)
    if not config.optimizer.lora_rank:
        raise UserError(
            f"--workdir={source}: was not trained with LoRA (config.optimizer.lora_rank); use "
            "--to=hf"
        )
    if config.model.rank_ratio:
        raise UserError(
            f"--workdir={source}: has matrices of low rank; export the merged weights with --to=hf"
        )
    base = inference.load_trained(source, trained.step, _TRUST.value, merge_lora=False)
    with atomic_folder(output) as folder:
        name = peft_adapter.write(
            folder, trained.model, base.params, trained.params, config.optimizer.lora_rank
        )
    return f"an adapter of a {name}"


class Export(NamedTuple):
    new_output: Callable[
        [str, str | None], Path
    ]  # (flag, its value) → path; raises UserError if it cannot be written
    write: Callable[
        [Path, Path, inference.TrainedModel], str
    ]  # (workdir, output, model) → what was written


EXPORTS = {
    "hf": Export(new_folder, write_hugging_face),
    "gguf": Export(new_file, write_gguf),
    "peft": Export(new_folder, write_peft),
}


def import_model(source: str, folder: Path) -> None:
    """Writes the model as a checkpoint of step 0, and where it comes from as origin.json."""
    origin = {
        "format": _FROM.value,
        "read from": resolve(as_path("--input", source)).name,
        "on": datetime.date.today().isoformat(),
    }
    model_state, chat_template = {}, ""
    if _FROM.value == "hf":
        model, params, tokenizer, model_state, chat_template = hugging_face.read_folder(
            str(local_path("--input", source)) if is_remote(source) else source,
            not _TOKENIZER.value,
            _TRUST.value,
        )
    elif _FROM.value == "run":
        model, params, model_state, tokenizer, origin["step"] = inference.load_trained(
            source, _STEP.value, _TRUST.value
        )
        chat_template = inference.portable_chat_template(source, tokenizer)
        # Records how the source run was trained. If its weights were imported, also records where
        # they come from.
        origin |= dict(model_card.training_facts(as_path("--input", source), origin["step"]))
        if _RANK_RATIO.value is not None:
            model, params = low_rank.with_rank_ratio(model, params, _RANK_RATIO.value)
            origin["rank_ratio"] = _RANK_RATIO.value
    else:
        model, params, facts = gpt_variations.read_checkpoint(local_path("--input", source))
        origin, tokenizer = origin | facts, None
    if _TOKENIZER.value or not tokenizer:
        tokenizer = TokenizerSource(_TOKENIZER.value or "gpt2").make()
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"--input={source}: the tokenizer has {tokenizer.vocab_size:,} entries, but the model "
            f"has only {model.config.vocab_size:,}; name the model's tokenizer with --tokenizer"
        )
    # orbax checkpoints have another layout in object storage than on a local disk, so a local one
    # cannot be uploaded.
    with removed_on_error(folder) if is_remote(folder) else atomic_folder(folder) as partial:
        write_imported(partial, model, params, model_state, tokenizer, origin, chat_template)
    print(
        f"{_WORKDIR.value}: {model.config.architecture}, {models.num_parameters(model):,} "
        "parameters; tokenizer: "
        f"{tokenizer.kind}, {tokenizer.vocab_size:,} entries. To train it further:\n"
        f"  {command_line('main', f'--config=run:{_WORKDIR.value}')} "
        f"{shlex.quote(f'--workdir={_WORKDIR.value}')} --config.data.source=..."
    )


if __name__ == "__main__":
    cli.run(main)
