"""Tests of text sources: local files in all formats, invalid items, resuming."""

import bz2
import collections
import gzip
import json
import os
import shutil
import tracemalloc

import numpy as np
import pyarrow
import pytest
from conftest import load_config
from data_helpers import RULES, parquet, prepare_store, read, write_jsonl, zstd

from smallgpt_jax.data import parts, text_files
from smallgpt_jax.data.corpus import open_or_prepare
from smallgpt_jax.data.parts import Rules, document_batches
from smallgpt_jax.data.source import Source
from smallgpt_jax.errors import UserError


@pytest.mark.slow
def test_python_stdlib():
    texts = read("python_stdlib")
    assert sum(map(len, texts)) > 5_000_000
    assert any("class JSONDecoder" in text for text in texts)
    (library,) = Source("python_stdlib").members
    files = library.files
    assert files == sorted(set(files))


def test_text_files_are_split_without_loss(tmp_path):
    paragraphs = [f"Paragraph {i}: " + "word " * (i % 90) for i in range(900)]
    long = "x" * 40_000 + "\n\n" + "\n\n".join(paragraphs)
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.md").write_text("not read")
    texts = read(tmp_path)
    assert "".join(texts[:-1]) == long and texts[-1] == "short"
    max_length = (tmp_path / "a.txt").stat().st_size // 100
    assert max(map(len, texts)) <= max_length + 1
    assert all(text.startswith("Paragraph") for text in texts[-50:-1])


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "n": 1}\n\n{"text": "zwei ü"}\n{"text": ""}\n')
    assert read(path) == ["one", "zwei ü"]
    assert read(str(tmp_path / "*.jsonl")) == ["one", "zwei ü"]


def test_line_endings_become_newlines(tmp_path):
    """All line endings become "\\n", even if a "\\r\\n" is split between two blocks of a file."""
    (tmp_path / "dos.txt").write_bytes(b"x" * 999_999 + b"\r\nline\r\n\r\nold\rmac\r")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "kept\r\n"}))
    texts = read(tmp_path)
    assert texts[0] == "kept\r\n"
    assert "".join(texts[1:]) == "x" * 999_999 + "\nline\n\nold\nmac\n"


def test_follows_each_linked_folder_once(tmp_path):
    source, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for folder, text in ((source / "sub", "inside"), (elsewhere / "deep", "outside")):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(text)
    (source / "again").symlink_to(source / "sub")
    (source / "link").symlink_to(elsewhere)
    (elsewhere / "deep" / "back").symlink_to(elsewhere)
    (source / "circle").symlink_to(source)
    assert sorted(read(source)) == sorted(read(f"{source}/**/*.txt")) == ["inside", "outside"]
    with pytest.raises(UserError, match="is inside"):
        prepare_store(elsewhere / "deep" / "store", source)


def test_reads_a_linked_file_once(tmp_path):
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    for name in ("b.txt", "sub/c.txt"):
        (texts / name).write_text(f"text of {name}")
    (texts / "a.txt").symlink_to("b.txt")
    (texts / "sub" / "d.txt").symlink_to(tmp_path / "outside.txt")
    (tmp_path / "outside.txt").write_text("outside")
    os.link(texts / "sub" / "c.txt", texts / "e.txt")
    expected = ["text of b.txt", "text of sub/c.txt", "outside"]
    assert read(texts) == read(f"{texts}/**/*.txt") == expected
    (file_set,) = Source(str(texts)).members
    assert [file.path.name for file in file_set.files] == ["a.txt", "e.txt", "d.txt"]


def test_hidden_files_are_counted_but_not_read(tmp_path):
    texts = tmp_path / ".notes"
    for name in ("a.txt", "._a.txt", ".git/b.txt", "sub/.ipynb_checkpoints/c.txt", "sub/d.txt"):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_text(name)
    assert read(texts) == read(f"{texts}/**/*.txt") == ["a.txt", "sub/d.txt"]
    (message,) = Source(str(texts)).messages()
    assert message == f"{texts}: files read: 2 .txt; files not read: 3 hidden"
    assert read(texts / ".git") == read(f"{texts}/.git/*.txt") == [".git/b.txt"]
    shutil.rmtree(texts / "sub")
    (texts / "a.txt").unlink()
    with pytest.raises(UserError, match=r"contains no \.txt"):
        read(texts)


