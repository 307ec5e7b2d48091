"""Text ↔ token ids: SentencePiece, GPT-2's byte-pair encoding, and bytes.

A tokenizer lives in a folder, next to its token store and again in each workdir, in the file names
that other tools read: `tokenizer.model` (SentencePiece) or `vocab.json` and `merges.txt` (GPT-2);
`tokenizer_kind.json` beside them says which kind it is. No tokenizer gives its end-of-text id for any
text: that id only ever marks the beginning of a document.
"""

import functools
import hashlib
import io
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from smallgpt_jax.errors import UserError
from smallgpt_jax.files import local_path, write_atomically

KIND_FILE = "tokenizer_kind.json"
END_OF_TEXT = "<|endoftext|>"
# SentencePiece is trained on at most this much text: more hardly changes its pieces.
TRAINING_CHARACTERS = 50_000_000
LONGEST_LINE = 4096  # characters; SentencePiece leaves out lines beyond a length, so cut them

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}  # our name: OpenAI's
GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


class Tokenizer(Protocol):
    kind: str
    vocab_size: int
    end_of_text: int
    unknown: int | None  # what stands for characters that it has no piece for, if there are such

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without end-of-text. Threads may call it at the same time."""

    def encode_continuation(self, text: str) -> np.ndarray:
        """The ids of a text that continues another one."""
        return self.encode([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids below vocab_size."""

    def files(self) -> dict[str, bytes]:
        """File name → content: all that `load` needs besides the kind."""


class Bytes(Tokenizer):
    """One id a byte of UTF-8, and 256 for end-of-text."""

    kind = "bytes"
    vocab_size = 257
    end_of_text = 256
    unknown = None

    def encode(self, texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def files(self):
        return {}


class SentencePiece(Tokenizer):
    """A SentencePiece model. Text comes back as it was, but U+2581, SentencePiece's own mark for a
    space, comes back as a space."""

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.unknown = self._processor.unk_id()
        marks = (self._processor.piece_to_id(END_OF_TEXT), self._processor.eos_id())
        # Not one that a text can have in it.
        self.end_of_text = next((i for i in marks if i >= 0 and self._processor.is_control(i)), None)
        if self.end_of_text is None:
            raise UserError(f"the SentencePiece model has neither {END_OF_TEXT} nor an end-of-sentence "
                            "piece to mark documents with")

    def encode(self, texts):
        return [np.array(ids, np.int32) for ids in self._processor.encode(list(texts), num_threads=1)]

    def encode_continuation(self, text):
        # Most models put a space in front of a text (add_dummy_prefix) and drop those that it begins with
        # (remove_extra_whitespaces). Within a text neither may happen: one space stays one, none stays none.
        without_space, with_space = self._for_continuations
        ids = without_space.encode(text)
        if text[:1].isspace() and ids == without_space.encode(text.lstrip()):
            ids = with_space.encode(text)
        return np.array(ids, np.int32)

    @functools.cached_property
    def _for_continuations(self) -> list[sentencepiece.SentencePieceProcessor]:
        """The same model, which puts no space in front of a text, and which does."""
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        model, processors = ModelProto.FromString(self._model), []
        for model.normalizer_spec.add_dummy_prefix in (False, True):
            processors.append(sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()))
        return processors

    def decode(self, ids):
        return self._processor.decode([int(i) for i in ids])

    def files(self):
        return {"tokenizer.model": self._model}


class GPT2(Tokenizer):
    """GPT-2's byte-pair encoding, 50,257 ids, through tiktoken."""

    kind = "gpt2"
    unknown = None

    def __init__(self, vocab_json: bytes, merges_txt: bytes):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self._files = {"vocab.json": vocab_json, "merges.txt": merges_txt}
        ids = json.loads(vocab_json)
        self.end_of_text = ids.pop(END_OF_TEXT)
        # tiktoken merges in the order of the ids: that has to be the order of the merges.
        merges = [line for line in merges_txt.decode().splitlines() if not line.startswith("#version")]
        if any(ids[merge.replace(" ", "")] != 256 + i for i, merge in enumerate(merges)):
            raise ValueError("the ids are not in the order of the merges")
        byte_of = gpt2_bytes()
        ranks = {bytes(byte_of[c] for c in token): i for token, i in ids.items()}
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text})
        self.vocab_size = self._encoding.n_vocab

    def encode(self, texts):
        # Text that spells a special token is text like any other.
        return [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids):
        return self._encoding.decode([int(i) for i in ids])

    def files(self):
        return self._files


