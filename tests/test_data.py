"""Text to batches: sources, tokenizers, the token store, and which batch a step gets."""

import hashlib
import json
import random
import shutil
import sys
import types

import numpy as np
import pytest

from smallgpt_jax.data import batches, sources, store, tokenizers
from smallgpt_jax.errors import UserError


def read(source, invalid_utf8="refuse", text_field="text"):
    return list(sources.documents(str(source), text_field, invalid_utf8))


def prepare(folder, source, **changes):
    settings = dict(tokenizer="bytes", validation_fraction=0.2, text_field="text",
                    invalid_utf8="refuse", say=lambda _: None)
    return store.prepare(folder, source=str(source), **{**settings, **changes})


def stream(split):
    return split.read(np.array([0]), split.tokens)[0]


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


def test_web_text(shared_data):
    assert len(read(shared_data / "text/web/openwebtext_1k.jsonl")) == 1000


@pytest.mark.parametrize("name, content, settings, words", [
    ("a.txt", None, {}, ["no such file"]),
    ("a.txt", b"", {}, ["a.txt", "no text"]),
    ("a.txt", b"fine\nbut \xff\xfe not\n", {}, ["a.txt", "2 bytes", "byte 9", "line 2", "replace"]),
    ("a.txt", b"x\xe2\x82", {}, ["2 bytes", "byte 1"]),
    ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', {}, ["a.jsonl", "line 2", "'text'", "body"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', {}, ["a.jsonl", "line 2", "'text'"]),
    ("a.jsonl", b'{"text": "a"}\n[1]\n', {}, ["line 2", "list"]),
    ("a.jsonl", b'\n{"text": "a"\n', {}, ["line 2", "not JSON"]),
    ("a.jsonl", b'{"text": "\\ud800"}\n', {}, ["line 1", "surrogate"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', {}, ["line 2", "1 byte is", "byte 24 "]),
    ("a.txt", b"\xef\xbb\xbfabc\xff", {}, ["1 byte is", "byte 6 "]),
    ("a.jsonl", b'{"text": "a"}\n', {"text_field": "body"}, ["line 1", "'body'", "text"]),
    ("a.txt", b"text", {"invalid_utf8": "ignore"}, ["invalid_utf8='ignore'"]),
    ("a.parquet", b"PAR1", {}, ["a.parquet", ".parquet"]),
])
def test_bad_sources(tmp_path, name, content, settings, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read(path, **settings)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_odd_files(tmp_path):
    (tmp_path / "b[1].txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert read(tmp_path / "b[1].txt") == read(tmp_path) == ["marked"]


def test_invalid_utf8_can_be_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "c\xff"}\n{"text": "d\\ud800"}\n')
    assert read(tmp_path, "replace") == ["a\N{REPLACEMENT CHARACTER}b", "c\N{REPLACEMENT CHARACTER}", "d?"]


def test_hugging_face_datasets_are_streamed(monkeypatch):
    """With a stand-in for the library, which only users of hf: sources have."""
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        if args[0] == "nobody/nothing":
            raise FileNotFoundError("Dataset 'nobody/nothing' doesn't exist\nmore")
        return iter([{"text": "one", "id": 1}, {"text": ""}, {"text": "two"}])

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset
    library.exceptions = types.SimpleNamespace(DatasetNotFoundError=FileNotFoundError)
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert read("hf:some/corpus:sample-10BT") == ["one", "two"]
    assert calls == [(("some/corpus", "sample-10BT"), {"split": "train", "streaming": True})]
    with pytest.raises(UserError, match=r"no field 'body' \(they have: text, id\)"):
        read("hf:some/corpus", text_field="body")
    with pytest.raises(UserError, match=r"nobody/nothing' doesn't exist$"):
        read("hf:nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install"):
        read("hf:some/corpus")


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
    assert made["gpt2"].encode(["Hello world", " tokenization"]) == [[15496, 995], [11241, 1634]]
    assert (made["gpt2"].vocab_size, made["gpt2"].end_of_text) == (50257, 50256)


def test_gpt2_is_taken_from_tiktokens_cache(shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("encoder.json", "vocab.bpe"):
        key = hashlib.sha1((tokenizers.GPT2_URL + name).encode()).hexdigest()
        shutil.copy(shared_data / "tokenizer/gpt2" / name, tmp_path / key)
    assert tokenizers.make("gpt2", []).encode(["Hello world"]) == [[15496, 995]]


def test_sentencepiece_takes_what_a_small_text_has():
    assert 256 < tokenizers.make("sentencepiece:4000", ["a few words\n" * 3]).vocab_size < 400


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


def test_store_goes_over_several_files(corpus, tmp_path, monkeypatch):
    path, _texts = corpus
    whole = prepare(tmp_path / "whole", path)
    monkeypatch.setattr(store, "RECORDS_PER_FILE", 3)
    parts = prepare(tmp_path / "parts", path)
    assert len(parts.train.files) > 5
    assert np.array_equal(stream(parts.train), stream(whole.train))


def test_any_window_can_be_read(token_store):
    tokens = stream(token_store.train)
    starts = np.random.default_rng(0).integers(0, len(tokens) - 5000, 50)
    for length in (1, 100, 5000):
        windows = token_store.train.read(starts, length)
        assert windows.dtype == np.int32
        assert all(np.array_equal(w, tokens[s:s + length]) for w, s in zip(windows, starts))


@pytest.mark.parametrize("changes, words", [
    ({"validation_fraction": 0.0}, ["validation_fraction=0.0"]),
    ({"validation_fraction": 1e-9}, ["300 documents", "validation"]),
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
    for taken in (tmp_path / "mine", corpus[0]):
        with pytest.raises(UserError, match="something else there"):
            prepare(taken, corpus[0])
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "text"


@pytest.mark.parametrize("damage, words", [
    (lambda f: (f / "metadata.json").write_text("{"), ["metadata.json"]),
    (lambda f: (f / "metadata.json").write_text('{"format": 99}'), ["format 99"]),
    (lambda f: (f / "train-00000.array_record").unlink(), ["train-00000", "missing"]),
])
def test_a_damaged_store_is_named(corpus, tmp_path, damage, words):
    prepare(tmp_path / "store", corpus[0])
    damage(tmp_path / "store")
    with pytest.raises(UserError) as error:
        store.open_store(tmp_path / "store")
    assert all(word in str(error.value) for word in words), str(error.value)


# ---------------------------------------------------------------------- batches

def test_each_token_is_a_target_once_an_epoch(token_store):
    split, context = token_store.train, 32
    windows = (split.tokens - 1) // context
    order = batches.train_batches(split, context, batch_size=7, seed=3)
    epoch = np.concatenate([order[step] for step in range(windows // 7 + 1)])[:windows]
    assert epoch.shape == (windows, context + 1)
    expected = stream(split)[:windows * context + 1]
    by_content = lambda rows: sorted(map(bytes, np.ascontiguousarray(rows)))  # noqa: E731
    assert by_content(epoch[:, 1:]) == by_content(expected[1:].reshape(windows, context))
    assert by_content(epoch[:, :-1]) == by_content(expected[:-1].reshape(windows, context))


def test_a_batch_depends_on_seed_and_step_only(token_store):
    split = token_store.train
    some = batches.train_batches(split, 32, 8, seed=3)
    in_order = [some[step] for step in range(40)]
    again = batches.train_batches(split, 32, 8, seed=3)
    assert all(np.array_equal(again[step], in_order[step]) for step in (39, 0, 17))
    for first in (0, 13):
        ahead = batches.prefetched(again, first)
        assert all(np.array_equal(next(ahead), in_order[step]) for step in range(first, 40))
    parts = [batches.train_batches(split, 32, 8, 3, slice(i, i + 2))[17] for i in (0, 2, 4, 6)]
    assert np.array_equal(np.concatenate(parts), in_order[17])
    assert not np.array_equal(batches.train_batches(split, 32, 8, seed=4)[17], in_order[17])


def test_epochs_are_shuffled_differently(token_store):
    windows = (token_store.train.tokens - 1) // 1024
    epochs = batches.train_batches(token_store.train, 1024, windows, seed=0)
    assert not np.array_equal(epochs[0], epochs[1])
    assert sorted(map(bytes, epochs[0])) == sorted(map(bytes, epochs[1]))


def test_validation_counts_each_window_once(token_store):
    split, context = token_store.validation, 64
    windows = (split.tokens - 1) // context
    whole = list(batches.validation_batches(split, context, 8, limit=0))
    counted = np.concatenate([tokens[counts] for tokens, counts in whole])
    targets = stream(split)[1:windows * context + 1].reshape(windows, context)
    assert sorted(map(bytes, np.ascontiguousarray(counted[:, 1:]))) == sorted(map(bytes, targets))
    assert all(tokens.shape == (8, context + 1) for tokens, _ in whole)
    some = list(batches.validation_batches(split, context, 8, limit=2))
    assert len(some) == 2 and np.array_equal(some[1][0], whole[1][0])


def test_too_little_text(token_store):
    with pytest.raises(UserError, match="tokens, one batch takes 100000 × 32"):
        batches.train_batches(token_store.train, 32, 100_000, seed=0)
    with pytest.raises(UserError, match="validation text"):
        batches.validation_batches(token_store.validation, 10_000_000, 8, limit=0)
