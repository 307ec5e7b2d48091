"""What `config.data.tokenizer` names: a tokenizer to train or download, or files."""

import dataclasses
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import sentencepiece

from smallgpt_jax.data import hugging_face_tokenizer, tokenizer_folder
from smallgpt_jax.data.config import SYMBOLS
from smallgpt_jax.data.hugging_face_tokenizer import SETTINGS_FILES
from smallgpt_jax.data.special_tokens import END_OF_TEXT, SpecialTokens
from smallgpt_jax.data.tokenizer_folder import GPT2_FILES, GPT2_SHA256, TOKENIZER_FILES
from smallgpt_jax.data.tokenizers import GPT2, Bytes, SentencePiece, Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.paths import local_path

# SentencePiece is trained on at most this much text; more text hardly changes the vocabulary.
MAX_TRAINING_CHARACTERS = 50_000_000
_MAX_LINE_CHARACTERS = 4096  # longer lines are split, because SentencePiece would ignore them
_TRAINED_END, _GPT2_END = 1, 50256  # ids of end-of-text
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


@dataclasses.dataclass(frozen=True)
class TokenizerSource:
    value: str  # config.data.tokenizer

    @property
    def is_trained(self) -> bool:
        return self.value.startswith("sentencepiece:")

    @cached_property
    def path(self) -> Path:
        """Missing, if the value is not a path."""
        return local_path("config.data.tokenizer", self.value)

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Returns those of the tokenizer that `make` returns, without training or download."""
        if not self.is_trained and self.value != "gpt2":
            return self.make().special_tokens
        end = (END_OF_TEXT, _TRAINED_END if self.is_trained else _GPT2_END)
        return SpecialTokens.of_marks(end, end)

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash of the tokenizer's files; "" if there are none."""
        if not self.path.exists():
            return ""
        if self.path.is_dir():
            names = TOKENIZER_FILES  # not all files: a folder may have a model's weights
        elif self.path.suffix == ".json":
            names = {self.path.name, *SETTINGS_FILES}
        else:
            names = {self.path.name}
        digest = hashlib.sha256()
        for file in filter(Path.is_file, (self.folder / name for name in sorted(names))):
            digest.update(file.name.encode())
            with file.open("rb") as content:
                hashlib.file_digest(content, lambda: digest)
        return digest.hexdigest()

    def make(self, texts: Iterable[str] = ()) -> Tokenizer:
        """Returns the tokenizer. SentencePiece is trained on `texts`."""
        kind, _, size = self.value.partition(":")
        if kind == "bytes":
            return Bytes()
        if kind == SYMBOLS:
            raise UserError(
                f"config.data.tokenizer={self.value!r}: writes only probes "
                "(config.data.source=synthetic:PROBE); choose another one for text"
            )
        if kind == "sentencepiece":
            if not size.isdecimal() or int(size) < 300:
                raise UserError(
                    f"config.data.tokenizer={self.value!r}: expected sentencepiece:SIZE, where "
                    "SIZE is the number of pieces, at least 300 (256 of them are bytes)"
                )
            return train_sentencepiece(texts, int(size))
        if kind == "gpt2":
            return GPT2(*(_download(name) for name in GPT2_FILES.values()))
        path = self.path
        if path.is_dir():
            return tokenizer_folder.load(path)
        if path.is_file() and path.suffix == ".json":
            return hugging_face_tokenizer.read_files(path)
        if path.is_file():
            return tokenizer_folder.read_sentencepiece(path)
        raise UserError(
            f"config.data.tokenizer={self.value!r}: expected sentencepiece:SIZE, gpt2, bytes, or "
            "an existing file or folder"
        )


def train_sentencepiece(texts: Iterable[str], size: int) -> SentencePiece:
    """Returns a byte-pair model that preserves whitespace and encodes unseen characters as bytes.

    If the texts are too short for `size` pieces, the model has fewer pieces.
    """
    unreadable = []  # errors of `texts`, which SentencePiece turns into a RuntimeError

    def lines() -> Iterator[str]:
        read = 0  # characters
        try:
            for text in texts:
                for line in text.split("\n"):
                    for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                        yield line[start : start + _MAX_LINE_CHARACTERS]
                read += len(text)
                if read > MAX_TRAINING_CHARACTERS:
                    return
        except UserError as error:
            unreadable.append(error)
            raise

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            hard_vocab_limit=False,
            max_sentence_length=4 * _MAX_LINE_CHARACTERS,  # bytes
            unk_id=0,
            eos_id=_TRAINED_END,
            eos_piece=END_OF_TEXT,
            bos_id=-1,
            pad_id=-1,
            num_threads=os.cpu_count(),
            minloglevel=2,
        )
    except RuntimeError as error:
        if unreadable:
            raise unreadable[0] from None
        # "Internal: src/trainer.cc(12) [condition] why" → "why"
        why = str(error).split("]")[-1].strip() or "it is empty"
        raise UserError(
            f"config.data.tokenizer='sentencepiece:{size}': cannot be trained on this text "
            f"({why}); use more text"
        ) from None
    return SentencePiece(model.getvalue())


def _download(name: str) -> bytes:
    import tiktoken.load

    try:  # or from the cache in TIKTOKEN_CACHE_DIR
        return tiktoken.load.read_file_cached(GPT2_URL + name, GPT2_SHA256[name])
    except (OSError, ValueError) as error:  # no network, or a file with another checksum
        raise UserError(
            f"config.data.tokenizer='gpt2': {name} could not be downloaded "
            f"({type(error).__name__}); put encoder.json and vocab.bpe (or vocab.json and "
            "merges.txt) into a folder and set --config.data.tokenizer=FOLDER"
        ) from None
