"""Tokenizers: SentencePiece, GPT-2's byte-pair encoding, bytes, and those of Hugging Face's
`tokenizers` library.

A tokenizer's folder has the files that other tools expect: `tokenizer.model` for SentencePiece,
`vocab.json` and `merges.txt` for GPT-2, `tokenizer.json` for Hugging Face. `symbols.json` for
probes. `tokenizer_kind.json` contains the kind. As in transformers, a `tokenizer.json` precedes the
files of other formats.

Each document begins with the end-of-text id. If a tokenizer has an id of its own for the beginning,
as those of Llama have, each document begins with that id and ends with the end-of-text id. No text
is encoded as one of these ids.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from smallgpt_jax.data import hugging_face_tokenizer
from smallgpt_jax.data.config import SYMBOLS
from smallgpt_jax.data.hugging_face_tokenizer import (
    SETTINGS_FILES,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
)
from smallgpt_jax.data.special_tokens import END_OF_TEXT, SpecialTokens
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_reason, short_repr
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.bounded import read_bounded
from smallgpt_jax.storage.json_files import (
    OBJECT,
    TEXT,
    Each,
    Kind,
    integer,
    parse_json,
    read_json,
    read_json_or_none,
)

_KIND_FILE, _SYMBOLS_FILE = "tokenizer_kind.json", "symbols.json"
_SENTENCEPIECE_FILE, _ADDED_FILE = "tokenizer.model", "added_tokens.json"
_SHORT_TEXT = 10_000  # characters
# Name in a tokenizer folder → OpenAI's name.
GPT2_FILES = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}
GPT2_SHA256 = {  # in the order of GPT2_FILES
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# Values of tokenizer_class for tokenizers that split texts as GPT-2's.
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast")
# Models with vocab.json and merges.txt of another class → the class.
_OTHER_BYTE_PAIRS = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
# Names of all files that `load` reads.
TOKENIZER_FILES = {
    _KIND_FILE,
    _SYMBOLS_FILE,
    _SENTENCEPIECE_FILE,
    TOKENIZER_JSON,
    _ADDED_FILE,
    *SETTINGS_FILES,
    *GPT2_FILES,
    *GPT2_FILES.values(),
}

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's symbol for a space
# Texts on which two tokenizers are compared.
PROBES = [
    "Hello world, it's 3.14159!  Two  spaces, a\ttab\nand\n\nlines \n",
    "  leading and trailing  ",
    "def f(x):\n    return {'a': [x ** 2, -1]}  # code\n",
    "Grüße, naïve café, Ὅμηρος, Привет, こんにちは世界, 你好",
    "emoji 🙂👩‍👩‍👧 and math ∑∫√ and \x00\x01 control",
    "aaaaaaaaaaaaaaaaaaaa 1111111111 ---------- ______",
    f"the mark {END_OF_TEXT} as text, and {SPACE}{SPACE} too",
    "ﬁne Ｆｕｌｌ width, Å and Å, half\u00a0space",
    "",
]


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
        """Returns the ids of what a chat template writes: the names of special tokens become these
        tokens. If `continues` is true, the text continues an earlier text.
        """
        ids = []
        for part in self.special_tokens.split(text):
            if part in self.special_tokens.ids:
                ids.append(self.special_tokens.ids[part])
            elif part and (ids or continues):
                ids += self.encode_continuation(part).tolist()
            elif part:
                ids += self.encode([part])[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text that `ids` encode. All ids must be below vocab_size."""

    def files(self) -> dict[str, bytes]:
        """Returns the files that `load` needs, except _KIND_FILE, as a dict from name to content."""


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


def _is_symbol(value) -> bool:
    return isinstance(value, str) and len(value) <= 100 and value.split() == [value]