def test_preparation_walks_a_folder_once(tmp_path, monkeypatch):
    """All uses of a source see the same files: its size, its fingerprint, its parts and the check
    of the store's path.

    In the cache, the name of the store depends on the fingerprint.
    """
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.jsonl"):
        write_jsonl(texts / name, [f"document {i}" for i in range(300)])
    walked, walk = [], os.walk
    monkeypatch.setattr(os, "walk", lambda folder: walked.append(folder) or walk(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config(
        "gpt", data__source=str(texts), data__tokenizer="bytes", data__store=""
    ).data
    assert open_or_prepare(config, log=lambda _: None)[1]
    assert walked == [str(texts)]
    assert not open_or_prepare(config)[1]
    assert walked == [str(texts)] * 2


def test_files_read_by_ending(tmp_path):
    """The messages list the files of a folder by ending. Other endings can be read as text, as the
    message suggests.
    """
    for name in (
        "a/one.md",
        "a/b/two.MD.gz",
        "a/.git/three.md",
        "a/four.zip",
        "a/five.rst",
        "a/b/README",
        "six.txt",
        "a/seven.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"text": name}) if name.endswith("jsonl") else name
        (tmp_path / name).write_bytes(
            gzip.compress(content.encode()) if name.endswith("gz") else content.encode()
        )
    assert read(tmp_path) == ["a/seven.jsonl", "six.txt"]
    (message,) = Source(f"{tmp_path},{tmp_path}/six.txt,python_stdlib").messages()
    assert message == (
        f"{tmp_path}: files read: 1 .jsonl, 1 .txt; files not read: 2 .md, 1 without ending, 1 "
        ".rst, 1 .zip, 1 hidden; to read its 2 .md files as text, set --config.data.text_endings=.txt,.md"
    )
    shutil.rmtree(tmp_path / "a" / ".git")
    (tmp_path / "a" / "four.zip").unlink()
    assert set(read(tmp_path, text_endings=".txt, .MD")) == {
        "a/one.md",
        "a/b/two.MD.gz",
        "a/seven.jsonl",
        "six.txt",
    }
    assert read(tmp_path, text_endings=".rst") == ["a/five.rst", "a/seven.jsonl"]
    with pytest.raises(
        UserError, match=r"contains no \.txt.* to read its 2 \.md files .*text_endings=\.txt,\.md$"
    ):
        (tmp_path / "a" / "seven.jsonl").unlink()
        read(tmp_path / "a")
    logged = []
    prepare_store(
        tmp_path / "../new",
        tmp_path,
        validation_fraction=0.5,
        text_endings=".txt,.md,.rst",
        log=logged.append,
    )
    assert (
        logged[0]
        == f"{tmp_path}: files read: 2 .md, 1 .rst, 1 .txt; files not read: 1 without ending"
    )


def test_skips_text_files_that_are_not_utf8(tmp_path):
    """A text file with an invalid byte is skipped as a whole, even if passages before this byte are
    valid.
    """
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_bytes(b"valid passages\n\n" * 200_000 + b"\xff")
    (texts / "b.txt").write_bytes("gültig".encode())
    (texts / "c.txt.gz").write_bytes(gzip.compress("ungültig".encode("latin-1")))
    (texts / "d.txt").write_bytes(b"cut \xe2\x82")
    logged = []
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 at byte 3200000 .*skip it with"):
        read(texts)
    assert read(texts, invalid_items="skip") == ["gültig"]
    assert len(read(texts, invalid_items="skip", invalid_utf8="replace")) > 3
    (texts / "e.txt").write_text(" ".join(map(str, range(50_000))))
    prepare_store(tmp_path / "store", texts, invalid_items="skip", log=logged.append)
    assert logged[-1].endswith("skipped: 3 not UTF-8 (whole file)")


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.zst", "a.parquet"]
)
def test_refuses_or_skips_long_documents(tmp_path, name):
    texts = ["short", "x" * 100_000, "also short"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    compress = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "zst": zstd,
        "parquet": lambda _: parquet({"text": texts}),
    }
    (tmp_path / name).write_bytes(compress.get(name.split(".")[-1], bytes)(lines))
    assert read(tmp_path, max_document_bytes=100_020) == texts
    assert read(tmp_path, max_document_bytes=99_999, invalid_items="skip") == [texts[0], texts[2]]
    with pytest.raises(
        UserError, match=r" 2: too long: more than 99,999 bytes; increase config.data.max_docu"
    ):
        read(tmp_path, max_document_bytes=99_999)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_end_of_a_line_does_not_count(tmp_path, end):
    line = json.dumps({"text": "x" * 20})
    (tmp_path / "a.jsonl").write_bytes(f"{line}{end}".encode())
    assert read(tmp_path, max_document_bytes=len(line)) == ["x" * 20]
    with pytest.raises(UserError, match="line 1: too long"):
        read(tmp_path, max_document_bytes=len(line) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("invalid_items", ["refuse", "skip"])
def test_a_hostile_line_takes_little_memory(tmp_path, invalid_items):
    """A file of 300 kB that expands to a single line of 300 MB is refused or skipped within 30
    MB.
    """
    block = gzip.compress(b"x" * 10_000_000)
    (tmp_path / "a.jsonl.gz").write_bytes(
        gzip.compress(b'{"text": "') + block * 30 + gzip.compress(b'"}\n{"text": "fine"}\n')
    )
    tracemalloc.start()
    try:
        if invalid_items == "skip":
            assert read(tmp_path, invalid_items="skip", max_document_bytes=1_000_000) == ["fine"]
        else:
            with pytest.raises(UserError, match="line 1: too long"):
                read(tmp_path, max_document_bytes=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def test_web_text(shared_data):
    assert len(read(shared_data / "text/web/openwebtext_1k.jsonl")) == 1000


@pytest.mark.parametrize(
    "name, content, settings, substrings",
    [
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
        (
            "a.jsonl",
            b'{"text": null}',
            {},
            ["line 1", "no string in the field", "invalid_items=skip"],
        ),
        ("a.png", b"\x89PNG\r\n\x1a\n\x00", {}, ["a.png", "not UTF-8 at byte 0"]),
        ("a.txt", "text".encode("utf-16"), {}, ["not UTF-8"]),
        ("a.jsonl.gz", b'{"text": "a"}\n', {}, ["a.jsonl.gz", "damaged", "gzip"]),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-20],
            {},
            ["a.jsonl.gz", "damaged", "ended"],
        ),
        (
            "a.txt.gz",
            gzip.compress(b"words " * 99, mtime=0)[:-9] + b"123456789",
            {},
            ["a.txt.gz", "damaged"],
        ),
        (
            "a.jsonl.bz2",
            bz2.compress(b'{"text": "a"}\n' * 999)[:-9],
            {},
            ["a.jsonl.bz2", "damaged"],
        ),
        ("a.txt.bz2", b"nonsense", {}, ["a.txt.bz2", "damaged"]),
        ("a.txt.gz", b"", {}, ["a.txt.gz", "damaged", "the file is empty"]),
        ("a.jsonl.bz2", b"", {}, ["a.jsonl.bz2", "damaged", "the file is empty"]),
        ("a.jsonl.zst", b"", {"invalid_items": "skip"}, ["a.jsonl.zst", "damaged", "is empty"]),
        ("a.jsonl.zst", b"nonsense", {}, ["a.jsonl.zst", "damaged"]),
        (
            "a.jsonl.zst",
            zstd(b'{"text": "a"}\n' * 999)[:-9],
            {},
            ["a.jsonl.zst", "damaged", "runcated"],
        ),
        ("a.zip", b"PK", {}, ["a.zip", "archives", "unpack"]),
        ("a.parquet", b"PAR1", {}, ["a.parquet", "damaged"]),
        ("a.parquet", parquet({"text": ["a"] * 5000})[:-100], {}, ["a.parquet", "damaged"]),
        (
            "a.parquet",
            parquet({"body": ["a"], "n": [1]}),
            {},
            ["a.parquet", "no column 'text'", "body, n"],
        ),
        (
            "a.parquet",
            parquet({"text": [1, 2]}),
            {},
            ["a.parquet", "row 1", "no string in the field"],
        ),
        (
            "a.parquet",
            parquet({"text": ["a", None]}),
            {},
            ["a.parquet", "row 2", "no string in the field"],
        ),
        ("a.jsonl", b'{"text": "a"}\n', {"text_field": "body"}, ["line 1", "'body'", "text"]),
        (
            "a.txt",
            b"text",
            {"text_endings": "txt,md"},
            ["text_endings='txt,md'", "'txt' is no ending"],
        ),
        (
            "a.txt",
            b"text",
            {"text_endings": ".txt,.parquet"},
            [".parquet files are not plain text"],
        ),
    ],
)
def test_refuses_bad_sources(tmp_path, name, content, settings, substrings):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path, **settings)
    assert all(s in str(error.value) for s in substrings), str(error.value)


def test_memory_of_a_long_text_that_a_parquet_file_repeats(tmp_path, monkeypatch):
    """The file has the text once. All rows of a read would have it in memory many times."""
    monkeypatch.setattr(text_files, "PARQUET_BYTES", 2**22)
    text = pyarrow.array(["a" * 2**18])
    column = pyarrow.DictionaryArray.from_arrays(np.zeros(300, np.int32), text)
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": column})
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 5000
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        texts = Source(str(path), ".txt").documents(Rules("text", "refuse", "refuse", 2**18))
        assert sum(len(item) for item in texts) == 300 * 2**18
    finally:
        pyarrow.set_memory_pool(before)
    assert 2**18 < pool.max_memory() < 3 * 2**22
    with pytest.raises(UserError, match=r"row 1: too long: more than 262,143 bytes"):
        read(path, max_document_bytes=2**18 - 1)


def test_a_json_line_of_many_values(tmp_path):
    """One in a string counts as text."""
    lines = [{"text": "a", "x": [0] * 2**20}, {"text": "," * 2**21}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"line 1: too large: has more than 1,048,576 values"):
        read(tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl", invalid_items="skip") == ["," * 2**21]


def test_invalid_utf8_in_parquet(tmp_path):
    good, bad = "grün".encode(), b"a\xffb"
    buffers = pyarrow.array([good, bad], pyarrow.binary()).buffers()
    for column_type in (pyarrow.binary(), pyarrow.string()):
        column = pyarrow.Array.from_buffers(column_type, 2, buffers)
        (tmp_path / "a.parquet").write_bytes(parquet({"text": column}))
        assert read(tmp_path / "a.parquet", "replace") == ["grün", "a\N{REPLACEMENT CHARACTER}b"]
        assert read(tmp_path / "a.parquet", invalid_items="skip") == ["grün"]
        with pytest.raises(
            UserError, match=r"row 2: not UTF-8: byte 1; set --config.data.invalid_utf8"
        ):
            read(tmp_path / "a.parquet")
    dictionary = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 0]), column)
    (tmp_path / "a.parquet").write_bytes(parquet({"text": dictionary}))
    with pytest.raises(UserError, match=r"not UTF-8 in the column 'text', .* in a dictionary"):
        read(tmp_path / "a.parquet")
    right = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    (tmp_path / "a.parquet").write_bytes(parquet({"text": right}))
    assert read(tmp_path / "a.parquet") == ["a", "b", "a"]


