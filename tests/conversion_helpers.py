"""Functions for tests of import and export: exporting, loading in PyTorch, random tokens, comparing parameters."""

from pathlib import Path

import jax
import numpy as np
import pytest

from smallgpt_jax.conversion import hugging_face

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GPT2 = dict(use_bias=True, tie_embeddings=True, activation="gelu_tanh")  # exported as a GPT2LMHeadModel


def export(folder: Path, model, params, tokenizer=None, model_state=None) -> Path:
    folder.mkdir()
    hugging_face.export_folder(folder, model, params, tokenizer, "# a card\n", model_state)
    return folder


def load_in_torch(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def random_tokens(model, rows: int = 3, seed: int = 0) -> np.ndarray:
    size = (rows, model.config.context_length)
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, size)


def assert_bitwise_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes()
               for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)))
