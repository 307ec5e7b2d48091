"""The texts that a model is observed on, as windows of context_length + 1 tokens."""

from pathlib import Path

import numpy as np

from smallgpt_jax.data.config import is_synthetic
from smallgpt_jax.data.corpus import open_existing
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config

WINDOWS = 64  # per text, by default


def windows_of_file(
    path: Path, tokenizer: Tokenizer, context_length: int, count: int
) -> np.ndarray:
    """Returns at most `count` windows, (N, context_length + 1) int32, of a file: one document."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--text={path}: cannot be read as UTF-8 text ({error}); give another file"
        ) from None
    tokens = np.append([tokenizer.begin_of_text], tokenizer.encode([text])[0]).astype(np.int32)
    if len(tokens) <= context_length:
        raise UserError(
            f"--text={path}: has {len(tokens):,} tokens with the first, fewer than a window of "
            f"{context_length + 1:,}; give a longer text"
        )
    return cut(tokens, [0], [len(tokens)], context_length, count)


def validation_windows(config: Config, tokenizer: Tokenizer, count: int) -> dict[str, np.ndarray]:
    """Returns {text: windows} of the run's validation split; a mixture has several texts."""
    advice = "give a text file with --text"
    if is_synthetic(config.data):
        config.data.refuse("source", f"a probe has no text; {advice}")
    # a diagnosis does not tokenize the training text
    corpus = open_existing(config.data)
    if corpus is None:
        config.data.refuse("source", f"its token store is not here; prepare it, or {advice}")
    if corpus.tokenizer.files() != tokenizer.files():
        config.data.refuse(
            "source", f"its token store has another tokenizer than the run; {advice}"
        )
    windows, length = {}, config.model.context_length
    for store in corpus.stores:
        split = store.validation
        ends = np.append(split.starts[1:], split.tokens)
        if max(ends - split.starts) <= length:
            raise UserError(
                f"{split.shown}: no validation document has {length + 1:,} tokens, a window; "
                f"{advice}"
            )
        name = "validation" if len(corpus.stores) == 1 else store.folder.name
        windows[name] = cut(split.stream, split.starts, ends, length, count)
    return windows


def cut(stream, starts, ends, length: int, count: int) -> np.ndarray:
    """Returns at most `count` of the windows that begin `length` tokens apart in each document."""
    # no window crosses two documents
    firsts = np.concatenate(
        [np.arange(start, end - length, length) for start, end in zip(starts, ends)]
    )
    chosen = firsts[evenly_spaced(len(firsts), count)]
    windows = [stream[first : first + length + 1] for first in chosen]
    return np.stack(windows).astype(np.int32)


def evenly_spaced(total: int, count: int) -> np.ndarray:
    """Returns at most `count` indices of `total` items, with the first and the last."""
    return np.linspace(0, total - 1, min(count, total)).round().astype(int)
