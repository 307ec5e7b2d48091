"""Small models and tokenizers for tests of GGUF files."""

import io
import json

import sentencepiece

from smallgpt_jax.data.tokenizers import GPT2, SentencePiece, gpt2_bytes

BLOCK = dict(
    position="rope",
    norm="rms",
    mlp="gated",
    activation="silu",
    num_layers=2,
    d_model=32,
    num_heads=4,
    context_length=64,
    vocab_size=300,
    mlp_ratio=2.625,
    dtype="float32",
)
MERGES = ["\u0120 t", "h e", "\u0120t he", "a t", "o n", "1 2"]  # U+0120 represents a space


def small_gpt2() -> GPT2:
    """Returns a tokenizer in GPT-2's format, with 262 tokens and end-of-text."""
    tokens = [*gpt2_bytes(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    return GPT2(
        json.dumps({token: i for i, token in enumerate(tokens)}).encode(),
        "\n".join(["#version: 0.2", *MERGES, ""]).encode(),
    )


def small_sentencepiece(**changes) -> SentencePiece:
    """Returns a byte-pair model with 300 pieces, as `config.data.tokenizer=sentencepiece:300`
    trains it.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            ["the cat sat on the mat and that is that", "a dog ran on the other path"] * 20
        ),
        model_writer=model,
        **{
            **dict(
                vocab_size=300,
                model_type="bpe",
                byte_fallback=True,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                hard_vocab_limit=False,
                unk_id=0,
                eos_id=1,
                eos_piece="<|endoftext|>",
                bos_id=-1,
                pad_id=-1,
                minloglevel=2,
            ),
            **changes,
        },
    )
    return SentencePiece(model.getvalue())
