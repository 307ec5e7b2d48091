"""Folders with tokenizers in the format of the `tokenizers` library, as those of published models."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

library = pytest.importorskip("tokenizers")

TEXTS = [
    "",
    " ",
    "  two  spaces",
    "tab\tand\nline\r\n",
    "ünïcödé 漢字 🙂\u200d🙂",
    "a <|endoftext|> b <s> c </s>",
    "def f(x):\n    return x  # comment\n",
    "'s 12345 ...!!!",
]
WORDS = ["some words to learn from, and other words\n" * 9, *TEXTS]
SPECIAL = ["<|endoftext|>", "<s>", "</s>", "<unk>"]


def byte_level(more: Sequence[str] = ()) -> library.Tokenizer:
    """Returns a tokenizer like those of SmolLM2 and Qwen3."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        WORDS,
        library.trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=[*SPECIAL, *more],
            show_progress=False,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def with_spaces(old_form: bool) -> library.Tokenizer:
    """Returns a tokenizer like those of Llama 2, which prepends a space to each text and has byte
    tokens.
    """
    tokenizer = library.Tokenizer(
        library.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if old_form:
        tokenizer.normalizer = library.normalizers.Sequence(
            [library.normalizers.Prepend("▁"), library.normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = library.pre_tokenizers.Metaspace(
            prepend_scheme="first", split=False
        )
    tokenizer.decoder = library.decoders.Sequence(
        [
            library.decoders.Replace("▁", " "),
            library.decoders.ByteFallback(),
            library.decoders.Fuse(),
            library.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat " * 9],
        library.trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
    )
    return tokenizer


def save(folder: Path, tokenizer: library.Tokenizer, **settings) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
