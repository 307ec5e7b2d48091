"""Questions with known answers, from a file of examples, and how probable these answers are.

Accuracies of small models are near chance. The probability of the right answer is a measure without
a threshold, in bits per byte, so that answers of different lengths can be averaged.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from smallgpt_jax.data.chat_template import Answer, ChatTemplate
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.prompts import encode_answer, encode_prompt, text_of
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError

_MAX_LABELS = 20


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
    limit: float | None = None,
) -> list[Question]:
    """Returns the questions of a file of examples. `limit` is a number of questions or, below 1, a
    fraction of them. Raises UserError for an invalid file, which it names by --examples, and for
    prompts that leave no room for an answer.
    """
    template = ChatTemplate(chat_template, tokenizer.special_tokens) if chat_template else None
    rules = Rules(
        text_field="text",
        invalid_utf8="refuse",
        invalid_items="refuse",
        max_document_bytes=10**8,
        format=form,
        chat_template=template,
        can_skip=False,
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


def find_labels(
    questions: Sequence[Question],
    field: str = "--metrics=accuracy",
    advice: str = "name the labels with --label, or use --metrics=exact_match",
) -> list[str]:
    """Returns the different answers. Raises UserError if there are too many to be labels."""
    labels = sorted({question.answer for question in questions})
    if not 2 <= len(labels) <= _MAX_LABELS:
        raise UserError(f"{field}: the file has {len(labels)} different answers; {advice}")
    return labels


def label_sequences(
    questions: Sequence[Question], labels: Sequence[str], tokenizer: Tokenizer, context_length: int
) -> list[tuple[list[int], int]]:
    """Returns the tokens of each question with each label, up to the one that ends it, and how many
    of them are those of the label. Raises UserError if they do not fit into the context.
    """
    sequences = []
    for question in questions:
        for label in labels:
            ending = question.tokens_of(label, tokenizer)
            tokens = [*question.prompt, *ending]
            if len(tokens) > context_length + 1:  # the last token is only a target
                raise UserError(
                    f"{question.where}: prompt and label have more than {context_length + 1:,} "
                    "tokens; shorten the prompt"
                )
            sequences.append((tokens, len(ending)))
    return sequences


class AnswerBits(NamedTuple):
    """Bits per byte of a question's right answer, and how many more the best wrong answer has."""

    right: float
    margin: float


def answer_bits(
    log_likelihoods: Sequence[float], answers: Sequence[str], right: set[int]
) -> AnswerBits | None:
    """Returns the bits of the answers to a question; None without any right or wrong one. `answers`
    are the scored texts, `right` the numbers of the right ones.

    The bits per byte of an answer are −log₂ p(answer | question) / bytes of the answer in UTF-8. Of
    several right answers, the most probable per byte counts.
    """
    bits = [
        -log_likelihood / math.log(2) / max(1, len(answer.encode()))
        for log_likelihood, answer in zip(log_likelihoods, answers)
    ]
    of_right = [value for number, value in enumerate(bits) if number in right]
    of_wrong = [value for number, value in enumerate(bits) if number not in right]
    if not of_right or not of_wrong:
        return None
    return AnswerBits(min(of_right), min(of_wrong) - min(of_right))


def label_bits(
    log_likelihoods_QxL: Sequence[Sequence[float]],
    questions: Sequence[Question],
    labels: Sequence[str],
) -> list[AnswerBits | None]:
    """Returns the bits of each question's labels; None for a question whose answer is no label."""
    bits = []
    for question, log_likelihoods in zip(questions, log_likelihoods_QxL):
        right = {number for number, label in enumerate(labels) if label == question.answer}
        bits.append(answer_bits(log_likelihoods, labels, right))
    return bits
