"""Comparison of mixers and of small options with Llama's block, at two sizes, at equal FLOPs.

    python -m smallgpt_jax.compare --config=configs/compare/mixers.py --output=runs/mixers

Names are MODEL@SIZE, and sizes, text, schedule and learning rates are those of
configs/compare/scaling.py. "attention" has attention with rotary positions in all blocks; all
others change one thing:

- mixers: "windows" has attention windows of 32 positions in three of four blocks; "hybrid" has
  Gated DeltaNet in these blocks. "delta", "mamba" and "conv" have their mixer in all blocks,
  without positions. Mixers have about as many parameters as attention, and the states of "delta"
  and "mamba" are equal within 12%.
- options: one field of `model` or `train` each.

A second size shows whether an option's gain shrinks. "loops" and "value embeddings" need more
FLOPs, or parameters; the report compares all models at equal FLOPs. The presets, after a colon, are

- `tiny`: a few seconds per run, for tests
- `small`: 45k and 0.2M parameters of gpt, 10 tokens per parameter
- `medium`: 0.2M and 1.3M parameters, 20 tokens per parameter
"""

from configs.compare import base, scaling

# Preset → sizes, tokens per parameter of gpt.
PRESETS = {
    "tiny": (("20k", "45k"), 1),
    "small": (("45k", "0.2M"), 10),
    "medium": (("0.2M", "1.3M"), 20),
}
OPTIONS = {
    "x0": {"model": {"input_mix": True}},
    "residual scales": {"model": {"residual_scales": True}},
    "value embeddings": {"model": {"value_embeddings": (0, 1)}},
    "smear": {"model": {"smear": True}},
    "canon": {"model": {"canon_taps": 4}},
    "gate": {"model": {"attention_gate": True}},
    "softcap": {"model": {"logit_softcap": 15.0}},
    "parallel": {"model": {"parallel_block": True}},
    "loops": {"model": {"loops": 2}},
    "ema": {"train": {"ema": 0.99}},
}
# Both options that were best past copying, which other comparisons train.
CANON_WINDOWS = {"model": {"canon_taps": 4, "attention_windows": (32, 32, 32, 0)}}


def get_config(preset: str = "small"):
    sizes, tokens_per_parameter = base.preset(preset, PRESETS)
    common = scaling.common_config(preset)
    common.model.update(
        base.differences(base.recipe("llama", "quickstart"), base.recipe("gpt", "quickstart"))[
            "model"
        ]
    )
    common.model.update(num_heads=2, num_kv_heads=0)
    runs = {}
    for size in sizes:
        width, _ = scaling.WIDTHS[size]
        steps = scaling.num_steps(size, tokens_per_parameter, common)
        for model, fields in {**mixers(width), **OPTIONS}.items():
            own = scaling.size_fields(size, steps)
            runs[f"{model}@{size}"] = {
                **own,
                "model": {"d_model": width, **fields.get("model", {})},
                "train": {**own["train"], **fields.get("train", {})},
            }
    return base.comparison(
        common,
        runs,
        budget="own",
        reference=f"attention@{sizes[0]}",
        horizons=(0.25, 0.5, 1.0),
        seeds=2 if preset == "tiny" else 3,
        learning_rates=(0.5, 1.0, 2.0),
        decoding=False,
    )


def mixers(width: int) -> dict[str, dict]:
    head_width = width // 2
    delta = {"delta_head_dim": 3 * head_width // 4, "delta_value_ratio": 1}
    mamba = {"mamba_expand": 1, "mamba_state": round(0.3 * width)}
    fields = {
        "attention": {},
        "windows": {"attention_windows": (32, 32, 32, 0)},
        "hybrid": {"mixers": ("delta", "delta", "delta", "attention"), **delta},
        "delta": {"mixers": ("delta",), "position": "none", **delta},
        "mamba": {"mixers": ("mamba",), "position": "none", **mamba},
        "conv": {"mixers": ("conv",), "position": "none"},
    }
    return {name: {"model": own} for name, own in fields.items()}
