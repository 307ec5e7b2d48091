"""Tests of tokenizers in the format of the `tokenizers` library, compared with the library."""

import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import spaced_tokenizer
from hugging_face_folders import SPECIAL, TEXTS, WORDS, byte_level, save, with_spaces

from smallgpt_jax.conversion import tokenizer_files
from smallgpt_jax.data import panics, tokenizer_folder, tokenizers
from smallgpt_jax.data.hugging_face_tokenizer import HuggingFaceTokenizer
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference.detokenizer import Detokenizer

library = pytest.importorskip("tokenizers")


@pytest.mark.parametrize(
    "make",
    [byte_level, lambda: with_spaces(True), lambda: with_spaces(False)],
    ids=["byte level", "Prepend", "Metaspace"],
)
def test_ids_are_those_of_the_library(make, tmp_path):
    """The names of special tokens in a text are encoded as ordinary text. Nothing is added, cut or
    padded.
    """
    theirs = make()
    theirs.post_processor = library.processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(token, theirs.token_to_id(token)) for token in ("<s>", "</s>")],
    )
    theirs.enable_truncation(4)
    theirs.enable_padding(length=50)
    folder = save(tmp_path / "theirs", theirs, eos_token="</s>")
    tokenizer = TokenizerSource(str(folder)).make()
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    ids = tokenizer.encode(TEXTS)
    for text, own in zip(TEXTS, ids):
        assert (
            own.dtype == np.int32
            and own.tolist() == theirs.encode(text, add_special_tokens=False).ids
        )
        assert not {theirs.token_to_id(token) for token in SPECIAL[:3]} & {*own.tolist()}
    assert (
        tokenizer.end_of_text == theirs.token_to_id("</s>")
        and tokenizer.vocab_size == theirs.get_vocab_size()
    )
    assert tokenizer.unknown == (None if make is byte_level else theirs.token_to_id("<unk>"))
    # If a text begins with a space, Metaspace prepends none. Decoding then removes the text's own
    # space.
    assert [tokenizer.decode(own) for own in ids] == [
        text.removeprefix(" ") if "Metaspace" in theirs.to_str() else text for text in TEXTS
    ]
    tokenizer_folder.save(tokenizer, tmp_path / "saved")
    loaded = tokenizer_folder.load(tmp_path / "saved")
    assert [own.tolist() for own in loaded.encode(TEXTS)] == [own.tolist() for own in ids]
    assert tokenizers.fingerprint(loaded) == tokenizers.fingerprint(tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("old_form", [True, False])
def test_a_continuation_begins_without_a_space(old_form, tmp_path):
    tokenizer = TokenizerSource(str(save(tmp_path, with_spaces(old_form), eos_token="</s>"))).make()
    start = tokenizer.encode(["the c"])[0].tolist()
    for text in ("at sat", " mat", ""):
        ids = tokenizer.encode_continuation(text).tolist()
        assert tokenizer.decode([*start, *ids]) == f"the c{text}"
    assert tokenizer.decode([*start, *tokenizer.encode(["at"])[0].tolist()]) == "the c at"


@pytest.mark.parametrize(
    "make", [byte_level, lambda: with_spaces(True)], ids=["byte level", "Prepend"]
)
def test_streamed_text(make, tmp_path):
    """Pieces of streamed text never contain parts of a character, and together they are the
    text.
    """
    tokenizer = TokenizerSource(str(save(tmp_path, make(), eos_token="</s>"))).make()
    text = "the cat 🙂\u200d🙂 sat <s> ünïcödé"
    detokenizer = Detokenizer(tokenizer, before=tokenizer.encode(["on"])[0].tolist(), prompt="on")
    pieces = [
        detokenizer.add(int(token))
        for token in (*tokenizer.encode_continuation(text), tokenizer.end_of_text)
    ]
    assert "".join(pieces) == text and not any(
        "\N{REPLACEMENT CHARACTER}" in piece for piece in pieces
    )
    assert detokenizer.is_done


@pytest.mark.parametrize(
    "files, token",
    [
        ({}, "<|endoftext|>"),
        ({"tokenizer_config.json": {"eos_token": None}}, "<|endoftext|>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "<s>"}}}, "<s>"),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, "</s>"),
        (
            {
                "special_tokens_map.json": {"eos_token": "</s>"},
                "tokenizer_config.json": {"eos_token": "<s>"},
            },
            "</s>",
        ),
    ],
)
def test_end_of_text(files, token, tmp_path):
    save(tmp_path, byte_level())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = TokenizerSource(str(tmp_path / "tokenizer.json")).make()
    assert tokenizer.end_of_text == SPECIAL.index(token) and tokenizer.end_of_text_token == token


def test_tokenizer_json_precedes_the_files_of_other_formats(tmp_path):
    """Folders of SmolLM2 and Qwen3 also contain a vocab.json and a merges.txt, which lack the
    splitting rules.
    """
    theirs = byte_level()
    save(tmp_path / "model", theirs).joinpath("model.safetensors").write_bytes(b"weights")
    theirs.model.save(str(tmp_path / "model"))
    assert isinstance(tokenizer_folder.load(tmp_path / "model"), HuggingFaceTokenizer)
    before = TokenizerSource(str(tmp_path / "model")).fingerprint
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other weights")
    assert TokenizerSource(str(tmp_path / "model")).fingerprint == before
    file = str(tmp_path / "model" / "tokenizer.json")
    before = TokenizerSource(file).fingerprint
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert TokenizerSource(file).fingerprint != before


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer.json": "{"}, "tokenizer.json: unsupported tokenizer, or damaged"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: unsupported tokenizer, or damaged"),
        ({"tokenizer.json": "[]"}, "tokenizer.json: unsupported tokenizer, or damaged"),
        ({"tokenizer_config.json": "{"}, "tokenizer.json: unsupported tokenizer, or damaged"),
        ({"tokenizer_config.json": "[]"}, "tokenizer.json: unsupported tokenizer, or damaged"),
        (
            {"tokenizer_config.json": '{"eos_token": "<end>"}'},
            r"eos_token='<end>' is not in the vocabulary",
        ),
        (
            {"tokenizer_config.json": '{"eos_token": "a"}'},
            r"the text 'a' is encoded as a special token",
        ),
    ],
)
def test_refuses_bad_files(files, message, tmp_path):
    save(tmp_path, byte_level())
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        TokenizerSource(str(tmp_path)).make()


