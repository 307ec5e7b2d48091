"""Text to batches: sources, tokenizers, the token store."""

import bz2
import collections
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
from conftest import ROOT, load_config, run

from smallgpt_jax import data
from smallgpt_jax.data import prepare as preparing
from smallgpt_jax.data import sources, store, tfrecord, tokenizers
from smallgpt_jax.errors import UserError


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def parquet(columns: dict) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=1000)
    return file.getvalue()


def read(source, invalid_utf8="refuse", text_field="text", invalid_items="refuse"):
    return list(sources.documents(str(source), text_field, invalid_utf8, invalid_items))


def prepare(folder, source, **changes):
    settings = dict(tokenizer="bytes", validation_fraction=0.2, text_field="text",
                    invalid_utf8="refuse", invalid_items="refuse", say=lambda _: None)
    return preparing.prepare_store(folder, source=str(source), **{**settings, **changes})


def stream(split):
    return np.asarray(split.stream)


# ---------------------------------------------------------------------- sources

def test_standard_library_is_read_whole():
    texts = read("python_stdlib")
    assert sum(map(len, texts)) > 5_000_000
    assert any("class JSONDecoder" in text for text in texts)
    assert read("python_stdlib") == texts


def test_text_files_are_cut_without_loss(tmp_path):
    paragraphs = [f"Paragraph {i}: " + "word " * (i % 90) for i in range(900)]
    long = "x" * 40_000 + "\n\n" + "\n\n".join(paragraphs)
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.md").write_text("not asked for")
    texts = read(tmp_path)
    assert "".join(texts[:-1]) == long and texts[-1] == "short"
    most = (tmp_path / "a.txt").stat().st_size // 100
    assert max(map(len, texts)) <= most + 1
    assert all(text.startswith("Paragraph") for text in texts[-50:-1])


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "n": 1}\n\n{"text": "zwei ü"}\n{"text": ""}\n')
    assert read(path) == ["one", "zwei ü"]
    assert read(str(tmp_path / "*.jsonl")) == ["one", "zwei ü"]


def test_line_ends_of_text_files_are_newlines(tmp_path):
    """However the file ends its lines, and also where a line end lies between two blocks."""
    (tmp_path / "dos.txt").write_bytes(b"x" * 999_999 + b"\r\nline\r\n\r\nold\rmac\r")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "kept\r\n"}))
    texts = read(tmp_path)
    assert texts[0] == "kept\r\n"
    assert "".join(texts[1:]) == "x" * 999_999 + "\nline\n\nold\nmac\n"


def test_links_to_folders_are_followed_once(tmp_path):
    source, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for folder, text in ((source / "sub", "inside"), (elsewhere / "deep", "outside")):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(text)
    (source / "again").symlink_to(source / "sub")
    (source / "link").symlink_to(elsewhere)
    (elsewhere / "deep" / "back").symlink_to(elsewhere)
    (source / "circle").symlink_to(source)
    assert sorted(read(source)) == sorted(read(f"{source}/**/*.txt")) == ["inside", "outside"]
    with pytest.raises(UserError, match="lies inside of"):
        prepare(elsewhere / "deep" / "store", source)


