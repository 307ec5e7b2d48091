"""Examples: documents of which training counts only the answers, from rows with a prompt and its
completion, or with the messages of a conversation; and their token ids.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from smallgpt_jax.data.chat_template import BEGIN, END, MARKS, ChatTemplate
from smallgpt_jax.data.parts import Item, Rules, Skipped, extract_text
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError

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
    if rules.format == "text":
        return extract_text(row.get(rules.text_field), where, row, rules)
    return (
        extract_completion(row, where, rules)
        if rules.format == "completion"
        else extract_chat(row, where, rules)
    )


def extract_completion(row: Mapping, where: str, rules: Rules) -> Item:
    texts = [
        extract_text(row.get(field), where, row, rules, field) for field in (PROMPT, COMPLETION)
    ]
    if skipped := [text for text in texts if isinstance(text, Skipped)]:
        return skipped[0]
    prompt, completion = texts
    if not completion:
        return rules.refuse_or_skip(
            where, f"the field {COMPLETION!r} is empty", "write the answer to learn"
        )
    return Example.of(where, [Piece(prompt, False), Piece(completion, True)])


def extract_chat(row: Mapping, where: str, rules: Rules) -> Item:
    messages = row.get(MESSAGES)
    if problem := find_problem(messages):
        return rules.refuse_or_skip(where, f"the field {MESSAGES!r} {problem}", "correct the line")
    contents = [
        extract_text(message["content"], where, message, rules, "content") for message in messages
    ]
    if skipped := [text for text in contents if isinstance(text, Skipped)]:
        return skipped[0]
    try:
        pieces = ChatTemplate.of(rules.chat_template).pieces(messages)
    except ValueError as error:
        return rules.refuse_or_skip(
            where,
            f"the chat template fails for the field {MESSAGES!r}: {error}",
            "correct the messages or config.data.chat_template",
        )
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
    return (
        ""
        if any(message["role"] == "assistant" for message in messages)
        else "has no message of the assistant"
    )


def encode_example(example: Example, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a document, and whether the loss counts the id after each of them, both
    (tokens,).

    Prompt and answer are encoded separately, as in generation. The end-of-text id after the last
    answer counts.
    """
    ids, is_answer = encode_pieces(example.pieces, example.where, example.contents, tokenizer)
    if ids[-1:] == [tokenizer.end_of_text] and example.contents is not None:
        ids, is_answer = ids[:-1], is_answer[:-1]
    ids, counted = [tokenizer.begin_of_text, *ids], [*is_answer, True]
    if (
        tokenizer.begin_of_text != tokenizer.end_of_text
    ):  # else the beginning of the next document marks the end
        ids, counted = [*ids, tokenizer.end_of_text], [*counted, False]
    return np.array(ids, np.int64), np.array(counted, bool)


def encode_prompt(example: Example, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids up to the last answer, with the begin-of-text id."""
    return [
        tokenizer.begin_of_text,
        *encode_pieces(example.pieces[:-1], example.where, example.contents, tokenizer)[0],
    ]


def encode_pieces(
    pieces: Sequence[Piece],
    where: str,
    contents: Sequence[str] | None,
    tokenizer: Tokenizer,
) -> tuple[list[int], list[bool]]:
    """Returns the ids of the first pieces of an example, and which are answers, without the
    begin-of-text id.

    `contents` are those of the messages; None: not a conversation. Raises UserError if one names a
    special token.
    """
    for name in tokenizer.special_tokens if contents is not None else ():
        if any(name in content for content in contents):
            raise UserError(
                f"{where}: a message contains {name!r}, which the tokenizer would read as a "
                "special token; remove it from the message"
            )
    ids, is_answer = [], []
    for piece in pieces:
        if contents is not None:
            new = encode_chat(piece.text, tokenizer, continues=bool(ids))
        else:
            new = (
                tokenizer.encode_continuation(piece.text)
                if ids
                else tokenizer.encode([piece.text])[0]
            )
        ids.extend(int(i) for i in new)
        is_answer.extend([piece.is_answer] * len(new))
    wrote_begin = contents is not None and ids[:1] == [tokenizer.begin_of_text]
    return ids[wrote_begin:], is_answer[wrote_begin:]


def encode_chat(text: str, tokenizer: Tokenizer, continues: bool = False) -> list[int]:
    """Encodes what a chat template wrote: the names of special tokens become these tokens."""
    special = special_tokens(tokenizer)
    ids = []
    for part in re.split(
        f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text
    ):
        if part in special:
            ids.append(special[part])
        elif part:
            ids.extend(
                tokenizer.encode_continuation(part)
                if ids or continues
                else tokenizer.encode([part])[0]
            )
    return [int(i) for i in ids]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    return {BEGIN: tokenizer.begin_of_text, END: tokenizer.end_of_text, **tokenizer.special_tokens}


def with_begin(source: str, tokenizer: Tokenizer) -> str:
    """Returns the chat template that also writes the begin-of-text token, which `encode_example`
    puts before each text.

    Where the end-of-text token begins a text, a Hugging Face tokenizer has no `bos_token`, or one
    that it never writes.
    """
    begin = "eos_token" if tokenizer.begin_of_text == tokenizer.end_of_text else "bos_token"
    try:
        text = ChatTemplate.of(source).render([{"role": "user", "content": "text"}])
        writes_begin = encode_chat(text, tokenizer)[:1] == [tokenizer.begin_of_text]
    except ValueError:  # it needs other messages
        writes_begin = "bos_token" in source
    return source if writes_begin else f"{{{{ {begin} }}}}{source}"


def describe_length(example: Example, tokenizer: Tokenizer) -> str:
    """Returns the number of tokens of each field."""
    total = len(encode_example(example, tokenizer)[0])
    if example.contents is not None:
        return f"the field 'messages' has {total:,} tokens"
    prompt = len(tokenizer.encode([example.pieces[0].text])[0])
    return (
        f"the fields 'prompt' ({prompt:,} tokens) and 'completion' have {total:,} tokens, "
        "including the marks of beginning and end"
    )
