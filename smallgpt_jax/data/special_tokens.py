"""Special tokens: tokens that a text contains only by their names."""

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property

END_OF_TEXT = "<|endoftext|>"  # the name for tokenizers that have none
# Variables of a chat template, as in transformers.
VARIABLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)  # name → id
    # Of a chat template: "eos_token" → "</s>".
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Names that a message may contain, such as "<think>": its author means the token.
    allowed_in_messages: frozenset[str] = frozenset()

    @classmethod
    def of_marks(cls, begin: tuple[str, int], end: tuple[str, int]) -> "SpecialTokens":
        """Returns those of a tokenizer whose special tokens begin and end a text."""
        variables = {"bos_token": begin[0], "eos_token": end[0], "pad_token": end[0]}
        return cls(dict([begin, end]), variables)

    @cached_property
    def _pattern(self) -> re.Pattern:
        longest_first = sorted(self.ids, key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first))
        return re.compile(f"({names or '(?!)'})")  # (?!) matches nothing

    def split(self, text: str) -> list[str]:
        """Returns the names in `text` and the texts between them, which can be empty."""
        return self._pattern.split(text)

    def up_to_first(self, text: str) -> str:
        """Returns `text` up to its first name, with the name; all of it, if it has none."""
        first = self._pattern.search(text)
        return text[: first.end()] if first else text

    def remove_from(self, text: str) -> str:
        return self._pattern.sub("", text)

    def reserved_in(self, text: str) -> str:
        """Returns a name in `text` that no message may contain, or ""."""
        names = (name for name in self.ids if name not in self.allowed_in_messages)
        return next((name for name in names if name in text), "")
