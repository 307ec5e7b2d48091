"""Writes what LoRA has trained as an adapter of the library `peft`: `adapter_model.safetensors`,
`adapter_config.json`.

The adapter belongs to the Hugging Face export of the weights from which the run started. Its
factors are those of the singular value decomposition of the difference between the two exports,
whose matrices are parts or permutations of ours: the rank is the same or lower.
"""

from pathlib import Path

import numpy as np

from smallgpt_jax import models
from smallgpt_jax.conversion import gpt2, low_rank, tensors
from smallgpt_jax.conversion.hugging_face import NATIVE, find_format, write_json
from smallgpt_jax.errors import UserError, import_library


def write(folder: Path, model: models.LanguageModel, base, tuned, rank: int) -> str:
    """`base` and `tuned` are parameters. Returns the class of the adapter's base model."""
    form = find_format(model.config)
    if form not in NATIVE:
        raise UserError(
            "--to=peft: the model is no GPT-2, Llama or Qwen3 in transformers, and peft supports "
            "no other; export the merged weights with --to=hf"
        )
    exports = [
        form.to_hugging_face(model.config, tensors.from_params(model, params))
        for params in (base, tuned)
    ]
    factors, is_transposed = {}, form is gpt2  # GPT-2's matrices are (inputs, outputs)
    for name, before in exports[0].items():
        delta = np.asarray(exports[1][name], np.float64) - np.asarray(before, np.float64)
        if delta.ndim == 2 and np.any(delta):
            b, a = low_rank.factor(delta.T if is_transposed else delta, rank)
            further = ((0, rank - len(a)), (0, 0))  # beyond the sides of delta, the factors are 0
            factors[name.removesuffix(".weight")] = np.pad(a, further), np.pad(b, further[::-1])
    import_library("safetensors.numpy").save_file(
        {
            f"base_model.model.{name}.lora_{letter}.weight": x
            for name, pair in factors.items()
            for letter, x in zip("AB", pair)
        },
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": is_transposed,
            "inference_mode": True,
            "target_modules": sorted(factors),
        },
    )
    return form.class_name(model.config)
