"""Examples: documents of which training counts only the answers, from rows with a prompt and its completion, or with
the messages of a conversation.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from smallgpt_jax.data.chat_template import MARKS, ChatTemplate
from smallgpt_jax.data.parts import Item, Rules, Skipped, extract_text

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"


class Piece(NamedTuple):
    text: str
    is_answer: bool


class Example(str):
    """As a string, the text of all pieces."""

    where: str  # for messages
    pieces: tuple[Piece, ...]
    contents: tuple[str, ...] | None  # of the messages; None: not a conversation

    @classmethod
    def of(cls, where: str, pieces: Sequence[Piece], contents: Sequence[str] | None = None) -> Self:
        text = "".join(piece.text for piece in pieces)
        example = cls("".join(character for character in text if character not in MARKS))
        example.where, example.pieces = where, tuple(pieces)
        example.contents = None if contents is None else tuple(contents)
        return example


def extract_document(row: Mapping, where: str, rules: Rules) -> Item:
    """Returns the text or the `Example` of a row; see `extract_text`."""
    if rules.format == "text":
        return extract_text(row.get(rules.text_field), where, row, rules)
    return extract_completion(row, where, rules) if rules.format == "completion" else extract_chat(row, where, rules)


def extract_completion(row: Mapping, where: str, rules: Rules) -> Item:
    texts = [extract_text(row.get(field), where, row, rules, field) for field in (PROMPT, COMPLETION)]
    if skipped := [text for text in texts if isinstance(text, Skipped)]:
        return skipped[0]
    prompt, completion = texts
    if not completion:
        return rules.refuse_or_skip(where, f"the field {COMPLETION!r} is empty", "write the answer to learn")
    return Example.of(where, [Piece(prompt, False), Piece(completion, True)])


def extract_chat(row: Mapping, where: str, rules: Rules) -> Item:
    messages = row.get(MESSAGES)
    if problem := find_problem(messages):
        return rules.refuse_or_skip(where, f"the field {MESSAGES!r} {problem}", "correct the line")
    contents = [extract_text(message["content"], where, message, rules, "content") for message in messages]
    if skipped := [text for text in contents if isinstance(text, Skipped)]:
        return skipped[0]
    try:
        pieces = ChatTemplate.of(rules.chat_template).pieces(messages)
    except ValueError as error:
        return rules.refuse_or_skip(where, f"the chat template fails for the field {MESSAGES!r}: {error}",
                                    "correct the messages or config.data.chat_template")
    return Example.of(where, [Piece(*piece) for piece in pieces], contents)


def find_problem(messages) -> str:
    """Returns what is wrong with a field `messages`, or ""."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        return "is not a list of messages"
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"has a message without a role (message {number})"
        if not isinstance(message.get("content"), str):
            return f"has a message without a text as its content (message {number})"
        if message["role"] == "assistant" and not message["content"]:
            return f"has an empty answer (message {number})"
    return "" if any(message["role"] == "assistant" for message in messages) else "has no message of the assistant"
