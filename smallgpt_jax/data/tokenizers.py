"""Tokenizers: SentencePiece, GPT-2's byte-pair encoding, bytes, and those of Hugging Face's
`tokenizers` library.

Each document begins with the end-of-text id. If a tokenizer has an id of its own for the beginning,
as those of Llama have, each document begins with that id and ends with the end-of-text id. No text
is encoded as one of these ids.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import sentencepiece

from smallgpt_jax.data.config import SYMBOLS
from smallgpt_jax.data.special_tokens import END_OF_TEXT, SpecialTokens
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.json_files import Each, integer, parse_json

SYMBOLS_FILE, SENTENCEPIECE_FILE = "symbols.json", "tokenizer.model"
_SHORT_TEXT = 10_000  # characters
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's symbol for a space


class Tokenizer(Protocol):
    kind: str
    vocab_size: int
    end_of_text: int
    # equal to end_of_text, unless the tokenizer has an id of its own for the beginning
    begin_of_text: int
    unknown: int | None  # id of characters that are not in the vocabulary; None if there is none
    special_tokens: SpecialTokens = SpecialTokens()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, without end-of-text. Thread-safe."""

    def encode_continuation(self, text: str) -> np.ndarray:
        """Returns the ids of a text that continues an earlier text."""
        return self.encode([text])[0]

    def count_dropped(self, text: str) -> int:
        """Returns how many characters of a text have no token, not even `unknown`."""
        return 0

    def encode_chat(self, text: str, continues: bool = False) -> list[int]:
        """Returns ids of what a chat template writes. Names of special tokens become these tokens."""
        ids = []
        id_of = self.special_tokens.ids
        for piece in self.special_tokens.split(text):
            if piece in id_of:
                ids.append(id_of[piece])
            elif piece and (ids or continues):
                ids += self.encode_continuation(piece).tolist()
            elif piece:
                ids += self.encode([piece])[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text that `ids` encode. All ids must be below vocab_size."""

    def files(self) -> dict[str, bytes]:
        """Returns {name: content} of the files from which `tokenizer_folder.load` makes it again."""


class Bytes(Tokenizer):
    """One id per byte of UTF-8, and id 256 for end-of-text."""

    kind = "bytes"
    vocab_size = 257
    end_of_text = begin_of_text = 256
    special_tokens = SpecialTokens.of_marks((END_OF_TEXT, 256), (END_OF_TEXT, 256))
    unknown = None

    def encode(self, texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def files(self):
        return {}


class Symbols(Tokenizer):
    """The symbols of a probe, separated by spaces, with the ids from 1 on; id 0 is end-of-text."""

    kind = SYMBOLS
    end_of_text = begin_of_text = 0
    unknown = None

    def __init__(self, symbols: Sequence[str]):
        self._symbols = tuple(symbols)
        self._ids = {symbol: i for i, symbol in enumerate(self._symbols, start=1)}
        self.vocab_size = 1 + len(self._symbols)

    def encode(self, texts):
        """Raises UserError if a text contains something else."""
        return [np.fromiter(map(self._id, text.split()), np.int32) for text in texts]

    def _id(self, symbol: str) -> int:
        if symbol not in self._ids:
            listed = " ".join(self._symbols[:20])
            if len(self._symbols) > 20:
                listed += " …"
            raise UserError(
                f"{symbol!r}: not a symbol of this probe; use {listed}, separated by spaces"
            )
        return self._ids[symbol]

    def decode(self, ids):
        return " ".join(self._symbols[i - 1] for i in ids if i > 0)

    def files(self):
        return {SYMBOLS_FILE: (json.dumps(self._symbols) + "\n").encode()}


class SentencePiece(Tokenizer):
    """Decoding turns U+2581 into a space, because SentencePiece represents spaces by it."""

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        if not model:  # the library would accept it, but not its use
            raise ValueError("empty")
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self._pieces = [self._processor.id_to_piece(i) for i in range(self.vocab_size)]
        self.unknown = self._processor.unk_id()
        # Models that we train name it so; those of others have an end-of-sentence piece.
        ends = [self._processor.piece_to_id(END_OF_TEXT), self._processor.eos_id()]
        ends = list(filter(self._is_control, ends))
        if not ends:
            raise UserError(
                f"config.data.tokenizer: the SentencePiece model has neither {END_OF_TEXT} nor an "
                "end-of-sentence piece to mark documents; use another model"
            )
        self.end_of_text = ends[0]
        begin = self._processor.bos_id()
        self.begin_of_text = begin if self._is_control(begin) else self.end_of_text
        self.special_tokens = self._find_special_tokens()

    def _is_control(self, i: int) -> bool:
        """Returns whether no text is encoded as this id; -1 is none."""
        return i >= 0 and self._processor.is_control(i)

    def _find_special_tokens(self) -> SpecialTokens:
        control = {piece: i for i, piece in enumerate(self._pieces) if self._is_control(i)}
        begin, end = self.begin_of_text, self.end_of_text
        marks = SpecialTokens.of_marks((self._pieces[begin], begin), (self._pieces[end], end))
        return SpecialTokens(control, marks.variables)

    def names(self) -> set[str]:
        return set(self._pieces)

    def encode(self, texts):
        if len(texts) == 1 and len(texts[0]) < _SHORT_TEXT:  # a list costs the start of a thread
            return [np.array(self._processor.encode(texts[0]), np.int32)]
        encoded = self._processor.encode(list(texts), num_threads=1)
        return [np.array(ids, np.int32) for ids in encoded]

    def encode_continuation(self, text):
        # Most models prepend a space to each text (add_dummy_prefix) and drop leading spaces
        # (remove_extra_whitespaces). Neither may happen in the middle of a text.
        ids = self._without_prefix.encode(text)
        if text[:1].isspace():
            drops_space = ids == self._without_prefix.encode(text.lstrip())
            if drops_space:
                ids = self._with_prefix.encode(text)
        return np.array(ids, np.int32)

    @functools.cached_property
    def _without_prefix(self) -> sentencepiece.SentencePieceProcessor:
        return self._with_dummy_prefix(False)

    @functools.cached_property
    def _with_prefix(self) -> sentencepiece.SentencePieceProcessor:
        return self._with_dummy_prefix(True)

    def _with_dummy_prefix(self, adds: bool) -> sentencepiece.SentencePieceProcessor:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto

        model = ModelProto.FromString(self._model)
        model.normalizer_spec.add_dummy_prefix = adds
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def decode(self, ids):
        return self._processor.decode([int(i) for i in ids])

    def files(self):
        return {SENTENCEPIECE_FILE: self._model}


class GPT2(Tokenizer):
    kind = "gpt2"
    unknown = None

    def __init__(self, vocab_json: bytes, merges_txt: bytes):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self._files = {"vocab.json": vocab_json, "merges.txt": merges_txt}
        ids = parse_json(vocab_json, Each(integer(0)))
        byte_of = gpt2_bytes()
        has_gaps = sorted(ids.values()) != list(range(len(ids)))
        if has_gaps or not byte_of.keys() <= ids.keys():
            raise ValueError("the ids have gaps, or bytes without an id")
        self.end_of_text = self.begin_of_text = ids.pop(END_OF_TEXT)
        mark = (END_OF_TEXT, self.end_of_text)
        self.special_tokens = SpecialTokens.of_marks(mark, mark)
        # tiktoken merges pairs in the order of their ids, so the ids must be in the order of
        # merges.txt.
        lines = merges_txt.decode().splitlines()
        merges = [line for line in lines if not line.startswith("#version")]
        for i, merge in enumerate(merges, start=256):  # after the bytes
            if ids[merge.replace(" ", "")] != i:
                raise ValueError("the ids are not in the order of the merges")
        ranks = {bytes(map(byte_of.__getitem__, token)): i for token, i in ids.items()}
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text},
        )
        self.vocab_size = self._encoding.n_vocab

    def names(self) -> set[str]:
        return set(json.loads(self._files["vocab.json"]))

    def encode(self, texts):
        # "<|endoftext|>" in a document is ordinary text.
        return [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids):
        return self._encoding.decode([int(i) for i in ids])

    def files(self):
        return self._files


def gpt2_bytes() -> dict[str, int]:
    """Returns the byte that each character in GPT-2's files represents.

    Printable Latin-1 characters represent their code points, those from U+0100 on the other 68
    bytes, ascending.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for point, byte in enumerate(others, start=0x100):
        byte_of[chr(point)] = byte
    return byte_of


def fingerprint(tokenizer: Tokenizer) -> str:
    """Tokenizers with equal fingerprints give the same ids."""
    digest = hashlib.sha256(tokenizer.kind.encode())
    for _, content in sorted(tokenizer.files().items()):
        digest.update(content)
    return digest.hexdigest()[:16]
