"""Text from a trained model: load a workdir, generate.

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

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how decoding shows bytes that are not a character yet
PRECEDING = 16  # tokens that new ones are decoded with


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A model ready to write: its architecture, its weights as decoding wants them, its tokenizer."""

    model: models.LanguageModel
    weights: Any  # as `layout.pack` returns them
    tokenizer: tokenizers.Tokenizer

    def generate(self, prompt: str = "", max_new_tokens: int = 200, *, temperature: float | None = 1.0,
                 top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
                 stop: Sequence[str] = (), seed: int = 0) -> str:
        """Returns the continuation of `prompt`; arguments as for `stream`."""
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).check()
        check(stop, max_new_tokens)
        return self.finish(self._begin([prompt], seed), [prompt], max_new_tokens, stop, sampling)[0]

    def stream(self, prompt: str = "", max_new_tokens: int = 200, *, temperature: float | None = 1.0,
               top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
               stop: Sequence[str] = (), seed: int = 0) -> Iterator[str]:
        """Yields the continuation of `prompt` ("": begins a document) piece by piece, as it is computed.

        Ends at end-of-text, after `max_new_tokens`, or before the first of the strings in `stop`.
        `temperature` 0 chooses the likeliest token each time; `top_k` and `top_p` choose among the
        likeliest only; a `repetition_penalty` above 1 makes tokens of the context less likely. Beyond
        the model's context the older half of it is forgotten and the rest read again. Raises UserError
        at once for settings out of range, and for a prompt that is longer than the context or that the
        tokenizer cannot represent.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).check()
        check(stop, max_new_tokens)
        return self._write(self._begin([prompt], seed), prompt, max_new_tokens, stop, sampling)

    def generate_batch(self, prompts: Sequence[str], max_new_tokens: int = 200, *, samples: int = 1,
                       temperature: float | None = 1.0, top_k: int | None = None, top_p: float | None = None,
                       repetition_penalty: float | None = None, stop: Sequence[str] = (), seed: int = 0,
                       ) -> list[list[str]]:
        """Returns `samples` continuations of each prompt, computed together: one list per prompt.

        The prompts may differ in length. Each text is what `generate` would write alone, up to
        rounding; the second and later samples draw from random streams of their own.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).check()
        check(stop, max_new_tokens)
        if samples < 1:
            raise UserError(f"samples={samples}: must be at least 1")
        text = self._begin(prompts, seed)
        text.repeat(samples, sampling)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        texts = self.finish(text, repeated, max_new_tokens, stop, sampling)
        return [texts[i:i + samples] for i in range(0, len(texts), samples)]

    def finish(self, text: decoder.Texts, prompts: Sequence[str], max_new_tokens: int, stop: Sequence[str],
               sampling: Sampling) -> list[str]:
        """Continues the rows of `text`, which begin with `prompts`; returns the continuations."""
        text.reserve(max_new_tokens)
        written = [Written(self.tokenizer, stop, row, prompt) for row, prompt in zip(text.ids, prompts)]
        left = max_new_tokens
        while left and not all(writing.is_done for writing in written):
            drawn_BxN = text.draw_ahead(sampling, left)
            left -= drawn_BxN.shape[1]
            for row, writing, drawn in zip(text.ids, written, drawn_BxN.tolist()):
                for token in drawn:
                    if not writing.is_done:
                        writing.add(token)
                    if not writing.is_done:
                        row.append(token)
        return [writing.text for writing in written]

    def conversation(self, seed: int = 0) -> "Conversation":
        """A text that you and the model write in turns."""
        return Conversation(self, seed)

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Returns the ids of a text, which `continues` another one or begins a document.

        Raises UserError if the tokenizer cannot represent it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the prompt is not text: {text[error.start]!r} at character {error.start + 1} "
                            "stands for something that is not UTF-8") from None
        ids = (self.tokenizer.encode_continuation(text) if continues else self.tokenizer.encode([text])[0]).tolist()
        if (unknown := self.tokenizer.unknown) in ids:
            strange = sorted({c for c in text if unknown in self.tokenizer.encode([c])[0]})
            raise UserError(f"the tokenizer has no piece for {', '.join(map(repr, strange)) or 'this text'}; "
                            "leave that out of the prompt")
        return ids

    def _begin(self, prompts: Sequence[str], seed: int) -> decoder.Texts:
        if isinstance(prompts, str) or not prompts:
            raise UserError(f"prompts={prompts!r}: must be a list of texts; \"\" begins a document")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed}: must be at least 0 and below 2^32")
        context = self.model.config.context_length
        ids = [[self.tokenizer.end_of_text, *self.encode(prompt)] for prompt in prompts]
        if (longest := max(map(len, ids))) > context:
            raise UserError(f"a prompt of {longest - 1:,} tokens: the model's context ends at {context:,} "
                            "(one of them marks the beginning); shorten it")
        return decoder.Texts(self.model, self.weights, self.tokenizer.vocab_size, ids, seed,
                             unpenalised=self.tokenizer.end_of_text)

    def _write(self, text: decoder.Texts, prompt: str, max_new_tokens: int, stop: Sequence[str],
               sampling: Sampling) -> Iterator[str]:
        """Continues the only row of `text`, which ends with `prompt` and has all written tokens afterwards."""
        text.reserve(max_new_tokens)
        written = Written(self.tokenizer, stop, text.ids[0], prompt)
        drawn_B = text.draw(sampling) if max_new_tokens else None
        for left in reversed(range(max_new_tokens)):
            token = int(drawn_B[0])
            if token == self.tokenizer.end_of_text:
                break
            text.ids[0].append(token)
            if left and not stop:  # the next token is computed while this one is shown
                drawn_B = text.draw(sampling)
            yield written.add(token)
            if written.is_done:
                break
            if left and stop:
                drawn_B = text.draw(sampling)
        yield written.rest()


