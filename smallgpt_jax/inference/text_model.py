"""Text generation with a model, its weights and its tokenizer."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypedDict, Unpack

from smallgpt_jax import models
from smallgpt_jax.data import tokenizers
from smallgpt_jax.data.chat_template import ChatTemplate
from smallgpt_jax.data.prompts import encode_pieces
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference.decoder import MAX_STEPS, Decoder, DecodeSession
from smallgpt_jax.inference.detokenizer import Detokenizer
from smallgpt_jax.inference.sampling import TEMPERATURE, Sampling

# seconds; if a step is slower, starting a program for each token takes less than 3% of the time
FAST_STEP = 0.02
NEW_TOKENS = 200


class Settings(TypedDict, total=False):
    """Keyword arguments of all methods that generate. `Sampling` describes the first four."""

    temperature: float | None  # by default TEMPERATURE
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    stop: Sequence[str | int]  # the text ends before the first of these strings or token ids


class GenerationConfig(NamedTuple):
    max_new_tokens: int
    stop: Sequence[str | int]
    sampling: Sampling


def _make_config(method: str, max_new_tokens: int, settings: Settings) -> GenerationConfig:
    """Raises UserError for invalid settings, and TypeError as `method` would for unknown ones."""
    unknown = settings.keys() - Settings.__annotations__.keys()
    if unknown:
        raise TypeError(f"{method}() got an unexpected keyword argument {min(unknown)!r}")
    chosen: dict[str, Any] = {"temperature": TEMPERATURE, **settings}
    stop = chosen.pop("stop", ())
    sampling = Sampling(**chosen).validated()
    if isinstance(stop, str) or not isinstance(stop, Collection):
        raise UserError(f"stop={stop!r}: expected a list of texts")
    for end in stop:
        # every text contains the empty one
        if end == "" or not isinstance(end, (str, Integral)):
            raise UserError(f"stop={stop!r}: expected texts that are not empty, or token ids")
    _require_integer("max_new_tokens", max_new_tokens, 0)
    return GenerationConfig(max_new_tokens, stop, sampling)


def _require_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, Integral) or value < least:
        raise UserError(f"{name}={value!r}: must be an integer, at least {least}")


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UserError(f"{name}={value!r}: expected a text")


@dataclasses.dataclass(frozen=True)
class TextModel:
    """What `load` returns: a model with its weights and its tokenizer."""

    model: models.LanguageModel
    weights: Any  # in the decoding layout, see `layout.pack`
    tokenizer: tokenizers.Tokenizer
    # reads that of the run, if the model is from one: only a chat needs it
    load_template: Callable[[], ChatTemplate] | None = None

    def __repr__(self) -> str:
        # not the weights, which a notebook would print
        config = self.model.config
        parameters = f"{models.num_parameters(self.model):,}"
        return f"TextModel({config.architecture}, {config.num_layers} × {config.d_model}, {parameters} parameters)"

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = NEW_TOKENS,
        *,
        seed: int = 0,
        **settings: Unpack[Settings],
    ) -> str:
        """Returns the continuation of `prompt`. See `stream` for the arguments."""
        config = _make_config("TextModel.generate", max_new_tokens, settings)
        return self._generate_batch([prompt], config, 1, seed)[0][0]

    def stream(
        self,
        prompt: str = "",
        max_new_tokens: int = NEW_TOKENS,
        *,
        seed: int = 0,
        **settings: Unpack[Settings],
    ) -> Iterator[str]:
        """Yields the continuation of `prompt` piece by piece, while it is generated.

        Generation ends at end-of-text, after `max_new_tokens` tokens, or before the first of the
        strings or token ids in `stop`. A full context loses its older half. The other settings are
        temperature, top_k, top_p and repetition_penalty (see `Sampling`). Raises UserError at once.
        """
        config = _make_config("TextModel.stream", max_new_tokens, settings)
        return self._stream(self._start_session([prompt], seed), prompt, config)

    def generate_batch(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = NEW_TOKENS,
        *,
        samples: int = 1,
        seed: int = 0,
        **settings: Unpack[Settings],
    ) -> list[list[str]]:
        """Returns one list of `samples` continuations per prompt; see `stream`. The first is what
        `generate` returns, unless rounding changes a token; each has its own random stream.
        """
        config = _make_config("TextModel.generate_batch", max_new_tokens, settings)
        _require_integer("samples", samples, 1)
        return self._generate_batch(prompts, config, samples, seed)

    def _generate_batch(
        self, prompts: Sequence[str], config: GenerationConfig, samples: int, seed: int
    ) -> list[list[str]]:
        session = self._start_session(prompts, seed)
        session.repeat(samples, config.sampling)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        texts = self.complete(session, repeated, config)
        return [texts[i : i + samples] for i in range(0, len(texts), samples)]

    def complete(
        self, session: DecodeSession, prompts: Sequence[str], config: GenerationConfig
    ) -> list[str]:
        """Returns one continuation per row of `session`, which has the tokens of `prompts`."""
        session.reserve(config.max_new_tokens)
        detokenizers = [
            Detokenizer(self.tokenizer, config.stop, row, prompt)
            for row, prompt in zip(session.ids, prompts)
        ]
        # until all rows are done: finished ones sample along, and the tokens are not used
        left = config.max_new_tokens
        while left and not all(detokenizer.is_done for detokenizer in detokenizers):
            sampled_BxN = session.sample_steps(config.sampling, left)
            left -= sampled_BxN.shape[1]
            for row, detokenizer, tokens in zip(session.ids, detokenizers, sampled_BxN.tolist()):
                for token in tokens:
                    if not detokenizer.is_done:
                        detokenizer.add(token)
                    # The session samples nothing more for a row that lacks one of its tokens, so the
                    # token that ended the text is not appended.
                    if not detokenizer.is_done:
                        row.append(token)
        return [detokenizer.text for detokenizer in detokenizers]

    def session(
        self, ids: Sequence[Sequence[int]], seed: int = 0, samples: Sequence[int] | None = None
    ) -> DecodeSession:
        """Returns a session of rows of tokens; see `DecodeSession` for the arguments."""
        decoder = Decoder(self.model, self.tokenizer.vocab_size, self.tokenizer.end_of_text)
        return DecodeSession(decoder, self.weights, ids, seed, samples)

    def conversation(self, seed: int = 0) -> "Conversation":
        """Begins a text to which both sides append in turn."""
        return Conversation(self, seed)

    def chat(self, template: ChatTemplate | None = None, seed: int = 0) -> "Chat":
        """Begins a conversation in the chat template of the run, or in another `template`. Raises
        UserError if the run has none.
        """
        if template is None:
            if self.load_template is None:
                raise UserError("template: the model is not from a run; give a ChatTemplate")
            template = self.load_template()
        return Chat(self, template, seed)

    def _tokens_of_turn(self, max_new_tokens: int | None) -> int:
        if max_new_tokens is not None:
            return max_new_tokens
        # an answer as long as the context would drop the question at once
        return min(NEW_TOKENS, max(1, self.model.config.context_length // 4))

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """The text begins a document, or `continues` an earlier text."""
        _require_text("prompt", text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"prompt: not valid UTF-8 at character {error.start + 1} ({text[error.start]!r}); "
                "remove that character"
            ) from None
        tokenizer = self.tokenizer
        encoded = tokenizer.encode_continuation(text) if continues else tokenizer.encode([text])[0]
        ids = encoded.tolist()
        if tokenizer.unknown in ids or tokenizer.count_dropped(text):
            unencodable = sorted({c for c in text if not self._encodes(c)})
            # a text may fail although each of its characters can be encoded
            what = ", ".join(map(repr, unencodable)) or "this text"
            raise UserError(
                f"prompt: the tokenizer cannot encode {what}; remove it from the prompt"
            )
        return ids

    def _encodes(self, text: str) -> bool:
        if self.tokenizer.count_dropped(text):
            return False
        return self.tokenizer.unknown not in self.tokenizer.encode([text])[0]

    def _start_session(self, prompts: Sequence[str], seed: int) -> DecodeSession:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise UserError(f'prompts={prompts!r}: expected a list of texts; "" begins a document')
        _require_integer("seed", seed, 0)
        if seed >= 2**32:
            raise UserError(f"seed={seed}: must be below 2^32")
        context = self.model.config.context_length
        ids = [[self.tokenizer.begin_of_text, *self.encode(prompt)] for prompt in prompts]
        longest = max(map(len, ids))
        if longest > context:
            raise UserError(
                f"prompt: has {longest - 1:,} tokens, but the model's context of {context:,} "
                f"tokens has room for {context - 1:,} after the begin-of-text token; shorten the "
                "prompt"
            )
        return self.session(ids, seed)

    def _stream(
        self,
        session: DecodeSession,
        prompt: str,
        config: GenerationConfig,
        max_steps: int = MAX_STEPS,
    ) -> Iterator[str]:
        """Appends the tokens to the only row, whose text ends with `prompt`."""
        session.reserve(config.max_new_tokens)
        ids = session.ids[0]
        detokenizer = Detokenizer(self.tokenizer, config.stop, ids, prompt)
        left, steps = config.max_new_tokens, 1
        while left and not detokenizer.is_done:
            started = time.perf_counter()
            tokens = session.sample_steps(config.sampling, min(left, steps))[0].tolist()
            # slow steps run singly, for even output
            is_fast = time.perf_counter() - started < FAST_STEP * len(tokens)
            steps = max_steps if is_fast else 1
            left -= len(tokens)
            for token in tokens:
                if token != self.tokenizer.end_of_text:
                    ids.append(token)
                yield detokenizer.add(token)
                if detokenizer.is_done:
                    break
        yield detokenizer.flush()


class Conversation:
    """A text that grows turn by turn, and loses its older half when it exceeds the context."""

    def __init__(self, text_model: TextModel, seed: int = 0):
        self._model = text_model
        self._session = text_model._start_session([""], seed)

    def say(
        self, text: str, max_new_tokens: int | None = None, **settings: Unpack[Settings]
    ) -> Iterator[str]:
        """Appends `text`, or raises UserError, at once; appends the continuation as it is read. By
        default, that has up to NEW_TOKENS tokens, but at most a quarter of the context.
        """
        new_tokens = self._model._tokens_of_turn(max_new_tokens)
        config = _make_config("Conversation.say", new_tokens, settings)
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
        # A stop string is not yielded, but becomes part of the conversation. Several tokens per
        # call could also cache tokens after it, and the next turn would compute the cache again.
        max_steps = 1 if config.stop else MAX_STEPS
        return self._model._stream(self._session, text, config, max_steps)

    @property
    def dropped(self) -> int:
        return self._session.dropped


class Chat:
    """A conversation whose messages a chat template writes, encoded as in fine-tuning. A full
    context loses its oldest messages, a question and its answer at a time.
    """

    def __init__(self, text_model: TextModel, template: ChatTemplate, seed: int = 0):
        self._model, self._template, self._seed = text_model, template, seed
        self.messages: list[Mapping[str, str]] = []
        self.dropped = 0  # tokens

    def say(
        self, text: str, max_new_tokens: int | None = None, **settings: Unpack[Settings]
    ) -> Iterator[str]:
        """Appends the question, or raises UserError, at once; the answer when the iteration ends. By
        default, that has up to NEW_TOKENS tokens, but at most a quarter of the context.
        """
        config = _make_config("Chat.say", self._model._tokens_of_turn(max_new_tokens), settings)
        _require_text("text", text)
        # Encoded anew for each question: what a template writes for earlier messages can change.
        ids = self._append({"role": "user", "content": text}, config.max_new_tokens)
        session = self._model.session([ids], self._seed)
        # the special token with which the template ends an answer
        end = self._template.end_of_turn
        if end is not None:
            config = config._replace(stop=[*config.stop, end])
        return self._remember(self._model._stream(session, text, config))

    def _append(self, question: Mapping[str, str], max_new_tokens: int) -> list[int]:
        """Returns the tokens of the conversation, without the oldest messages if room is scarce."""
        context = self._model.model.config.context_length
        # A maximum: the answer may need less than half of the context.
        room = max(context - max_new_tokens, context // 2, 1)
        messages = [*self._answered(), question]
        ids = self._encode(messages)
        before = len(ids)
        # Two at a time, since templates expect a question first.
        while len(messages) > 1 and len(ids) > room:
            messages = messages[2:] or messages[-1:]
            ids = self._encode(messages)
        # a lone question may take the room of its answer, which then outgrows the context
        if len(messages) == 1 and len(ids) > context - 1:
            raise UserError(
                f"text: has {len(ids):,} tokens with what the chat template adds, but the "
                f"model's context has room for {context - 1:,}; shorten the text"
            )
        self.messages = messages
        self.dropped += before - len(ids)
        return ids

    def _answered(self) -> list[Mapping[str, str]]:
        """Returns the messages without a last question whose answer nobody has read."""
        has_answer = not self.messages or self.messages[-1]["role"] != "user"
        return self.messages if has_answer else self.messages[:-1]

    def _remember(self, pieces: Iterator[str]) -> Iterator[str]:
        answer = ""
        try:
            for piece in pieces:
                answer += piece
                yield piece
        finally:  # also if the reader stops early; templates write spaces around the answer
            self.messages.append({"role": "assistant", "content": answer.strip()})

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