def test_the_glob_that_a_message_advises_works(tmp_path):
    for name in ("a[1]/one.md", "a[1]/b/two.md", "a[1]/.git/three.md", "a[1]/four.zip", "a[1]/five.rst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name[-6:-3])
    with pytest.raises(UserError, match=r"to read its 2 \.md files") as error:
        read(tmp_path / "a[1]")
    advised = shlex.split(str(error.value).split("--config.data.source=")[1])[0]
    assert sorted(read(advised)) == ["one", "two"]


def test_web_text(shared_data):
    assert len(read(shared_data / "text/web/openwebtext_1k.jsonl")) == 1000


@pytest.mark.parametrize("name, content, settings, words", [
    ("a.txt", None, {}, ["no such file"]),
    ("a.txt", b"fine\nbut \xff\xfe not\n", {}, ["a.txt", "byte 9", "line 2", "replace"]),
    ("a.txt", b"x\xe2\x82", {}, ["byte 1 "]),
    ("a.txt", b"\n" * 1_000_000 + b"y\xe2\x82x", {}, ["byte 1000001 ", "line 1000001"]),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', {}, ["a.jsonl", "line 2", "'text'", "body"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', {}, ["a.jsonl", "line 2", "'text'"]),
    ("a.jsonl", b'{"text": "a"}\n[1]\n', {}, ["line 2", "list"]),
    ("a.jsonl", b'\n{"text": "a"\n', {}, ["line 2", "not JSON"]),
    ("a.jsonl", b'{"text": "\\ud800"}\n', {}, ["line 1", "surrogate"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', {}, ["line 2", "byte 24 "]),
    ("a.txt", b"\xef\xbb\xbfabc\xff", {}, ["byte 6 "]),
    ("a.jsonl", b"[" * 100_000, {}, ["line 1", "not JSON", "deep"]),
    ("a.jsonl", b'{"text": null}', {}, ["line 1", "no text in the field", "invalid_items=skip"]),
    ("a.png", b"\x89PNG\r\n\x1a\n\x00", {}, ["a.png", "not UTF-8 at byte 0"]),
    ("a.txt", "text".encode("utf-16"), {}, ["not UTF-8"]),
    ("a.jsonl.gz", b'{"text": "a"}\n', {}, ["a.jsonl.gz", "damaged", "gzip"]),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-20], {}, ["a.jsonl.gz", "damaged", "ended"]),
    ("a.txt.gz", gzip.compress(b"words " * 99, mtime=0)[:-9] + b"123456789", {}, ["a.txt.gz", "damaged"]),
    ("a.jsonl.bz2", bz2.compress(b'{"text": "a"}\n' * 999)[:-9], {}, ["a.jsonl.bz2", "damaged"]),
    ("a.txt.bz2", b"nonsense", {}, ["a.txt.bz2", "damaged"]),
    ("a.jsonl.zst", b"nonsense", {}, ["a.jsonl.zst", "damaged"]),
    ("a.jsonl.zst", zstd(b'{"text": "a"}\n' * 999)[:-9], {}, ["a.jsonl.zst", "damaged", "runcated"]),
    ("a.zip", b"PK", {}, ["a.zip", "archives", "unpack"]),
    ("a.parquet", b"PAR1", {}, ["a.parquet", "damaged"]),
    ("a.parquet", parquet({"text": ["a"] * 5000})[:-100], {}, ["a.parquet", "damaged"]),
    ("a.parquet", parquet({"body": ["a"], "n": [1]}), {}, ["a.parquet", "no column 'text'", "body, n"]),
    ("a.parquet", parquet({"text": [1, 2]}), {}, ["a.parquet", "row 1", "no text"]),
    ("a.parquet", parquet({"text": ["a", None]}), {}, ["a.parquet", "row 2", "no text"]),
    ("a.jsonl", b'{"text": "a"}\n', {"text_field": "body"}, ["line 1", "'body'", "text"]),
    ("a.txt", b"text", {"invalid_utf8": "ignore"}, ["invalid_utf8='ignore'"]),
])
def test_bad_sources(tmp_path, name, content, settings, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path, **settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_bytes_that_are_no_text_in_a_column(tmp_path):
    good, bad = "grün".encode(), b"a\xffb"
    for column_type in (pyarrow.binary(), pyarrow.string()):
        column = pyarrow.Array.from_buffers(
            column_type, 2, pyarrow.array([good, bad], pyarrow.binary()).buffers())
        (tmp_path / "a.parquet").write_bytes(parquet({"text": column}))
        assert read(tmp_path / "a.parquet", "replace") == ["grün", "a\N{REPLACEMENT CHARACTER}b"]
        assert read(tmp_path / "a.parquet", invalid_items="skip") == ["grün"]
        with pytest.raises(UserError, match=r"row 2: not UTF-8: byte 1; set --config.data.invalid_utf8"):
            read(tmp_path / "a.parquet")


def test_what_is_no_document_can_be_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "one"}\n{"text": ""}\nnonsense\n{"body": 1}\n[1]\n{"text": "\\ud800"}\n'
        b'{"text": "\xff"}\n{"text": "two"}\n')
    (tmp_path / "b.parquet").write_bytes(parquet({"text": ["three", None, "", "four"]}))
    *_, last = found = list(sources.batches(
        sources.open_source(str(tmp_path)), sources.Rules("text", "refuse", "skip")))
    assert [text for batch in found for text in batch.texts] == ["one", "two", "three", "four"]
    skipped = sum((batch.skipped for batch in found), collections.Counter())
    assert skipped == {"empty": 2, "not JSON": 1, "no text in the field 'text'": 2, "not a JSON object": 1,
                       "half a surrogate pair": 1, "not UTF-8": 1}
    assert (last.place, last.done) == ((2, 0), 1.0)


def test_every_form_of_a_text_gives_the_same_documents(tmp_path):
    texts = [f"document {i}\nwith ünïcödé " + "words " * i for i in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    files = {"a.jsonl": lines, "b.ndjson.gz": gzip.compress(lines), "c.json.bz2": bz2.compress(lines),
             "d.jsonl.zst": zstd(lines[:5000]) + zstd(lines[5000:]), "e.parquet": parquet({"text": texts})}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert read(tmp_path / name) == texts, name
    assert read(f"{tmp_path}/a.jsonl, {tmp_path}/e.*") == texts * 2
    assert read(tmp_path) == texts * len(files)
    book = "\n\n".join(texts).encode()
    for name, content in {"a.txt": book, "b.txt.gz": gzip.compress(book)}.items():
        (tmp_path / "books" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "books" / name).write_bytes(content)
        assert "".join(read(tmp_path / "books" / name)).encode() == book


def test_reading_goes_on_from_any_place(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"word " * i}"}}\n' for i in range(200)))
    (tmp_path / "b.txt").write_text("paragraph\n\n" * 3000)
    (tmp_path / "c.parquet").write_bytes(parquet({"text": [f"row {i}" for i in range(500)]}))
    parts, rules = sources.open_source(str(tmp_path)), sources.Rules("text", "refuse", "refuse")
    whole = list(sources.batches(parts, rules, size=900))
    assert len(whole) > 50 and [batch.done for batch in whole] == sorted(batch.done for batch in whole)
    for number in range(0, len(whole), 7):
        rest = sources.batches(parts, rules, whole[number].place, size=10_000)
        texts = [text for batch in rest for text in batch.texts]
        assert texts == [text for batch in whole[number + 1:] for text in batch.texts]


def test_odd_files(tmp_path):
    (tmp_path / "b[1].txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert read(tmp_path / "b[1].txt") == read(tmp_path) == ["marked"]


def test_invalid_utf8_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "c\xff"}\n{"text": "d\\ud800"}\n')
    assert read(tmp_path, "replace") == ["a\ufffdb", "c\ufffd", "d\ufffd"]


def test_hugging_face_datasets_are_streamed(tmp_path, monkeypatch):
    """The library's own reading of a folder, in which each file is a shard."""
    datasets = pytest.importorskip("datasets")
    datasets.utils.logging.set_verbosity_error()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for shard in range(3):
        lines = [json.dumps({"text": f"text {i} of {shard}" if i % 9 else "", "id": i}) for i in range(40)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))
    source = f"hf:{tmp_path}"
    texts = [f"text {i} of {shard}" for shard in range(3) for i in range(40) if i % 9]
    assert read(source) == texts
    parts = sources.open_source(source)
    assert len(parts) == 3
    rest = sources.batches(parts, sources.Rules("text", "refuse", "refuse"), sources.Place(1, 30))
    assert [text for batch in rest for text in batch.texts] == texts[texts.index("text 30 of 1"):]
    with pytest.raises(UserError, match=r"row 1: no text in the field 'body': it has text, id"):
        read(source, text_field="body")
    with pytest.raises(UserError, match=r"hf:nobody/nothing"):
        read("hf:nobody/nothing")


