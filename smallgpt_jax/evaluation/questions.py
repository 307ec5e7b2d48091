"""Answers of a model to questions: likelihoods of labels, exact match, ROUGE-L.

A prompt is encoded as in training. An answer is generated greedily, up to the token that ends it in
training.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from smallgpt_jax.data.questions import Question, label_sequences
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence
from smallgpt_jax.inference import TextModel
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.inference.text_model import GenerationConfig

_BATCH_ROWS = 32  # texts generated per batch


def score_labels(
    scorer: Scorer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    labels: Sequence[str],
    progress: Callable[[str, int, int], Any],
) -> np.ndarray:
    """Returns the log-likelihoods of labels with the token that ends them, (questions, labels)."""
    context_length = scorer.model.config.context_length
    sequences = [
        TokenSequence(tokens, scored)
        for tokens, scored in label_sequences(questions, labels, tokenizer, context_length)
    ]
    scores = np.empty(len(sequences))
    for done, (index, score) in enumerate(scorer.score(sequences), start=1):
        scores[index] = score.log_likelihood
        progress("labels scored", done, len(sequences))
    return scores.reshape(len(questions), len(labels))


def generate_answers(
    model: TextModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    progress: Callable[[str, int, int], Any],
) -> list[str]:
    """Returns what the model generates after each question's prompt, until the answer ends."""
    answers = [""] * len(questions)
    lengths = [len(question.prompt) for question in questions]
    # prompts of similar lengths have little padding
    order = sorted(range(len(questions)), key=lambda i: -lengths[i])
    for first in range(0, len(order), _BATCH_ROWS):
        batch = order[first : first + _BATCH_ROWS]
        session = model.session([questions[i].prompt for i in batch])
        prompts = [questions[i].text for i in batch]
        # the token that ends an empty answer ends every answer
        ends = {questions[i].tokens_of("", model.tokenizer)[-1] for i in batch}
        config = GenerationConfig(max_new_tokens, sorted(ends), Sampling(temperature=None))
        texts = model.complete(session, prompts, config)
        for i, text in zip(batch, texts):
            # What a chat template writes before an answer is no part of it.
            answers[i] = text.strip().removeprefix(questions[i].turn.before.strip())
        progress("answers generated", first + len(batch), len(order))
    return answers


def exact_match(answer: str, generated: str) -> float:
    return float(generated.strip() == answer.strip())


def rouge_l(answer: str, generated: str) -> float:
    """Returns the F1 score of the longest common subsequence of words (Lin, ROUGE, 2004)."""
    words, generated_words = _words(answer), _words(generated)
    # common[j]: the longest one of the words so far and the first j generated words
    common = [0] * (len(generated_words) + 1)
    for word in words:
        previous = common
        common = [0]
        for j, other in enumerate(generated_words):
            if word == other:
                common.append(previous[j] + 1)
            else:
                common.append(max(previous[j + 1], common[j]))
    longest = common[-1]
    return 2 * longest / (len(words) + len(generated_words)) if longest else 0.0


def _words(text: str) -> list[str]:
    # as in the package rouge_score without stemming
    return re.findall(r"[a-z0-9]+", text.lower())


GENERATED = {"exact_match": exact_match, "rouge_l": rouge_l}  # of an answer and a generated text
METRICS = ("accuracy", *GENERATED)


def mean_and_error(values: Sequence[float]) -> dict[str, float]:
    # n − 1, because the mean is estimated from the same values; 1 for a single question
    error = np.std(values) / math.sqrt(max(len(values) - 1, 1))
    return {"mean": float(np.mean(values)), "standard_error": float(error)}
