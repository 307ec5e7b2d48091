"""Converts models to and from other formats.

    python -m smallgpt_jax.convert --to=hf --workdir=runs/pgpt --output=exported/pgpt
    python -m smallgpt_jax.convert --to=hf --workdir=runs/pgpt --output=exported/pgpt --push=ada/pgpt
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

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.conversion.exporting import EXPORTS, export
from smallgpt_jax.conversion.gguf_export import DTYPES
from smallgpt_jax.conversion.importing import IMPORTS, import_
from smallgpt_jax.errors import UserError, command_line

_TO = flags.DEFINE_enum(
    "to", None, list(EXPORTS), "Export the model in --workdir to --output, in this format."
)
_FROM = flags.DEFINE_enum(
    "from",
    None,
    list(IMPORTS),
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
    "dtype", "float32", list(DTYPES), "With --to=gguf: the dtype of matrices."
)
_RANK_RATIO = flags.DEFINE_float(
    "rank_ratio",
    None,
    "With --from=run: replace each matrix of attention and MLP by two factors, which together "
    "have at most this fraction (below 1) of its parameters. 0: multiply the factors of the run. "
    "Default: change no matrices.",
)
_PUSH = flags.DEFINE_string(
    "push", "", "With --to: also upload the export to this OWNER/NAME at the Hugging Face hub."
)
_PRIVATE = flags.DEFINE_bool("private", True, "With --push: only its owner sees a new repository.")
_TRUST = cli.define_trust()
flags.mark_flag_as_required("workdir")

_FORMAT_FLAGS = (_INPUT, _OUTPUT, _TOKENIZER, _STEP, _PATHS, _DTYPE, _RANK_RATIO)


def main() -> None:
    if (_TO.value is None) == (_FROM.value is None):
        raise UserError("give either --to=hf|gguf|peft or --from=hf|gpt_variations|run; see --help")
    given = {flag.name: flag.value for flag in _FORMAT_FLAGS if flag.present}
    if _TO.value:
        options = _options(EXPORTS[_TO.value], given, f"--to={_TO.value}", ("output", "step"))
        form = EXPORTS[_TO.value](**_without_tokenizer(options))
        output, step = _OUTPUT.value, _STEP.value
        summary = export(
            _WORKDIR.value, output, form, step=step, push=_PUSH.value, private=_PRIVATE.value
        )
        print(f"{output}: {summary}")
    else:
        options = _options(IMPORTS[_FROM.value], given, f"--from={_FROM.value}", ("input",))
        if _PUSH.value:
            raise UserError("--push: uploads exports; use it with --to")
        if not _INPUT.value:
            raise UserError("--input: must be given; name the folder, file or model to import")
        form, workdir = IMPORTS[_FROM.value](**options), _WORKDIR.value
        summary = import_(_INPUT.value, workdir, form, trust_custom_code=_TRUST.value)
        train = command_line("main", f"--config=run:{workdir}", f"--workdir={workdir}")
        print(f"{workdir}: {summary}. To train it further:\n  {train} --config.data.source=...")


def _options(
    form: type, given: Mapping[str, Any], direction: str, arguments: Collection[str]
) -> dict[str, Any]:
    """Returns those of the given flags that are options of a format: the fields of its class.
    Refuses flags that are neither among them nor among `arguments`.
    """
    fields = [field.name for field in dataclasses.fields(form)]
    for name in given:
        if name not in fields and name not in arguments:
            raise UserError(f"--{name}: cannot be combined with {direction}; see --help")
    return {name: value for name, value in given.items() if name in fields}


def _without_tokenizer(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an export, which only `--tokenizer=skip` suits."""
    if "tokenizer" not in options:
        return dict(options)
    if options["tokenizer"] != "skip":
        raise UserError(
            f"--tokenizer={options['tokenizer']}: an export contains the run's tokenizer; use "
            "--tokenizer=skip to export without it"
        )
    return {**options, "tokenizer": False}


if __name__ == "__main__":
    cli.run(main)
