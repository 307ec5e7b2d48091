"""Scaling laws of seven models: four sizes are trained to several horizons, and a fifth, larger one
is predicted.

    python -m smallgpt_jax.compare --config=configs/compare/scaling.py --output=runs/scaling

Names are MODEL@SIZE. The size is about the number of parameters of gpt. All sizes have four blocks
and differ in their widths, and all models of a size are trained on equally many tokens: 20 per
parameter of gpt. Per token, moe uses as many parameters as the others, of four times as many in its
blocks.

Each run holds its learning rate constant, and decays from there to the end of each horizon
(compare.horizons). The smallest size of each model chooses the learning rate from a grid. From
there the rate falls with the cube root of the number of parameters. muP would keep it, but had
higher losses (docs/optimizers.md). The text is python_packages (docs/data.md).

Scaling laws of the four fitted sizes predict the losses of the largest one. They are written to
predictions.json before the largest one is trained. To stop there, for example to commit this file
first, add

    --config.compare.train_held_out=false

and continue later without this flag. The presets, after a colon, are

- `tiny`: a few seconds per run, for tests
- `small`: 45k to 0.2M parameters, 0.47M held out: 1.0e15 FLOPs, about six hours on two CPU cores
- `medium`: 0.1M to 0.65M parameters, 1.4M held out: 8.5e15 FLOPs
- `full`: 0.33M to 2.5M parameters, 5.3M held out, for a GPU: 1.1e17 FLOPs

Set --config.model.dtype=bfloat16 where the processor computes with it.
"""

from configs.compare import base

VOCABULARY, BLOCKS = 1024, 4
# SIZE → width of the models, and of the first stage of lgpt and cgpt, at which they have about as
# many parameters.
WIDTHS = {
    "20k": (8, 16),
    "45k": (16, 24),
    "77k": (24, 32),
    "0.1M": (32, 48),
    "0.2M": (48, 64),
    "0.33M": (64, 88),
    "0.47M": (80, 104),
    "0.65M": (96, 128),
    "1.3M": (144, 184),
    "1.4M": (152, 192),
    "2.5M": (208, 272),
    "5.3M": (312, 400),
}
# Preset → fitted sizes, held-out size, tokens per parameter of gpt, heads. Two heads are not too
# narrow for width 16.
PRESETS = {
    "tiny": (("20k", "45k", "77k"), "0.2M", 1, 2),
    "small": (("45k", "77k", "0.1M", "0.2M"), "0.47M", 20, 2),
    "medium": (("0.1M", "0.2M", "0.33M", "0.65M"), "1.4M", 20, 4),
    "full": (("0.33M", "0.65M", "1.3M", "2.5M"), "5.3M", 20, 4),
}
# Name of the model → its recipe, and further fields of `model`.
MODELS = {
    "gpt": ("gpt", {}),
    "gpt-learned": ("gpt", {"position": "learned"}),
    "llama": ("llama", {}),
    "pgpt": ("pgpt", {}),
    "lgpt": ("lgpt", {"num_heads": 2}),
    "cgpt": ("cgpt", {"num_heads": 2, "conv_kernel": 3}),
    "moe": ("moe", {}),
}
STAGED = ("lgpt", "cgpt")


def get_config(preset: str = "small"):
    fitted, held_out, tokens_per_parameter, num_heads = base.preset(preset, PRESETS)
    common = common_config(preset)
    common.model.num_heads = num_heads
    runs = {
        f"{model}@{size}": run_fields(model, size, num_steps(size, tokens_per_parameter, common))
        for size in (*fitted, held_out)
        for model in MODELS
    }
    return base.comparison(
        common,
        runs,
        budget="own",
        held_out=held_out,
        reference=f"gpt@{fitted[0]}",
        # An eighth of the steps of `tiny` would be too few for the decay.
        horizons=(0.25, 0.5, 1.0) if preset == "tiny" else (0.125, 0.25, 0.5, 1.0),
        seeds=2 if preset == "tiny" else 3,
        learning_rates=(0.5, 1.0, 2.0),
        decoding=False,
    )


def common_config(preset: str):
    config = base.recipe("gpt", "quickstart")
    config.model.update(
        vocab_size=VOCABULARY, context_length=256, num_layers=BLOCKS, position="rope"
    )
    config.data.source = "python_packages" if preset != "tiny" else "python_stdlib"
    config.data.tokenizer = f"sentencepiece:{VOCABULARY}"
    config.optimizer.update(schedule="wsd", decay_fraction=0.2, final_fraction=0.0)
    config.train.update(batch_size=8, eval_steps=64)
    if preset == "tiny":
        config.model.context_length = 64
        config.train.eval_steps = 2
    return config


def run_fields(model: str, size: str, steps: int) -> dict[str, dict]:
    recipe, fields = MODELS[model]
    own = base.differences(base.recipe(recipe, "quickstart"), base.recipe("gpt", "quickstart")).get(
        "model", {}
    )
    return {
        "model": {**own, **fields, "d_model": WIDTHS[size][model in STAGED]},
        **size_fields(size, steps),
    }


def size_fields(size: str, steps: int) -> dict[str, dict]:
    return {
        "optimizer": {"learning_rate": learning_rate(size)},
        "train": {
            "steps": steps,
            "eval_every": steps // 4,
            "checkpoint_every": steps // 8,
            "log_every": max(1, steps // 40),
        },
    }


def num_parameters(size: str) -> int:
    """Returns the number of parameters of gpt's matrices."""
    width, _ = WIDTHS[size]
    return 12 * BLOCKS * width**2 + 2 * VOCABULARY * width


def num_steps(size: str, tokens_per_parameter: float, common) -> int:
    """Returns a multiple of 8, so that an eighth of the steps is a whole number."""
    batch = common.train.batch_size * common.model.context_length
    return 8 * round(tokens_per_parameter * num_parameters(size) / batch / 8)


def learning_rate(size: str) -> float:
    """Returns the rate that is multiplied by the grid. It falls with the cube root of the size, as
    in OLMo-core.
    """
    return float(f"{3e-3 * (num_parameters(size) / 1e6) ** (-1 / 3):.3g}")