def made_dataset(folder, file_format: str, shards: list[list[dict]], monkeypatch) -> list[Path]:
    """Writes `words`, a TensorFlow dataset of these shards, into `folder`, where tfds then looks. Returns its files."""
    pytest.importorskip("tensorflow_datasets")
    from tensorflow_datasets.core import constants
    from tensorflow_datasets.proto import tf_example_pb2

    monkeypatch.setattr(constants, "DATA_DIR", str(folder))
    folder = folder / "words" / "1.0.0"
    folder.mkdir(parents=True)
    features = "tensorflow_datasets.core.features."
    (folder / "features.json").write_text(json.dumps({
        "pythonClassName": features + "features_dict.FeaturesDict", "featuresDict": {"features": {
            name: {"pythonClassName": features + "text_feature.Text", "text": {}} for name in shards[0][0]}}}))
    (folder / "dataset_info.json").write_text(json.dumps({
        "name": "words", "version": "1.0.0", "fileFormat": file_format, "splits": [
            {"name": "train", "shardLengths": [str(len(items)) for items in shards],
             "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"}]}))
    files = []
    for number, items in enumerate(shards):
        files.append(folder / f"words-train.{file_format}-{number:05}-of-{len(shards):05}")
        records = []
        for item in items:
            example = tf_example_pb2.Example()
            for field, text in item.items():
                example.features.feature[field].bytes_list.value.append(text)
            records.append(example.SerializeToString())
        if file_format == "array_record":
            from array_record.python.array_record_module import ArrayRecordWriter

            writer = ArrayRecordWriter(str(files[-1]), "group_size:1")
            for record in records:
                writer.write(record)
            writer.close()
        else:
            files[-1].write_bytes(b"".join(map(tfrecord_bytes, records)))
    return files


def tfrecord_bytes(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return b"".join([length, struct.pack("<I", tfrecord.masked_crc32c(length)), record,
                     struct.pack("<I", tfrecord.masked_crc32c(record))])


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_tensorflow_datasets(file_format, tmp_path, monkeypatch):
    """The store of a dataset is that of the same texts as JSON lines."""
    shards = [[{"text": f"text {i} ü of {shard}".encode(), "url": b"-"} for i in range(count)]
              for shard, count in enumerate((30, 0, 20))]
    items = [item for shard in shards for item in shard]
    made_dataset(tmp_path, file_format, shards if file_format == "tfrecord" else [items], monkeypatch)
    texts = [item["text"].decode() for item in items]
    assert read("tfds:words") == texts
    assert_stores_equal("tfds:words", texts, tmp_path)
    with pytest.raises(UserError, match="no text in the field 'body': it has text, url; set"):
        read("tfds:words", text_field="body")
    with pytest.raises(UserError, match="'tfds:nothing': Dataset nothing not found"):
        read("tfds:nothing")


def assert_stores_equal(source: str, texts: list[str], folder: Path) -> None:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, which in (("one", source), ("other", str(folder / "texts.jsonl"))):
        prepare(folder / name, which)
    for split in store.SPLITS:
        for file in (store.tokens_file, store.documents_file):
            assert file(folder / "one", split).read_bytes() == file(folder / "other", split).read_bytes()


def test_tfrecord_shards_are_read_from_any_record_on(tmp_path, monkeypatch):
    shards = [[{"text": f"text {i} of {shard}".encode()} for i in range(40)] for shard in range(3)]
    made_dataset(tmp_path, "tfrecord", shards, monkeypatch)
    parts = sources.open_source("tfds:words")
    rest = list(sources.batches(parts, sources.Rules("text", "refuse", "refuse"), sources.Place(1, 30), size=100))
    texts = [f"text {i} of {shard}" for shard in range(3) for i in range(40)]
    assert [text for batch in rest for text in batch.texts] == texts[70:]
    done = [batch.done for batch in rest]
    assert done == sorted(done) and done[-1] == 1 and done[0] == pytest.approx(78 / 120, abs=0.02)


def test_damaged_tfrecord_files_are_named(tmp_path, monkeypatch):
    assert tfrecord.crc32c(b"123456789") == 0xE3069283
    one, two = made_dataset(tmp_path, "tfrecord", [[{"text": b"a" * 40}] * 9, [{"text": b"b"}] * 2], monkeypatch)
    whole = one.read_bytes()
    record, flipped = len(whole) // 9, bytearray(whole)
    flipped[2 * record + 5] ^= 1
    for damaged, words in (
            (whole[:-3], f"the record at byte {8 * record} is cut off"),
            (whole[:4 * record + 7], f"the record at byte {4 * record} is cut off"),
            (bytes(flipped), f"no record begins at byte {2 * record}"),
            (whole + tfrecord_bytes(b"text"), "record 10 is no tf.train.Example"),
            (whole[:8 * record], "has 8 records, dataset_info.json says 9; fetch this shard")):
        one.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{re.escape(str(one))}: .*{words}"):
            read("tfds:words", invalid_items="skip")
    one.write_bytes(whole)
    two.unlink()
    with pytest.raises(UserError, match=f"{re.escape(str(two))}: No such file or directory; fetch this shard"):
        sources.open_source("tfds:words")


def test_prepare_continues_behind_a_shard_that_was_damaged(tmp_path, monkeypatch):
    shards = [[{"text": f"text {i} of {shard}".encode()} for i in range(40)] for shard in range(3)]
    files = made_dataset(tmp_path, "tfrecord", shards, monkeypatch)
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 100)
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-3])
    with pytest.raises(UserError, match="is cut off"):
        prepare(tmp_path / "one", "tfds:words")
    files[1].write_bytes(whole)
    told = []
    prepare(tmp_path / "one", "tfds:words", say=told.append)
    assert "61% done" in told[0], told  # up to the last whole batch of the second shard
    prepare(tmp_path / "other", "tfds:words")
    assert all((tmp_path / "one" / f"{split}.bin").read_bytes() == (tmp_path / "other" / f"{split}.bin").read_bytes()
               for split in store.SPLITS)


