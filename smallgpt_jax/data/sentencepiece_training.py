"""Trains SentencePiece tokenizers on a text."""

import io
import os
from collections.abc import Iterable

import sentencepiece

from smallgpt_jax.data.special_tokens import END_OF_TEXT
from smallgpt_jax.data.tokenizers import SentencePiece
from smallgpt_jax.errors import UserError

# Training reads at most this much text; more text hardly changes the vocabulary.
MAX_TRAINING_CHARACTERS = 50_000_000
_MAX_LINE_CHARACTERS = 4096  # longer lines are split, because SentencePiece would ignore them
TRAINED_END = 1  # id of end-of-text


def train_sentencepiece(texts: Iterable[str], size: int) -> SentencePiece:
    """Returns a byte-pair model that preserves whitespace and encodes unseen characters as bytes.

    If the texts are too short for `size` pieces, the model has fewer pieces.
    """
    # Read first: SentencePiece would turn an error of `texts` into a RuntimeError without its message.
    lines, read = [], 0  # characters
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                lines.append(line[start : start + _MAX_LINE_CHARACTERS])
        read += len(text)
        if read > MAX_TRAINING_CHARACTERS:
            break
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            hard_vocab_limit=False,
            max_sentence_length=4 * _MAX_LINE_CHARACTERS,  # bytes
            unk_id=0,
            eos_id=TRAINED_END,
            eos_piece=END_OF_TEXT,
            bos_id=-1,
            pad_id=-1,
            num_threads=os.cpu_count(),
            minloglevel=2,
        )
    except RuntimeError as error:
        # "Internal: src/trainer.cc(12) [condition] why" → "why"
        why = str(error).split("]")[-1].strip() or "it is empty"
        raise UserError(
            f"config.data.tokenizer='sentencepiece:{size}': cannot be trained on this text "
            f"({why}); use more text"
        ) from None
    return SentencePiece(model.getvalue())