_SYMBOL = Kind("a symbol of at most 100 characters, without spaces", _is_symbol)


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
            known = " ".join(self._symbols[:20])
            if len(self._symbols) > 20:
                known += " …"
            raise UserError(
                f"{symbol!r}: not a symbol of this probe; use {known}, separated by spaces"
            )
        return self._ids[symbol]

    def decode(self, ids):
        return " ".join(self._symbols[i - 1] for i in ids if i > 0)

    def files(self):
        return {_SYMBOLS_FILE: (json.dumps(self._symbols) + "\n").encode()}


class SentencePiece(Tokenizer):
    """Decoding turns U+2581 into a space, because SentencePiece represents spaces by it."""

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        if not model:  # the library would accept it, but not its use
            raise ValueError("empty")
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.unknown = self._processor.unk_id()
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
        pieces = [self._processor.id_to_piece(i) for i in range(self.vocab_size)]
        control = {piece: i for i, piece in enumerate(pieces) if self._is_control(i)}
        begin, end = self.begin_of_text, self.end_of_text
        marks = SpecialTokens.of_marks((pieces[begin], begin), (pieces[end], end))
        return SpecialTokens(control, marks.variables)

    def names(self) -> set[str]:
        return {self._processor.id_to_piece(i) for i in range(self.vocab_size)}

    def encode(self, texts):
        if len(texts) == 1 and len(texts[0]) < _SHORT_TEXT:  # a list costs the start of a thread
            return [np.array(self._processor.encode(texts[0]), np.int32)]
        encoded = self._processor.encode(list(texts), num_threads=1)
        return [np.array(ids, np.int32) for ids in encoded]

    def encode_continuation(self, text):
        # Most models prepend a space to each text (add_dummy_prefix) and drop leading spaces
        # (remove_extra_whitespaces). Neither may happen in the middle of a text.
        ids = self._without_prefix.encode(text)
        if text[:1].isspace() and ids == self._without_prefix.encode(text.lstrip()):
            ids = self._with_prefix.encode(text)  # the space at its beginning was dropped
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
        return {_SENTENCEPIECE_FILE: self._model}


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


