"""A model of this project as lm-evaluation-harness sees one."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scoring import Score, Scorer, TokenSequence, windows
from smallgpt_jax.inference import TextModel, text_model
from smallgpt_jax.inference.decoder import Texts
from smallgpt_jax.inference.sampling import Sampling

NEW_TOKENS = 256  # at most, where a task does not say
ROWS = 32  # texts that are written at one time
SETTINGS = {"temperature", "top_k", "top_p", "repetition_penalty"}  # of sampling
OTHER_SETTINGS = {"until", "max_gen_toks", "do_sample"}


class SmallGPT(TemplateLM):
    """What the harness's `hf` backend does with a causal language model, in JAX.

    Contexts are read as they are, without a mark in front; an empty one is the end-of-text mark.
    What is longer than the model's context loses its beginning; the text to be scored never does.
    `params` and `model_state` are those of the scorer's model; `progress` is called with what is done and how many
    there are; `seed` is of texts that are drawn.
    """

    def __init__(self, scorer: Scorer, params, tokenizer: Tokenizer, progress: Callable[[str, int, int], Any],
                 seed: int = 0, model_state=None):
        super().__init__()
        self._scorer, self._params, self._tokenizer = scorer, params, tokenizer
        self._model_state = model_state
        self._progress, self._seed = progress, seed
        self.max_length = scorer.model.config.context_length

    @cached_property
    def _writer(self) -> TextModel:
        """Made when there is something to write: it has the weights once more."""
        return text_model(self._scorer.model, self._params, self._tokenizer, self._model_state)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_text

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.kind

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self._tokenizer.encode([string])[0].tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Requests are ((context, continuation), the context's tokens, the continuation's)."""
        jobs = []
        for text, context, continuation in requests:
            if not continuation:
                raise UserError(f"there is nothing to score in {text!r}: the continuation has no tokens of its own")
            context = context or [self.prefix_token_id]  # which was nothing but spaces
            jobs.append(windows([*context, *continuation], len(context), self.max_length))
        keys = [text for text, _, _ in requests]
        return [tuple(score) for score in self._score("loglikelihood", keys, jobs)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        jobs = [windows([self.prefix_token_id, *self.tok_encode(text)], 1, self.max_length)
                for text, in (request.args for request in requests)]
        keys = [request.args for request in requests]
        return [score.log_likelihood for score in self._score("loglikelihood_rolling", keys, jobs)]

    def _score(self, kind: str, keys: Sequence[tuple], jobs: Sequence[Sequence[TokenSequence]]) -> list[Score]:
        """The score of each job, a text in as many sequences as it takes; each goes into the harness's
        cache as soon as it is there."""
        sequences = [(job, sequence) for job, parts in enumerate(jobs) for sequence in parts]
        left, total = [len(parts) for parts in jobs], [Score(0.0, True)] * len(jobs)
        done = sum(not parts for parts in jobs)
        for number, score in self._scorer.score([sequence for _, sequence in sequences]):
            job = sequences[number][0]
            total[job] = Score(total[job].log_likelihood + score.log_likelihood,
                               total[job].is_greedy and score.is_greedy)
            left[job] -= 1
            if not left[job]:
                result = total[job].log_likelihood if kind == "loglikelihood_rolling" else tuple(total[job])
                self.cache_hook.add_partial(kind, keys[job], result)
                done += 1
                self._progress("texts scored", done, len(jobs))
        return total

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts of the same settings are written together, those of the longest contexts first."""
        written: list[str] = [""] * len(requests)
        contexts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (repr(requests[i].args[1]), -len(contexts[i])))
        seen, samples = Counter(), []
        for request in requests:  # equal ones are to give different texts, if these are drawn
            samples.append(seen[repr(request.args)])
            seen[repr(request.args)] += 1
        done = 0
        while done < len(order):
            settings = requests[order[done]].args[1]
            some = [i for i in order[done:done + ROWS] if requests[i].args[1] == settings]
            texts = self._write([requests[i].args[0] for i in some], [contexts[i] for i in some],
                                [samples[i] for i in some], settings)
            for i, text in zip(some, texts):
                written[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
            done += len(some)
            self._progress("texts written", done, len(order))
        return written

    def _write(self, prompts: list[str], contexts: list[list[int]], samples: list[int], settings: dict) -> list[str]:
        """The continuations of `prompts`, whose tokens are `contexts`."""
        settings = normalize_gen_kwargs(settings, NEW_TOKENS)
        if unknown := settings.keys() - SETTINGS - OTHER_SETTINGS:
            raise UserError(f"writing text knows no {', '.join(sorted(unknown))}; it knows "
                            f"{', '.join(sorted(SETTINGS | OTHER_SETTINGS))}")
        most = settings["max_gen_toks"]
        chosen = {name: settings[name] for name in SETTINGS if settings.get(name)}  # top_k=0: all
        sampling = Sampling(**chosen if settings["do_sample"] else {"temperature": 0.0}).check()
        room = max(self.max_length - most, self.max_length // 2, 1)  # for a context; the rest is to be written
        text = Texts(self._writer.model, self._writer.weights, self._tokenizer.vocab_size,
                     [context[-room:] for context in contexts], self._seed, self.eot_token_id, samples)
        return self._writer.finish(text, prompts, most, settings["until"], sampling)

    def get_model_info(self) -> dict:
        config = self._scorer.model.config
        return {"architecture": config.architecture, "context_length": config.context_length,
                "products_in": config.dtype}
