"""Exports the model of a run. A format is a class in EXPORTS, whose fields are its options."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from smallgpt_jax import inference, models
from smallgpt_jax.conversion import (
    gguf_export,
    hub,
    hugging_face,
    low_rank,
    model_card,
    peft_adapter,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.models.naming import architecture_name
from smallgpt_jax.run.config_file import read_config, read_groups
from smallgpt_jax.run.training_text import training_format
from smallgpt_jax.storage.atomic import atomic_file, atomic_folder
from smallgpt_jax.storage.json_files import OBJECT, read_json_or_none
from smallgpt_jax.storage.paths import as_path, new_file, new_folder


class Export(Protocol):
    @property
    def paths(self) -> str | Sequence[int]:  # of a pgpt
        ...

    def new_output(self, name: str | Path) -> Path:
        """Raises UserError if the output cannot be written."""

    def write(self, workdir: Path, output: Path, trained: inference.TrainedModel, name: str) -> str:
        """Returns what was written. `name` is that of the model, for its card."""


def export(
    workdir: str | Path,
    output: str | Path,
    to: str | Export = "hf",
    *,
    step: int | None = None,
    push: str = "",
    private: bool = True,
) -> str:
    """Writes the model of a run in another format, and returns a description of what was written.

    `to` is "hf" (a Hugging Face folder), "gguf" (a file for llama.cpp), "peft" (an adapter, of a
    run with LoRA), or a format with options, such as GgufExport(dtype="q8_0"). `step` is the
    checkpoint's; None: the newest. With `push`, an OWNER/NAME, the export is also uploaded to the
    Hugging Face hub, to a new or existing repository; a new one is `private`. Raises UserError if
    `output` exists or the format does not support the model; then nothing is written. Also raises
    it if the upload fails; then `output` is complete.
    """
    if push:
        hub.check_repository(push)
    if isinstance(to, str) and to not in EXPORTS:
        raise UserError(f"--to={to}: no such format; choose from {', '.join(EXPORTS)}")
    form = EXPORTS[to]() if isinstance(to, str) else to
    source = as_path("--workdir", workdir)
    output = form.new_output(output)
    _refuse_custom_classes(source)
    trained = inference.load_trained(source, step).with_paths(form.paths)
    has_low_rank = trained.model.config.rank_ratio > 0
    # no other format has matrices that are products of two
    if has_low_rank:
        model, params = low_rank.with_rank_ratio(trained.model, trained.params, 0.0)
        trained = trained._replace(model=model, params=params)
    written = form.write(source, output, trained, push or output.name)
    summary = (
        f"{architecture_name(trained.model.config)} of step {trained.step}, "
        f"{models.num_parameters(trained.model):,} parameters, as {written}"
    )
    if has_low_rank:
        summary += "; its low-rank matrices are exported as full matrices"
    if push:
        summary += f"; uploaded to {hub.push(output, push, private)}"
    return summary


def _refuse_custom_classes(workdir: Path) -> None:
    # before the model is loaded, which would import their modules or ask whether to trust them
    if not workdir.is_dir():
        return
    for field, name in models.custom_classes(read_groups(workdir)["model"]):
        raise UserError(
            f"--workdir={workdir}: config.model.{field}={name!r} is not built in, and exports "
            "support only built-in parts; use the model in Python, with smallgpt_jax.load"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceExport:
    paths: str | Sequence[int] = "all"  # of a pgpt: "all", "best", or indices such as "0,1"
    tokenizer: bool = True  # False: without the tokenizer

    def new_output(self, name: str | Path) -> Path:
        return new_folder("--output", name)

    def write(self, workdir: Path, output: Path, trained: inference.TrainedModel, name: str) -> str:
        model, params, model_state, run_tokenizer, step = trained
        form = hugging_face.find_format(model.config)
        pgpt_paths = self.paths if isinstance(self.paths, str) else ",".join(map(str, self.paths))
        tokenizer, template = None, ""
        if self.tokenizer:
            tokenizer = run_tokenizer
            template = inference.portable_chat_template(workdir, tokenizer)
        with atomic_folder(output) as folder:
            hugging_face.export_folder(folder, model, params, tokenizer, model_state, template)
            splits = None
            if tokenizer:
                settings = read_json_or_none(folder / "tokenizer_config.json", OBJECT) or {}
                splits = settings.get("split_special_tokens", False)
            card = model_card.format_model_card(
                name,
                model,
                model_card.training_facts(workdir, step, pgpt_paths),
                # transformers writes a begin-of-text token before each text, but no end-of-text one
                adds_begin=run_tokenizer.begin_of_text != run_tokenizer.end_of_text,
                is_chat=bool(training_format(workdir).chat_template),
                splits_special_tokens=splits,
            )
            (folder / "README.md").write_text(card, "utf-8", errors="backslashreplace")
        class_name = form.class_name(model.config)
        if form.CODE:
            return f"{class_name} with its own code (trust_remote_code=True)"
        return class_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufExport:
    dtype: str = "float32"  # of matrices, one of gguf_export.DTYPES

    paths = "all"

    def new_output(self, name: str | Path) -> Path:
        return new_file("--output", name, ".gguf")

    def write(self, workdir: Path, output: Path, trained: inference.TrainedModel, name: str) -> str:
        if self.dtype not in gguf_export.DTYPES:
            raise UserError(f"--dtype={self.dtype}: must be one of {', '.join(gguf_export.DTYPES)}")
        template = inference.find_chat_template(workdir)
        with atomic_file(output) as path:
            return gguf_export.write(path, output.stem, trained, self.dtype, template)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeftExport:
    paths = "all"

    def new_output(self, name: str | Path) -> Path:
        return new_folder("--output", name)

    def write(self, workdir: Path, output: Path, trained: inference.TrainedModel, name: str) -> str:
        config = read_config(workdir)
        if not config.optimizer.lora_rank:
            raise UserError(
                f"--workdir={workdir}: was not trained with LoRA (config.optimizer.lora_rank); "
                "use --to=hf"
            )
        if config.model.rank_ratio:
            raise UserError(
                f"--workdir={workdir}: has matrices of low rank; export the merged weights with "
                "--to=hf"
            )
        # the weights before the run; the adapter is the difference
        base = inference.load_trained(workdir, trained.step, merge_lora=False)
        with atomic_folder(output, last="adapter_config.json") as folder:
            class_name = peft_adapter.write(
                folder, trained.model, base.params, trained.params, config.optimizer.lora_rank
            )
        return f"an adapter of a {class_name}"


EXPORTS: dict[str, type[Export]] = {
    "hf": HuggingFaceExport,
    "gguf": GgufExport,
    "peft": PeftExport,
}
