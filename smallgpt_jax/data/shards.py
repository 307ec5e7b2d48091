"""Shards of a token store, which several machines prepare and one joins.

Shard 3 of 16 is the folder STORE.shards/3-of-16: the files of a store with the tokens of successive
documents, and `shard.json`, which says what they were made from. The joined store equals, bit for
bit, the one that a single machine makes.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from smallgpt_jax import __version__
from smallgpt_jax.data import store, tokenizer_folder, tokenizers
from smallgpt_jax.data.encoding import token_dtype
from smallgpt_jax.data.parts import Part, Shard
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.data.tokenizing import name_store_in_errors, write_metadata, write_splits
from smallgpt_jax.data.unfinished_store import (
    JOURNAL_FILE,
    START,
    Entry,
    add_counts,
    require_documents,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import duration, millions
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import atomic_folder, rename, sync_tree, write_atomically
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.json_files import BOOLEAN, TEXT, Each, integer, one_of, read_json
from smallgpt_jax.storage.locks import file_lock

SHARD_FILE = "shard.json"
# A place in the source, and a hash of the items before it in the same file.
_BORDER = {"parts": integer(0), "items": integer(0), "digest": TEXT}
_SCHEMA = {
    "format": one_of(store.FORMAT),
    "version": TEXT,  # of smallgpt_jax
    "made_from": store.MADE_FROM,
    "texts": TEXT,  # a hash of the names and sizes of the source's files
    "tokenizer": TEXT,
    "split_by_file": BOOLEAN,
    "start": _BORDER,
    "end": _BORDER,
    "skipped": Each(integer(1)),
    "splits": dict.fromkeys(store.SPLITS, dict.fromkeys(store.COUNTS, integer(0))),
    "plain_text": {"files": integer(0), "passages": integer(0), "validation_files": [TEXT]},
    "fingerprints": {name: TEXT for name in store.SPLITS},
}


def parse_shard(text: str) -> Shard:
    """Returns the shard that a text such as 3/16 names. Raises UserError for other texts."""
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if numbers:
        shard = Shard(*map(int, numbers.groups()))
        if 1 <= shard.number <= shard.count:
            return shard
    raise UserError(f"--shard={text!r}: expected NUMBER/COUNT, from 1/16 to 16/16 for 16 machines")


def _shards_folder(spec: StoreSpec) -> Path:
    return spec.real_folder.with_name(f"{spec.real_folder.name}.shards")


def _shard_name(shard: Shard) -> str:
    return f"{shard.number}-of-{shard.count}"


def write_shard(
    spec: StoreSpec, shard: Shard, workers: int | None = None, log=print
) -> tuple[Path, bool]:
    """Prepares a shard, or resumes. Returns its folder, or the folder of the joined store if that
    exists; and whether it is new.
    """
    if not spec.store:
        raise UserError(
            "config.data.store='': --shard needs a folder that all machines reach; set "
            "--config.data.store"
        )
    if (spec.folder / store.METADATA_FILE).is_file():
        return store.open_store(spec.folder, spec.made_from).folder, False
    spec.check()
    folder = _shards_folder(spec) / _shard_name(shard)
    local = folder
    if object_storage.is_remote(folder):  # tokens are appended to files, which objects do not allow
        local = _shards_folder(dataclasses.replace(spec, store="")) / folder.name
    local.parent.mkdir(parents=True, exist_ok=True)
    lock = local.with_name(f".{local.name}.lock")
    with name_store_in_errors(local), file_lock(lock, wait=True):
        if (folder / SHARD_FILE).is_file():
            _require_same_settings(folder, _read_record(folder), spec)
            return folder, False
        if not (local / SHARD_FILE).is_file():
            partial = local.with_name(f"{local.name}.partial")
            _write_shard(partial, spec, shard, workers or os.cpu_count(), log)
            rename(partial, local)
            (local / JOURNAL_FILE).unlink()
        if folder != local:
            log(f"uploading {local} to {folder}")
            object_storage.upload_folder(local, folder, last=SHARD_FILE)
            shutil.rmtree(local)
    return folder, True


def _write_shard(partial: Path, spec: StoreSpec, shard: Shard, workers: int, log) -> None:
    started = time.monotonic()
    start, latest, tokenizer = write_splits(partial, spec, shard, workers, log)
    record = {
        "format": store.FORMAT,
        "version": __version__,
        "made_from": spec.made_from,
        "texts": _hash_of_sizes(spec.source.parts),
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "split_by_file": spec.rules.split_by_file,
        "start": _border(start),
        "end": _border(latest),
        "skipped": latest.skipped,
        "splits": latest.splits,
        "plain_text": latest.plain_text,
        "fingerprints": {
            name: store.fingerprint(partial, name, counts["text_bytes"])
            for name, counts in latest.splits.items()
        },
    }
    write_atomically(partial / SHARD_FILE, json.dumps(record, indent=2) + "\n")
    documents = sum(counts["documents"] for counts in latest.splits.values())
    tokens = sum(counts["tokens"] for counts in latest.splits.values())
    seconds = duration(time.monotonic() - started)
    log(f"shard {shard}: {documents:,} documents, {millions(tokens)} tokens ({seconds})")


def _hash_of_sizes(parts: Sequence[Part]) -> str:
    """Without times of modification, which differ between copies on several machines."""
    names = repr([(part.name, part.size) for part in parts])
    return hashlib.sha256(names.encode()).hexdigest()


def _border(entry: Entry) -> dict:
    # The first half of the digest covers whole files, with their times of modification.
    return {**entry.place._asdict(), "digest": entry.digest[len(entry.digest) // 2 :]}


def _read_record(folder: Path) -> dict:
    return read_json(folder / SHARD_FILE, _SCHEMA, _remedy(folder))


def _remedy(folder: Path) -> str:
    number, _, count = folder.name.partition("-of-")
    return f"remove {folder} and rerun prepare with --shard={number}/{count}"


def _require_same_settings(folder: Path, record: dict, spec: StoreSpec) -> None:
    advice = f"use the same settings, or {_remedy(folder)}"
    store.require_settings(str(folder), record["made_from"], spec.made_from, advice)


def find_shards(spec: StoreSpec) -> list[Path]:
    """Returns the folders of all shards of a store that does not exist yet, in order; [] if none
    was begun. Raises UserError if some are missing or unfinished.
    """
    if not spec.store or (spec.folder / store.METADATA_FILE).is_file():
        return []
    folder = _shards_folder(spec)
    if object_storage.is_remote(folder):
        with object_storage.name_path_in_errors(f"config.data.store={spec.folder}"):
            files = object_storage.list_files(folder)
        names = {path.relative_to(folder).parts[0] for path in files}
    else:
        names = os.listdir(folder) if folder.is_dir() else []
    matches = [re.fullmatch(r"(\d+)-of-(\d+)(\.partial)?", name) for name in names]
    counts = sorted({int(match[2]) for match in matches if match})
    if not counts:
        return []
    if len(counts) > 1:
        listed = " and of ".join(map(str, counts))
        raise UserError(f"{folder}: contains shards of {listed}; remove all but those of one count")
    shards = [Shard(number, counts[0]) for number in range(1, counts[0] + 1)]
    folders = [folder / _shard_name(shard) for shard in shards]
    missing = [
        str(shard) for shard, path in zip(shards, folders) if not (path / SHARD_FILE).is_file()
    ]
    if missing:
        raise UserError(
            f"{folder}: missing or unfinished: {', '.join(missing)}; prepare each with "
            f"--shard={missing[0]}, or remove the folder to prepare on one machine"
        )
    return folders


def join_shards(spec: StoreSpec, folders: Sequence[Path], log) -> None:
    """Writes the store of `spec` from the shards in `folders`. Does not read the source.

    Raises UserError for shards that are damaged or do not belong together.
    """
    started = time.monotonic()
    log(f"joining the {len(folders)} shards in {folders[0].parent}")
    records = list(map(_read_record, folders))
    _require_same_settings(folders[0], records[0], spec)
    for before, after in itertools.pairwise(zip(folders, records)):
        _require_successive(*before, *after)
    joined = _join_entries(records)
    require_documents(spec.made_from, joined)
    with (
        name_store_in_errors(spec.real_folder),
        atomic_folder(spec.real_folder, store.METADATA_FILE) as partial,
    ):
        tokens = dict.fromkeys(store.SPLITS, 0)  # written so far
        for folder, record in zip(folders, records):
            local = local_copy(folder)
            tokenizer = _check_files(folder, local, record)
            for name in store.SPLITS:
                _append_split(partial, local, name, tokens[name])
                tokens[name] += record["splits"][name]["tokens"]
        tokenizer_folder.save(tokenizer, partial / "tokenizer")
        write_metadata(partial, spec.made_from, records[0]["split_by_file"], tokenizer, joined)
        sync_tree(partial)
        log(store.size_message(store.open_store(partial), time.monotonic() - started))
    log(f"{folders[0].parent} is no longer needed")


def _require_successive(before: Path, previous: dict, folder: Path, record: dict) -> None:
    """Raises UserError unless the shard in `folder` goes on where the one in `before` ends."""
    differences = {
        "version": "was made by another version of smallgpt_jax",
        "made_from": "was made with other config.data settings",
        "texts": "was made from other text, whose files have other names or sizes,",
        "split_by_file": "was made from other text, with another number of files,",
        "tokenizer": "has another tokenizer",
    }
    for field, what in differences.items():
        if record[field] != previous[field]:
            raise UserError(f"{folder}: {what} than {before.name}; {_remedy(folder)}")
    if record["start"] != previous["end"]:
        raise UserError(
            f"{folder}: does not begin where {before.name} ends, because their machines read "
            "different text, or with different versions of Python; remove both, and prepare them "
            "again"
        )


def _join_entries(records: Sequence[dict]) -> Entry:
    joined = START
    for record in records:
        joined = START._replace(
            skipped=dict(Counter(joined.skipped) + Counter(record["skipped"])),
            splits={
                name: add_counts(counts, record["splits"][name])
                for name, counts in joined.splits.items()
            },
            plain_text=add_counts(joined.plain_text, record["plain_text"]),
        )
    return joined


def _check_files(folder: Path, local: Path, record: dict) -> tokenizers.Tokenizer:
    """Returns the shard's tokenizer. Raises UserError if a file of the shard has changed."""
    tokenizer = tokenizer_folder.load(local / "tokenizer")
    if tokenizers.fingerprint(tokenizer) != record["tokenizer"]:
        raise UserError(f"{folder / 'tokenizer'}: damaged; {_remedy(folder)}")
    has_answers = store.holds_examples(record["made_from"])
    for name in store.SPLITS:
        counts = record["splits"][name]
        sizes = store.file_sizes(token_dtype(tokenizer), has_answers, counts)
        for ending, size in sizes.items():
            store.require_size(local / f"{name}{ending}", folder, size, _remedy(folder))
        if store.fingerprint(local, name, counts["text_bytes"]) != record["fingerprints"][name]:
            raise UserError(
                f"{folder}: damaged, the files of the {name} split have changed; {_remedy(folder)}"
            )
    return tokenizer


def _append_split(partial: Path, shard: Path, name: str, tokens: int) -> None:
    """Appends a shard's files of a split. `tokens`: the number of tokens in the shards before, by
    which the documents move.
    """
    for source in shard.glob(f"{name}.*"):
        with source.open("rb") as content, (partial / source.name).open("ab") as file:
            if source.name == f"{name}{store.DOCUMENTS}":
                starts = np.fromfile(content, np.int64) + tokens
                starts.tofile(file)
            else:
                shutil.copyfileobj(content, file, 2**24)