class Conversation:
    """A text that grows turn by turn: what was read or written before is not computed again.

    When it is longer than the model's context, the older tokens but half a context are forgotten
    and the rest is read again; `forgotten` counts them.
    """

    def __init__(self, text_model: TextModel, seed: int = 0):
        self._model = text_model
        self._text = text_model._begin([""], seed)

    def say(self, text: str, max_new_tokens: int = 200, *, temperature: float | None = 1.0,
            top_k: int | None = None, top_p: float | None = None, repetition_penalty: float | None = None,
            stop: Sequence[str] = ()) -> Iterator[str]:
        """Adds `text` at once, and yields the model's continuation; arguments as for `TextModel.stream`.

        What is not taken from the iterator is not written. A stop string, too, belongs to what has
        been written. Raises UserError, having added nothing, also for a text of more than half a
        context.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty).check()
        check(stop, max_new_tokens)
        begins = self._text.ids[0] == [self._model.tokenizer.end_of_text]
        ids = self._model.encode(text, continues=not begins)
        half = max(1, self._model.model.config.context_length // 2)
        if len(ids) > half:
            raise UserError(f"{len(ids):,} tokens at once: at most {half:,}, half of the model's context")
        self._text.ids[0] += ids
        return self._model._write(self._text, text, max_new_tokens, stop, sampling)

    @property
    def forgotten(self) -> int:
        return self._text.forgotten


class Written:
    """The text of tokens that arrive one by one; ends before the first of the strings in `stop`.

    They continue the tokens `before`, the text of which ends with `prompt`. They are decoded together with
    the last of these: a tokenizer may show a token otherwise at the beginning of a text, without its space.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = (), before: Sequence[int] = (),
                 prompt: str = ""):
        self.text, self.is_done = "", False
        self._tokenizer, self._stop = tokenizer, [s for s in stop if s]
        self._ids, self._shown = list(before[-PRECEDING:]), 0
        self._before = tokenizer.decode(self._ids)
        if prompt[-1:].isspace() and not self._before[-1:].isspace():
            self._before += " "  # no token stands for it, but the prompt shows it already

    def add(self, token: int) -> str:
        """Takes a token; returns what can be shown now. Sets `is_done` at end-of-text and stop strings."""
        if token == self._tokenizer.end_of_text:
            self.is_done = True
            return self.rest()
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # Not merely as long as that: tokens may complete a character that was begun before them.
        self.text = text[common_length(self._before, text):]
        if places := [place for s in self._stop if (place := self.text.find(s)) >= 0]:
            self.is_done = True
            self.text = self.text[:min(places)]
            return self.rest()
        # A character may take several tokens, and a stop string may be about to come.
        whole = self.text.rstrip(INCOMPLETE)
        begun = max((n for s in self._stop for n in range(1, len(s)) if whole.endswith(s[:n])), default=0)
        return self._show(len(whole) - begun)

    def rest(self) -> str:
        """What was held back, once no more tokens come."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece = self.text[self._shown:end]
        self._shown = max(self._shown, end)
        return piece


def common_length(one: str, other: str) -> int:
    """The number of characters that two texts begin with in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def load(folder: str | Path, step: int | None = None, paths: str | Sequence[int] = "all") -> TextModel:
    """The model of a workdir, as of `step` (the newest checkpoint), on the default device.

    `paths`: which paths of a pgpt to keep: "all", "best" (the one with the largest weight), or
    their numbers, "0,1" or [0, 1]. Raises UserError if the workdir holds no run, or no checkpoint
    of it, or for paths that the model has not.
    """
    trained = load_trained(folder, step)
    model, params = trained.model, trained.params
    if paths != "all":
        config, params = with_paths(model.config, params, chosen_paths(model, params, paths))
        model = models.LanguageModel(config)
    return text_model(model, params, trained.tokenizer, trained.model_state)