def test_a_real_tfrecord_dataset(shared_data, tmp_path, monkeypatch):
    """C4 as tfds wrote it, against grain's reader and tfds' own decoder."""
    tfds = pytest.importorskip("tensorflow_datasets")
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(shared_data / "tfds"))
    name = "c4_minimal/en:3.0.1"
    builder = tfds.builder(name)
    texts = [builder.info.features.deserialize_example_np(record)["text"].decode()
             for path in builder.info.splits["train"].filepaths
             for record in grain.experimental.TFRecordIterDataset(str(path))]
    assert len(texts) == 1000
    assert_stores_equal(f"tfds:{name}", texts, tmp_path)


def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(parquet({"text": ["a"]}))
    (tmp_path / "b.txt.zst").write_bytes(zstd(b"text"))
    for library in ("tensorflow_datasets", "datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, library, None)
    for source in ("tfds:words", "hf:some/corpus", tmp_path / "a.parquet", tmp_path / "b.txt.zst"):
        with pytest.raises(UserError, match=r"pip install -e '\.\[data\]'"):
            read(source)


# ---------------------------------------------------------------------- tokenizers

STRANGE = ["", " ", "  two  spaces", "tab\tand\nline\r\nends\n", "ünïcödé 漢字 🙂\u200d🙂", "<|endoftext|>",
           "def f(x):\n    return x  # comment\n", "\x00\x01", "'s 12345 ...!!!"]


@pytest.fixture(scope="module")
def made(shared_data_or_none):
    """One tokenizer of each kind."""
    texts = [*STRANGE[1:], *(f"some words {i} and other words to learn from\n" for i in range(300))]
    made = {"bytes": tokenizers.make("bytes", []),
            "sentencepiece": tokenizers.make("sentencepiece:400", texts)}
    if shared_data_or_none:
        made["gpt2"] = tokenizers.make(str(shared_data_or_none / "tokenizer/gpt2"), [])
    return made


@pytest.fixture(scope="module")
def shared_data_or_none():
    from conftest import SHARED_DATA

    return SHARED_DATA if SHARED_DATA.is_dir() else None


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "gpt2"])
def test_text_survives_the_tokenizer(made, kind, tmp_path):
    if kind not in made:
        pytest.skip("needs the GPT-2 vocabulary in ../shared/data, which only developers have")
    tokenizer = made[kind]
    encoded = [list(ids) for ids in tokenizer.encode(STRANGE)]
    assert [tokenizer.decode(ids) for ids in encoded] == STRANGE
    assert all(tokenizer.end_of_text not in ids for ids in encoded)
    assert all(0 <= i < tokenizer.vocab_size for ids in encoded for i in ids)
    tokenizers.save(tokenizer, tmp_path / "kept")
    loaded = tokenizers.load(tmp_path / "kept")
    assert [list(ids) for ids in loaded.encode(STRANGE)] == encoded
    assert tokenizers.fingerprint(loaded) == tokenizers.fingerprint(tokenizer)


def test_gpt2_ids_are_gpt2s(made):
    """Against ids that OpenAI's encoder gives, which are widely printed."""
    if "gpt2" not in made:
        pytest.skip("needs the GPT-2 vocabulary in ../shared/data, which only developers have")
    assert made["gpt2"].encode(["Hello world", " tokenization"]) [0].tolist() == [15496, 995]
    assert (made["gpt2"].vocab_size, made["gpt2"].end_of_text) == (50257, 50256)


def test_gpt2_is_taken_from_tiktokens_cache(shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("encoder.json", "vocab.bpe"):
        key = hashlib.sha1((tokenizers.GPT2_URL + name).encode()).hexdigest()
        shutil.copy(shared_data / "tokenizer/gpt2" / name, tmp_path / key)
    assert tokenizers.make("gpt2", []).encode(["Hello world"])[0].tolist() == [15496, 995]


def test_sentencepiece_wants_a_text():
    with pytest.raises(UserError, match=r"'sentencepiece:400': cannot be trained on this text \(there is none\)"):
        tokenizers.make("sentencepiece:400", [])


def test_sentencepiece_takes_what_a_small_text_has():
    assert 256 < tokenizers.make("sentencepiece:4000", ["a few words\n" * 3]).vocab_size < 400


def test_a_mark_that_texts_can_have_in_them_does_not_end_documents():
    """A piece <|endoftext|> that SentencePiece would find in a text; the end-of-sentence piece is used."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words and more of them"] * 20), model_writer=model, vocab_size=300,
        hard_vocab_limit=False, byte_fallback=True, user_defined_symbols=["<|endoftext|>"], minloglevel=2)
    made = tokenizers.SentencePiece(model.getvalue())
    assert made.end_of_text not in made.encode(["words <|endoftext|> and more"])[0]


def test_sentencepiece_learns_from_every_document():
    """Also from texts that can be read only once, and from lines of any length."""
    texts = [f"w{c * 9} " * 2000 for c in "abcdefghij"]
    made = tokenizers.make("sentencepiece:600", (text for text in texts))
    assert all(len(made.encode([text])[0]) < 2500 for text in texts)
    with pytest.raises(UserError, match="cannot be trained"):
        tokenizers.make("sentencepiece:600", [])


@pytest.mark.parametrize("spec, files, words", [
    ("sentencepiece:10", {}, ["at least 300"]),
    ("sentencepiece:many", {}, ["number of"]),
    ("gpt3", {}, ["'gpt3'"]),
    ("FOLDER", {}, ["no tokenizer here"]),
    ("FOLDER", {"vocab.json": b"{}"}, ["merges.txt"]),
    ("FOLDER", {"vocab.json": b"{", "merges.txt": b""}, ["vocab.json", "not GPT-2's"]),
    ("FOLDER", {"vocab.json": b"{}", "merges.txt": b""}, ["vocab.json", "not GPT-2's"]),
    ("FOLDER/tokenizer.model", {"tokenizer.model": b"nonsense"}, ["not a SentencePiece model"]),
])
def test_bad_tokenizers(tmp_path, spec, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        tokenizers.make(spec.replace("FOLDER", str(tmp_path)), [])
    assert all(word in str(error.value) for word in words), str(error.value)


# ---------------------------------------------------------------------- store

@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    texts = [f"document {i} " + "text " * (i * 37 % 500) for i in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


def documents_of(split):
    """The texts in a stream of bytes tokens."""
    pieces = "".join(chr(i) if i < 256 else "\0" for i in stream(split)).split("\0")
    assert pieces[0] == ""  # a stream begins with an end-of-text
    return pieces[1:]


def test_store_holds_every_document_once(corpus, tmp_path):
    path, texts = corpus
    made = prepare(tmp_path / "store", path)
    train, validation = documents_of(made.train), documents_of(made.validation)
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]  # in the source's order
    assert 0.1 < len(validation) / len(texts) < 0.3
    assert made.train.documents == len(train)
    assert made.train.text_bytes == sum(map(len, train))
    assert made.train.tokens == sum(map(len, train)) + len(train)
    reopened = store.open_store(tmp_path / "store")
    assert np.array_equal(stream(reopened.validation), stream(made.validation))


def test_split_does_not_depend_on_order(corpus, tmp_path):
    path, texts = corpus
    first = prepare(tmp_path / "first", path)
    random.Random(0).shuffle(texts)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, *texts]))
    second = prepare(tmp_path / "second", path)
    assert set(documents_of(first.validation)) == set(documents_of(second.validation))


def files_of(folder):
    """Every file of a store, by name, whole."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece:400"])
