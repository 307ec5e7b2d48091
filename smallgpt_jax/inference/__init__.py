"""Text generation with a trained model.

    model = inference.load("runs/pgpt-quickstart")
    print(model.generate("def main(", temperature=0.5))
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from smallgpt_jax import models, workdir
from smallgpt_jax.checkpoint import Checkpoints
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import local_path
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.decoding_check import check_decoding
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.pgpt import path_weights, with_paths

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # incomplete UTF-8 decodes to this character
DECODED_CONTEXT = 16  # number of earlier tokens that are decoded together with new tokens


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model with its weights and tokenizer, ready to generate text."""

    model: models.LanguageModel
    weights: Any  # in the decoding layout, see `layout.pack`
    tokenizer: tokenizers.Tokenizer

    def generate(self, prompt: str = "", max_new_tokens: int = 200, *, temperature: float | None = 1.0,
                 top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
                 stop: Sequence[str] = (), seed: int = 0) -> str:
        """Returns the continuation of `prompt`. See `stream` for the arguments."""
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).validated()
        validate_settings(stop, max_new_tokens)
        return self.complete(self._start_session([prompt], seed), [prompt], max_new_tokens, stop, sampling)[0]

    def stream(self, prompt: str = "", max_new_tokens: int = 200, *, temperature: float | None = 1.0,
               top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
               stop: Sequence[str] = (), seed: int = 0) -> Iterator[str]:
        """Yields the continuation of `prompt` string by string, as it is generated.

        Generation ends at end-of-text, after `max_new_tokens`, or before the first stop string. When the context is
        full, its older half is dropped and the rest is prefilled again.

        Args:
            prompt: the text to continue; "" begins a new document.
            max_new_tokens: the maximum number of new tokens.
            temperature: the sampling temperature; 0 or None: greedy decoding.
            top_k: samples from this many most likely tokens.
            top_p: samples from the most likely tokens up to this total probability.
            repetition_penalty: values above 1 make tokens that are in the context less likely.
            stop: strings that end the generation; not yielded.
            seed: the random seed.

        Raises UserError when called, not when iterated, if a setting is out of range, or if the prompt is longer than
        the context or cannot be encoded by the tokenizer.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).validated()
        validate_settings(stop, max_new_tokens)
        return self._stream(self._start_session([prompt], seed), prompt, max_new_tokens, stop, sampling)

    def generate_batch(self, prompts: Sequence[str], max_new_tokens: int = 200, *, samples: int = 1,
                       temperature: float | None = 1.0, top_k: int | None = None, top_p: float | None = None,
                       repetition_penalty: float | None = None, stop: Sequence[str] = (), seed: int = 0,
                       ) -> list[list[str]]:
        """Returns `samples` continuations per prompt, generated as one batch: one list per prompt.

        Prompts may differ in length. The first continuation of each prompt is the text that `generate` returns, up to
        rounding. Each further continuation has its own random stream. See `stream` for the other arguments.
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
        """Returns one continuation per row of a session whose rows contain the tokens of `prompts`."""
        session.reserve(max_new_tokens)
        detokenizers = [Detokenizer(self.tokenizer, stop, row, prompt) for row, prompt in zip(session.ids, prompts)]
        left = max_new_tokens
        while left and not all(detokenizer.is_done for detokenizer in detokenizers):
            drawn_BxN = session.sample_steps(sampling, left)
            left -= drawn_BxN.shape[1]
            for row, detokenizer, drawn in zip(session.ids, detokenizers, drawn_BxN.tolist()):
                for token in drawn:
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

        With `continues`, the text continues an earlier text; otherwise it begins a document. Raises UserError if the
        tokenizer cannot encode the text.
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
        ids = [[self.tokenizer.end_of_text, *self.encode(prompt)] for prompt in prompts]
        if (longest := max(map(len, ids))) > context:
            raise UserError(f"prompt: has {longest - 1:,} tokens, but the model's context of {context:,} has room for "
                            f"{context - 1:,} after the end-of-text token; shorten it")
        return decoder.DecodeSession(self.model, self.weights, self.tokenizer.vocab_size, ids, seed,
                                     unpenalized=self.tokenizer.end_of_text)

    def _stream(self, session: decoder.DecodeSession, prompt: str, max_new_tokens: int, stop: Sequence[str],
                sampling: Sampling) -> Iterator[str]:
        """Yields the continuation of the session's only row and appends it to the row. The row ends with `prompt`."""
        session.reserve(max_new_tokens)
        detokenizer = Detokenizer(self.tokenizer, stop, session.ids[0], prompt)
        drawn_B = session.sample(sampling) if max_new_tokens else None
        for left in reversed(range(max_new_tokens)):
            token = int(drawn_B[0])
            if token == self.tokenizer.end_of_text:
                break
            session.ids[0].append(token)
            if left and not stop:  # compute the next token while the caller handles this one
                drawn_B = session.sample(sampling)
            yield detokenizer.add(token)
            if detokenizer.is_done:
                break
            if left and stop:
                drawn_B = session.sample(sampling)
        yield detokenizer.flush()