def test_refuses_a_tokenizer_without_end_of_text(tmp_path):
    tokenizer = library.Tokenizer(library.models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(
        UserError, match=r"no end-of-text token; set eos_token in a tokenizer_config\.json"
    ):
        TokenizerSource(str(save(tmp_path, tokenizer))).make()


def crafted(folder: Path, **parts) -> Path:
    """Writes a tokenizer.json with some parts replaced; a dict `model` replaces only its fields."""
    path = save(folder, byte_level(), eos_token="</s>") / "tokenizer.json"
    described = json.loads(path.read_text())
    model = described["model"] | parts.pop("model", {})
    path.write_text(json.dumps({**described, **parts, "model": model}))
    return path


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


ADDED = dict(id=1, special=False, single_word=False, lstrip=False, rstrip=False, normalized=False)
DOUBLE = replace({"String": "a"}, "aa")
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}} | {
    "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}]
}


@pytest.mark.parametrize(
    "parts, message",
    [
        (dict(normalizer={"type": "Prepend", "prepend": ""}), "index out of bounds"),
        (dict(normalizer=replace({"String": ""}, "x")), "index out of bounds"),
        (
            dict(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "Cannot parse precompiled_charsmap",
        ),
        (
            dict(normalizer={"type": "Precompiled", "precompiled_charsmap": "AQAAAAAA"}),
            "index out of bounds",
        ),
        (dict(pre_tokenizer={"type": "FixedLength", "length": 0}), "chunk size must be non-zero"),
        (dict(post_processor=TEMPLATE), "no entry found for key"),
        (dict(model={"continuing_subword_prefix": "#" * 99}), "out of range"),
        (
            dict(model={"type": "Unigram", "unk_id": None, "vocab": [["</s>", -1.0]]}),
            "unknown token but `unk_id` is missing",
        ),
        (dict(normalizer=replace({"Regex": "("}, "x")), "unmatched parenthesis"),
        (
            dict(normalizer={"type": "Sequence", "normalizers": [DOUBLE] * 40}),
            "its normalizer makes texts up to 1,099,511,627,776 times as long",
        ),
        (dict(normalizer=replace({"Regex": "$"}, "x" * 2000)), "up to 2,001 times"),
        (dict(decoder={"type": "Sequence", "decoders": [DOUBLE] * 40}), "its decoder makes texts"),
        (dict(decoder=replace({"String": "th"}, "x" * 4000)), "up to 2,000 times"),
        (
            dict(added_tokens=[ADDED | {"content": "x" * 10_001}]),
            "a token has more than 10,000 characters",
        ),
    ],
)
def test_harmful_files_are_refused_in_one_line(parts, message, tmp_path, capfd):
    """Those at which the library panics, and those that make much text of little. The library
    writes nothing.
    """
    path = crafted(tmp_path, **parts)
    with pytest.raises(UserError) as refused:
        tokenizer_folder.load(tmp_path)
    assert str(refused.value).startswith(f"{path}: ") and message in str(refused.value)
    assert "\n" not in str(refused.value) and capfd.readouterr() == ("", "")


def test_a_text_at_which_the_library_panics(tmp_path):
    crafted(tmp_path, normalizer=replace({"Regex": "(a+)+$"}, "x"))
    tokenizer = tokenizer_folder.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(["a cat"])[0]) == "a cat"
    for encode in (lambda text: tokenizer.encode([text]), tokenizer.encode_continuation):
        with pytest.raises(
            UserError, match=r"tokenizer\.json: the tokenizer fails \(Onig: .*\); use another"
        ):
            encode("a" * 40 + "b")


def test_messages_of_other_threads_are_not_lost(tmp_path, capfd):
    """While the library's are hidden."""
    with panics.no_panic_messages():
        os.write(2, b"from a thread\n")
    assert capfd.readouterr().err == "from a thread\n"