def test_a_store_does_not_depend_on_the_number_of_workers(corpus, tmp_path, monkeypatch, tokenizer):
    stores = {}
    for workers, size in ((1, 4_000_000), (2, 3000), (5, 700)):
        monkeypatch.setattr(sources, "BATCH_CHARACTERS", size)
        prepare(tmp_path / str(workers), corpus[0], tokenizer=tokenizer, workers=workers)
        stores[workers] = files_of(tmp_path / str(workers))
    assert stores[1] == stores[2] == stores[5]


def test_an_interrupted_preparation_goes_on(corpus, tmp_path, monkeypatch):
    """Stopped by what is not the text's fault at several places, noting its progress in between."""
    whole = files_of(prepare(tmp_path / "whole", corpus[0], tokenizer="sentencepiece:400").folder)
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(preparing, "JOURNAL_SECONDS", 0)
    encode, trained, said = preparing.encode, [], []
    train = tokenizers.train_sentencepiece
    monkeypatch.setattr(tokenizers, "train_sentencepiece", lambda *args: trained.append(1) or train(*args))
    for most in (3, 1, 8):
        left = [most]

        def encode_some(texts, tokenizer, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return encode(texts, tokenizer)

        monkeypatch.setattr(preparing, "encode", encode_some)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / "parts", corpus[0], tokenizer="sentencepiece:400", workers=1, say=said.append)
        assert not (tmp_path / "parts").exists()
    monkeypatch.setattr(preparing, "encode", encode)
    prepare(tmp_path / "parts", corpus[0], tokenizer="sentencepiece:400", say=said.append)
    assert files_of(tmp_path / "parts") == whole
    assert len(trained) == 1
    assert sum("going on" in line for line in said) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "parts", "whole"]


def test_an_interrupted_preparation_of_other_text_begins_anew(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 2000)
    path, texts = corpus
    with path.open("a") as file:
        file.write("nonsense")
    with pytest.raises(UserError, match="line 301: not JSON"):
        prepare(tmp_path / "store", path)
    assert (tmp_path / "store.partial").is_dir() and not (tmp_path / "store").exists()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[100:]))
    made = prepare(tmp_path / "store", path)
    assert sorted(documents_of(made.train) + documents_of(made.validation)) == sorted(texts[100:])
    assert not (tmp_path / "store.partial").exists()


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """A folder of three files of 100 documents, of which line 50 of the second is broken; batches are small."""
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 1000)
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in "abc":
        lines = [json.dumps({"text": f"document {i} of {name} " + "text " * (i % 30)}) + "\n" for i in range(100)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    edit(folder / "b.jsonl", lambda lines: [*lines[:49], "{broken\n", *lines[49:]])
    return folder


def edit(path, change):
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def tokenized(monkeypatch):
    """A list to which every text is added that is tokenized from now on."""
    texts, encode = [], preparing.encode
    monkeypatch.setattr(preparing, "encode", lambda batch, tokenizer: texts.extend(batch) or encode(batch, tokenizer))
    return texts


@contextlib.contextmanager
def interrupted(monkeypatch, after):
    """A Ctrl-C when so many texts have been tokenized."""
    texts, encode = [], preparing.encode

    def encode_some(batch, tokenizer):
        texts.extend(batch)
        if len(texts) > after:
            raise KeyboardInterrupt
        return encode(batch, tokenizer)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing, "JOURNAL_SECONDS", 0)
        patch.setattr(preparing, "encode", encode_some)
        yield


def stopped_at_the_broken_line(shards, tmp_path, **settings):
    with pytest.raises(UserError, match=r"b\.jsonl, line 50: not JSON"):
        prepare(tmp_path / "store", shards, **settings)


