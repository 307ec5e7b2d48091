"""Tokenizers in the format of Hugging Face's `tokenizers` library: a `tokenizer.json` and the files
beside it.
"""

import contextlib
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from smallgpt_jax.data.panics import no_panic_messages, panics_as_errors
from smallgpt_jax.data.special_tokens import VARIABLES, SpecialTokens
from smallgpt_jax.data.tokenizers import gpt2_bytes
from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.storage.bounded import read_bounded
from smallgpt_jax.storage.json_files import OBJECT, parse_json

TOKENIZER_JSON = "tokenizer.json"
# These name the special tokens; both may be missing.
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Names of the end-of-text token, for tokenizers without a file that names it. The first that exists
# is used.
_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_TRIAL = "The 1st,\n\t ü漢🙂"  # is encoded and decoded when a tokenizer is opened
_MAX_VALUES = 2**22  # of a tokenizer.json; the largest ones have 2 million
_MAX_GROWTH = 1000  # of a text in a normalizer or a decoder
_MAX_TOKEN_CHARACTERS = 10_000
_MAX_TRIED = 300  # tokens whose text is tried, to find what begins a text
_SEQUENCE_FIELDS = ("normalizers", "pretokenizers", "decoders")  # the steps of a "Sequence"


class HuggingFaceTokenizer:
    """Adds no special tokens to a text, does not truncate, and encodes a special token's name as
    ordinary text.
    """

    kind = "hugging_face"

    def __init__(self, files: Mapping[str, bytes]):
        """`files` are TOKENIZER_JSON and those of SETTINGS_FILES that exist. Raises ValueError for
        damaged files.
        """
        self._files = dict(files)
        self._tokenizer = self._open(files[TOKENIZER_JSON].decode())
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if max(map(len, vocabulary), default=0) > _MAX_TOKEN_CHARACTERS:
            raise ValueError(f"a token has more than {_MAX_TOKEN_CHARACTERS:,} characters")
        # Ids may have gaps, so the vocabulary may have fewer tokens than this.
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        if self.vocab_size > 2**24:  # weights for so many ids would fit nowhere
            raise ValueError(f"the id {self.vocab_size - 1} is too large")
        content = json.loads(files[TOKENIZER_JSON])
        self.unknown = self._find_unknown(content["model"])
        encodes_all = _encodes_bytes(content, vocabulary.keys())
        self._drops_characters = self.unknown is None and not encodes_all
        self._variables = _template_variables(self._files)  # such as {"eos_token": "</s>"}
        self.special_tokens = self._find_special_tokens()
        self.end_of_text_token = self._find_end_of_text()
        self.end_of_text = self._tokenizer.token_to_id(self.end_of_text_token)
        self.begin_of_text = self._find_begin_of_text()
        self.begin_of_text_token = self._tokenizer.id_to_token(self.begin_of_text)
        self._try_out()

    def _try_out(self) -> None:
        """Raises ValueError if a text can be encoded as a mark, which separates documents."""
        # Some damage, such as a normalizer that fails, shows only when the tokenizer is used.
        self._tokenizer.decode(self._tokenizer.encode(_TRIAL, add_special_tokens=False).ids)
        marks = {
            self.end_of_text_token: self.end_of_text,
            self.begin_of_text_token: self.begin_of_text,
        }
        for token, mark in marks.items():
            if mark in self._tokenizer.encode(token, add_special_tokens=False).ids:
                raise ValueError(f"the text {token!r} is encoded as a special token")

    @staticmethod
    def _open(content: str):
        tokenizer = import_library("tokenizers").Tokenizer.from_str(content)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # as ordinary text
        return tokenizer

    def _find_special_tokens(self) -> SpecialTokens:
        ids, allowed_in_messages = {}, set()
        for i, token in self._tokenizer.get_added_tokens_decoder().items():
            # spaces that are a token, as in models for code, are text and not a name
            if token.content.strip():
                ids[token.content] = i
            if not token.special:
                allowed_in_messages.add(token.content)
        return SpecialTokens(ids, self._variables, frozenset(allowed_in_messages))

    def _find_end_of_text(self) -> str:
        if "eos_token" in self._variables:
            token = self._variables["eos_token"]
            if self._tokenizer.token_to_id(token) is None:
                raise ValueError(f"eos_token={token!r} is not in the vocabulary")
            return token
        for token in _END_OF_TEXT_NAMES:
            if self._tokenizer.token_to_id(token) is not None:
                return token
        raise ValueError(
            "no end-of-text token; set eos_token in a tokenizer_config.json in the same folder"
        )

    def _find_begin_of_text(self) -> int:
        """Returns the id that transformers puts before a text, or end_of_text if it puts none.

        `add_bos_token` in tokenizer_config.json has no effect where there is a tokenizer.json.
        """
        # A vocabulary of another script or of special symbols encodes neither "a" nor "0".
        tokens = (self._tokenizer.decode([i]) for i in range(min(self.vocab_size, _MAX_TRIED)))
        for text in itertools.chain(["a", "0"], tokens):
            encoding = self._tokenizer.encode(text, add_special_tokens=True)
            if 0 not in encoding.special_tokens_mask:
                continue  # the text has no tokens
            count = encoding.special_tokens_mask.index(0)  # before the text's first token
            if count > 1:
                raise ValueError(f"{count} special tokens begin each text, at most one can")
            return encoding.ids[0] if count else self.end_of_text
        raise ValueError("it encodes no text")

    def _find_unknown(self, model: Mapping) -> int | None:
        if model.get("unk_id") is not None:  # a unigram model
            return model["unk_id"]
        token = model.get("unk_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _failures_named():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_continuation(self, text: str) -> np.ndarray:
        with _failures_named():
            encoding = self._for_continuations.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def encode_chat(self, text: str, continues: bool = False) -> list[int]:
        """Returns the ids of a text with the names of special tokens, as transformers encodes it;
        but no space is put before a text that continues another.
        """
        # Only the text up to the first special token continues another one.
        first = self.special_tokens.split(text)[0] if continues else ""
        ids = self.encode_continuation(first).tolist() if first else []
        with _failures_named():
            rest = self._for_chats.encode(text[len(first) :], add_special_tokens=False)
        return ids + rest.ids

    @functools.cached_property
    def _for_chats(self):
        """Returns the tokenizer, which encodes the names of special tokens as these tokens."""
        tokenizer = self._open(self._files[TOKENIZER_JSON].decode())
        tokenizer.encode_special_tokens = False
        return tokenizer

    @functools.cached_property
    def _for_continuations(self):
        """Returns the tokenizer, without the steps that prepend a space to each text."""
        content = json.loads(self._files[TOKENIZER_JSON])
        for name in ("normalizer", "pre_tokenizer"):
            content[name] = _without_prefix_space(content.get(name))
        with no_panic_messages(), _failures_named():
            return self._open(json.dumps(content))

    def decode(self, ids: Sequence[int]) -> str:
        with _failures_named():
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def count_dropped(self, text: str) -> int:
        if not self._drops_characters:
            return 0
        is_encoded = np.zeros(len(text), bool)
        with _failures_named():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        for start, end in encoding.offsets:
            is_encoded[start:end] = True
        dropped = [text[i] for i in np.flatnonzero(~is_encoded)]
        # Spaces may be dropped on purpose: many tokenizers split at them.
        return sum(not char.isspace() for char in dropped)

    def step_types(self) -> list[str]:
        """Returns the types of the normalizers and pre-tokenizers, in their order."""
        content = json.loads(self._files[TOKENIZER_JSON])
        steps = _steps(content.get("normalizer")) + _steps(content.get("pre_tokenizer"))
        return [step["type"] for step in steps]

    def names(self) -> Set[str]:
        return self._tokenizer.get_vocab(with_added_tokens=True).keys()

    def files(self) -> dict[str, bytes]:
        return self._files


def _encodes_bytes(content: Mapping, vocabulary: Set[str]) -> bool:
    """Returns whether a tokenizer.json has a token for each byte, so that it can encode all texts."""
    if content["model"].get("byte_fallback"):
        return {f"<0x{byte:02X}>" for byte in range(256)} <= vocabulary
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return '"ByteLevel"' in steps and vocabulary >= gpt2_bytes().keys()


def _steps(step: Mapping | None) -> list[Mapping]:
    """Returns the steps of a normalizer, pre-tokenizer or decoder, which can be a sequence."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    (nested,) = (step[name] for name in _SEQUENCE_FIELDS if name in step)
    return list(itertools.chain.from_iterable(map(_steps, nested)))


def _template_variables(files: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the values of VARIABLES that SETTINGS_FILES have, as transformers reads them. Raises
    ValueError for other values than tokens.
    """
    settings = [parse_json(files.get(name, b"{}"), OBJECT) for name in SETTINGS_FILES]
    merged, tokens = merge_settings(*settings), {}
    for name in VARIABLES:
        token = merged.get(name)
        if token is None:
            continue
        tokens[name] = _content_of(token)
        if not isinstance(tokens[name], str):
            raise ValueError(f"{name}={token!r} is not a token")
    return tokens


def merge_settings(settings: Mapping, special: Mapping) -> dict:
    """Arguments: the content of SETTINGS_FILES."""
    if "added_tokens_decoder" in settings:  # then the first file is complete
        return dict(settings)
    return {**settings, **special}


def _content_of(token):
    return token.get("content") if isinstance(token, dict) else token


def added_tokens(settings: Mapping) -> set[str]:
    """Returns the tokens that merged settings add to a tokenizer, if it lacks them."""
    tokens = [settings.get("bos_token"), settings.get("eos_token")]
    for name in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
        more = settings.get(name)
        if isinstance(more, dict):
            tokens += more.values()
        elif isinstance(more, list):
            tokens += more
    contents = map(_content_of, tokens)
    return {content for content in contents if isinstance(content, str) and content}


def read_files(path: Path) -> HuggingFaceTokenizer:
    """Returns the tokenizer in a file and, beside one that is named `tokenizer.json`, in
    SETTINGS_FILES. Raises UserError.
    """
    files = {TOKENIZER_JSON: path}
    if path.name == TOKENIZER_JSON:
        beside = [path.parent / name for name in SETTINGS_FILES]
        files |= {file.name: file for file in beside if file.is_file()}
    try:
        contents = {name: read_bounded(file) for name, file in files.items()}
        described = parse_json(contents[TOKENIZER_JSON], {"model": OBJECT}, _MAX_VALUES)
        for name in ("normalizer", "decoder"):
            times = math.prod(map(_growth, _steps(described.get(name))))
            if times > _MAX_GROWTH:
                raise ValueError(f"its {name} makes texts up to {times:,.0f} times as long")
        dropout = described["model"].get("dropout")
        is_random = isinstance(dropout, int | float) and dropout > 0
        if is_random:  # a store, and a resumed preparation of it, must always have the same ids
            described["model"]["dropout"] = None
            contents[TOKENIZER_JSON] = json.dumps(described).encode()
        with no_panic_messages(), panics_as_errors():
            tokenizer = HuggingFaceTokenizer(contents)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: unsupported tokenizer, or damaged ({short_reason(error)})"
        ) from None
    if is_random:
        print(
            f"{path}: its dropout of {dropout} is not used, so that a text always has the same ids",
            file=sys.stderr,
        )
    return tokenizer


def _growth(step: Mapping) -> float:
    """Returns how many times as many characters a step can make of a text."""
    if step["type"] == "Prepend":
        return 1 + len(step["prepend"])
    if step["type"] == "Replace":
        content = len(step["content"])
        replaced = len(step["pattern"].get("String", ""))
        # A regular expression can match "" before each character.
        return max(1, content / replaced) if replaced else 1 + content
    return 1


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    """Raises UserError if the library fails for a text."""
    try:
        with panics_as_errors():
            yield
    except ValueError as error:
        raise UserError(
            f"{TOKENIZER_JSON}: the tokenizer fails ({error}); use another tokenizer"
        ) from None


def _without_prefix_space(step: dict | None) -> dict | None:
    """Returns a normalizer or pre-tokenizer, changed so that it prepends nothing to a text."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Replace":
        pattern = step["pattern"].get("Regex", "")
        if pattern.startswith(r"\A"):  # at the beginning of a text, as in our exports
            return None
    changed = dict(step)
    for name in _SEQUENCE_FIELDS:
        if name in step:
            changed[name] = list(filter(None, map(_without_prefix_space, step[name])))
    if "add_prefix_space" in step:
        changed["add_prefix_space"] = False
    if step["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    return changed
