"""Tests of tokenizers: round trips, training, damaged files."""

import hashlib
import io
import os
import random
import shutil

import numpy as np
import pytest
import sentencepiece
from conftest import SHARED_DATA
from gguf_helpers import small_sentencepiece

from smallgpt_jax.conversion import tokenizer_files
from smallgpt_jax.data import encoding, tokenizer_folder, tokenizer_source, tokenizers
from smallgpt_jax.data.hugging_face_tokenizer import HuggingFaceTokenizer
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError

STRANGE = [
    "",
    " ",
    "  two  spaces",
    "tab\tand\nline\r\nends\n",
    "ünïcödé 漢字 🙂\u200d🙂",
    "<|endoftext|>",
    "def f(x):\n    return x  # comment\n",
    "\x00\x01",
    "'s 12345 ...!!!",
]


@pytest.fixture(scope="module")
def all_tokenizers():
    """Returns {kind: tokenizer}. Contains "gpt2" only if its vocabulary is available."""
    texts = [*STRANGE[1:], *(f"some words {i} and other words to learn from\n" for i in range(300))]
    all_tokenizers = {
        "bytes": TokenizerSource("bytes").make(),
        "sentencepiece": TokenizerSource("sentencepiece:400").make(texts),
    }
    if SHARED_DATA.is_dir():
        all_tokenizers["gpt2"] = TokenizerSource(str(SHARED_DATA / "tokenizer/gpt2")).make()
    return all_tokenizers


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "gpt2"])
def test_round_trip(all_tokenizers, kind, tmp_path):
    if kind not in all_tokenizers:
        pytest.skip("needs the GPT-2 vocabulary of the reference data, which only developers have")
    tokenizer = all_tokenizers[kind]
    encoded = [list(ids) for ids in tokenizer.encode(STRANGE)]
    assert [tokenizer.decode(ids) for ids in encoded] == STRANGE
    assert all(tokenizer.end_of_text not in ids for ids in encoded)
    assert all(0 <= i < tokenizer.vocab_size for ids in encoded for i in ids)
    tokenizer_folder.save(tokenizer, tmp_path / "kept")
    loaded = tokenizer_folder.load(tmp_path / "kept")
    assert [list(ids) for ids in loaded.encode(STRANGE)] == encoded
    assert tokenizers.fingerprint(loaded) == tokenizers.fingerprint(tokenizer)


def test_gpt2_ids(all_tokenizers):
    """The token ids and the vocabulary size are those published for OpenAI's encoder."""
    if "gpt2" not in all_tokenizers:
        pytest.skip("needs the GPT-2 vocabulary of the reference data, which only developers have")
    assert all_tokenizers["gpt2"].encode(["Hello world", " tokenization"])[0].tolist() == [
        15496,
        995,
    ]
    assert (all_tokenizers["gpt2"].vocab_size, all_tokenizers["gpt2"].end_of_text) == (50257, 50256)