def load(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise UserError(f"{folder}: tokenizer folder is missing")
    files = {path.name: path for path in folder.iterdir()}
    tokenizer = _read_native(folder, files)
    if TOKENIZER_JSON in files:
        try:
            theirs = hugging_face_tokenizer.read_files(files[TOKENIZER_JSON])
        except UserError:
            if not tokenizer:
                raise
            return tokenizer
        # Our own class is faster, and has more forms of export.
        if tokenizer and _encode_equally(tokenizer, theirs):
            return tokenizer
        if _KIND_FILE not in files:
            _require_added_tokens(theirs, files)
        return theirs
    if not tokenizer:
        raise UserError(
            f"{folder}: contains no tokenizer; expected tokenizer.json (Hugging Face), "
            "tokenizer.model (SentencePiece), or vocab.json and merges.txt, or encoder.json and "
            "vocab.bpe (GPT-2)"
        )
    if _KIND_FILE not in files:
        _require_complete(tokenizer, files)
    return tokenizer


def _read_native(folder: Path, files: Mapping[str, Path]) -> Tokenizer | None:
    """Returns the tokenizer of a folder that was saved by `save`, or that has other files than a
    tokenizer.json; None, if this file alone tells the tokenizer.
    """
    kind = None
    if _KIND_FILE in files:
        kind = read_json(files[_KIND_FILE], {"kind": TEXT}, "restore it")["kind"]
    if kind == Bytes.kind:
        return Bytes()
    if kind == SYMBOLS:
        return Symbols(read_json(folder / _SYMBOLS_FILE, [_SYMBOL], "restore it"))
    if kind == HuggingFaceTokenizer.kind:
        return None
    has_json = TOKENIZER_JSON in files
    if _SENTENCEPIECE_FILE in files and (kind or not has_json):
        return read_sentencepiece(files[_SENTENCEPIECE_FILE])
    # GPT-2's two files, under the names that Hugging Face or OpenAI uses.
    pair = [files.get(name) or files.get(openai) for name, openai in GPT2_FILES.items()]
    if all(pair) and (kind or not has_json or _is_gpt2(pair)):
        return _read_gpt2(pair)
    return None


def _read_gpt2(pair: Sequence[Path]) -> GPT2:
    try:
        return GPT2(*map(read_bounded, pair))
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(
            f"{pair[0]}: not GPT-2's vocabulary ({type(error).__name__}: {short_reason(error)})"
        ) from None


def _encode_equally(one: Tokenizer, other: Tokenizer) -> bool:
    """Returns whether the second tokenizer adds nothing to the first one, in texts and chats."""
    for field in ("vocab_size", "end_of_text", "begin_of_text"):
        if getattr(one, field) != getattr(other, field):
            return False
    special = other.special_tokens
    reserved = special.ids.keys() - special.allowed
    if not reserved <= one.special_tokens.ids.keys():
        return False
    texts = [*PROBES, *(f"a{name} {name}b" for name in special.ids)]
    return all(map(np.array_equal, one.encode(texts), other.encode(texts)))


_ADVICE = (
    "write a complete tokenizer.json, for example with transformers: "
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def _require_complete(tokenizer: SentencePiece | GPT2, files: Mapping[str, Path]) -> None:
    """Raises UserError if settings in the folder of a tokenizer change it."""
    _require_added_tokens(tokenizer, files)
    folder = next(iter(files.values())).parent
    settings, model = _read_objects(folder, SETTINGS_FILES[0], "config.json")
    if isinstance(tokenizer, GPT2):
        kind = settings.get("tokenizer_class") or _OTHER_BYTE_PAIRS.get(model.get("model_type"))
        if kind not in (None, *_GPT2_CLASSES):
            raise UserError(
                f"{folder}: is a {kind}, which splits texts otherwise than GPT-2; {_ADVICE}"
            )
        return
    adds_begin = tokenizer.begin_of_text != tokenizer.end_of_text
    if settings.get("add_bos_token") is False and adds_begin:
        raise UserError(
            f"{folder}: add_bos_token=false in tokenizer_config.json, but its tokenizer.model has a "
            f"piece that begins texts; {_ADVICE}"
        )


def _require_added_tokens(tokenizer: Tokenizer, files: Mapping[str, Path]) -> None:
    """Raises UserError if settings in the folder of a tokenizer add tokens that it lacks."""
    folder = next(iter(files.values())).parent
    *settings, added = _read_objects(folder, *SETTINGS_FILES, _ADDED_FILE)
    merged = hugging_face_tokenizer.merge_settings(*settings)
    names = hugging_face_tokenizer.added_tokens(merged) | added.keys()
    if missing := sorted(names - tokenizer.names()):
        raise UserError(
            f"{folder}: its settings name tokens that its tokenizer lacks, such as "
            f"{short_repr(missing[0])}; {_ADVICE}"
        )


def _read_objects(folder: Path, *names: str) -> list[dict]:
    return [read_json_or_none(folder / name, OBJECT) or {} for name in names]


def _is_gpt2(pair: Sequence[Path]) -> bool:
    return list(map(_sha256_of, pair)) == list(GPT2_SHA256.values())


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.files().items():
        write_atomically(folder / name, content)
    write_atomically(folder / _KIND_FILE, json.dumps({"kind": tokenizer.kind}) + "\n")


def fingerprint(tokenizer: Tokenizer) -> str:
    """Tokenizers with equal fingerprints give the same ids."""
    digest = hashlib.sha256(tokenizer.kind.encode())
    for _, content in sorted(tokenizer.files().items()):
        digest.update(content)
    return digest.hexdigest()[:16]


def read_sentencepiece(path: Path) -> SentencePiece:
    try:
        return SentencePiece(read_bounded(path))
    except (RuntimeError, OSError, ValueError, IndexError):
        raise UserError(f"{path}: not a SentencePiece model") from None
