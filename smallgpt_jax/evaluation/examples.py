"""Evaluation on a file of examples: the label of the highest likelihood, exact match, ROUGE-L.

A prompt is encoded as in training. An answer is generated greedily, up to the end-of-text token.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from smallgpt_jax.data.examples import Example, encode_prompt, special_tokens
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence
from smallgpt_jax.inference import TextModel
from smallgpt_jax.inference.sampling import Sampling

MAX_LABELS = 20
BATCH_ROWS = 32  # texts generated per batch


class Question(NamedTuple):
    where: str
    prompt: list[int]  # tokens, beginning with begin-of-text
    text: str  # of the prompt
    answer: str


def read_questions(
    path: str,
    tokenizer: Tokenizer,
    form: str,
    chat_template: str,
    context_length: int,
    limit: float | None,
) -> list[Question]:
    """`limit` is a number of questions or, below 1, a fraction of them. Raises UserError for an
    invalid file, and for prompts that leave no room for an answer.
    """
    rules = Rules("text", "refuse", "refuse", 10**8, form, chat_template)
    source = Source(path)
    try:
        has_fields = all(part.has_fields for part in source.parts)
    except UserError as error:  # it names the field that a run's text comes from
        raise UserError(str(error).replace("config.data.source", "--examples")) from None
    if not has_fields:
        raise UserError(
            f"--examples={path}: expected JSON lines with the fields of config.data.format={form!r}"
        )
    questions = []
    for example in source.documents(rules):
        if limit is not None and 1 <= limit <= len(questions):
            break
        prompt = encode_prompt(example, tokenizer)
        if len(prompt) >= context_length:
            raise UserError(
                f"{example.where}: the prompt has {len(prompt):,} tokens, but the model's context "
                f"of {context_length:,} needs room for an answer; shorten it"
            )
        text = "".join(piece.text for piece in example.pieces[:-1])
        questions.append(Question(example.where, prompt, text, answer_of(example, tokenizer)))
    if not questions:
        raise UserError(f"--examples={path}: has no examples")
    return (
        questions[: max(1, round(limit * len(questions)))]
        if limit is not None and limit < 1
        else questions
    )


def answer_of(example: Example, tokenizer: Tokenizer) -> str:
    """Returns the last answer. That of a conversation ends where its template writes a special
    token.
    """
    answer = example.pieces[-1].text
    if example.contents is None:
        return answer
    return re.split("|".join(map(re.escape, special_tokens(tokenizer))), answer)[0]


def find_labels(questions: Sequence[Question]) -> list[str]:
    """Returns the different answers. Raises UserError if there are too many to be labels."""
    labels = sorted({question.answer for question in questions})
    if not 2 <= len(labels) <= MAX_LABELS:
        raise UserError(
            f"--metrics=accuracy: the file has {len(labels)} different answers; name the labels "
            "with --label, or use --metrics=exact_match"
        )
    return labels


def choose_labels(
    scorer: Scorer,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    labels: Sequence[str],
    progress: Callable[[str, int, int], Any],
) -> list[str]:
    """Returns the label with the highest likelihood, including that of end-of-text, for each
    question.
    """
    ends = [
        [*tokenizer.encode_continuation(label).tolist(), tokenizer.end_of_text] for label in labels
    ]
    longest = scorer.model.config.context_length + 1
    for question in questions:
        if len(question.prompt) + max(map(len, ends)) > longest:
            raise UserError(
                f"{question.where}: prompt and label have more than {longest:,} tokens; shorten "
                "the prompt"
            )
    sequences = [
        TokenSequence([*question.prompt, *end], len(end)) for question in questions for end in ends
    ]
    scores = np.empty(len(sequences))
    for done, (index, score) in enumerate(scorer.score(sequences), start=1):
        scores[index] = score.log_likelihood
        progress("labels scored", done, len(sequences))
    return [labels[i] for i in scores.reshape(len(questions), len(labels)).argmax(axis=1)]


def generate_answers(
    model: TextModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    progress: Callable[[str, int, int], Any],
) -> list[str]:
    """Longest prompts first, in batches."""
    answers, order = (
        [""] * len(questions),
        sorted(range(len(questions)), key=lambda i: -len(questions[i].prompt)),
    )
    for first in range(0, len(order), BATCH_ROWS):
        batch = order[first : first + BATCH_ROWS]
        texts = model.complete(
            model.session([questions[i].prompt for i in batch]),
            [questions[i].text for i in batch],
            max_new_tokens,
            (),
            Sampling(temperature=None),
        )
        for i, text in zip(batch, texts):
            answers[i] = text
        progress("answers generated", first + len(batch), len(order))
    return answers


def exact_match(answer: str, found: str) -> float:
    return float(found.strip() == answer.strip())


def rouge_l(answer: str, found: str) -> float:
    """Returns the F1 score of the longest common subsequence of words (Lin, ROUGE, 2004), without
    stemming.

    As in the package rouge_score, words are lower case and consist of a–z and 0–9.
    """
    words, found_words = (re.findall(r"[a-z0-9]+", text.lower()) for text in (answer, found))
    common = [0] * (len(found_words) + 1)
    for word in words:
        previous = common
        common = [0]
        for j, other in enumerate(found_words):
            common.append(previous[j] + 1 if word == other else max(previous[j + 1], common[j]))
    return 2 * common[-1] / (len(words) + len(found_words)) if common[-1] else 0.0


GENERATED = {"exact_match": exact_match, "rouge_l": rouge_l}  # of an answer and a generated text
METRICS = ("accuracy", *GENERATED)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values) / math.sqrt(max(len(values) - 1, 1)))