class Conversation:
    """A text that grows turn by turn. The cache keeps earlier turns, so that only new tokens are computed.

    When the text becomes longer than the model's context, only the newest context_length / 2 tokens are kept, and
    prefilled again.
    """

    def __init__(self, text_model: TextModel, seed: int = 0):
        self._model = text_model
        self._session = text_model._start_session([""], seed)

    def say(self, text: str, max_new_tokens: int = 200, *, temperature: float | None = 1.0,
            top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
            stop: Sequence[str] = ()) -> Iterator[str]:
        """Appends `text` to the conversation and yields the model's continuation. See `TextModel.stream`.

        `text` is appended immediately, the continuation while the iterator is consumed. A stop string is not yielded,
        but is part of the conversation. Raises UserError and leaves the conversation unchanged if a setting is out of
        range, if the tokenizer cannot encode `text`, or if `text` is longer than half the context.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).validated()
        validate_settings(stop, max_new_tokens)
        is_empty = self._session.ids[0] == [self._model.tokenizer.end_of_text]
        ids = self._model.encode(text, continues=not is_empty)
        half = max(1, self._model.model.config.context_length // 2)
        if len(ids) > half:
            raise UserError(f"text: has {len(ids):,} tokens, more than {half:,}, half of the model's context; "
                            "shorten it")
        self._session.ids[0] += ids
        return self._model._stream(self._session, text, max_new_tokens, stop, sampling)

    @property
    def dropped(self) -> int:
        """Returns the number of tokens that have been dropped from the context."""
        return self._session.dropped


class Detokenizer:
    """Decodes tokens one by one, up to the first of the strings in `stop`.

    `before` has the ids of the preceding tokens, whose text ends with `prompt`. New tokens are decoded together with
    the last DECODED_CONTEXT ids of `before`, because some tokenizers drop the leading space of a text's first token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = (),
                 prompt: str = ""):
        self.text, self.is_done = "", False
        self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
        self._ids, self._shown = list(before[-DECODED_CONTEXT:]), 0
        self._before = tokenizer.decode(self._ids)
        if prompt[-1:].isspace() and not self._before[-1:].isspace():
            self._before += " "  # the tokenizer dropped the prompt's last space

    def add(self, token: int) -> str:
        """Adds a token; returns the new text that later tokens cannot change.

        Sets `is_done` at end-of-text and at stop strings.
        """
        if token == self._tokenizer.end_of_text:
            self.is_done = True
            return self.flush()
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # text[len(self._before):] would be wrong if the token completes a character that begins in `before`.
        self.text = text[common_prefix_length(self._before, text):]
        if starts := [start for s in self._stop if (start := self.text.find(s)) >= 0]:
            self.is_done = True
            self.text = self.text[:min(starts)]
            return self.flush()
        # Hold back an incomplete character, and a suffix that may be the beginning of a stop string.
        complete = self.text.rstrip(REPLACEMENT_CHARACTER)
        held_back = max((n for s in self._stop for n in range(1, len(s)) if complete.endswith(s[:n])), default=0)
        return self._show(len(complete) - held_back)

    def flush(self) -> str:
        """Returns the text that `add` has held back. Call it after the last token."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece = self.text[self._shown:end]
        self._shown = max(self._shown, end)
        return piece


def common_prefix_length(one: str, other: str) -> int:
    """Returns the length of the longest common prefix of two texts."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def load(folder: str | Path, step: int | None = None, paths: str | Sequence[int] = "all") -> TextModel:
    """Returns the model of a workdir, on the default device.

    Args:
        folder: the workdir.
        step: the step of the checkpoint to load; None: the newest.
        paths: the paths of a pgpt to use: "all", "best" (the path with the largest weight), or indices, "0,1" or
            [0, 1].

    Raises UserError if the workdir has no run, the run has no checkpoint of `step`, or the model lacks the paths.
    """
    trained = load_trained(folder, step)
    model, params, model_state = trained.model, trained.params, trained.model_state
    if paths != "all":
        config, params, model_state = with_paths(
            model.config, params, model_state, select_paths(model, params, paths))
        model = models.LanguageModel(config)
    return build_text_model(model, params, trained.tokenizer, model_state)


