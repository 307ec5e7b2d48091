"""Tests of the preparation of token stores: content, resuming, concurrent preparations,
failures.
"""

import contextlib
import errno
import gzip
import json
import os
import random
import re
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import call, load_config
from data_helpers import files_of, prepare_store, write_jsonl

from configs.compare import base
from smallgpt_jax.data import (
    encoding,
    parts,
    prepare,
    sentencepiece_training,
    store,
    tokenizer_source,
    unfinished_store,
)
from smallgpt_jax.data.corpus import Corpus, open_mixture, open_or_prepare
from smallgpt_jax.data.corpus import prepare as prepare_text
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.locks import file_lock


@pytest.fixture
def corpus(tmp_path):
    texts = [f"document {i} " + "text " * (i * 37 % 500) for i in range(300)]
    return write_jsonl(tmp_path / "corpus.jsonl", texts), texts


def documents_of(split):
    """Returns the texts of a split's documents. The tokenizer of the split must be "bytes"."""
    pieces = "".join(chr(i) if i < 256 else "\0" for i in split.stream).split("\0")
    assert pieces[0] == ""  # the stream begins with an end-of-text token
    return pieces[1:]


def test_store_contains_every_document_once(corpus, tmp_path):
    path, texts = corpus
    made = prepare_store(tmp_path / "store", path)
    train, validation = documents_of(made.train), documents_of(made.validation)
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # in the source's order
    assert 0.1 < len(validation) / len(texts) < 0.3
    assert made.train.documents == len(train)
    assert made.train.text_bytes == sum(map(len, train))
    assert made.train.tokens == sum(map(len, train)) + len(train)
    reopened = store.open_store(tmp_path / "store")
    assert list(reopened.validation.stream) == list(made.validation.stream)


def test_split_does_not_depend_on_order(corpus, tmp_path):
    path, texts = corpus
    first = prepare_store(tmp_path / "first", path)
    random.Random(0).shuffle(texts)
    write_jsonl(path, [*texts, *texts])
    second = prepare_store(tmp_path / "second", path)
    assert set(documents_of(first.validation)) == set(documents_of(second.validation))


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:400"])
def test_store_does_not_depend_on_workers(corpus, tmp_path, monkeypatch, tokenizer):
    stores = {}
    for workers, size in ((1, 4_000_000), (2, 3000), (5, 700)):
        monkeypatch.setattr(parts, "BATCH_CHARACTERS", size)
        prepare_store(tmp_path / str(workers), corpus[0], tokenizer=tokenizer, workers=workers)
        stores[workers] = files_of(tmp_path / str(workers))
    assert stores[1] == stores[2] == stores[5]


def test_resumes_after_interruptions(corpus, tmp_path, monkeypatch):
    """A preparation that is interrupted three times makes the same store as an uninterrupted
    preparation.

    In this test, preparation writes its journal after every batch.
    """
    whole = files_of(
        prepare_store(tmp_path / "whole", corpus[0], tokenizer="sentencepiece:400").folder
    )
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(unfinished_store, "JOURNAL_SECONDS", 0)
    encode, trained, logged = encoding.encode, [], []
    train = tokenizer_source.train_sentencepiece
    monkeypatch.setattr(
        tokenizer_source, "train_sentencepiece", lambda *args: trained.append(1) or train(*args)
    )
    for batches in (3, 1, 8):
        left = [batches]

        def encode_some(texts, tokenizer, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return encode(texts, tokenizer)

        monkeypatch.setattr(encoding, "encode", encode_some)
        with pytest.raises(KeyboardInterrupt):
            prepare_store(
                tmp_path / "parts",
                corpus[0],
                tokenizer="sentencepiece:400",
                workers=1,
                log=logged.append,
            )
        assert not (tmp_path / "parts").exists()
    monkeypatch.setattr(encoding, "encode", encode)
    prepare_store(tmp_path / "parts", corpus[0], tokenizer="sentencepiece:400", log=logged.append)
    assert files_of(tmp_path / "parts") == whole
    assert len(trained) == 1
    assert sum(line.startswith("resuming ") for line in logged) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "parts", "whole"]


