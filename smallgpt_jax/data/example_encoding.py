"""Token ids of examples, and of what a chat template writes."""

import re
from collections.abc import Sequence

import numpy as np

from smallgpt_jax.data.chat_template import BEGIN, END, ChatTemplate
from smallgpt_jax.data.examples import Example, Piece
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError


def encode_example(example: Example, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of a document, and whether the loss counts the id after each of them, both (tokens,).

    Prompt and answer are encoded separately, as in generation. The end-of-text id after the last answer counts.
    """
    ids, is_answer = encode_pieces(example.pieces, example.where, example.contents, tokenizer)
    if ids[-1:] == [tokenizer.end_of_text] and example.contents is not None:
        ids, is_answer = ids[:-1], is_answer[:-1]
    ids, counted = [tokenizer.begin_of_text, *ids], [*is_answer, True]
    if tokenizer.begin_of_text != tokenizer.end_of_text:  # else the beginning of the next document marks the end
        ids, counted = [*ids, tokenizer.end_of_text], [*counted, False]
    return np.array(ids, np.int64), np.array(counted, bool)


def encode_prompt(example: Example, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids up to the last answer, with the begin-of-text id."""
    return [tokenizer.begin_of_text, *encode_pieces(example.pieces[:-1], example.where, example.contents, tokenizer)[0]]


def encode_pieces(pieces: Sequence[Piece], where: str, contents: Sequence[str] | None, tokenizer: Tokenizer,
                  ) -> tuple[list[int], list[bool]]:
    """Returns the ids of the first pieces of an example, and which are answers, without the begin-of-text id.

    `contents` are those of the messages; None: not a conversation. Raises UserError if one names a special token.
    """
    for name in tokenizer.special_tokens if contents is not None else ():
        if any(name in content for content in contents):
            raise UserError(f"{where}: a message contains {name!r}, which the tokenizer would read as a special token; "
                            "remove it from the message")
    ids, is_answer = [], []
    for piece in pieces:
        if contents is not None:
            new = encode_chat(piece.text, tokenizer, continues=bool(ids))
        else:
            new = tokenizer.encode_continuation(piece.text) if ids else tokenizer.encode([piece.text])[0]
        ids.extend(int(i) for i in new)
        is_answer.extend([piece.is_answer] * len(new))
    wrote_begin = contents is not None and ids[:1] == [tokenizer.begin_of_text]
    return ids[wrote_begin:], is_answer[wrote_begin:]


def encode_chat(text: str, tokenizer: Tokenizer, continues: bool = False) -> list[int]:
    """Encodes what a chat template wrote: the names of special tokens become these tokens."""
    special = special_tokens(tokenizer)
    ids = []
    for part in re.split(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True)))})", text):
        if part in special:
            ids.append(special[part])
        elif part:
            ids.extend(tokenizer.encode_continuation(part) if ids or continues else tokenizer.encode([part])[0])
    return [int(i) for i in ids]


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    return {BEGIN: tokenizer.begin_of_text, END: tokenizer.end_of_text, **tokenizer.special_tokens}


def with_begin(source: str, tokenizer: Tokenizer) -> str:
    """Returns the chat template that also writes the begin-of-text token, which `encode_example` puts before each text.

    Where the end-of-text token begins a text, a Hugging Face tokenizer has no `bos_token`, or one that it never writes.
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
    return (f"the fields 'prompt' ({prompt:,} tokens) and 'completion' have {total:,} tokens, including the marks of "
            "beginning and end")
