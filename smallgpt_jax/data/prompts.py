"""Prompts with answers: documents of which training counts only the answers, from rows with a prompt and its
completion, or with the messages of a conversation; and their token ids.
"""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from smallgpt_jax.data.chat_template import Answer, ChatTemplate
from smallgpt_jax.data.parts import Item, Rules, Skipped, extract_text
from smallgpt_jax.data.tokenizers import Tokenizer

_PROMPT, _COMPLETION, _MESSAGES = "prompt", "completion", "messages"
_Piece = str | Answer


class Example(str):
    """As a string, the text of all pieces without the names of special tokens."""

    where: str  # for messages
    pieces: tuple[_Piece, ...]
    is_chat: bool

    @classmethod
    def of(cls, text: str, where: str, pieces: Sequence[_Piece], is_chat: bool) -> Self:
        example = cls(text)
        example.where = where
        example.pieces = tuple(pieces)
        example.is_chat = is_chat
        return example

    @property
    def answer(self) -> Answer:
        return self.pieces[-1]


def text_of(piece: _Piece) -> str:
    return piece.text if isinstance(piece, Answer) else piece


def extract_document(row: Mapping, where: str, rules: Rules) -> Item:
    if rules.format == "completion":
        return _extract_completion(row, where, rules)
    if rules.format == "messages":
        return _extract_chat(row, where, rules)
    return extract_text(row.get(rules.text_field), where, row, rules)


def _extract_completion(row: Mapping, where: str, rules: Rules) -> Item:
    prompt = extract_text(row.get(_PROMPT), where, row, rules, _PROMPT)
    completion = extract_text(row.get(_COMPLETION), where, row, rules, _COMPLETION)
    for text in (prompt, completion):
        if isinstance(text, Skipped):
            return text
    if not completion:
        why = f"the field {_COMPLETION!r} is empty"
        return rules.refuse_or_skip(where, why, "write the answer to learn")
    pieces = [prompt, Answer("", completion, "")]
    return Example.of(prompt + completion, where, pieces, is_chat=False)


def _extract_chat(row: Mapping, where: str, rules: Rules) -> Item:
    messages = row.get(_MESSAGES)
    if problem := _find_problem(messages):
        return rules.refuse_or_skip(where, f"the field {_MESSAGES!r} {problem}", "correct the line")
    contents = [
        extract_text(message["content"], where, message, rules, "content") for message in messages
    ]
    for text in contents:
        if isinstance(text, Skipped):
            return text
    template = rules.chat_template
    for text in contents:
        if name := template.special_tokens.reserved_in(text):
            why = f"a message contains a special token: {name}"
            return rules.refuse_or_skip(where, why, "remove it from the message")
    # `extract_text` has replaced half surrogate pairs, if config.data.invalid_utf8 says so.
    messages = [{**message, "content": text} for message, text in zip(messages, contents)]
    try:
        pieces = template.pieces(messages)
    except ValueError as error:
        return rules.refuse_or_skip(
            where,
            f"the chat template fails for the field {_MESSAGES!r}: {error}",
            "correct the messages or config.data.chat_template",
        )
    text = template.special_tokens.remove_from("".join(map(text_of, pieces)))
    try:
        text.encode()
    except UnicodeEncodeError:  # of a role or another field, or of the template itself
        return rules.refuse_or_skip(
            where,
            f"half a surrogate pair: outside the contents of {_MESSAGES!r}",
            "correct the line",
        )
    return Example.of(text, where, pieces, is_chat=True)


def _find_problem(messages) -> str:
    """Returns what is wrong with a field `messages`, or ""."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages:
        return "is not a list of messages"
    for number, message in enumerate(messages, start=1):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            return f"has a message without a role (message {number})"
        if not isinstance(message.get("content"), str):
            return f"has a message without a text as its content (message {number})"
        if role == "assistant" and not message["content"]:
            return f"has an empty answer (message {number})"
    if not any(message["role"] == "assistant" for message in messages):
        return "has no message of the assistant"
    return ""


def encode_example(example: Example, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a document, and whether the loss counts the id after each of them, both
    (tokens,).

    Prompt and answer are encoded separately, as in generation. The end-of-text id after the last
    answer counts.
    """
    ids, is_answer = encode_pieces(example.pieces, example.is_chat, tokenizer)
    if ids[-1:] == [tokenizer.end_of_text] and example.is_chat:  # the template has written it
        ids, is_answer = ids[:-1], is_answer[:-1]
    # counted[i] is about ids[i + 1]; the last one is about the end-of-text id that follows.
    ids, counted = [tokenizer.begin_of_text, *ids], [*is_answer, True]
    # If they are equal, the beginning of the next document marks the end.
    if tokenizer.begin_of_text != tokenizer.end_of_text:
        ids, counted = [*ids, tokenizer.end_of_text], [*counted, False]
    return np.array(ids, np.int64), np.array(counted, bool)


def encode_prompt(example: Example, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids up to the last answer, with the begin-of-text id."""
    ids, _ = encode_pieces(example.pieces[:-1], example.is_chat, tokenizer)
    return [tokenizer.begin_of_text, *ids]


def encode_answer(answer: Answer, is_chat: bool, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids of an answer after its prompt, up to the one that ends it."""
    if not is_chat:
        return [*tokenizer.encode_continuation(answer.text).tolist(), tokenizer.end_of_text]
    ids = tokenizer.encode_chat(answer.text, continues=True)
    ends_itself = answer.end.endswith(tuple(tokenizer.special_tokens.ids))
    return ids if ends_itself else [*ids, tokenizer.end_of_text]


def encode_pieces(
    pieces: Sequence[_Piece], is_chat: bool, tokenizer: Tokenizer
) -> tuple[list[int], list[bool]]:
    """Returns the ids of pieces, without begin-of-text, and which of them are answers."""
    ids, is_answer = [], []
    for piece in pieces:
        text = text_of(piece)
        if is_chat:
            ids += tokenizer.encode_chat(text, continues=bool(ids))
        elif ids:
            ids += tokenizer.encode_continuation(text).tolist()
        else:
            ids += tokenizer.encode([text])[0].tolist()
        num_added = len(ids) - len(is_answer)
        is_answer += [isinstance(piece, Answer)] * num_added
    if is_chat and ids[:1] == [tokenizer.begin_of_text]:  # the template has written it
        return ids[1:], is_answer[1:]
    return ids, is_answer


def with_begin(source: str, tokenizer: Tokenizer) -> str:
    """Returns the chat template, changed so that it also writes the begin-of-text token, which
    `encode_example` puts before each text.
    """
    template = ChatTemplate(source, tokenizer.special_tokens)
    try:
        text = template.render([{"role": "user", "content": "text"}])
        writes_begin = tokenizer.encode_chat(text)[:1] == [tokenizer.begin_of_text]
    except ValueError:  # it needs other messages
        writes_begin = "bos_token" in source
    if writes_begin:
        return source
    names = {i: name for name, i in tokenizer.special_tokens.ids.items()}
    return names.get(tokenizer.begin_of_text, "") + source