def build_text_model(model: models.LanguageModel, params, tokenizer: tokenizers.Tokenizer,
                     model_state=None) -> TextModel:
    """Returns a TextModel for parameters and state in the training layout.

    Raises UserError if a custom architecture's cached decoding does not match its full forward pass.
    """
    weights = layout.pack(model, params, model_state)
    if models.find_architecture(model.config.architecture) not in models.BUILT_IN:
        check_decoding(model, params, model_state)
    return TextModel(model, weights, tokenizer)


class TrainedModel(NamedTuple):
    """The model of a workdir at one checkpoint."""

    model: models.LanguageModel
    params: Any  # in the training layout
    model_state: Any  # the variable collection "state"
    tokenizer: tokenizers.Tokenizer
    step: int


def load_trained(folder: str | Path, step: int | None = None) -> TrainedModel:
    """Returns the model of a workdir in the training layout. See `load` for arguments and errors."""
    folder = local_path("--workdir", folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the workdir of a run")
    config = workdir.read_config(folder)
    model = models.build(**config.model)
    if not (folder / workdir.CHECKPOINT_FOLDER).is_dir():
        raise UserError(f"{folder}: the run has no checkpoint yet; train it first")
    checkpoints = Checkpoints(folder / workdir.CHECKPOINT_FOLDER)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{folder}: the run has no checkpoint yet; train it first")
    if step not in (None, *steps):
        raise UserError(f"{folder}: no checkpoint of step {step}; choose from {', '.join(map(str, steps))}")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
                            (nn.unbox(models.abstract_params(model)), models.abstract_model_state(model)))
    step = steps[-1] if step is None else step
    params, model_state = checkpoints.restore_model(step, *abstract)
    checkpoints.close()
    return TrainedModel(model, params, model_state, tokenizers.load(folder / workdir.TOKENIZER_FOLDER), step)


def select_paths(model: models.LanguageModel, params, paths: str | Sequence[int]) -> list[int]:
    """Returns the indices of the paths that `paths` selects. Raises UserError if the model lacks one of the paths."""
    c = model.config
    if c.architecture != "pgpt":
        raise UserError(f"paths={paths!r}: only pgpt has paths, this model is a {c.architecture}; use 'all'")
    if paths == "best":
        return [int(np.argmax(path_weights(params)))]
    try:
        indices = [int(index) for index in (paths.split(",") if isinstance(paths, str) else paths)]
    except ValueError:
        indices = []
    if not indices or len(set(indices)) < len(indices) or not set(indices) <= set(range(c.num_paths)):
        raise UserError(f"paths={paths!r}: expected all, best, or distinct indices from 0 to {c.num_paths - 1}, "
                        "separated by commas")
    return indices


def validate_settings(stop: Sequence[str], max_new_tokens: int) -> None:
    """Raises UserError if a setting is invalid."""
    if isinstance(stop, str):
        raise UserError(f"stop={stop!r}: expected a list of texts")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
