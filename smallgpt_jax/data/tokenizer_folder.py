"""The folder of a tokenizer, with the files that other tools expect.

These are `tokenizer.model` for SentencePiece, `vocab.json` and `merges.txt` for GPT-2,
`tokenizer.json` for Hugging Face, and `symbols.json` for probes. `tokenizer_kind.json` contains the
kind. As in transformers, a `tokenizer.json` precedes the files of other formats.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from smallgpt_jax.data import hugging_face_tokenizer
from smallgpt_jax.data.config import SYMBOLS
from smallgpt_jax.data.hugging_face_tokenizer import (
    SETTINGS_FILES,
    TOKENIZER_JSON,
    HuggingFaceTokenizer,
)
from smallgpt_jax.data.special_tokens import END_OF_TEXT
from smallgpt_jax.data.tokenizers import (
    GPT2,
    SENTENCEPIECE_FILE,
    SPACE,
    SYMBOLS_FILE,
    Bytes,
    SentencePiece,
    Symbols,
    Tokenizer,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_reason, short_repr
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.bounded import read_bounded
from smallgpt_jax.storage.json_files import OBJECT, TEXT, Kind, read_json, read_json_or_none

_KIND_FILE, _ADDED_FILE = "tokenizer_kind.json", "added_tokens.json"
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
    SYMBOLS_FILE,
    SENTENCEPIECE_FILE,
    TOKENIZER_JSON,
    _ADDED_FILE,
    *SETTINGS_FILES,
    *GPT2_FILES,
    *GPT2_FILES.values(),
}
# Texts on which two tokenizers are compared.
TRIAL_TEXTS = [
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


def _is_symbol(value) -> bool:
    return isinstance(value, str) and len(value) <= 100 and value.split() == [value]


_SYMBOL = Kind("a symbol of at most 100 characters, without spaces", _is_symbol)


def load(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise UserError(f"{folder}: tokenizer folder is missing")
    files = {path.name: path for path in folder.iterdir()}
    is_foreign = _KIND_FILE not in files  # not written by `save`: its files may be incomplete
    native = _read_native(folder, files)
    if TOKENIZER_JSON in files:
        try:
            theirs = hugging_face_tokenizer.read_files(files[TOKENIZER_JSON])
        except UserError:  # such as a library that is not installed, or a damaged file
            if not native:
                raise
            return native
        # Our own class is faster, and has more forms of export.
        if native and _encode_equally(native, theirs):
            return native
        if is_foreign:
            _require_added_tokens(theirs, folder)
        return theirs
    if not native:
        raise UserError(
            f"{folder}: contains no tokenizer; expected tokenizer.json (Hugging Face), "
            "tokenizer.model (SentencePiece), or vocab.json and merges.txt, or encoder.json and "
            "vocab.bpe (GPT-2)"
        )
    if is_foreign:
        _require_complete(native, folder)
    return native


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
        return Symbols(read_json(folder / SYMBOLS_FILE, [_SYMBOL], "restore it"))
    if kind == HuggingFaceTokenizer.kind:
        return None
    # in folders that `save` has not written, a tokenizer.json tells more than the other files
    has_json = TOKENIZER_JSON in files
    if SENTENCEPIECE_FILE in files and (kind or not has_json):
        return read_sentencepiece(files[SENTENCEPIECE_FILE])
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


def read_sentencepiece(path: Path) -> SentencePiece:
    try:
        return SentencePiece(read_bounded(path))
    except (RuntimeError, OSError, ValueError, IndexError):
        raise UserError(f"{path}: not a SentencePiece model") from None


def _encode_equally(one: Tokenizer, other: Tokenizer) -> bool:
    """Returns whether the second tokenizer adds nothing to the first one, in texts and chats."""
    for field in ("vocab_size", "end_of_text", "begin_of_text"):
        if getattr(one, field) != getattr(other, field):
            return False
    special = other.special_tokens
    reserved = special.ids.keys() - special.allowed_in_messages
    if not reserved <= one.special_tokens.ids.keys():
        return False
    texts = [*TRIAL_TEXTS, *(f"a{name} {name}b" for name in special.ids)]
    return all(map(np.array_equal, one.encode(texts), other.encode(texts)))


_ADVICE = (
    "write a complete tokenizer.json, for example with transformers: "
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def _require_complete(tokenizer: SentencePiece | GPT2, folder: Path) -> None:
    """Raises UserError if settings in the folder of a tokenizer change it."""
    _require_added_tokens(tokenizer, folder)
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


def _require_added_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Raises UserError if settings in the folder of a tokenizer add tokens that it lacks."""
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
