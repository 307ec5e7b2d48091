"""Carries models to and from the formats that others read.

    python -m smallgpt_jax.convert --to=hf --workdir=runs/pgpt --output=exported/pgpt
    python -m smallgpt_jax.convert --from=hf --input=gpt2 --workdir=runs/gpt2
    python -m smallgpt_jax.convert --from=gpt_variations --input=pgpt.pt --workdir=runs/released-pgpt
    python -m smallgpt_jax.convert --from=run --input=runs/pgpt --workdir=runs/pgpt-tuned

`hf` is a folder as Hugging Face's libraries know it (or, read, a model's name on the hub): of one's own
models, or of a GPT-2. `gpt_variations` is a .pt file of the paper's released code. `run` is another
workdir, whose model is to be trained further on other text. What is read becomes a workdir, which
generate, evaluate and, with --config=configs/run.py:WORKDIR, main take up.
"""

import datetime
import shlex
from pathlib import Path

from absl import flags

from smallgpt_jax import cli, inference, models, workdir
from smallgpt_jax.conversion import gpt2, gpt_variations, hugging_face, model_card
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import appearing, local_path
from smallgpt_jax.models.pgpt import with_paths

_TO = flags.DEFINE_enum("to", None, ["hf"], "Write this format, from --workdir to --output.")
_FROM = flags.DEFINE_enum("from", None, ["hf", "gpt_variations", "run"], "Read this format, from --input to --workdir.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run: an existing one with --to, else a new one.")
_OUTPUT = flags.DEFINE_string("output", None, "With --to: the new folder.")
_INPUT = flags.DEFINE_string("input", None, "With --from: the folder, file, or name on the hub.")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "With --from: the model's tokenizer, as config.data.tokenizer has it; unset: the one in "
    "the folder, or GPT-2's. With --to: 'skip' leaves the tokenizer out.")
_STEP = flags.DEFINE_integer("step", None, "Of a run: which checkpoint; the newest if unset.")
_PATHS = flags.DEFINE_string("paths", "all", "With --to, of a pgpt: all, best (the heaviest), or numbers: 0,1.")
flags.mark_flag_as_required("workdir")

READ_WITH = {  # besides --workdir
    "--to=hf": ("output", "tokenizer", "step", "paths"),
    "--from=hf": ("input", "tokenizer"),
    "--from=gpt_variations": ("input", "tokenizer"),
    "--from=run": ("input", "step"),
}


def main() -> None:
    if (_TO.value is None) == (_FROM.value is None):
        raise UserError("either --to=hf or --from=hf, gpt_variations or run; --help explains")
    way = f"--to={_TO.value}" if _TO.value else f"--from={_FROM.value}"
    for flag in (_INPUT, _OUTPUT, _TOKENIZER, _STEP, _PATHS):
        if flag.present and flag.name not in READ_WITH[way]:
            raise UserError(f"--{flag.name} means nothing with {way}; --help explains")
    if _TO.value and _TOKENIZER.value not in (None, "skip"):
        raise UserError(f"--tokenizer={_TOKENIZER.value}: a run has its own; --tokenizer=skip leaves it out")
    if _TO.value:
        export(local_path("--workdir", _WORKDIR.value), new_folder("--output", _OUTPUT.value))
    else:
        if not _INPUT.value:
            raise UserError("--input must be given: what to read")
        local_path("--input", _INPUT.value)  # or a name on the hub, which has no scheme
        read(_INPUT.value, new_folder("--workdir", _WORKDIR.value))


def new_folder(flag: str, name: str | None) -> Path:
    """A folder that is not there yet, or empty."""
    if not name:
        raise UserError(f"{flag} must be given: a new folder")
    folder = local_path(flag, name).resolve()
    if folder == Path.cwd():
        raise UserError(f"{flag}={name}: is the folder that you are in; name a new one")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{flag}={name}: there is something in it; name a new folder")
    return folder


def export(source: Path, output: Path) -> None:
    model, params, _, tokenizer, step = inference.load_trained(source, _STEP.value)
    if _PATHS.value != "all":
        config, params = with_paths(model.config, params, inference.chosen_paths(model, params, _PATHS.value))
        model = models.LanguageModel(config)
    is_gpt2 = gpt2.is_gpt2(model.config)
    card = model_card.write(source, output.name, model, step, is_gpt2, _PATHS.value)
    with appearing(output) as folder:
        hugging_face.export(folder, model, params, None if _TOKENIZER.value == "skip" else tokenizer, card)
    print(f"{output}: {model.config.architecture} of step {step}, {models.num_parameters(model):,} parameters, as "
          f"{'a GPT2LMHeadModel' if is_gpt2 else 'a model that brings its own code (trust_remote_code=True)'}")


def read(source: str, folder: Path) -> None:
    origin = {"format": _FROM.value, "read from": Path(source).resolve().name, "on": datetime.date.today().isoformat()}
    model_state = {}
    if _FROM.value == "hf":
        model, params, tokenizer = hugging_face.read(source, finds_tokenizer=not _TOKENIZER.value)
    elif _FROM.value == "run":
        model, params, model_state, tokenizer, origin["step"] = inference.load_trained(source, _STEP.value)
        # How it came about goes with the weights, and so does where it was begun itself.
        origin |= dict(model_card.training_facts(Path(source).expanduser(), origin["step"]))
    else:
        model, params, facts = gpt_variations.read(Path(source).expanduser())
        origin, tokenizer = origin | facts, None
    if _TOKENIZER.value or not tokenizer:
        tokenizer = tokenizers.make(_TOKENIZER.value or "gpt2", [])
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.vocab_size:,} entries, the model only "
                        f"{model.config.vocab_size:,}: not the one it was trained with. Name that with --tokenizer")
    with appearing(folder) as partial:
        workdir.plant(partial, model, params, model_state, tokenizer, origin)
    print(f"{folder}: {model.config.architecture}, {models.num_parameters(model):,} parameters; the tokenizer is "
          f"{tokenizer.kind}, with {tokenizer.vocab_size:,} entries. Train it further with\n"
          f"  python -m smallgpt_jax.main {shlex.quote(f'--config=configs/run.py:{folder}')} "
          f"{shlex.quote(f'--workdir={folder}')} --config.data.source=...")


if __name__ == "__main__":
    cli.run(main)
