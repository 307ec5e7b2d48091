"""Text generation with a model, its weights and its tokenizer."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smallgpt_jax import models
from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.data.prompts import encode_pieces
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder
from smallgpt_jax.inference.detokenizer import Detokenizer
from smallgpt_jax.inference.sampling import TEMPERATURE, Sampling

# seconds; if a step is slower, starting a program for each token takes less than 3% of the time
FAST_STEP = 0.02


@dataclasses.dataclass(frozen=True)
class TextModel:
    model: models.LanguageModel
    weights: Any  # in the decoding layout, see `layout.pack`
    tokenizer: tokenizers.Tokenizer

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 200,
        *,
        temperature: float | None = TEMPERATURE,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str | int] = (),
        seed: int = 0,
    ) -> str:
        """Returns the continuation of `prompt`. See `stream` for the arguments."""
        return self.generate_batch(
            [prompt],
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            stop=stop,
            seed=seed,
        )[0][0]

    def stream(
        self,
        prompt: str = "",
        max_new_tokens: int = 200,
        *,
        temperature: float | None = TEMPERATURE,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str | int] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Yields the continuation of `prompt` piece by piece, while it is generated.

        Generation ends at end-of-text, after `max_new_tokens` tokens, or before the first of the
        strings or token ids in `stop`. When the context is full, its older half is dropped and the rest is
        prefilled again. `Sampling` describes the other settings. UserError is raised by the call
        itself, before the iteration begins.
        """
        sampling = validated(
            Sampling(temperature, top_k, top_p, repetition_penalty), stop, max_new_tokens
        )
        return self._stream(
            self._start_session([prompt], seed), prompt, max_new_tokens, stop, sampling
        )

    def generate_batch(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 200,
        *,
        samples: int = 1,
        temperature: float | None = TEMPERATURE,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str | int] = (),
        seed: int = 0,
    ) -> list[list[str]]:
        """Returns one list of `samples` continuations per prompt. See `stream` for the other
        arguments.

        The first is what `generate` returns, unless rounding changes a token; each has its own
        random stream.
        """
        sampling = validated(
            Sampling(temperature, top_k, top_p, repetition_penalty), stop, max_new_tokens
        )
        if samples < 1:
            raise UserError(f"samples={samples}: must be at least 1")
        session = self._start_session(prompts, seed)
        session.repeat(samples, sampling)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        texts = self.complete(session, repeated, max_new_tokens, stop, sampling)
        return [texts[i : i + samples] for i in range(0, len(texts), samples)]

    def complete(
        self,
        session: decoder.DecodeSession,
        prompts: Sequence[str],
        max_new_tokens: int,
        stop: Sequence[str | int],
        sampling: Sampling,
    ) -> list[str]:
        """Returns one continuation per row of `session`. Row i of the session contains the tokens
        of `prompts[i]`.
        """
        session.reserve(max_new_tokens)
        detokenizers = [
            Detokenizer(self.tokenizer, stop, row, prompt)
            for row, prompt in zip(session.ids, prompts)
        ]
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

    def session(
        self,
        ids: Sequence[Sequence[int]],
        seed: int = 0,
        samples: Sequence[int] | None = None,
    ) -> decoder.DecodeSession:
        """Returns a session of rows of tokens; see `DecodeSession` for the arguments."""
        return decoder.DecodeSession(
            self.model,
            self.weights,
            self.tokenizer.vocab_size,
            ids,
            seed,
            self.tokenizer.end_of_text,
            samples,
        )

    def conversation(self, seed: int = 0) -> "Conversation":
        return Conversation(self, seed)

    def chat(self, template: ChatTemplate, seed: int = 0) -> "Chat":
        return Chat(self, template, seed)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """If `continues` is true, the text continues an earlier text; otherwise it begins a
        document.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: not valid UTF-8 at character {error.start + 1} ({text[error.start]!r}); "
                "remove that character"
            ) from None
        ids = (
            self.tokenizer.encode_continuation(text)
            if continues
            else self.tokenizer.encode([text])[0]
        ).tolist()
        if self.tokenizer.unknown in ids or self.tokenizer.count_dropped(text):
            unencodable = sorted({c for c in text if not self._encodes(c)})
            raise UserError(
                "prompt: the tokenizer cannot encode "
                f"{', '.join(map(repr, unencodable)) or 'this text'}; remove it from the prompt"
            )
        return ids

    def _encodes(self, text: str) -> bool:
        if self.tokenizer.count_dropped(text):
            return False
        return self.tokenizer.unknown not in self.tokenizer.encode([text])[0]

    def _start_session(self, prompts: Sequence[str], seed: int) -> decoder.DecodeSession:
        if isinstance(prompts, str) or not prompts:
            raise UserError(f'prompts={prompts!r}: expected a list of texts; "" begins a document')
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed}: must be at least 0 and below 2^32")
        context = self.model.config.context_length
        ids = [[self.tokenizer.begin_of_text, *self.encode(prompt)] for prompt in prompts]
        if (longest := max(map(len, ids))) > context:
            raise UserError(
                f"prompt: has {longest - 1:,} tokens, but the model's context of {context:,} "
                f"tokens has room for {context - 1:,} after the begin-of-text token; shorten the "
                "prompt"
            )
        return self.session(ids, seed)

    def _stream(
        self,
        session: decoder.DecodeSession,
        prompt: str,
        max_new_tokens: int,
        stop: Sequence[str | int],
        sampling: Sampling,
        max_steps: int = decoder.MAX_STEPS,
    ) -> Iterator[str]:
        """Appends the tokens to the only row, whose text ends with `prompt`. Slow steps run singly,
        for even output.
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
    """A text that grows turn by turn. When it exceeds the context, its newest context_length / 2
    tokens are kept.
    """

    def __init__(self, text_model: TextModel, seed: int = 0):
        self._model = text_model
        self._session = text_model._start_session([""], seed)

    def say(
        self,
        text: str,
        max_new_tokens: int = 200,
        *,
        temperature: float | None = TEMPERATURE,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str | int] = (),
    ) -> Iterator[str]:
        """Appends `text`, or raises UserError, at once; appends the continuation while the caller
        iterates over it.

        A stop string is not yielded, but becomes part of the conversation.
        """
        sampling = validated(
            Sampling(temperature, top_k, top_p, repetition_penalty), stop, max_new_tokens
        )
        is_empty = self._session.ids[0] == [self._model.tokenizer.begin_of_text]
        ids = self._model.encode(text, continues=not is_empty)
        half = max(1, self._model.model.config.context_length // 2)
        if len(ids) > half:
            raise UserError(
                f"text: has {len(ids):,} tokens, more than {half:,}, which is half of the model's "
                "context; shorten the text"
            )
        self._session.resume()
        self._session.ids[0] += ids
        # With stop strings, compute one token per call. A call for several tokens could also cache
        # tokens after the stop string. The next turn would then have to compute the whole cache
        # again.
        return self._model._stream(
            self._session, text, max_new_tokens, stop, sampling, 1 if stop else decoder.MAX_STEPS
        )

    @property
    def dropped(self) -> int:
        return self._session.dropped


class Chat:
    """A conversation whose messages a chat template writes, encoded as in fine-tuning.

    When it exceeds the context, its oldest messages are dropped, a question and its answer at a
    time.
    """

    def __init__(self, text_model: TextModel, template: ChatTemplate, seed: int = 0):
        self._model, self._template, self._seed = text_model, template, seed
        self.messages: list[dict[str, str]] = []
        self.dropped = 0  # tokens

    def say(
        self,
        text: str,
        max_new_tokens: int = 200,
        *,
        temperature: float | None = TEMPERATURE,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: Sequence[str | int] = (),
    ) -> Iterator[str]:
        """Appends the question, or raises UserError, at once; appends the answer when the iteration
        ends. The answer ends before the special token with which the template ends it.
        """
        sampling = validated(
            Sampling(temperature, top_k, top_p, repetition_penalty), stop, max_new_tokens
        )
        context, question = (
            self._model.model.config.context_length,
            {"role": "user", "content": text},
        )
        room, before = max(1, context - max_new_tokens), None
        while len(ids := self._encode([*self.messages, question])) > (
            room if self.messages else context - 1
        ):
            if not self.messages:
                raise UserError(
                    f"text: has {len(ids):,} tokens with what the chat template adds, but the "
                    f"model's context has room for {context - 1:,}; shorten the text"
                )
            before, self.messages = before or len(ids), self.messages[2:]
        self.dropped += before - len(ids) if before else 0
        session = self._model.session([ids], self._seed)
        self.messages.append(question)
        end = self._template.end_of_turn
        stop = stop if end is None else [*stop, end]
        return self._remember(self._model._stream(session, text, max_new_tokens, stop, sampling))

    def _remember(self, pieces: Iterator[str]) -> Iterator[str]:
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:
            self.messages.append(
                {"role": "assistant", "content": answer.strip()}
            )  # templates write spaces around it

    def _encode(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        tokenizer = self._model.tokenizer
        if name := tokenizer.special_tokens.reserved_in(messages[-1]["content"]):
            raise UserError(f"text: contains a special token: {name}; remove it")
        try:
            pieces = self._template.pieces(messages, add_generation_prompt=True)
        except ValueError as error:
            raise UserError(
                f"text: the chat template fails: {error}; correct the text or the template"
            ) from None
        ids, _ = encode_pieces(pieces, is_chat=True, tokenizer=tokenizer)
        return [tokenizer.begin_of_text, *ids]


def validated(sampling: Sampling, stop: Sequence[str | int], max_new_tokens: int) -> Sampling:
    sampling = sampling.validated()
    if isinstance(stop, str):
        raise UserError(f"stop={stop!r}: expected a list of texts")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
    return sampling
