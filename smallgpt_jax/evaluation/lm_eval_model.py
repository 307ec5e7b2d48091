"""Adapter between lm-evaluation-harness and models of this project."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.score_cache import ScoreCache
from smallgpt_jax.evaluation.scoring import Score, Scorer, TokenSequence, split_into_sequences
from smallgpt_jax.inference import TextModel, TrainedModel
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.inference.text_model import GenerationConfig

_MAX_NEW_TOKENS = 256  # maximum number of generated tokens, for tasks that set no maximum
_BATCH_ROWS = 32  # texts generated per batch
_SAMPLING_SETTINGS = {"temperature", "top_k", "top_p", "repetition_penalty"}
_OTHER_SETTINGS = {"until", "max_gen_toks", "do_sample"}


class SmallGPT(TemplateLM):
    """A model for lm-evaluation-harness. It behaves like the harness's `hf` backend with a causal
    language model.

    The token that begins documents replaces an empty context. It is prepended to other contexts
    only if the tokenizer has one of its own for the beginning, as those of Llama have. Contexts are
    truncated on the left, texts to score never. A generated text ends before `end_of_turn`, the
    special token that ends an answer in the model's chat template, or None. `progress` is called
    with a label, the number of finished texts and the total number of texts.
    """

    def __init__(
        self,
        scorer: Scorer,
        trained: TrainedModel,
        progress: Callable[[str, int, int], Any],
        seed: int = 0,
        end_of_turn: int | None = None,
    ):
        super().__init__()
        self.set_cache_hook(ScoreCache())
        self._scorer, self._trained, self._tokenizer = scorer, trained, trained.tokenizer
        self._ends = [] if end_of_turn is None else [end_of_turn]
        self._progress, self._seed = progress, seed
        self.unencoded = 0  # texts with characters that the tokenizer cannot encode
        self.max_length = scorer.model.config.context_length

    @cached_property
    def _text_model(self) -> TextModel:
        """Building it copies the weights, so it is built only for tasks that generate text."""
        return self._trained.text_model()

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        return self._tokenizer.begin_of_text

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.kind

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        ids = self._tokenizer.encode([string])[0].tolist()
        if self._tokenizer.unknown in ids or self._tokenizer.count_dropped(string) > 0:
            self.unencoded += 1
        # See the class's docstring. False: the caller adds the beginning, or wants none.
        has_own_beginning = self._tokenizer.begin_of_text != self._tokenizer.end_of_text
        if has_own_beginning and add_special_tokens is not False:
            return [self._tokenizer.begin_of_text, *ids]
        return ids

    # without the bar that the harness shows while it tokenizes
    def loglikelihood(self, requests: list[Instance], **_) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        """A request is ((context, continuation), context tokens, continuation tokens)."""
        jobs = []
        for text, context, continuation in requests:
            # a log-likelihood of 0 would be the most probable answer
            if not continuation:
                raise UserError(
                    f"nothing to score in {text!r}: the continuation has no tokens; check the "
                    "task's data"
                )
            context = context or [self.prefix_token_id]  # a context of only spaces has no tokens
            jobs.append(
                split_into_sequences([*context, *continuation], len(context), self.max_length)
            )
        keys = [text for text, _, _ in requests]
        return self._score("loglikelihood", keys, jobs)

    def loglikelihood_rolling(self, requests: list[Instance], **_) -> list[float]:
        texts = [
            [self.prefix_token_id, *self.tok_encode(request.args[0], add_special_tokens=False)]
            for request in requests
        ]
        jobs = [split_into_sequences(tokens, 1, self.max_length) for tokens in texts]
        keys = [request.args for request in requests]
        return self._score("loglikelihood_rolling", keys, jobs)

    def _score(self, kind: str, keys: list[tuple], jobs: list[list[TokenSequence]]) -> list:
        """Returns the result of each job as the harness expects it: the sum of the scores of its
        sequences, which make up one text; for the request `kind` "loglikelihood_rolling" a number,
        else also whether the text is what greedy decoding gives.
        """
        is_rolling = kind == "loglikelihood_rolling"
        # Results that an interrupted evaluation has cached are not computed again.
        results = [self.cache_hook.find(kind, key) for key in keys]
        sequences, job_of = [], []  # of all jobs together, and the job of each
        for job, its_sequences in enumerate(jobs):
            if not its_sequences:  # of an empty text
                results[job] = 0.0
            if results[job] is None:
                sequences += its_sequences
                job_of += [job] * len(its_sequences)
        left = Counter(job_of)  # sequences to score, by job
        done = len(jobs) - len(left)
        totals = [Score(0.0, True)] * len(jobs)
        for index, score in self._scorer.score(sequences):
            job = job_of[index]
            log_likelihood = totals[job].log_likelihood + score.log_likelihood
            totals[job] = Score(log_likelihood, totals[job].is_greedy and score.is_greedy)
            left[job] -= 1
            if left[job] == 0:
                results[job] = log_likelihood if is_rolling else tuple(totals[job])
                self.cache_hook.add_partial(kind, keys[job], results[job])
                done += 1
                self._progress("texts scored", done, len(jobs))
        return results

    def generate_until(self, requests: list[Instance], **_) -> list[str]:
        """Returns the generated text of each request, (prompt, settings). Sampled texts are not
        cached.
        """
        is_sampled = [
            normalize_gen_kwargs(request.args[1], _MAX_NEW_TOKENS)["do_sample"]
            for request in requests
        ]
        texts = [
            None if sampled else self.cache_hook.find("generate_until", request.args)
            for request, sampled in zip(requests, is_sampled)
        ]
        contexts = [
            self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests
        ]
        # identical requests get different numbers, hence different random samples
        seen, samples = Counter(), []
        for request in requests:
            samples.append(seen[repr(request.args)])
            seen[repr(request.args)] += 1
        missing = [i for i, text in enumerate(texts) if text is None]
        done = 0
        for batch in _generation_batches(missing, requests, contexts):
            continuations = self._generate(
                [requests[i].args[0] for i in batch],
                [contexts[i] for i in batch],
                [samples[i] for i in batch],
                requests[batch[0]].args[1],
            )
            for i, text in zip(batch, continuations):
                texts[i] = text
                if not is_sampled[i]:
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
            done += len(batch)
            self._progress("texts generated", done, len(missing))
        return texts

    def _generate(
        self, prompts: list[str], contexts: list[list[int]], samples: list[int], settings: dict
    ) -> list[str]:
        """`contexts` are the tokens of `prompts`; `samples` select the prompts' random streams."""
        settings = normalize_gen_kwargs(settings, _MAX_NEW_TOKENS)
        unknown = settings.keys() - _SAMPLING_SETTINGS - _OTHER_SETTINGS
        if unknown:
            raise UserError(
                f"--gen_kwargs: {', '.join(sorted(unknown))} not supported; use "
                f"{', '.join(sorted(_SAMPLING_SETTINGS | _OTHER_SETTINGS))}"
            )
        new_tokens = settings["max_gen_toks"]
        chosen = {"temperature": 0.0}
        if settings["do_sample"]:
            # A temperature of 0 selects greedy decoding. For the other settings, 0 means unset.
            chosen = {
                name: settings[name]
                for name in _SAMPLING_SETTINGS & settings.keys()
                if settings[name] or name == "temperature"
            }
        sampling = Sampling(**chosen).validated()
        # A long answer leaves at least half of the context to the question; it may outgrow the rest.
        room = max(self.max_length - new_tokens, self.max_length // 2, 1)
        ids = [context[-room:] for context in contexts]
        session = self._text_model.session(ids, self._seed, samples)
        stop = [*settings["until"], *self._ends]
        config = GenerationConfig(new_tokens, stop, sampling)
        return self._text_model.complete(session, prompts, config)

    # the harness writes this into its results
    def get_model_info(self) -> dict:
        config = self._scorer.model.config
        return {
            "architecture": config.architecture,
            "context_length": config.context_length,
            "products_in": config.dtype,
        }


def _generation_batches(
    indices: Sequence[int], requests: Sequence[Instance], contexts: Sequence[list[int]]
) -> Iterator[list[int]]:
    """Yields the indices in batches of requests with equal settings, the longest contexts first."""

    def settings_of(i: int) -> str:
        return repr(requests[i].args[1])

    # similar lengths together, because a batch is padded to its longest context
    order = sorted(indices, key=lambda i: (settings_of(i), -len(contexts[i])))
    for _, group in itertools.groupby(order, settings_of):
        of_settings = list(group)
        for first in range(0, len(of_settings), _BATCH_ROWS):
            yield of_settings[first : first + _BATCH_ROWS]
