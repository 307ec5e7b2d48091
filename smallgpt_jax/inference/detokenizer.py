"""Conversion of generated tokens to text, one token at a time, up to a stop string."""

import itertools
from collections.abc import Sequence
from numbers import Integral

from smallgpt_jax.data import tokenizers

_REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # incomplete UTF-8 decodes to this character
_DECODED_CONTEXT = 16


class Detokenizer:
    """Converts tokens to text, one token at a time. The text ends before end-of-text, and before
    the first of the strings or tokens in `stop`. `before` are the tokens before the text; `prompt`
    is their text, or its end.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        stop: Sequence[str | int] = (),
        before: Sequence[int] = (),
        prompt: str = "",
    ):
        self.text = ""
        self.is_done = False
        self._shown = 0  # characters of `text` that `add` has returned
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if isinstance(text, str) and text]
        self._ends = {tokenizer.end_of_text, *(i for i in stop if isinstance(i, Integral))}
        # decoded with the new tokens, since some tokenizers drop a text's leading space
        self._ids = list(before[-_DECODED_CONTEXT:])
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
        self.text = text[_common_prefix_length(self._before, text) :]
        starts = [self.text.find(stop) for stop in self._stop if stop in self.text]
        if starts:
            self.is_done = True
            self.text = self.text[: min(starts)]
            return self.flush()
        # Hold back an incomplete character, and a suffix that may be the beginning of a stop
        # string: of "…\nUs" the last three characters, if "\nUser:" is one.
        complete = self.text.rstrip(_REPLACEMENT_CHARACTER)
        held_back = 0
        for stop in self._stop:
            for length in range(1, len(stop)):
                if complete.endswith(stop[:length]):
                    held_back = max(held_back, length)
        return self._show(len(complete) - held_back)

    def flush(self) -> str:
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _common_prefix_length(one: str, other: str) -> int:
    are_equal = (a == b for a, b in zip(one, other))
    return len(list(itertools.takewhile(bool, are_equal)))
