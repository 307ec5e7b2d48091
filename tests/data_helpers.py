"""Files, stores and documents for the tests of smallgpt_jax.data."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from smallgpt_jax.data import prepare
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.store import TokenStore
from smallgpt_jax.data.store_spec import StoreSpec

RULES = Rules("text", "refuse", "refuse", 10**8)


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def parquet(columns: dict, names: list[str] | None = None) -> bytes:
    file, table = io.BytesIO(), pyarrow.table(columns)
    table = table.rename_columns(names or table.column_names)
    pyarrow.parquet.write_table(table, file, row_group_size=1000)
    return file.getvalue()


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read(
    source,
    invalid_utf8="refuse",
    text_field="text",
    invalid_items="refuse",
    max_document_bytes=10**8,
    text_endings=".txt",
) -> list[str]:
    rules = Rules(text_field, invalid_utf8, invalid_items, max_document_bytes)
    return list(Source(str(source), text_endings).documents(rules))


def prepare_store(folder: Path, source, workers=None, log=lambda _: None, **changes) -> TokenStore:
    fields = {"tokenizer": "bytes", "validation_fraction": 0.2, **changes}
    data = DataConfig(store=str(folder), source=str(source), **fields)
    return prepare.prepare_store(StoreSpec.of(data), workers, log)


def random_store(folder: Path, lengths, letters: bytes = b"abcdefgh") -> TokenStore:
    """Returns a store of random documents with the given lengths in bytes."""
    rng = np.random.default_rng(0)
    texts = [
        bytes(rng.choice(list(letters), length).astype(np.uint8)).decode() for length in lengths
    ]
    folder.parent.mkdir(exist_ok=True)
    return prepare_store(folder, write_jsonl(folder.with_name(f"{folder.name}.jsonl"), texts))


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file in a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
