"""Questions with known answers: the label of the highest likelihood, exact match, ROUGE-L.

A prompt is encoded as in training. An answer is generated greedily, up to the token that ends it in
training.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from smallgpt_jax.data.chat_template import Answer, ChatTemplate
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.prompts import encode_answer, encode_prompt, text_of
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.scoring import Scorer, TokenSequence
from smallgpt_jax.inference import TextModel
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.inference.text_model import GenerationConfig

_MAX_LABELS = 20
_BATCH_ROWS = 32  # texts generated per batch


class Question(NamedTuple):
    where: str
    prompt: list[int]  # tokens, beginning with begin-of-text
    text: str  # of the prompt
    turn: Answer  # the right answer, and what the chat template writes around it
    is_chat: bool

    @property
    def answer(self) -> str:
        return self.turn.content

    def tokens_of(self, answer: str, tokenizer: Tokenizer) -> list[int]:
        """Returns the ids of an answer, up to the one that ends it."""
        return encode_answer(self.turn._replace(content=answer), self.is_chat, tokenizer)


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
    template = ChatTemplate(chat_template, tokenizer.special_tokens) if chat_template else None
    rules = Rules(
        text_field="text",
        invalid_utf8="refuse",
        invalid_items="refuse",
        max_document_bytes=10**8,
        format=form,
        chat_template=template,
    )
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
    for example in source.examples(rules):
        if limit is not None and 1 <= limit <= len(questions):
            break
        prompt = encode_prompt(example, tokenizer)
        if len(prompt) >= context_length:
            raise UserError(
                f"{example.where}: the prompt has {len(prompt):,} tokens, but the model's context "
                f"of {context_length:,} needs room for an answer; shorten it"
            )
        text = "".join(map(text_of, example.pieces[:-1]))
        questions.append(Question(example.where, prompt, text, example.answer, example.is_chat))
    if not questions:
        raise UserError(f"--examples={path}: has no examples")
    if limit is not None and limit < 1:
        return questions[: max(1, round(limit * len(questions)))]
    return questions


def find_labels(questions: Sequence[Question]) -> list[str]:
    """Returns the different answers. Raises UserError if there are too many to be labels."""
    labels = sorted({question.answer for question in questions})
    if not 2 <= len(labels) <= _MAX_LABELS:
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
    """Returns the label with the highest likelihood, including that of the token which ends it, for
    each question.
    """
    longest = scorer.model.config.context_length + 1
    sequences = []
    for question in questions:
        for label in labels:
            ending = question.tokens_of(label, tokenizer)
            tokens = [*question.prompt, *ending]
            if len(tokens) > longest:
                raise UserError(
                    f"{question.where}: prompt and label have more than {longest:,} tokens; "
                    "shorten the prompt"
                )
            sequences.append(TokenSequence(tokens, len(ending)))
    scores = np.empty(len(sequences))
    for done, (index, score) in enumerate(scorer.score(sequences), start=1):
        scores[index] = score.log_likelihood
        progress("labels scored", done, len(sequences))
    best = scores.reshape(len(questions), len(labels)).argmax(axis=1)
    return [labels[i] for i in best]


def generate_answers(
    model: TextModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    progress: Callable[[str, int, int], Any],
) -> list[str]:
    """Longest prompts first, in batches."""
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
            answers[i] = text.strip().removeprefix(questions[i].turn.before.strip())
        progress("answers generated", first + len(batch), len(order))
    return answers


def exact_match(answer: str, generated: str) -> float:
    return float(generated.strip() == answer.strip())


def rouge_l(answer: str, generated: str) -> float:
    """Returns the F1 score of the longest common subsequence of words (Lin, ROUGE, 2004), without
    stemming.

    As in the package rouge_score, words are lower case and consist of a–z and 0–9.
    """
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
    return re.findall(r"[a-z0-9]+", text.lower())


GENERATED = {"exact_match": exact_match, "rouge_l": rouge_l}  # of an answer and a generated text
METRICS = ("accuracy", *GENERATED)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    # n − 1, because the mean is estimated from the same values; 1 for a single question
    error = np.std(values) / math.sqrt(max(len(values) - 1, 1))
    return float(np.mean(values)), float(error)