def test_starts_over_when_the_text_changed(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 2000)
    path, texts = corpus
    with path.open("a") as file:
        file.write("nonsense")
    with pytest.raises(UserError, match="line 301: not JSON"):
        prepare_store(tmp_path / "store", path)
    assert (tmp_path / "store.partial").is_dir() and not (tmp_path / "store").exists()
    write_jsonl(path, texts[100:])
    made = prepare_store(tmp_path / "store", path)
    assert sorted(documents_of(made.train) + documents_of(made.validation)) == sorted(texts[100:])
    assert not (tmp_path / "store.partial").exists()


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Returns a folder with three files, each of 100 documents. Line 50 of b.jsonl is invalid.

    Also limits batches to 1,000 characters.
    """
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 1000)
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in "abc":
        lines = [
            json.dumps({"text": f"document {i} of {name} " + "text " * (i % 30)}) + "\n"
            for i in range(100)
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    edit(folder / "b.jsonl", lambda lines: [*lines[:49], "{invalid\n", *lines[49:]])
    return folder


def edit(path, change):
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def tokenized(monkeypatch):
    """Returns a list, initially empty, to which every text is appended when it is tokenized."""
    texts, encode = [], encoding.encode
    monkeypatch.setattr(
        encoding, "encode", lambda batch, tokenizer: texts.extend(batch) or encode(batch, tokenizer)
    )
    return texts


@contextlib.contextmanager
def interrupted(monkeypatch, after):
    """Interrupts the preparation in the `with` block after `after` texts, and catches the
    KeyboardInterrupt.
    """
    texts, encode = [], encoding.encode

    def encode_some(batch, tokenizer):
        texts.extend(batch)
        if len(texts) > after:
            raise KeyboardInterrupt
        return encode(batch, tokenizer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(unfinished_store, "JOURNAL_SECONDS", 0)
        patch.setattr(encoding, "encode", encode_some)
        yield


def prepare_until_the_invalid_line(shards, tmp_path, **settings):
    with pytest.raises(UserError, match=r"b\.jsonl, line 50: not JSON"):
        prepare_store(tmp_path / "store", shards, **settings)


@pytest.mark.parametrize(
    "fix, settings, max_tokenized",
    [
        (lambda folder: None, {"invalid_items": "skip"}, 160),
        (
            lambda folder: edit(folder / "b.jsonl", lambda lines: [*lines[:49], *lines[50:]]),
            {},
            160,
        ),
        (
            lambda folder: edit(
                folder / "b.jsonl",
                lambda lines: [*lines[:49], '{"text": "repaired"}\n', *lines[50:]],
            ),
            {"invalid_utf8": "replace"},
            165,
        ),
        (
            lambda folder: (
                edit(folder / "b.jsonl", lambda lines: [*lines[:49], *lines[50:]]),
                shutil.copy(folder / "a.jsonl", folder / "d.jsonl"),
            ),
            {},
            260,
        ),
        (lambda folder: (folder / "b.jsonl").unlink(), {}, 120),  # the file with the error
    ],
    ids=[
        "line skipped",
        "line removed",
        "line repaired",
        "line removed, file added",
        "file removed",
    ],
)
def test_resumes_after_bad_input_is_fixed(
    shards, tmp_path, monkeypatch, fix, settings, max_tokenized
):
    """After the bad input is fixed, preparation resumes and tokenizes at most `max_tokenized`
    texts.

    `fix` changes the folder, and `settings` are config fields of the resumed preparation. An
    uninterrupted preparation with the same files and settings makes the same store.
    """
    prepare_until_the_invalid_line(shards, tmp_path)
    fix(shards)
    texts = tokenized(monkeypatch)
    made = files_of(prepare_store(tmp_path / "store", shards, **settings).folder)
    assert len(texts) <= max_tokenized
    assert made == files_of(prepare_store(tmp_path / "whole", shards, **settings).folder)


@pytest.mark.parametrize("limits, max_tokenized", [((2000, 5000), 160), ((5000, 2000), 301)])
def test_resumes_with_another_length_limit(shards, tmp_path, monkeypatch, limits, max_tokenized):
    """With a higher limit, preparation resumes at the document that was too long. With a lower one,
    it starts over.
    """
    edit(
        shards / "a.jsonl",
        lambda lines: [json.dumps({"text": "x" * 4000}) + "\n"] * (limits[0] > 4000) + lines,
    )
    edit(
        shards / "b.jsonl",
        lambda lines: [
            *lines[:49],
            json.dumps({"text": "x" * 4500}) + "\n" if limits[0] < 4500 else "{invalid\n",
            *lines[50:],
        ],
    )
    with pytest.raises(UserError, match=r"b\.jsonl, line 50"):
        prepare_store(tmp_path / "store", shards, max_document_bytes=limits[0])
    settings = dict(max_document_bytes=limits[1], invalid_items="skip")
    texts = tokenized(monkeypatch)
    made = files_of(prepare_store(tmp_path / "store", shards, **settings).folder)
    assert len(texts) <= max_tokenized and (len(texts) > 200) == (max_tokenized > 200)
    assert made == files_of(prepare_store(tmp_path / "whole", shards, **settings).folder)


def test_starts_over_before_a_text_file_that_is_now_skipped(shards, tmp_path, monkeypatch):
    """Passages that were read before the invalid byte are not kept if the file is then skipped."""
    (shards / "b.jsonl").unlink()
    (shards / "b.txt").write_bytes(b"a valid passage\n\n" * 200_000 + b"\xff")
    with pytest.raises(UserError, match=r"b\.txt: not UTF-8"):
        prepare_store(tmp_path / "store", shards)
    assert max(path.stat().st_size for path in (tmp_path / "store.partial").glob("*.bin")) > 10**6
    texts = tokenized(monkeypatch)
    made = files_of(prepare_store(tmp_path / "store", shards, invalid_items="skip").folder)
    assert len(texts) < 150  # resumes after a.jsonl
    assert made == files_of(prepare_store(tmp_path / "whole", shards, invalid_items="skip").folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"place": [', '"place": [1'),
        lambda text: text[:-9],
        lambda text: "null",
        lambda text: text.replace('"documents": ', '"documents": 1'),
    ],
    ids=["place", "truncated", "null", "counts"],
)
def test_starts_over_after_damage_to_the_journal(shards, tmp_path, damage):
    prepare_until_the_invalid_line(shards, tmp_path)
    journal = tmp_path / "store.partial" / "journal.json"
    journal.write_text(damage(journal.read_text()))
    made = files_of(prepare_store(tmp_path / "store", shards, invalid_items="skip").folder)
    assert made == files_of(prepare_store(tmp_path / "whole", shards, invalid_items="skip").folder)


def test_names_a_truncated_file_of_an_unfinished_store(shards, tmp_path):
    prepare_until_the_invalid_line(shards, tmp_path)
    (tmp_path / "store.partial" / "train.bin").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"train\.bin: damaged, has 0 bytes, .* remove .*store\.partial and rerun"
    ):
        prepare_store(tmp_path / "store", shards, invalid_items="skip")


def test_keeps_a_damaged_unfinished_store_of_text_that_is_read_completely(
    corpus, tmp_path, monkeypatch
):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "rename", stop)
        prepare_store(tmp_path / "store", corpus[0])
    (tmp_path / "store.partial" / "train.bin").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"train\.bin: damaged, .* remove .*store\.partial and rerun"
    ):
        prepare_store(tmp_path / "store", corpus[0])
    assert (tmp_path / "store.partial" / "validation.bin").exists()


def test_names_the_file_that_the_training_of_a_tokenizer_cannot_read(tmp_path):
    path, rng = tmp_path / "corpus.jsonl.gz", random.Random(0)
    lines = [
        json.dumps({"text": " ".join(str(rng.random()) for _ in range(30))}) for _ in range(5000)
    ]
    content = gzip.compress("\n".join(lines).encode(), 1)
    path.write_bytes(
        content[: 3 * len(content) // 4]
    )  # SentencePiece has texts already when reading fails
    with pytest.raises(UserError, match=r"^\S*corpus\.jsonl\.gz: "):
        prepare_store(tmp_path / "store", path, tokenizer="sentencepiece:300")


def test_the_text_of_a_comparison(corpus, tmp_path):
    """Names of its runs have dots, which a ConfigDict refuses by default."""
    fields = dict(source=str(corpus[0]), tokenizer="bytes", store=str(tmp_path / "store"))
    runs = {"gpt@0.2M": {"train": {"steps": 1}}}
    comparison = base.comparison(load_config("gpt", "tiny"), runs)
    found, is_new = prepare_text(comparison, {"data": fields})
    assert is_new and found.stores[0].train.documents > 200


def test_resumes_in_the_cache_folder(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = dict(data__source=str(shards), data__tokenizer="bytes", data__store="")
    with pytest.raises(UserError, match="line 50"):
        open_or_prepare(load_config("gpt", **fields).data, log=lambda _: None)
    texts = tokenized(monkeypatch)
    open_or_prepare(
        load_config("gpt", data__invalid_items="skip", **fields).data, log=lambda _: None
    )
    assert len(texts) <= 160
    assert [path.suffix for path in (tmp_path / "cache/smallgpt_jax/stores").iterdir()] == [""]


@pytest.mark.parametrize(
    "first, change, then",
    [
        (
            {},
            lambda folder: edit(folder / "a.jsonl", lambda lines: lines[1:]),
            {"invalid_items": "skip"},
        ),
        (
            {},
            lambda folder: edit(
                folder / "b.jsonl", lambda lines: [lines[0].replace("0", "1"), *lines[1:]]
            ),
            {"invalid_items": "skip"},
        ),
        ({}, lambda folder: None, {"invalid_items": "skip", "validation_fraction": 0.3}),
        (
            {"tokenizer": "TMP/my.model"},
            lambda folder: shutil.copy(folder.parent / "two", folder.parent / "my.model"),
            {"tokenizer": "TMP/my.model", "invalid_items": "skip"},
        ),
    ],
    ids=["earlier file", "earlier line", "validation fraction", "tokenizer file"],
)
def test_starts_over_when_earlier_text_or_settings_changed(
    shards, tmp_path, monkeypatch, first, change, then
):
    for name, size in (("my.model", 300), ("two", 310)):
        made = TokenizerSource(f"sentencepiece:{size}").make(
            ["some words to learn from, and others " * 9]
        )
        (tmp_path / name).write_bytes(made.files()["tokenizer.model"])
    first, then = (
        {
            key: str(value).replace("TMP", str(tmp_path)) if key == "tokenizer" else value
            for key, value in settings.items()
        }
        for settings in (first, then)
    )
    prepare_until_the_invalid_line(shards, tmp_path, **first)
    change(shards)
    made = files_of(prepare_store(tmp_path / "store", shards, **then).folder)
    assert made == files_of(prepare_store(tmp_path / "whole", shards, **then).folder)


def test_starts_over_when_skipped_bytes_are_now_replaced(shards, tmp_path, monkeypatch):
    """A preparation that has skipped texts with invalid UTF-8 starts over if a new config replaces
    invalid bytes.
    """
    (shards / "a.jsonl").write_bytes(
        b'{"text": "not \xff UTF-8"}\n' + (shards / "a.jsonl").read_bytes()
    )
    with interrupted(monkeypatch, after=60):
        prepare_store(tmp_path / "store", shards, invalid_items="skip", workers=1)
    settings = dict(invalid_items="skip", invalid_utf8="replace")
    made = files_of(prepare_store(tmp_path / "store", shards, **settings).folder)
    assert made == files_of(prepare_store(tmp_path / "whole", shards, **settings).folder)


@pytest.mark.parametrize("max_characters", [3000, 10**9])
def test_retrains_the_tokenizer_when_its_text_changed(
    shards, tmp_path, monkeypatch, max_characters
):
    """If the tokenizer's training text has changed, the tokenizer is retrained, and preparation
    starts over.

    The training text is the beginning of the source, up to about `max_characters` characters. If
    only later texts have changed, the tokenizer is kept, and preparation resumes.
    """
    edit(shards / "b.jsonl", lambda lines: [*lines[:49], *lines[50:]])
    monkeypatch.setattr(sentencepiece_training, "MAX_TRAINING_CHARACTERS", max_characters)
    with interrupted(monkeypatch, after=100):
        prepare_store(tmp_path / "store", shards, tokenizer="sentencepiece:400", workers=1)
    edit(shards / "c.jsonl", lambda lines: [line.replace("text ", "word ") for line in lines])
    texts = tokenized(monkeypatch)
    made = files_of(prepare_store(tmp_path / "store", shards, tokenizer="sentencepiece:400").folder)
    assert (len(texts) < 300) == (max_characters == 3000)
    assert made == files_of(
        prepare_store(tmp_path / "whole", shards, tokenizer="sentencepiece:400").folder
    )


def test_keeps_other_files_at_the_partial_path(corpus, tmp_path):
    path, _ = corpus
    precious = tmp_path / "store.partial" / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(
        UserError, match=r"store\.partial: is reserved .* contains other files; move it"
    ):
        prepare_store(tmp_path / "store", path)
    assert precious.read_text() == "mine" and not (tmp_path / "store").exists()


def test_refuses_store_inside_source(corpus, tmp_path):
    with pytest.raises(UserError, match="is inside"):
        prepare_store(tmp_path / "stores" / "store", tmp_path)


def test_store_behind_a_symlink(corpus, tmp_path, monkeypatch):
    """If the path of the store is a symbolic link, unfinished and finished stores are written where
    the link points.

    The finished store does not replace the link.
    """
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 2000)
    path, _ = corpus
    good = path.read_text()
    whole = files_of(prepare_store(tmp_path / "whole", path).folder)
    for target in ("big/empty", "big/new"):
        (tmp_path / "big" / "empty").mkdir(parents=True, exist_ok=True)
        link = tmp_path / f"link_to_{Path(target).name}"
        link.symlink_to(tmp_path / target)
        path.write_text(good + "nonsense")
        with pytest.raises(UserError, match="not JSON"):
            prepare_store(link, path)
        assert (tmp_path / f"{target}.partial").is_dir() and not link.with_name(
            f"{link.name}.partial"
        ).exists()
        path.write_text(good)
        assert prepare_store(link, path).folder == link and link.is_symlink()
        assert files_of(tmp_path / target) == whole


def test_compares_store_made_while_waiting(corpus, tmp_path, monkeypatch):
    locked = prepare.file_lock

    def locked_after_another(*args, **kwargs):
        monkeypatch.setattr(prepare, "file_lock", locked)
        prepare_store(tmp_path / "store", corpus[0], tokenizer="sentencepiece:300")
        return locked(*args, **kwargs)

    monkeypatch.setattr(prepare, "file_lock", locked_after_another)
    with pytest.raises(
        UserError, match="was made with tokenizer='sentencepiece:300', but this config has"
    ):
        prepare_store(tmp_path / "store", corpus[0])


def test_concurrent_preparations_make_one_store(corpus, tmp_path, monkeypatch):
    """The second preparation waits until the first has made the store, and then opens this
    store.
    """
    encode, has_begun, second_waits = encoding.encode, threading.Event(), threading.Event()
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 10**6)
    logs = [], []

    def encode_slowly(texts, tokenizer):
        has_begun.set()
        assert second_waits.wait(timeout=60)
        return encode(texts, tokenizer)

    def lock_second(*args, **kwargs):
        second_waits.set()
        return file_lock(*args, **kwargs)

    monkeypatch.setattr(encoding, "encode", encode_slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(prepare_store, tmp_path / "store", corpus[0], log=logs[0].append)
        assert has_begun.wait(timeout=60)
        monkeypatch.setattr(prepare, "file_lock", lock_second)
        second = pool.submit(prepare_store, tmp_path / "store", corpus[0], log=logs[1].append)
        assert first.result(60).metadata == second.result(60).metadata
    assert "300 documents" in logs[0][-1] and not logs[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "store"]


def test_summary(tmp_path):
    path = tmp_path / "a.jsonl"
    lengths = [*range(1, 100), 5000]
    with write_jsonl(path, ["x" * n + str(n) for n in lengths]).open("a") as file:
        file.write('{"n": 1}\n')
    logged = []
    prepare_store(tmp_path / "store", path, invalid_items="skip", log=logged.append)
    text = "\n".join(logged)
    assert "100 documents" in text and "bytes per token" in text
    # A document of n letters also contains the digits of n. Its length in tokens counts the
    # letters, the digits and an end-of-text token.
    assert "median 54, 95% at most 98, longest 5,005" in text
    assert "skipped: 1 no string in the field 'text'" in text


@pytest.mark.parametrize(
    "changes, substrings",
    [
        ({"validation_fraction": 1e-9}, ["300 documents", "validation"]),
        ({"text_field": "body"}, ["line 1"]),
        ({"tokenizer": "nothing"}, ["'nothing'"]),
        ({"tokenizer": "sentencepiece:9"}, ["at least 300"]),
    ],
)
def test_failure_leaves_no_files(corpus, tmp_path, changes, substrings):
    path, _ = corpus
    with pytest.raises(UserError) as error:
        prepare_store(tmp_path / "made" / "store", path, **changes)
    assert all(s in str(error.value) for s in substrings), str(error.value)
    assert not (tmp_path / "made").exists() or not list((tmp_path / "made").iterdir())


def test_refuses_to_replace_other_files(corpus, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for existing in (tmp_path / "mine", corpus[0], tmp_path / "circle", Path("/dev/null")):
        with pytest.raises(UserError, match="exists and is not a token store"):
            prepare_store(existing, corpus[0])
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "text"


@pytest.mark.parametrize("name", ["store", "store/thesis.tex"])
def test_keeps_files_put_at_the_store_meanwhile(corpus, tmp_path, name):
    def put(_):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")

    with pytest.raises(
        UserError, match="store': exists and is not a token store; choose another folder"
    ):
        prepare_store(tmp_path / "store", corpus[0], log=put)
    assert (tmp_path / name).read_text() == "text"


def test_refuses_source_without_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    for name, message in (("empty.txt", "contains no text"), ("blank.jsonl", "skipped: 2 empty")):
        with pytest.raises(UserError, match=message):
            prepare_store(tmp_path / "store", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blank.jsonl", "empty.txt"]


def test_resumes_after_a_failed_sync(corpus, tmp_path, monkeypatch):
    """A network disk reports that it is full when a file is synced, once, and has lost what was not
    synced before.
    """
    whole = files_of(prepare_store(tmp_path / "whole", corpus[0]).folder)
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(unfinished_store, "JOURNAL_SECONDS", 0)
    sync, synced, failed = os.fsync, {}, []

    def fail_once(file):
        name, size = os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size
        if name.endswith("store.partial/train.bin"):
            if size > 20_000 and not failed:
                failed.append(name)
                os.ftruncate(file, synced[name])
                os.ftruncate(file, size)  # zeros in place of the tokens
                raise OSError(errno.ENOSPC, "No space left on device")
            synced[name] = size
        sync(file)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(
        UserError, match="No space left on device; rerun the same command to resume"
    ):
        prepare_store(tmp_path / "store", corpus[0])
    assert failed
    logged = []
    prepare_store(tmp_path / "store", corpus[0], log=logged.append)
    assert any(line.startswith("resuming ") for line in logged)
    assert files_of(tmp_path / "store") == whole


def test_full_disk(corpus, tmp_path):
    """On a full disk, the command ends with an error and makes no store. The same command can be
    rerun later.

    A limit of 20 kB per file simulates the full disk.
    """
    flags = [
        "--config=configs/gpt.py:tiny",
        f"--config.data.source={corpus[0]}",
        f"--config.data.store={tmp_path / 'store'}",
    ]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        limited = call("prepare", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert limited.returncode == 1 and "File too large" in limited.stderr, limited.stderr
    assert "rerun the same command to resume" in limited.stderr and limited.stderr.count("\n") == 1
    assert not (tmp_path / "store").exists()
    finished = call("prepare", *flags)
    assert finished.returncode == 0, finished.stderr
    whole = prepare_store(tmp_path / "whole", corpus[0], validation_fraction=0.1)
    assert files_of(tmp_path / "store") == files_of(whole.folder)


def limited_tokenizer(folder: Path, unknown: str | None) -> str:
    """Writes a tokenizer of lower-case letters and spaces. Returns its folder."""
    library = pytest.importorskip("tokenizers")
    vocabulary = {c: i for i, c in enumerate([*"abcdefghijklmnopqrstuvwxyz", "▁", "<unk>", "</s>"])}
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token=unknown))
    tokenizer.normalizer = library.normalizers.Replace(" ", "▁")
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("unknown", ["<unk>", None], ids=["unknown", "dropped"])
def test_text_that_the_tokenizer_cannot_encode(unknown, tmp_path):
    """Each text has 17 letters, of which four are upper case and not in the vocabulary, three spaces,
    and an end.
    """
    texts = [f"Abcd Efgh Ijkl Mno{chr(97 + i % 26)}{chr(97 + i // 26)}" for i in range(300)]
    source, logged = write_jsonl(tmp_path / "a.jsonl", texts), []
    tokenizer = limited_tokenizer(tmp_path / "tokenizer", unknown)
    made = prepare_store(tmp_path / "store", source, tokenizer=tokenizer, log=logged.append)
    tokens = made.train.tokens + made.validation.tokens
    assert tokens == 300 * (21 if unknown else 17)
    expected = {"unknown": 4 if unknown else 0, "dropped": 0 if unknown else 4}
    for name in ("train", "validation"):
        split = getattr(made, name)
        found = made.metadata["unencoded"][name]
        assert found == {what: count * split.documents for what, count in expected.items()}
        assert np.isnan(split.bytes_per_token)
    warning = "warning: the tokenizer cannot encode 19.0% of the tokens; losses do not compare"
    assert warning in logged[-1]
    text = Corpus((made,))
    assert warning in text.warning and np.isnan(text.bytes_per_token("validation"))


def test_a_store_of_encoded_text_has_no_further_field(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(100)])
    tokenizer = limited_tokenizer(tmp_path / "tokenizer", "<unk>")
    lower = write_jsonl(tmp_path / "b.jsonl", ["a text " * (1 + i) for i in range(100)])
    for name, fields in (("bytes", {}), ("lower", {"tokenizer": tokenizer})):
        made = prepare_store(tmp_path / name, lower if fields else source, **fields)
        assert "unencoded" not in made.metadata and not Corpus((made,)).warning
        assert made.train.bytes_per_token == made.train.text_bytes / made.train.tokens


def test_counts_of_unknown_characters_survive_an_interruption(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 100)
    texts = [f"Text with {i} " + "x" * (i % 9) for i in range(200)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    tokenizer = limited_tokenizer(tmp_path / "tokenizer", "<unk>")
    whole = prepare_store(tmp_path / "whole", source, tokenizer=tokenizer)
    good = source.read_text()
    source.write_text("".join([*good.splitlines(True)[:150], "nonsense"]))
    with pytest.raises(UserError, match="line 151"):
        prepare_store(tmp_path / "store", source, tokenizer=tokenizer)
    source.write_text(good)
    made = prepare_store(tmp_path / "store", source, tokenizer=tokenizer)
    assert made.metadata["unencoded"] == whole.metadata["unencoded"]


def write_books(folder: Path, count: int, length: int = 20) -> Path:
    """Writes text files of a few passages. In each passage are names of its file."""
    folder.mkdir()
    for i in range(count):
        paragraphs = [f"book{i} {'word ' * 40}paragraph {j}" for j in range(length + i % 7)]
        (folder / f"book{i}.txt").write_text("\n\n".join(paragraphs))
    return folder


def books_of(split) -> set[str]:
    return set(re.findall(r"book\d+", "".join(documents_of(split))))


def test_the_validation_split_has_whole_files_where_there_are_enough(tmp_path):
    folder, logged = write_books(tmp_path / "books", 60), []
    (folder / "copy.txt").write_bytes((folder / "book3.txt").read_bytes())
    made = prepare_store(tmp_path / "store", folder, log=logged.append)
    train, validation = books_of(made.train), books_of(made.validation)
    assert train | validation == {f"book{i}" for i in range(60)} and not train & validation
    plain_text = made.metadata["plain_text"]
    named = {Path(name).stem for name in plain_text["validation_files"]}
    assert named - {"copy"} == validation and ("copy" in named) == ("book3" in named)
    assert 5 <= len(validation) <= 25
    assert plain_text["split_by_file"] and plain_text["files"] == 61
    passages = made.train.documents + made.validation.documents
    assert plain_text["passages"] == passages > 100
    assert f"{folder}: 61 files, {passages:,} passages, " in logged[-1]
    assert f"validation: {len(named)} whole files: book" in logged[-1]
    share = made.validation.tokens / (made.train.tokens + made.validation.tokens)
    assert f" ({share:.0%}) for validation, " in logged[-1]
    # A file keeps its split if it is renamed, or if others are removed.
    (folder / "book0.txt").rename(folder / "another.txt")
    for i in range(40, 60):
        (folder / f"book{i}.txt").unlink()
    again = prepare_store(tmp_path / "again", folder)
    assert books_of(again.validation) == {f"book{i}" for i in range(40)} & validation


def test_few_files_are_split_by_passage(tmp_path):
    """The split of a passage then depends on its own text, as that of other documents does."""
    folder, logged = write_books(tmp_path / "books", 20), []
    made = prepare_store(tmp_path / "store", folder, log=logged.append)
    assert books_of(made.train) & books_of(made.validation)
    assert all(encoding.is_validation(text, 0.2) for text in documents_of(made.validation))
    assert not any(encoding.is_validation(text, 0.2) for text in documents_of(made.train))
    assert not made.metadata["plain_text"]["split_by_file"]
    assert "validation: passages of files that are also trained on" in logged[-1]
    lines = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(90)])
    mixed = prepare_store(tmp_path / "mixed", f"{folder},{lines}", log=logged.append)
    passages = mixed.metadata["plain_text"]["passages"]
    assert f": {passages + 90} documents, of which 20 files, {passages} passages" in logged[-1]
    rows = prepare_store(tmp_path / "rows", lines, log=logged.append)
    assert "plain_text" not in rows.metadata and ": 90 documents, " in logged[-1]


def test_an_interrupted_split_by_file_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 3000)
    folder = write_books(tmp_path / "books", 60)
    whole = files_of(prepare_store(tmp_path / "whole", folder).folder)
    good = (folder / "book7.txt").read_bytes()
    (folder / "book7.txt").write_bytes(good[:-1] + b"\xff")
    with pytest.raises(UserError, match=r"book7\.txt: not UTF-8"):
        prepare_store(tmp_path / "store", folder)
    (folder / "book7.txt").write_bytes(good)
    logged = []
    made = prepare_store(tmp_path / "store", folder, log=logged.append)
    assert any("resuming" in line for line in logged) and files_of(made.folder) == whole


def test_another_way_to_split_starts_over(tmp_path):
    """With more files, the validation split has whole ones, also of those that were read before."""
    folder = write_books(tmp_path / "books", 60)
    more = tmp_path / "more"
    more.mkdir()
    for i in range(20, 60):
        (folder / f"book{i}.txt").rename(more / f"book{i}.txt")
    (folder / "zzz.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"zzz\.txt: not UTF-8"):
        prepare_store(tmp_path / "store", folder)
    (folder / "zzz.txt").unlink()
    for path in more.iterdir():
        path.rename(folder / path.name)
    made = prepare_store(tmp_path / "store", folder)
    assert not books_of(made.train) & books_of(made.validation)


def test_refuses_a_mixture_of_both_ways_to_split(tmp_path):
    folder = write_books(tmp_path / "books", 60, length=400)  # passages of the largest size
    few = tmp_path / "few books"
    few.mkdir()
    for i in range(20):
        shutil.copy(folder / f"book{i}.txt", few)
    for name, source in (("all", folder), ("some", few), ("same", folder)):
        prepare_store(tmp_path / name, source)
    with pytest.raises(UserError, match="leave what both have out of one of them"):
        open_mixture(f"{tmp_path}/all=1,{tmp_path}/some=1")
    assert len(open_mixture(f"{tmp_path}/all=1,{tmp_path}/same=1").stores) == 2


def test_refuses_a_mixture_of_one_file_in_passages_of_two_lengths(tmp_path):
    """Small sources have shorter passages, whose splits differ from those of the longer ones."""
    book = write_books(tmp_path / "books", 1, length=900) / "book0.txt"
    more = write_books(tmp_path / "more", 5, length=4000) / "book4.txt"
    for name, source in (("alone", book), ("both", f"{book},{more}"), ("other", more)):
        prepare_store(tmp_path / name, source)
    with pytest.raises(UserError, match="the same files in passages of different lengths"):
        open_mixture(f"{tmp_path}/both=1,{tmp_path}/alone=1")
    assert len(open_mixture(f"{tmp_path}/alone=1,{tmp_path}/other=1").stores) == 2
    # whole files are in the same split of both
    books = write_books(tmp_path / "60 books", 60)
    prepare_store(tmp_path / "60", books)
    prepare_store(tmp_path / "61", f"{books},{more}")
    assert len(open_mixture(f"{tmp_path}/60=1,{tmp_path}/61=1").stores) == 2