def test_dropout_is_not_used(tmp_path, capfd):
    """Merges that are dropped at random give a text other ids each time."""
    path = crafted(tmp_path / "random", model={"dropout": 0.5})
    theirs = library.Tokenizer.from_file(str(path))
    assert len({tuple(theirs.encode(WORDS[0]).ids) for _ in range(20)}) > 1
    tokenizer = tokenizer_folder.load(tmp_path / "random")
    assert capfd.readouterr().err == (
        f"{path}: its dropout of 0.5 is not used, so that a text always has the same ids\n"
    )
    tokenizer_folder.save(tokenizer, tmp_path / "saved")
    crafted(tmp_path / "exact", model={"dropout": None})
    (expected,) = tokenizer_folder.load(tmp_path / "exact").encode(WORDS[:1])
    for read in (tokenizer, tokenizer_folder.load(tmp_path / "saved")):
        for _ in range(20):
            assert read.encode(WORDS[:1])[0].tolist() == expected.tolist()
            assert read.encode_continuation(WORDS[0]).tolist() == expected.tolist()
    assert capfd.readouterr().err == ""


def test_settings_of_exported_tokenizers(tmp_path):
    """transformers reads the end-of-text token from these settings; llama.cpp's converter reads
    add_prefix_space, and whether a text begins with bos_token. tokenizer.json says so if bos_token
    is a token of its own.
    """

    def settings(tokenizer) -> dict:
        files = tokenizer_files.hugging_face_files(tokenizer, 64)
        return json.loads(files.get("tokenizer_config.json", "{}"))

    save(tmp_path, byte_level())
    assert (
        settings(TokenizerSource(str(tmp_path)).make()).items()
        >= dict(eos_token="<|endoftext|>", bos_token="<|endoftext|>", model_max_length=64).items()
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert tokenizer_files.hugging_face_files(TokenizerSource(str(tmp_path)).make(), 64) == {}
    trained = settings(TokenizerSource("sentencepiece:400").make(WORDS))
    assert trained["add_prefix_space"] is False and trained["add_bos_token"] is False
    with_begin = settings(spaced_tokenizer(False))
    assert with_begin["add_prefix_space"] is True and "add_bos_token" not in with_begin


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    save(tmp_path, byte_level())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        UserError, match=r"tokenizers is not installed; run pip install -c .* '\.\[hf\]'"
    ):
        TokenizerSource(str(tmp_path)).make()


def with_post_processor(kind: str) -> library.Tokenizer:
    tokenizer, processors = byte_level(), library.processors
    texts = {
        "begin": "<s> $A",
        "end": "$A </s>",
        "both": "<s> $A </s>",
        "end before": "</s> $A",
        "two": "<s> <unk> $A",
    }
    if kind in texts:
        tokens = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>", "<unk>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=texts[kind], special_tokens=tokens
        )
    elif kind == "sequence":
        begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), begin])
    return tokenizer


@pytest.mark.parametrize("kind", ["none", "begin", "end", "both", "sequence", "end before"])
def test_texts_begin_as_in_transformers(kind, tmp_path):
    """add_bos_token and add_eos_token have no effect where there is a tokenizer.json."""
    transformers = pytest.importorskip("transformers")
    theirs, tried = with_post_processor(kind), 0
    for begins, ends in itertools.product(["absent", True, False, None], ["absent", True, False]):
        settings = {"add_bos_token": begins, "add_eos_token": ends}
        settings = {name: value for name, value in settings.items() if value != "absent"}
        folder = save(tmp_path / str(tried), theirs, bos_token="<s>", eos_token="</s>", **settings)
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        with_special, without = (
            reference("hello", add_special_tokens=special).input_ids for special in (True, False)
        )
        tokenizer = TokenizerSource(str(folder)).make()
        before = with_special[: with_special.index(without[0])]
        expected = before[0] if before else tokenizer.end_of_text
        assert tokenizer.begin_of_text == expected, settings
        tried += 1
    assert tried == 12


def test_refuses_several_tokens_before_a_text(tmp_path):
    save(tmp_path, with_post_processor("two"))
    with pytest.raises(UserError, match="2 special tokens begin each text, at most one can"):
        TokenizerSource(str(tmp_path)).make()


@pytest.mark.parametrize("has_bytes, dropped", [(True, 0), (False, 2)])
def test_counts_dropped_characters(has_bytes, dropped, tmp_path):
    """A byte-level tokenizer drops bytes that its vocabulary lacks."""
    alphabet = library.pre_tokenizers.ByteLevel.alphabet() if has_bytes else []
    theirs = library.Tokenizer(library.models.BPE())
    theirs.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], show_progress=False, initial_alphabet=alphabet
    )
    theirs.train_from_iterator(["some words to learn from"] * 9, trainer)
    tokenizer = TokenizerSource(str(save(tmp_path, theirs))).make()
    assert tokenizer.unknown is None
    assert tokenizer.count_dropped("some words") == 0
    assert tokenizer.count_dropped("some XX words") == dropped