def gpt2_bytes() -> dict[str, int]:
    """The character that stands for each byte in GPT-2's files → that byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are written as
    the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def make(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that a config names; `texts` are what SentencePiece is trained on.

    spec: "sentencepiece:SIZE", "gpt2" (downloaded by tiktoken), "bytes", or a path: a SentencePiece
    model file, a folder with GPT-2's two files, or a folder that a run or store keeps.
    """
    kind, _, size = spec.partition(":")
    if kind == "bytes":
        return Bytes()
    if kind == "sentencepiece":
        if not size.isdecimal() or int(size) < 300:
            raise UserError(f"config.data.tokenizer={spec!r}: after sentencepiece: comes the number of "
                            "pieces, at least 300 (256 of them are bytes)")
        return train_sentencepiece(texts, int(size))
    if kind == "gpt2":
        return GPT2(*(download(name) for name in GPT2_FILES.values()))
    path = local_path("config.data.tokenizer", spec)
    if path.is_dir():
        return load(path)
    if path.is_file():
        return read_sentencepiece(path)
    raise UserError(f"config.data.tokenizer={spec!r}: neither sentencepiece:SIZE, gpt2 or bytes, nor a "
                    "file or folder")


def load(folder: Path) -> Tokenizer:
    """The tokenizer in a folder. Raises UserError naming what is missing or unreadable."""
    if not folder.is_dir():
        raise UserError(f"{folder}: the tokenizer's folder is missing")
    files = {path.name: path for path in folder.iterdir()}
    try:
        kind = json.loads(files[KIND_FILE].read_text())["kind"] if KIND_FILE in files else None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{files[KIND_FILE]}: damaged, it does not say which tokenizer this is") from None
    if kind == "bytes":
        return Bytes()
    if "tokenizer.model" in files:
        return read_sentencepiece(files["tokenizer.model"])
    # GPT-2's two files, by Hugging Face's names or OpenAI's.
    pair = [files.get(ours) or files.get(theirs) for ours, theirs in GPT2_FILES.items()]
    if not all(pair):
        raise UserError(f"{folder}: no tokenizer here: neither tokenizer.model (SentencePiece) nor "
                        "vocab.json and merges.txt (GPT-2; also as encoder.json and vocab.bpe)")
    try:
        return GPT2(*(path.read_bytes() for path in pair))
    except (ValueError, KeyError) as error:
        raise UserError(f"{pair[0]}: not GPT-2's vocabulary ({type(error).__name__}: {error})") from None


def content(spec: str) -> str:
    """Changes with what lies at the path that `spec` may be."""
    path = Path(spec).expanduser()
    if not path.exists():
        return ""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files that `load` reads; a loss of power afterwards does not undo them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.files().items():
        write_atomically(folder / name, content)
    write_atomically(folder / KIND_FILE, json.dumps({"kind": tokenizer.kind}) + "\n")


def fingerprint(tokenizer: Tokenizer) -> str:
    """The same for tokenizers that give the same ids."""
    content = b"".join(tokenizer.files()[name] for name in sorted(tokenizer.files()))
    return hashlib.sha256(tokenizer.kind.encode() + content).hexdigest()[:16]


def read_sentencepiece(path: Path) -> SentencePiece:
    try:
        return SentencePiece(path.read_bytes())
    except (RuntimeError, OSError):
        raise UserError(f"{path}: not a SentencePiece model") from None


def train_sentencepiece(texts: Iterable[str], size: int) -> SentencePiece:
    """Byte-pair pieces that keep every space and line end; unseen characters fall back to bytes.

    A source too small for `size` pieces gives as many as it has.
    """
    def lines():
        read = 0
        for text in texts:
            for line in text.split("\n"):
                yield from (line[i:i + LONGEST_LINE] for i in range(0, len(line), LONGEST_LINE))
            read += len(text)
            if read > TRAINING_CHARACTERS:
                return

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(), model_writer=model, vocab_size=size, model_type="bpe",
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, allow_whitespace_only_pieces=True, hard_vocab_limit=False,
            max_sentence_length=4 * LONGEST_LINE, unk_id=0, eos_id=1, eos_piece=END_OF_TEXT, bos_id=-1,
            pad_id=-1, num_threads=os.cpu_count(), minloglevel=2)
    except RuntimeError as error:
        raise UserError(f"config.data.tokenizer='sentencepiece:{size}': cannot be trained on this text "
                        f"({str(error).split(']')[-1].strip() or 'there is none'}); is there enough of it?") from None
    return SentencePiece(model.getvalue())


def download(name: str) -> bytes:
    """One of GPT-2's two files, through tiktoken's cache (TIKTOKEN_CACHE_DIR)."""
    import tiktoken.load

    try:
        return tiktoken.load.read_file_cached(GPT2_URL + name, GPT2_SHA256[name])
    except (OSError, ValueError) as error:  # no network, or not the file it should be
        raise UserError(
            f"config.data.tokenizer='gpt2': {name} could not be downloaded ({type(error).__name__}). "
            "Put encoder.json and vocab.bpe (or vocab.json and merges.txt) into a folder and set "
            "--config.data.tokenizer=FOLDER") from None
