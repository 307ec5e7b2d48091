"""Text generation with a model, its weights and its tokenizer."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from smallgpt_jax import models
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder
from smallgpt_jax.inference.detokenizer import Detokenizer
from smallgpt_jax.inference.sampling import TEMPERATURE, Sampling

FAST_STEP = 0.02  # seconds; if a step is slower, starting a program for each token takes less than 3% of the time


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model with its weights and tokenizer, ready to generate text."""

    model: models.LanguageModel
    weights: Any  # in the decoding layout, see `layout.pack`
    tokenizer: tokenizers.Tokenizer

    def generate(self, prompt: str = "", max_new_tokens: int = 200, *, temperature: float | None = TEMPERATURE,
                 top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
                 stop: Sequence[str] = (), seed: int = 0) -> str:
        """Returns the continuation of `prompt`. See `stream` for the arguments."""
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).validated()
        validate_settings(stop, max_new_tokens)
        return self.complete(self._start_session([prompt], seed), [prompt], max_new_tokens, stop, sampling)[0]

    def stream(self, prompt: str = "", max_new_tokens: int = 200, *, temperature: float | None = TEMPERATURE,
               top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
               stop: Sequence[str] = (), seed: int = 0) -> Iterator[str]:
        """Yields the continuation of `prompt` piece by piece, while it is generated.

        Generation ends at end-of-text, after `max_new_tokens` tokens, or before the first stop string. When the context
        is full, its older half is dropped and the rest is prefilled again.

        Args:
            prompt: the text to continue; "" begins a new document.
            max_new_tokens: the maximum number of new tokens.
            temperature: the sampling temperature; 0 or None: greedy decoding.
            top_k: samples only from the `top_k` most likely tokens.
            top_p: samples only from the smallest set of tokens with a total probability of at least `top_p`.
            repetition_penalty: values above 1 make tokens that are in the context less likely.
            stop: strings before which the generation ends.
            seed: the random seed.

        Raises UserError if a setting is out of range, if the prompt is longer than the context, or if the tokenizer
        cannot encode the prompt. The call itself raises the error, before the iteration begins.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).validated()
        validate_settings(stop, max_new_tokens)
        return self._stream(self._start_session([prompt], seed), prompt, max_new_tokens, stop, sampling,
                            decoder.MAX_STEPS)

    def generate_batch(self, prompts: Sequence[str], max_new_tokens: int = 200, *, samples: int = 1,
                       temperature: float | None = TEMPERATURE, top_k: int | None = None, top_p: float | None = None,
                       repetition_penalty: float | None = None, stop: Sequence[str] = (), seed: int = 0,
                       ) -> list[list[str]]:
        """Returns one list of `samples` continuations per prompt. All continuations are generated as one batch.

        Prompts may differ in length. The first continuation of each prompt is the text that `generate` returns, unless
        rounding changes a sampled token. Each further continuation has its own random stream. See `stream` for the
        other arguments.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).validated()
        validate_settings(stop, max_new_tokens)
        if samples < 1:
            raise UserError(f"samples={samples}: must be at least 1")
        session = self._start_session(prompts, seed)
        session.repeat(samples, sampling)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        texts = self.complete(session, repeated, max_new_tokens, stop, sampling)
        return [texts[i:i + samples] for i in range(0, len(texts), samples)]

    def complete(self, session: decoder.DecodeSession, prompts: Sequence[str], max_new_tokens: int,
                 stop: Sequence[str], sampling: Sampling) -> list[str]:
        """Returns one continuation per row of `session`. Row i of the session contains the tokens of `prompts[i]`."""
        session.reserve(max_new_tokens)
        detokenizers = [Detokenizer(self.tokenizer, stop, row, prompt) for row, prompt in zip(session.ids, prompts)]
        left = max_new_tokens
        while left and not all(detokenizer.is_done for detokenizer in detokenizers):
            sampled_BxN = session.sample_steps(sampling, left)
            left -= sampled_BxN.shape[1]
            for row, detokenizer, tokens in zip(session.ids, detokenizers, sampled_BxN.tolist()):
                for token in tokens:
                    if not detokenizer.is_done:
                        detokenizer.add(token)
                    if not detokenizer.is_done:
                        row.append(token)
        return [detokenizer.text for detokenizer in detokenizers]

    def conversation(self, seed: int = 0) -> "Conversation":
        """Returns an empty conversation, a text that a user and the model write in turns."""
        return Conversation(self, seed)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Returns the token ids of a text.

        If `continues` is true, the text continues an earlier text; otherwise it begins a document. Raises UserError if
        the tokenizer cannot encode the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"prompt: not valid UTF-8 at character {error.start + 1} ({text[error.start]!r}); "
                            "remove that character") from None
        ids = (self.tokenizer.encode_continuation(text) if continues else self.tokenizer.encode([text])[0]).tolist()
        if (unknown := self.tokenizer.unknown) in ids:
            unencodable = sorted({c for c in text if unknown in self.tokenizer.encode([c])[0]})
            raise UserError(f"prompt: the tokenizer cannot encode {', '.join(map(repr, unencodable)) or 'this text'}; "
                            "remove it from the prompt")
        return ids

    def _start_session(self, prompts: Sequence[str], seed: int) -> decoder.DecodeSession:
        if isinstance(prompts, str) or not prompts:
            raise UserError(f"prompts={prompts!r}: expected a list of texts; \"\" begins a document")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed}: must be at least 0 and below 2^32")
        context = self.model.config.context_length
        ids = [[self.tokenizer.begin_of_text, *self.encode(prompt)] for prompt in prompts]
        if (longest := max(map(len, ids))) > context:
            raise UserError(f"prompt: has {longest - 1:,} tokens, but the model's context of {context:,} tokens has "
                            f"room for {context - 1:,} after the begin-of-text token; shorten the prompt")
        return decoder.DecodeSession(self.model, self.weights, self.tokenizer.vocab_size, ids, seed,
                                     end_of_text=self.tokenizer.end_of_text)

    def _stream(self, session: decoder.DecodeSession, prompt: str, max_new_tokens: int, stop: Sequence[str],
                sampling: Sampling, max_steps: int) -> Iterator[str]:
        """Yields the continuation of the session's only row piece by piece, and appends its tokens to the row.

        `prompt` is the end of the row's text before the call. The compiled program computes up to `max_steps` tokens
        per call. If a step takes FAST_STEP seconds or more, it computes one, so that the text appears evenly.
        """
        session.reserve(max_new_tokens)
        detokenizer = Detokenizer(self.tokenizer, stop, session.ids[0], prompt)
        left, steps = max_new_tokens, 1
        while left and not detokenizer.is_done:
            started = time.perf_counter()
            tokens = session.sample_steps(sampling, min(left, steps))[0].tolist()
            steps = max_steps if time.perf_counter() - started < FAST_STEP * len(tokens) else 1
            left -= len(tokens)
            for token in tokens:
                if token != self.tokenizer.end_of_text:
                    session.ids[0].append(token)
                yield detokenizer.add(token)
                if detokenizer.is_done:
                    break
        yield detokenizer.flush()