def test_gpt2_from_tiktoken_cache(shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("encoder.json", "vocab.bpe"):
        key = hashlib.sha1((tokenizer_source.GPT2_URL + name).encode()).hexdigest()
        shutil.copy(shared_data / "tokenizer/gpt2" / name, tmp_path / key)
    assert TokenizerSource("gpt2").make().encode(["Hello world"])[0].tolist() == [15496, 995]


def test_sentencepiece_on_small_text_has_fewer_pieces():
    assert 256 < TokenizerSource("sentencepiece:4000").make(["a few words\n" * 3]).vocab_size < 400


def test_end_of_text_is_never_a_user_defined_piece():
    """If <|endoftext|> is a user-defined piece, the end-of-sentence piece marks the end of a text
    instead.

    The reason is that a text can contain user-defined pieces.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words and more of them"] * 20),
        model_writer=model,
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        user_defined_symbols=["<|endoftext|>"],
        minloglevel=2,
    )
    tokenizer = tokenizers.SentencePiece(model.getvalue())
    assert tokenizer.end_of_text not in tokenizer.encode(["words <|endoftext|> and more"])[0]


def test_sentencepiece_learns_from_every_document():
    """The training documents may come from an iterator, and their lines may have any length."""
    texts = [f"w{c * 9} " * 2000 for c in "abcdefghij"]
    tokenizer = TokenizerSource("sentencepiece:600").make(text for text in texts)
    assert all(len(tokenizer.encode([text])[0]) < 2500 for text in texts)
    with pytest.raises(
        UserError, match=r"'sentencepiece:600': cannot be trained on this text \(it is empty\)"
    ):
        TokenizerSource("sentencepiece:600").make()


@pytest.mark.parametrize(
    "spec, files, substrings",
    [
        ("sentencepiece:10", {}, ["at least 300"]),
        ("sentencepiece:many", {}, ["SIZE"]),
        ("gpt3", {}, ["'gpt3'"]),
        ("FOLDER", {}, ["contains no tokenizer"]),
        ("FOLDER", {"vocab.json": b"{}"}, ["merges.txt"]),
        ("FOLDER", {"vocab.json": b"{", "merges.txt": b""}, ["vocab.json", "not GPT-2's"]),
        ("FOLDER", {"vocab.json": b"{}", "merges.txt": b""}, ["vocab.json", "not GPT-2's"]),
        ("FOLDER/tokenizer.model", {"tokenizer.model": b"nonsense"}, ["not a SentencePiece model"]),
    ],
)
def test_refuses_bad_tokenizers(tmp_path, spec, files, substrings):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        TokenizerSource(spec.replace("FOLDER", str(tmp_path))).make()
    assert all(s in str(error.value) for s in substrings), str(error.value)


def test_save_syncs_contents_and_names(all_tokenizers, tmp_path, monkeypatch):
    """`save` syncs all files, and then their folder, because the folder stores their names."""
    synced, sync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.fstat(file).st_ino) or sync(file)
    )
    tokenizer_folder.save(all_tokenizers["sentencepiece"], tmp_path)
    files = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert set(files) == {"tokenizer.model", "tokenizer_kind.json"}
    assert set(synced) >= {*files.values(), tmp_path.stat().st_ino}
    assert synced[-1] == tmp_path.stat().st_ino


def test_long_documents_are_tokenized_in_pieces(all_tokenizers, monkeypatch):
    texts = [
        " ".join(f"word{i % 97} and {'x' * (i % 9)}, then" for i in range(2000)),
        "y" * 5000,
        "short",
    ]
    for kind, tokenizer in all_tokenizers.items():
        monkeypatch.setattr(encoding, "LONG_TEXT", 10**9)
        whole = encoding.encode(texts, tokenizer)
        monkeypatch.setattr(encoding, "LONG_TEXT", 1000)
        pieces = encoding.encode(texts, tokenizer)
        assert np.array_equal(pieces[0], whole[0]) and np.array_equal(pieces[2], whole[2]), kind
        assert tokenizer.decode(pieces[1]) == texts[1], kind


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
@pytest.mark.parametrize(
    "model_type, symbols",
    [
        ("bpe", ["<sep>", "<sep>s", "  ", "xx", "é"]),
        ("unigram", ["<sep>", "<sep>s", "é"]),
    ],
)
def test_exports_have_the_pieces_of_users(model_type, symbols, add_dummy_prefix):
    """SentencePiece makes a token of a user-defined piece wherever it is in a text."""
    library, rng = pytest.importorskip("tokenizers"), random.Random(0)
    ours = small_sentencepiece(
        model_type=model_type,
        vocab_size=320,
        add_dummy_prefix=add_dummy_prefix,
        user_defined_symbols=symbols,
        eos_piece="</s>",
    )
    content = tokenizer_files.hugging_face_files(ours, 64)["tokenizer.json"]
    theirs = library.Tokenizer.from_str(content)
    theirs.encode_special_tokens = True
    parts = [*symbols, "<se", " ", "x", "the", "th", "漢", "\n", "s", "▁"]
    for _ in range(500):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(0, 7)))
        ids = ours.encode([text])[0].tolist()
        assert theirs.encode(text, add_special_tokens=False).ids == ids, text
        assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids), text
    if model_type == "unigram":
        return  # in the library, a text can contain its end-of-text
    again = HuggingFaceTokenizer({"tokenizer.json": content.encode()})
    for text in ("the", " the<sep>th", "<sep>"):
        assert np.array_equal(again.encode_continuation(text), ours.encode_continuation(text))


@pytest.mark.parametrize(
    "settings",
    [
        # SentencePiece finds the piece of two spaces, and then removes a space.
        dict(remove_extra_whitespaces=True, user_defined_symbols=["  "]),
        # In xxx, it may find the second one.
        dict(model_type="unigram", user_defined_symbols=["xx"], eos_piece="</s>"),
    ],
)
def test_exports_refuse_pieces_that_differ(settings):
    with pytest.raises(UserError, match="this sentencepiece tokenizer cannot be exported"):
        tokenizer_files.hugging_face_files(small_sentencepiece(**settings), 64)