def test_skips_invalid_items(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "one"}\n{"text": ""}\nnonsense\n{"body": 1}\n[1]\n{"text": "\\ud800"}\n'
        b'{"text": "\xff"}\n{"text": "two"}\n'
    )
    (tmp_path / "b.parquet").write_bytes(parquet({"text": ["three", None, "", "four"]}))
    *_, last = found = list(
        document_batches(Source(str(tmp_path)).parts, Rules("text", "refuse", "skip", 10**8))
    )
    assert [text for batch in found for text in batch.texts] == ["one", "two", "three", "four"]
    skipped = sum((batch.skipped for batch in found), collections.Counter())
    assert skipped == {
        "empty": 2,
        "not JSON": 1,
        "no string in the field 'text'": 2,
        "not a JSON object": 1,
        "half a surrogate pair": 1,
        "not UTF-8": 1,
    }
    assert (last.place, last.done) == ((2, 0), 1.0)


def test_all_formats_give_the_same_documents(tmp_path):
    texts = [f"document {i}\nwith ünïcödé " + "words " * i for i in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    files = {
        "a.jsonl": lines,
        "b.ndjson.gz": gzip.compress(lines),
        "c.json.bz2": bz2.compress(lines),
        "d.jsonl.zst": zstd(lines[:5000]) + zstd(lines[5000:]),
        "e.parquet": parquet({"text": texts}),
    }
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


def test_resumes_at_any_place(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"word " * i}"}}\n' for i in range(200)))
    (tmp_path / "b.txt").write_text("paragraph\n\n" * 3000)
    (tmp_path / "c.parquet").write_bytes(parquet({"text": [f"row {i}" for i in range(500)]}))
    source = Source(str(tmp_path)).parts
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 900)
    whole = list(document_batches(source, RULES))
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 10_000)
    assert len(whole) > 50 and [batch.done for batch in whole] == sorted(
        batch.done for batch in whole
    )
    for number in range(0, len(whole), 7):
        rest = document_batches(source, RULES, whole[number].place)
        texts = [text for batch in rest for text in batch.texts]
        assert texts == [text for batch in whole[number + 1 :] for text in batch.texts]


def test_byte_order_mark_special_name_and_broken_link(tmp_path):
    (tmp_path / "b[1].txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert read(tmp_path / "b[1].txt") == read(tmp_path) == ["marked"]


def test_replaces_invalid_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "c\xff"}\n{"text": "d\\ud800"}\n')
    assert read(tmp_path, "replace") == ["a\ufffdb", "c\ufffd", "d\ufffd"]


def test_batches_span_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 100)
    for i in range(50):
        (tmp_path / f"{i:02}.txt").write_text(f"text {i}")
    source = Source(str(tmp_path)).parts
    found = list(document_batches(source, RULES))
    assert len(found) < 10 and [text for batch in found for text in batch.texts] == [
        f"text {i}" for i in range(50)
    ]
    again = list(document_batches(source, RULES, start=found[2].place))
    assert [batch.texts for batch in again] == [batch.texts for batch in found[3:]]
    assert found[-1].done == 1 and found[2].place.parts > 20