@pytest.mark.parametrize("remedy, settings, most_anew", [
    (lambda folder: None, {"invalid_items": "skip"}, 160),
    (lambda folder: edit(folder / "b.jsonl", lambda lines: [*lines[:49], *lines[50:]]), {}, 160),
    (lambda folder: edit(folder / "b.jsonl", lambda lines: [*lines[:49], '{"text": "mended"}\n', *lines[50:]]),
     {"invalid_utf8": "replace"}, 165),
    (lambda folder: (edit(folder / "b.jsonl", lambda lines: [*lines[:49], *lines[50:]]),
                     shutil.copy(folder / "a.jsonl", folder / "d.jsonl")), {}, 260),
    (lambda folder: (folder / "b.jsonl").unlink(), {}, 120),  # the part in which it stopped
], ids=["skipped", "taken out", "mended", "with a file added", "file left out"])
def test_a_remedied_preparation_goes_on(shards, tmp_path, monkeypatch, remedy, settings, most_anew):
    """What was tokenized before the error stays, and the store is the same as one that is made at once."""
    stopped_at_the_broken_line(shards, tmp_path)
    remedy(shards)
    texts = tokenized(monkeypatch)
    made = files_of(prepare(tmp_path / "store", shards, **settings).folder)
    assert len(texts) <= most_anew
    assert made == files_of(prepare(tmp_path / "whole", shards, **settings).folder)


def test_a_cached_preparation_that_was_remedied_goes_on(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = dict(data__source=str(shards), data__tokenizer="bytes", data__store="")
    with pytest.raises(UserError, match="line 50"):
        data.make(load_config("gpt", **fields).data, say=lambda _: None)
    texts = tokenized(monkeypatch)
    data.make(load_config("gpt", data__invalid_items="skip", **fields).data, say=lambda _: None)
    assert len(texts) <= 160
    assert [path.suffix for path in (tmp_path / "cache/smallgpt_jax/stores").iterdir()] == [""]


@pytest.mark.parametrize("first, change, then", [
    ({}, lambda folder: edit(folder / "a.jsonl", lambda lines: lines[1:]), {"invalid_items": "skip"}),
    ({}, lambda folder: edit(folder / "b.jsonl", lambda lines: [lines[0].replace("0", "1"), *lines[1:]]),
     {"invalid_items": "skip"}),
    ({}, lambda folder: None, {"invalid_items": "skip", "validation_fraction": 0.3}),
    ({"tokenizer": "TMP/my.model"}, lambda folder: shutil.copy(folder.parent / "two", folder.parent / "my.model"),
     {"tokenizer": "TMP/my.model", "invalid_items": "skip"}),
], ids=["file before", "line before", "fraction", "tokenizer's file"])
def test_a_preparation_of_other_text_is_not_continued(shards, tmp_path, monkeypatch, first, change, then):
    for name, size in (("my.model", 300), ("two", 310)):
        (tmp_path / name).write_bytes(tokenizers.make(
            f"sentencepiece:{size}", ["some words to learn from, and others " * 9]).files()["tokenizer.model"])
    first, then = ({key: str(value).replace("TMP", str(tmp_path)) if key == "tokenizer" else value
                    for key, value in settings.items()} for settings in (first, then))
    stopped_at_the_broken_line(shards, tmp_path, **first)
    change(shards)
    made = files_of(prepare(tmp_path / "store", shards, **then).folder)
    assert made == files_of(prepare(tmp_path / "whole", shards, **then).folder)


def test_what_was_skipped_and_can_now_be_replaced_is_not_left_out(shards, tmp_path, monkeypatch):
    """A preparation that skipped what is not UTF-8, and was interrupted, does not continue with replacing it."""
    (shards / "a.jsonl").write_bytes(b'{"text": "not \xff UTF-8"}\n' + (shards / "a.jsonl").read_bytes())
    with interrupted(monkeypatch, after=60):
        prepare(tmp_path / "store", shards, invalid_items="skip", workers=1)
    settings = dict(invalid_items="skip", invalid_utf8="replace")
    made = files_of(prepare(tmp_path / "store", shards, **settings).folder)
    assert made == files_of(prepare(tmp_path / "whole", shards, **settings).folder)


@pytest.mark.parametrize("enough", [3000, 10**9])
def test_a_tokenizer_trained_on_text_that_has_changed_is_trained_anew(shards, tmp_path, monkeypatch, enough):
    """If it was trained on a beginning that is the same, the preparation goes on."""
    edit(shards / "b.jsonl", lambda lines: [*lines[:49], *lines[50:]])
    monkeypatch.setattr(tokenizers, "TRAINING_CHARACTERS", enough)
    with interrupted(monkeypatch, after=100):
        prepare(tmp_path / "store", shards, tokenizer="sentencepiece:400", workers=1)
    edit(shards / "c.jsonl", lambda lines: [line.replace("text ", "word ") for line in lines])
    texts = tokenized(monkeypatch)
    made = files_of(prepare(tmp_path / "store", shards, tokenizer="sentencepiece:400").folder)
    assert (len(texts) < 300) == (enough == 3000)
    assert made == files_of(prepare(tmp_path / "whole", shards, tokenizer="sentencepiece:400").folder)


@pytest.mark.slow
def test_a_killed_preparation_goes_on(corpus, tmp_path):
    """As a user starts it, killed by the system while it works."""
    path, texts = corpus
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 60))
    flags = ["--config=configs/gpt.py:tiny", f"--config.data.source={path}",
             "--config.data.tokenizer=sentencepiece:400", "--workers=1"]
    hasty = ("from smallgpt_jax.data import prepare; prepare.JOURNAL_SECONDS = 0.01; import runpy; "
             "runpy.run_module('smallgpt_jax.prepare', run_name='__main__')")

    def place(journal):
        return json.loads(journal.read_text())["place"] if journal.exists() else [0, 0]

    for name in ("whole", "parts"):
        command = [sys.executable, "-c", hasty, *flags,
                   f"--config.data.store={tmp_path / name}"]
        if name == "parts":
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
            journal = tmp_path / "parts.partial" / "journal.json"
            until = time.monotonic() + 60
            while place(journal) == [0, 0] and time.monotonic() < until:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert place(journal) != [0, 0] and not (tmp_path / "parts").exists()
        assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_what_is_in_the_way_of_a_preparation_stays(corpus, tmp_path):
    path, _ = corpus
    precious = tmp_path / "store.partial" / "precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(UserError, match=r"store\.partial: is needed .* something else is there; move it"):
        prepare(tmp_path / "store", path)
    assert precious.read_text() == "mine" and not (tmp_path / "store").exists()


