"""What `config.data.tokenizer` names: a tokenizer to train or download, or files."""

import dataclasses
import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from smallgpt_jax.data import hugging_face_tokenizer, tokenizer_folder
from smallgpt_jax.data.config import SYMBOLS, stated_entries
from smallgpt_jax.data.hugging_face_tokenizer import SETTINGS_FILES
from smallgpt_jax.data.sentencepiece_training import TRAINED_END, train_sentencepiece
from smallgpt_jax.data.special_tokens import END_OF_TEXT, SpecialTokens
from smallgpt_jax.data.tokenizer_folder import GPT2_FILES, GPT2_SHA256, TOKENIZER_FILES
from smallgpt_jax.data.tokenizers import GPT2, Bytes, Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.paths import local_path

_GPT2_END = 50256  # id of end-of-text
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
        end = (END_OF_TEXT, TRAINED_END if self.is_trained else _GPT2_END)
        return SpecialTokens.of_marks(end, end)

    @cached_property
    def vocab_size(self) -> int:
        """Returns that of the tokenizer that `make` returns, without training or download; before
        training, the most that it can have.
        """
        return stated_entries(self.value) or self.make().vocab_size

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