def text_model(model: models.LanguageModel, params, tokenizer: tokenizers.Tokenizer, model_state=None) -> TextModel:
    """Returns a model with parameters and state as they were trained, ready to write.

    Raises UserError for an architecture that is not built in and that decodes wrongly.
    """
    weights = layout.pack(model, params, model_state)
    if models.find_architecture(model.config.architecture) not in models.BUILT_IN:
        check_decoding(model, params, model_state)
    return TextModel(model, weights, tokenizer)


class Trained(NamedTuple):
    """What a workdir holds, as of one step."""

    model: models.LanguageModel
    params: Any  # as they were trained
    model_state: Any  # what modules carried from step to step
    tokenizer: tokenizers.Tokenizer
    step: int


def load_trained(folder: str | Path, step: int | None = None) -> Trained:
    """The model of a workdir as it was trained; see `load`."""
    folder = local_path("--workdir", folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; a run's --workdir is wanted")
    config = workdir.read_config(folder)
    model = models.build(**config.model)
    if not (folder / workdir.CHECKPOINT_FOLDER).is_dir():
        raise UserError(f"{folder}: this run has no checkpoint yet")
    checkpoints = Checkpoints(folder / workdir.CHECKPOINT_FOLDER)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{folder}: this run has no checkpoint yet")
    if step not in (None, *steps):
        raise UserError(f"{folder}: no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
                            (nn.unbox(models.abstract_params(model)), models.abstract_model_state(model)))
    step = steps[-1] if step is None else step
    params, model_state = checkpoints.restore_model(step, *abstract)
    checkpoints.close()
    return Trained(model, params, model_state, tokenizers.load(folder / workdir.TOKENIZER_FOLDER), step)


def chosen_paths(model: models.LanguageModel, params, paths: str | Sequence[int]) -> list[int]:
    """The numbers of the paths that `paths` names. Raises UserError if there are no such paths."""
    c = model.config
    if c.architecture != "pgpt":
        raise UserError(f"paths={paths!r}: only pgpt has paths, this model is a {c.architecture}")
    if paths == "best":
        return [int(np.argmax(path_weights(params)))]
    try:
        numbers = [int(number) for number in (paths.split(",") if isinstance(paths, str) else paths)]
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(c.num_paths)):
        raise UserError(f"paths={paths!r}: must be all, best, or different numbers from 0 to "
                        f"{c.num_paths - 1}, separated by commas")
    return numbers


def check(stop: Sequence[str], max_new_tokens: int) -> None:
    """Raises UserError for arguments that no text can be written with."""
    if isinstance(stop, str):
        raise UserError(f"stop={stop!r}: must be a list of texts")
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