def test_a_store_does_not_become_its_own_source(corpus, tmp_path):
    with pytest.raises(UserError, match="lies inside of"):
        prepare(tmp_path / "stores" / "store", tmp_path)


def test_a_store_is_made_where_a_link_leads(corpus, tmp_path, monkeypatch):
    """The unfinished one too; the link stays."""
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 2000)
    path, _ = corpus
    good = path.read_text()
    whole = files_of(prepare(tmp_path / "whole", path).folder)
    for target in ("big/empty", "big/new"):
        (tmp_path / "big" / "empty").mkdir(parents=True, exist_ok=True)
        link = tmp_path / f"link_to_{Path(target).name}"
        link.symlink_to(tmp_path / target)
        path.write_text(good + "nonsense")
        with pytest.raises(UserError, match="not JSON"):
            prepare(link, path)
        assert (tmp_path / f"{target}.partial").is_dir() and not link.with_name(f"{link.name}.partial").exists()
        path.write_text(good)
        assert prepare(link, path).folder == link and link.is_symlink()
        assert files_of(tmp_path / target) == whole


def test_a_store_that_another_process_made_meanwhile_is_compared(corpus, tmp_path, monkeypatch):
    """While this one waited for the lock."""
    locked = preparing.locked

    def locked_after_another(*args, **kwargs):
        monkeypatch.setattr(preparing, "locked", locked)
        prepare(tmp_path / "store", corpus[0], tokenizer="sentencepiece:300")
        return locked(*args, **kwargs)

    monkeypatch.setattr(preparing, "locked", locked_after_another)
    with pytest.raises(UserError, match="was made with tokenizer='sentencepiece:300'; this config has"):
        prepare(tmp_path / "store", corpus[0])


def test_a_saved_tokenizer_outlives_a_loss_of_power(made, tmp_path, monkeypatch):
    """Every file's content is on the disk before its name is, and its name before the function returns."""
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino) or sync(file))
    tokenizers.save(made["sentencepiece"], tmp_path)
    files = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert set(files) == {"tokenizer.model", "tokenizer_kind.json"}
    assert set(synced) >= {*files.values(), tmp_path.stat().st_ino}
    assert synced[-1] == tmp_path.stat().st_ino


def test_stores_are_told_by_their_content(tmp_path):
    """By fingerprints: of one text under two names they are the same, of another text of the same size not."""
    texts = [f"document {n:05d}" for n in range(1000)]
    other = next(text for text in (f"document {n:05d}" for n in range(1000, 2000))
                 if not preparing.is_validation(text, 0.2))
    changed = next(i for i, text in enumerate(texts) if not preparing.is_validation(text, 0.2))
    made = {}
    for name, documents in (("a", texts), ("b", texts), ("c", [*texts[:changed], other, *texts[changed + 1:]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        made[name] = prepare(tmp_path / name, tmp_path / f"{name}.jsonl")
    a, b, c = (made[name].metadata for name in "abc")
    assert a["splits"] == b["splits"] == c["splits"] and a["fingerprints"] == b["fingerprints"]
    assert data.same_text(a, b) and not data.same_text(a, c)
    assert a["fingerprints"]["validation"] == c["fingerprints"]["validation"]
    mixtures = [data.Corpus((made[name], made["b"]), (0.5, 0.5)).description for name in "abc"]
    assert data.same_text(mixtures[0], mixtures[1]) and not data.same_text(mixtures[0], mixtures[2])
    # A store that an older version made: its description has no fingerprints.
    old = {field: value for field, value in a.items() if field != "fingerprints"}
    (tmp_path / "a" / "metadata.json").write_text(json.dumps(old))
    for split in store.SPLITS:
        assert store.open_store(tmp_path / "a").fingerprint(split) == a["fingerprints"][split]
    assert data.same_text(old, a) and data.same_text(old, old) and not data.same_text(old, b)


def test_a_cached_store_changes_with_the_tokenizer_at_a_path(corpus, tmp_path):
    config = load_config("gpt", data__source=str(corpus[0]), data__tokenizer=str(tmp_path / "my.model")).data
    (tmp_path / "my.model").write_bytes(b"one")
    before = data.store_folder(config)
    (tmp_path / "my.model").write_bytes(b"two")
    assert data.store_folder(config) != before


def test_many_small_files_are_read_in_batches_of_their_own_size(tmp_path):
    for i in range(50):
        (tmp_path / f"{i:02}.txt").write_text(f"text {i}")
    rules = sources.Rules("text", "refuse", "refuse")
    parts = sources.open_source(str(tmp_path))
    found = list(sources.batches(parts, rules, size=100))
    assert len(found) < 10 and [text for batch in found for text in batch.texts] == [
        f"text {i}" for i in range(50)]
    again = list(sources.batches(parts, rules, start=found[2].place, size=100))
    assert [batch.texts for batch in again] == [batch.texts for batch in found[3:]]
    assert found[-1].done == 1 and found[2].place.parts > 20


def test_two_preparations_of_one_store(corpus, tmp_path):
    """The second one waits for the first and takes what that has made."""
    flags = ["--config=configs/gpt.py:tiny", f"--config.data.source={corpus[0]}",
             f"--config.data.store={tmp_path / 'store'}"]
    command = [sys.executable, "-m", "smallgpt_jax.prepare", *flags]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)]
    results = [process.communicate(timeout=100) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert sum("300 documents" in out for out, _ in results) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "store"]


def test_very_long_documents_are_tokenized_in_pieces(made, monkeypatch):
    texts = [" ".join(f"word{i % 97} and {'x' * (i % 9)}, then" for i in range(2000)), "y" * 5000, "short"]
    for kind, tokenizer in made.items():
        monkeypatch.setattr(preparing, "LONG_TEXT", 10**9)
        whole = preparing.encode(texts, tokenizer)
        monkeypatch.setattr(preparing, "LONG_TEXT", 1000)
        pieces = preparing.encode(texts, tokenizer)
        assert np.array_equal(pieces[0], whole[0]) and np.array_equal(pieces[2], whole[2]), kind
        assert tokenizer.decode(pieces[1]) == texts[1], kind


def test_the_summary_tells_what_a_person_wants_to_know(tmp_path):
    path = tmp_path / "a.jsonl"
    lengths = [*range(1, 100), 5000]
    path.write_text("".join(json.dumps({"text": "x" * n + str(n)}) + "\n" for n in lengths) + '{"n": 1}\n')
    said = []
    prepare(tmp_path / "store", path, invalid_items="skip", say=said.append)
    text = "\n".join(said)
    assert "100 documents" in text and "bytes a token" in text
    # Lengths with the end-of-text and the digits: the 51st, the 95th, and the longest.
    assert "median 54, 95% have at most 98, the longest 5,005" in text
    assert "left out: 1 no text in the field 'text'" in text


@pytest.mark.parametrize("changes, words", [
    ({"validation_fraction": 0.0}, ["validation_fraction=0.0"]),
    ({"validation_fraction": 1e-9}, ["300 documents", "validation"]),
    ({"invalid_items": "keep"}, ["invalid_items='keep'", "'skip'"]),
    ({"workers": 0}, ["--workers=0"]),
    ({"text_field": "body"}, ["line 1"]),
    ({"tokenizer": "nothing"}, ["'nothing'"]),
    ({"tokenizer": "sentencepiece:9"}, ["at least 300"]),
])
def test_a_failed_preparation_leaves_nothing(corpus, tmp_path, changes, words):
    path, _ = corpus
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "made" / "store", path, **changes)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "made").exists() or not list((tmp_path / "made").iterdir())


