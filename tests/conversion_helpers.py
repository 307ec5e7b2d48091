"""Functions for tests of import and export: exporting, loading in PyTorch, random tokens, comparing
parameters.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from smallgpt_jax.conversion import hugging_face

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GPT2 = dict(
    use_bias=True, tie_embeddings=True, activation="gelu_tanh"
)  # exported as a GPT2LMHeadModel


def export(folder: Path, model, params, tokenizer=None, model_state=None) -> Path:
    folder.mkdir()
    hugging_face.export_folder(folder, model, params, tokenizer, model_state)
    return folder


def load_in_torch(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def random_tokens(model, rows: int = 3, seed: int = 0) -> np.ndarray:
    size = (rows, model.config.context_length)
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, size)


def write_released(path: Path, without: str = "") -> Path:
    """Writes a checkpoint in the format of the paper's code: a gpt of width 4 without the tensor
    named `without`.
    """
    shapes = {
        "transformer.wte": (8, 4),
        "transformer.wpe": (8, 4),
        "transformer.ln_f": (4,),
        "lm_head": (8, 4),
        **{
            f"transformer.h.0.{part}": shape
            for part, shape in {
                "ln_1": (4,),
                "attn.c_attn": (12, 4),
                "attn.c_proj": (4, 4),
                "ln_2": (4,),
                "mlp.c_fc": (16, 4),
                "mlp.c_proj": (4, 16),
            }.items()
        },
    }
    weights = {
        f"{name}.weight": torch.zeros(shape)
        for name, shape in shapes.items()
        if f"{name}.weight" != without
    }
    config = type("GPTConfig", (), {"__module__": "models"})()
    config.n_head = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "models", SimpleNamespace(GPTConfig=type(config)))
        torch.save({"model": weights, "config": config, "step": 1}, path)
    return path
