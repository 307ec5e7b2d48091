"""Conversion of generated tokens to text, one token at a time, up to a stop string."""

import itertools
from collections.abc import Sequence

from smallgpt_jax.data import tokenizers

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # incomplete UTF-8 decodes to this character
DECODED_CONTEXT = 16


class Detokenizer:
    """Converts tokens to text, one token at a time. The text ends before end-of-text, and before
    the first of the strings or tokens in `stop`.

    The last DECODED_CONTEXT tokens of `before` are decoded together with the new tokens, because
    some tokenizers drop the leading space of a text's first token. `prompt` is the text that
    `before` encodes, or its end.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        stop: Sequence[str | int] = (),
        before: Sequence[int] = (),
        prompt: str = "",
    ):
        self.text, self.is_done = "", False
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if isinstance(text, str) and text]
        self._ends = {tokenizer.end_of_text, *(i for i in stop if isinstance(i, int))}
        self._ids, self._shown = list(before[-DECODED_CONTEXT:]), 0
        self._before = tokenizer.decode(self._ids)
        if prompt[-1:].isspace() and not self._before[-1:].isspace():
            self._before += " "  # the tokenizer has dropped the space at the end of the prompt

    def add(self, token: int) -> str:
        """Returns new text that later tokens cannot change, and holds back the rest."""
        if token in self._ends:
            self.is_done = True
            return self.flush()
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # If a character begins in `before` and ends in a new token, the new text begins before
        # len(self._before).
        self.text = text[common_prefix_length(self._before, text) :]
        if starts := [start for s in self._stop if (start := self.text.find(s)) >= 0]:
            self.is_done = True
            self.text = self.text[: min(starts)]
            return self.flush()
        # Hold back an incomplete character, and a suffix that may be the beginning of a stop
        # string.
        complete = self.text.rstrip(REPLACEMENT_CHARACTER)
        held_back = max(
            (n for s in self._stop for n in range(1, len(s)) if complete.endswith(s[:n])), default=0
        )
        return self._show(len(complete) - held_back)

    def flush(self) -> str:
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def common_prefix_length(one: str, other: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
