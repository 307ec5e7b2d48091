"""Imports a model as a run. A format is a class in IMPORTS, whose fields are its options."""

import dataclasses
import datetime
from pathlib import Path
from typing import Any, Protocol

from smallgpt_jax import inference, models
from smallgpt_jax.conversion import gpt_variations, hugging_face, low_rank, model_card
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.naming import architecture_name
from smallgpt_jax.run.workdir import ImportedModel, refuse_patterns, write_imported
from smallgpt_jax.storage.atomic import atomic_folder, removed_on_error
from smallgpt_jax.storage.object_storage import is_remote
from smallgpt_jax.storage.paths import as_path, local_path, new_folder, resolve


class Import(Protocol):
    @property
    def NAME(self) -> str: ...

    def read(self, source: str, trust_custom_code: bool) -> tuple[ImportedModel, dict[str, Any]]:
        """Returns the model, and what origin.json says of it."""


def import_(
    source: str | Path,
    workdir: str | Path,
    format: "str | Import" = "hf",
    *,
    trust_custom_code: bool = False,
) -> str:
    """Writes a model as a run of step 0 to a new workdir, and returns a description of the model.

    `format` is "hf" (a Hugging Face folder, or the name of a model on the hub), "gpt_variations" (a
    .pt file of the paper's code), "run" (another workdir), or a format with options, such as
    RunImport(rank_ratio=0.5). `trust_custom_code` lets the source name a module, which is then
    imported. To train the model further, train "run:WORKDIR" in `workdir`. Raises UserError if the
    workdir is not empty or the source is not supported; then nothing is written.
    """
    if isinstance(format, str) and format not in IMPORTS:
        raise UserError(f"--from={format}: no such format; choose from {', '.join(IMPORTS)}")
    form = IMPORTS[format]() if isinstance(format, str) else format
    as_path("--input", source)  # refuses URLs other than gs://; accepts names on the hub
    source = str(source)
    folder = new_folder("--workdir", workdir)
    refuse_patterns(folder)
    imported, facts = form.read(source, trust_custom_code)
    model, tokenizer = imported.model, imported.tokenizer
    assert tokenizer is not None  # `read` chooses one if the source has none
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"--input={source}: the tokenizer has {tokenizer.vocab_size:,} entries, but the model "
            f"has only {model.config.vocab_size:,}; name the model's tokenizer with --tokenizer"
        )
    origin = {
        "format": form.NAME,
        "read from": resolve(as_path("--input", source)).name,
        "on": datetime.date.today().isoformat(),
        **facts,
    }
    # orbax checkpoints have another layout in object storage than on a local disk, so a local one
    # cannot be uploaded.
    with removed_on_error(folder) if is_remote(folder) else atomic_folder(folder) as partial:
        write_imported(partial, imported, origin)
    return (
        f"{architecture_name(model.config)}, {models.num_parameters(model):,} parameters; "
        f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} entries"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceImport:
    NAME = "hf"

    # in the syntax of config.data.tokenizer; None: that of the folder, or else GPT-2's
    tokenizer: str | None = None

    def read(self, source: str, trust_custom_code: bool) -> tuple[ImportedModel, dict[str, Any]]:
        folder = str(local_path("--input", source)) if is_remote(source) else source
        imported = hugging_face.read_folder(folder, not self.tokenizer, trust_custom_code)
        if imported.tokenizer:
            return imported, {}
        return imported._replace(tokenizer=TokenizerSource(self.tokenizer or "gpt2").make()), {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTVariationsImport:
    NAME = "gpt_variations"

    tokenizer: str | None = None  # in the syntax of config.data.tokenizer; None: GPT-2's

    def read(self, source: str, trust_custom_code: bool) -> tuple[ImportedModel, dict[str, Any]]:
        model, params, facts = gpt_variations.read_checkpoint(local_path("--input", source))
        tokenizer = TokenizerSource(self.tokenizer or "gpt2").make()
        return ImportedModel(model, params, tokenizer), facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunImport:
    NAME = "run"

    step: int | None = None  # of the checkpoint; None: the newest
    # Each matrix of attention and MLP becomes two factors, which together have at most this
    # fraction (below 1) of its parameters. 0: the factors of the run are multiplied. None: no
    # change.
    rank_ratio: float | None = None

    def read(self, source: str, trust_custom_code: bool) -> tuple[ImportedModel, dict[str, Any]]:
        model, params, model_state, tokenizer, step = inference.load_trained(
            source, self.step, trust_custom_code
        )
        template = inference.portable_chat_template(source, tokenizer)
        # How the source run was trained. If its weights were imported, also where they come from.
        facts = {"step": step, **dict(model_card.training_facts(as_path("--input", source), step))}
        if self.rank_ratio is not None:
            model, params = low_rank.with_rank_ratio(model, params, self.rank_ratio)
            facts["rank_ratio"] = self.rank_ratio
        return ImportedModel(model, params, tokenizer, model_state, template), facts


IMPORTS: dict[str, type[Import]] = {
    form.NAME: form for form in (HuggingFaceImport, GPTVariationsImport, RunImport)
}
