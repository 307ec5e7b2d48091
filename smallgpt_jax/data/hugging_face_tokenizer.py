"""Tokenizers in the format of Hugging Face's `tokenizers` library: a `tokenizer.json` and the files
beside it.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.storage.json_files import OBJECT, parse_json

TOKENIZER_JSON = "tokenizer.json"
SETTINGS_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
)  # name the special tokens; both may be missing
# Names of the end-of-text token, for tokenizers without a file that names it. The first that exists
# is used.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


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
        # Ids may have gaps, so the vocabulary may have fewer tokens than this.
        self.vocab_size = 1 + max(
            self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1
        )
        if self.vocab_size > 2**24:  # weights for so many ids would fit nowhere
            raise ValueError(f"the id {self.vocab_size - 1} is too large")
        self.unknown = self._find_unknown()
        self.special_tokens = {
            token.content: i
            for i, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.end_of_text_token = self._find_end_of_text()
        self.end_of_text = self._tokenizer.token_to_id(self.end_of_text_token)
        self.begin_of_text = self._find_begin_of_text()
        self.begin_of_text_token = self._tokenizer.id_to_token(self.begin_of_text)
        for mark, token in (
            (self.end_of_text, self.end_of_text_token),
            (self.begin_of_text, self.begin_of_text_token),
        ):
            if mark in self.encode([token])[0]:
                raise ValueError(f"the text {token!r} is encoded as a special token")

    @staticmethod
    def _open(content: str):
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"tokenizers is not installed; run {install_command('hf')}") from None
        try:
            tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception
            raise ValueError(short_reason(error)) from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # as ordinary text
        return tokenizer

    def _find_end_of_text(self) -> str:
        named = self._named("eos_token")
        known = [
            token for token in END_OF_TEXT_NAMES if self._tokenizer.token_to_id(token) is not None
        ]
        if not named and not known:
            raise ValueError(
                "no end-of-text token; set eos_token in a tokenizer_config.json in the same folder"
            )
        token = (named or known)[0]
        if self._tokenizer.token_to_id(token) is None:
            raise ValueError(f"eos_token={token!r} is not in the vocabulary")
        return token

    def _find_begin_of_text(self) -> int:
        """Returns the id that transformers puts before a text, or end_of_text if it puts none."""
        settings = parse_json(self._files.get(SETTINGS_FILES[0], b"{}"), OBJECT)
        if settings.keys() & {
            "add_bos_token",
            "add_eos_token",
        }:  # then transformers ignores tokenizer.json's own rule
            named = self._named("bos_token") if settings.get("add_bos_token") else []
            added = [self._tokenizer.token_to_id(token) for token in named[:1]]
        else:
            added = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        return self.end_of_text if not added or added[0] is None else added[0]

    def _named(self, name: str) -> list[str]:
        found = [
            parse_json(self._files[file], OBJECT).get(name)
            for file in SETTINGS_FILES
            if file in self._files
        ]
        return [token["content"] if isinstance(token, dict) else token for token in found if token]

    def _find_unknown(self) -> int | None:
        model = json.loads(self._files[TOKENIZER_JSON])["model"]
        if model.get("unk_id") is not None:  # a unigram model
            return model["unk_id"]
        return (
            None
            if model.get("unk_token") is None
            else self._tokenizer.token_to_id(model["unk_token"])
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.array(encoding.ids, np.int32)
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def encode_continuation(self, text: str) -> np.ndarray:
        return np.array(
            self._for_continuations.encode(text, add_special_tokens=False).ids, np.int32
        )

    @functools.cached_property
    def _for_continuations(self):
        """Returns the tokenizer, without the parts that prepend a space to each text."""
        content = json.loads(self._files[TOKENIZER_JSON])
        content |= {
            name: without_prefix_space(content.get(name))
            for name in ("normalizer", "pre_tokenizer")
        }
        return self._open(json.dumps(content))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def files(self) -> dict[str, bytes]:
        return self._files


def read_files(path: Path) -> HuggingFaceTokenizer:
    """Also reads the SETTINGS_FILES beside a file that is named `tokenizer.json`."""
    beside = [path.parent / name for name in SETTINGS_FILES] if path.name == TOKENIZER_JSON else []
    files = {TOKENIZER_JSON: path} | {file.name: file for file in beside if file.is_file()}
    try:
        return HuggingFaceTokenizer({name: file.read_bytes() for name, file in files.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path}: unsupported tokenizer, or damaged ({short_reason(error)})"
        ) from None


def without_prefix_space(step: dict | None) -> dict | None:
    """Returns a normalizer or pre-tokenizer of a tokenizer.json, changed so that it prepends
    nothing to a text.
    """
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Metaspace":
        return {
            "type": "Metaspace",
            "replacement": step["replacement"],
            "prepend_scheme": "never",
            "split": step.get("split", True),
        }
    changed = {
        name: [kept for part in step[name] if (kept := without_prefix_space(part))]
        for name in ("normalizers", "pretokenizers")
        if name in step
    }  # the steps of a sequence
    return step | changed | ({"add_prefix_space": False} if "add_prefix_space" in step else {})
