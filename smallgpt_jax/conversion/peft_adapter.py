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
from smallgpt_jax.storage.atomic import current_umask


def write(folder: Path, model: models.LanguageModel, base, tuned, rank: int) -> str:
    """`base` and `tuned` are parameters. Returns the class of the adapter's base model."""
    form = find_format(model.config)
    if form not in NATIVE:
        raise UserError(
            "--to=peft: the model is no GPT-2, Llama or Qwen3 in transformers, and peft supports "
            "no other; export the merged weights with --to=hf"
        )
    before = form.to_hugging_face(model.config, tensors.from_params(model, base))
    after = form.to_hugging_face(model.config, tensors.from_params(model, tuned))
    is_transposed = form is gpt2  # GPT-2's matrices are (inputs, outputs)
    factors = {}
    target_modules = []
    # Float64, because the difference of two close matrices has few digits.
    for name in before:
        delta = np.asarray(after[name], np.float64) - np.asarray(before[name], np.float64)
        if delta.ndim != 2 or not np.any(delta):
            continue
        b, a = low_rank.factor(delta.T if is_transposed else delta, rank)  # delta ≈ b·a
        padding = (0, rank - len(a))  # a matrix with a side below the rank has fewer factors
        module = name.removesuffix(".weight")
        target_modules.append(module)
        factors[f"base_model.model.{module}.lora_A.weight"] = np.pad(a, (padding, (0, 0)))
        factors[f"base_model.model.{module}.lora_B.weight"] = np.pad(b, ((0, 0), padding))
    if not target_modules:
        raise UserError("--to=peft: LoRA has changed no matrix at this step; choose a later --step")
    weights = folder / "adapter_model.safetensors"
    import_library("safetensors.numpy").save_file(factors, weights, metadata={"format": "pt"})
    weights.chmod(0o666 & ~current_umask())  # safetensors ignores the umask
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": rank,
            "lora_alpha": rank,  # a scale of 1: the factors contain the run's scale
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": is_transposed,
            "inference_mode": True,
            "target_modules": sorted(target_modules),
        },
    )
    return form.class_name(model.config)
