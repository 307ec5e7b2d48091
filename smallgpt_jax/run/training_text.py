"""Whether a run continues on its own training text."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from smallgpt_jax.data import tokenizer_folder, tokenizers
from smallgpt_jax.data.corpus import DESCRIPTION, Corpus, same_text
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_repr
from smallgpt_jax.run.names import ORIGIN_FILE, STORE_FILE, TOKENIZER_FOLDER
from smallgpt_jax.storage.json_files import read_json


def check_same_text(workdir: Path, corpus: Corpus) -> None:
    """Raises UserError for another text or tokenizer; in an untrained import, only for the latter."""
    if (workdir / STORE_FILE).exists():
        changes = text_changes(read_identity(workdir), identity_of(corpus))
        if changes:
            raise UserError(
                f"--workdir={workdir}: the training text has changed since the run started "
                f"({changes}); restore the original text, or use another --workdir"
            )
    elif (workdir / ORIGIN_FILE).exists():
        imported = tokenizer_folder.load(workdir / TOKENIZER_FOLDER)
        if tokenizers.fingerprint(imported) != tokenizers.fingerprint(corpus.tokenizer):
            raise UserError(
                f"--workdir={workdir}: config.data.tokenizer is not the imported model's "
                f"tokenizer; set --config.data.tokenizer={workdir / TOKENIZER_FOLDER}"
            )


def identity_of(corpus: Corpus) -> dict[str, Any]:
    return {
        "description": corpus.description,
        "tokenizer": tokenizers.fingerprint(corpus.tokenizer),
    }


def read_identity(workdir: Path) -> dict[str, Any]:
    """Returns the `identity_of` a run's training text."""
    advice = "replace it by the metadata.json of the run's token store"
    return {
        "description": read_json(workdir / STORE_FILE, DESCRIPTION, advice),
        "tokenizer": tokenizers.fingerprint(tokenizer_folder.load(workdir / TOKENIZER_FOLDER)),
    }


class TextFormat(NamedTuple):
    name: str  # config.data.format
    chat_template: str  # of "messages"; else ""


def training_format(workdir: Path) -> TextFormat:
    path = workdir / STORE_FILE
    return format_of(read_json(path, DESCRIPTION, "restore it") if path.exists() else {})


def format_of(description: dict[str, Any]) -> TextFormat:
    """Returns the format of the text that a `Corpus.description` describes."""
    for store in description.get("mixture", [description]):
        made_from = store.get("made_from", {})
        if made_from.get("format", "text") != "text":
            return TextFormat(made_from["format"], made_from.get("chat_template", ""))
    return TextFormat("text", "")


def text_changes(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns how two identities of texts differ, or "" if the tokens are the same."""
    is_same_text = same_text(before["description"], now["description"])
    if is_same_text and before["tokenizer"] == now["tokenizer"]:
        return ""
    return _describe_changes(before["description"], now["description"])


def _describe_changes(before: dict, now: dict) -> str:
    """Formats the first three differences between two `Corpus.description`s."""

    def flat_entries(description):
        entries = {}
        for path, value in jax.tree_util.tree_leaves_with_path(description):
            names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
            entries[names] = value
        return entries

    def format_value(path, value):
        if value is None:  # this description lacks the entry
            return "0" if "skipped" in path else "none"
        return f"{value:,}" if type(value) is int else short_repr(value)

    entries_before, entries_now = flat_entries(before), flat_entries(now)
    different = [
        path
        for path in sorted(entries_before.keys() | entries_now.keys())
        if entries_before.get(path) != entries_now.get(path) and "fingerprints" not in path
    ]
    listed = [
        f"{_entry_name(path)}: from {format_value(path, entries_before.get(path))} "
        f"to {format_value(path, entries_now.get(path))}"
        for path in different[:3]
    ]
    if len(different) > 3:
        listed.append(f"and {len(different) - 3} more")
    if listed:
        return "; ".join(listed)
    return "its tokenizer" if same_text(before, now) else "other content of the same size"


def _entry_name(path: tuple[str, ...]) -> str:
    match path:
        case ("mixture", number, *rest):
            return f"store {int(number) + 1}: {_entry_name(tuple(rest))}"
        case ("made_from", field):
            return f"config.data.{field}"
        case ("skipped", reason):
            return f"skipped items ({reason})"
        case ("splits", split, count):
            what = {"text_bytes": "bytes of text"}.get(count, count)
            return f"{what} for {'training' if split == 'train' else split}"
    return " ".join(path).replace("_", " ")