def test_a_store_takes_no_ones_place(corpus, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for taken in (tmp_path / "mine", corpus[0], tmp_path / "circle", Path("/dev/null")):
        with pytest.raises(UserError, match="something else there"):
            prepare(taken, corpus[0])
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "text"


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("damage, words", [
    (lambda f: (f / "metadata.json").write_text("{"), ["metadata.json"]),
    (lambda f: (f / "metadata.json").write_text("[]"), ["metadata.json"]),
    (lambda f: (f / "metadata.json").write_text('{"format": 99}'), ["format 99", "make the store again"]),
    (lambda f: (f / "metadata.json").write_text('{"format": 2}'), ["metadata.json: damaged"]),
    (lambda f: (f / "train.bin").unlink(), ["train.bin", "missing"]),
    (lambda f: cut(f / "train.bin"), ["train.bin", "bytes long", "damaged"]),
    (lambda f: cut(f / "validation.documents.bin"), ["validation.documents.bin", "damaged"]),
    (lambda f: (f / "tokenizer" / "tokenizer_kind.json").write_text("{"), ["tokenizer_kind.json"]),
    (lambda f: shutil.rmtree(f / "tokenizer"), ["tokenizer", "missing"]),
])
def test_a_damaged_store_is_named(corpus, tmp_path, damage, words):
    prepare(tmp_path / "store", corpus[0])
    damage(tmp_path / "store")
    with pytest.raises(UserError) as error:
        store.open_store(tmp_path / "store").tokenizer  # noqa: B018
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_source_without_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    for name, words in (("empty.txt", "no text in it"), ("blank.jsonl", "left out: 2 empty")):
        with pytest.raises(UserError, match=words):
            prepare(tmp_path / "store", tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blank.jsonl", "empty.txt"]


def test_a_disk_that_is_full(corpus, tmp_path):
    """Files can grow to 20 kB only: nothing half-written takes a store's place; later it goes on."""
    flags = ["--config=configs/gpt.py:tiny", f"--config.data.source={corpus[0]}",
             f"--config.data.store={tmp_path / 'store'}"]
    command = [sys.executable, "-m", "smallgpt_jax.prepare", *flags]
    limited = subprocess.run(["bash", "-c", 'ulimit -f 20; exec "$@"', "-", *command], cwd=ROOT,
                             capture_output=True, text=True)
    assert limited.returncode == 1 and "File too large" in limited.stderr, limited.stderr
    assert "goes on from there" in limited.stderr and limited.stderr.count("\n") == 1
    assert not (tmp_path / "store").exists()
    assert run("prepare", *flags).returncode == 0
    whole = prepare(tmp_path / "whole", corpus[0], validation_fraction=0.1)
    assert files_of(tmp_path / "store") == files_of(whole.folder)


# ---------------------------------------------------------------------- mixtures

@pytest.mark.parametrize("text, words", [
    ("STORES/one", ["is not FOLDER=WEIGHT"]),
    ("STORES/one=much", ["STORES/one=much", "is not FOLDER=WEIGHT"]),
    ("STORES/one=0", ["weight above 0"]),
    ("STORES/one=1,", ["''"]),
    ("STORES/one=1,STORES/two=1", ["different tokenizers", "--config.data.tokenizer=STORES/one/tokenizer"]),
    ("STORES/none=1", ["STORES/none", "not the description of a token store"]),
])
def test_impossible_mixtures(corpus, tmp_path, text, words):
    prepare(tmp_path / "one", corpus[0])
    prepare(tmp_path / "two", corpus[0], tokenizer="sentencepiece:300")
    with pytest.raises(UserError) as error:
        data.mixture(text.replace("STORES", str(tmp_path)))
    assert all(word.replace("STORES", str(tmp_path)) in str(error.value) for word in words), str(error.value)