class Conversation:
    """A text that grows turn by turn. The cache keeps earlier turns, so that the model computes only new tokens.

    When the text becomes longer than the model's context, only the newest context_length / 2 tokens are kept. They are
    prefilled again.
    """

    def __init__(self, text_model: TextModel, seed: int = 0):
        self._model = text_model
        self._session = text_model._start_session([""], seed)

    def say(self, text: str, max_new_tokens: int = 200, *, temperature: float | None = TEMPERATURE,
            top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
            stop: Sequence[str] = ()) -> Iterator[str]:
        """Appends `text` to the conversation and yields the model's continuation. See `TextModel.stream`.

        The call itself appends `text`; the continuation is appended while the caller iterates over it. A stop string is
        not yielded, but becomes part of the conversation.

        Raises UserError if a setting is out of range, if the tokenizer cannot encode `text`, or if `text` is longer
        than half the context. The conversation then stays unchanged.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).validated()
        validate_settings(stop, max_new_tokens)
        is_empty = self._session.ids[0] == [self._model.tokenizer.begin_of_text]
        ids = self._model.encode(text, continues=not is_empty)
        half = max(1, self._model.model.config.context_length // 2)
        if len(ids) > half:
            raise UserError(f"text: has {len(ids):,} tokens, more than {half:,}, which is half of the model's context; "
                            "shorten the text")
        self._session.resume()
        self._session.ids[0] += ids
        # With stop strings, compute one token per call. A call for several tokens could also cache tokens after the
        # stop string. The next turn would then have to compute the whole cache again.
        return self._model._stream(self._session, text, max_new_tokens, stop, sampling,
                                   1 if stop else decoder.MAX_STEPS)

    @property
    def dropped(self) -> int:
        """Returns the number of tokens that have been dropped from the context."""
        return self._session.dropped


def validate_settings(stop: Sequence[str], max_new_tokens: int) -> None:
    """Raises UserError if `stop` or `max_new_tokens` is invalid."""
    if isinstance(stop, str):
        raise UserError(f"stop={stop!r}: expected a list of texts")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
