"""Learning rates at the size 0.2M: does the order of the models depend on a rate that was chosen at
the smallest size?

    python -m smallgpt_jax.compare --config=configs/compare/rates.py --output=runs/rates

configs/compare/scaling.py and configs/compare/mixers.py choose each model's rate from a grid at 45k
parameters, with one seed, and let it fall with the cube root of the size. Here each model is
trained at half of the rate that was chosen for it, at that rate, and at twice that rate: at 0.2M
with two seeds, for 20 tokens per parameter of gpt. Four models are also trained at half and twice
their rate at 0.47M, with one seed. Names are MODEL@SIZE-MULTIPLEx, where the multiple is that of
the chosen rate, so that each model counts with its best one; attention is llama, as in
configs/compare/mixers.py.

The presets, after a colon, are `tiny` (seconds per run, for tests), `0.2M` (78 runs, 5.5e14 FLOPs)
and `0.47M` (8 runs, 2.1e14 FLOPs).
"""

from configs.compare import base, mixers, scaling

# Model → the multiple of the size's rate that its grid chose at 45k, in docs/results/scaling.json
# and in mixers.json.
SCALING = {
    "pgpt": 2.0,
    "gpt": 1.0,
    "llama": 1.0,
    "moe": 2.0,
    "lgpt": 1.0,
    "cgpt": 0.5,
    "gpt-learned": 1.0,
}
MIXERS = {"hybrid": 1.0, "conv": 2.0, "delta": 2.0, "canon": 1.0, "mamba": 4.0, "x0": 1.0}
# The same for models that are not trained here, but in configs/compare/tokens.py.
OTHERS = {"windows": 1.0}
# No grid has chosen this one; both of its options have the multiple 1.
COMBINED = {"canon windows": 1.0}
MULTIPLES = (0.5, 1.0, 2.0)
AT_LARGER_SIZE = ("pgpt", "gpt", "llama", "moe")
# Model → the multiple of the chosen rate that was best here at 0.2M (docs/results/rates.json).
BEST = {
    "gpt": 2.0,
    "llama": 2.0,
    "cgpt": 0.5,
    "conv": 0.5,
    "delta": 0.5,
    "mamba": 0.5,
    "x0": 2.0,
}
# Preset → size, tokens per parameter of gpt, seeds.
PRESETS = {"tiny": ("20k", 1, 1), "0.2M": ("0.2M", 20, 2), "0.47M": ("0.47M", 20, 1)}


def get_config(preset: str = "0.2M"):
    size, tokens_per_parameter, seeds = base.preset(preset, PRESETS)
    common = common_config(preset)
    steps = scaling.num_steps(size, tokens_per_parameter, common)
    if preset == "0.47M":
        models, multiples = {name: SCALING[name] for name in AT_LARGER_SIZE}, (0.5, 2.0)
    else:
        models, multiples = {**SCALING, **MIXERS}, MULTIPLES
    runs = {}
    for model, chosen in models.items():
        for multiple in multiples:
            runs[f"{model}@{size}-{multiple:g}x"] = run_fields(
                model, size, steps, chosen * multiple
            )
    return base.comparison(
        common, runs, budget="own", reference=next(iter(runs)), seeds=seeds, decoding=False
    )


def common_config(preset: str):
    config = scaling.common_config(preset)
    config.model.num_heads = 2
    return config


def one_size(models, size: str, steps: int, common, **compare):
    """Returns a comparison of models at one size, each at its best rate. The first is the reference."""
    runs = {}
    for model in models:
        runs[f"{model}@{size}"] = run_fields(model, size, steps, best_multiple(model))
    return base.comparison(
        common, runs, budget="own", reference=next(iter(runs)), decoding=False, **compare
    )


def best_multiple(model: str) -> float:
    """Returns the best rate that was tried for a model, as a multiple of the size's."""
    chosen = SCALING | MIXERS | OTHERS | COMBINED
    return chosen[model] * BEST.get(model, 1.0)


def run_fields(model: str, size: str, steps: int, multiple: float) -> dict[str, dict]:
    """Returns the fields of a run. `multiple` is that of the size's learning rate."""
    fields_of = scaling.run_fields if model in SCALING else mixer_fields
    fields = fields_of(model, size, steps)
    rate = scaling.learning_rate(size) * multiple
    return {**fields, "optimizer": {**fields["optimizer"], "learning_rate": rate}}


def mixer_fields(model: str, size: str, steps: int) -> dict[str, dict]:
    """Returns the fields of a model of configs/compare/mixers.py."""
    width, _ = scaling.WIDTHS[size]
    llama = base.differences(base.recipe("llama", "quickstart"), base.recipe("gpt", "quickstart"))[
        "model"
    ]
    options = {**mixers.OPTIONS, "canon windows": mixers.CANON_WINDOWS}
    own = {**mixers.mixers(width), **options}[model]
    fields = scaling.size_fields(size, steps)
    return {
        **fields,
        "model": {**llama, "num_kv_heads": 0, "d_model": width, **own.get("model", {})},
        "train": {**fields["train"], **own.get("train", {})},
    }
