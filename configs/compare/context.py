"""Do local mixers keep their gain with a longer context?

    python -m smallgpt_jax.compare --config=configs/compare/context.py --output=runs/context

Context 512 in batches of 4, so that a step has as many tokens as with 256 in the other comparisons.
The windows of "windows" stay at 32 positions. The presets, after a colon, are `tiny` (seconds per
run, for tests) and `0.47M` (four models for 20 and 40 tokens per parameter of gpt, 4 seeds, 16 runs,
about 1.3e15 FLOPs).

Predictions, before the runs: after 40 tokens per parameter, windows and hybrid are better than llama
by 0.02 to 0.1, and moe by 0.05 to 0.1. At equal FLOPs, windows gains more on llama than with context
256, since full attention costs more there.

docs/results/context.json has the runs. The gains are more than twice the largest that were predicted,
because llama copies late.
"""

from configs.compare import base, rates, scaling

MODELS = ("llama", "moe", "hybrid", "windows")
# Preset → size, tokens per parameter of gpt, context, batch size, seeds.
PRESETS = {"tiny": ("20k", 2, 128, 4, 2), "0.47M": ("0.47M", 40, 512, 4, 4)}


def get_config(preset: str = "0.47M"):
    size, tokens_per_parameter, context, batch_size, seeds = base.preset(preset, PRESETS)
    common = rates.common_config(preset)
    common.model.context_length = context
    common.train.batch_size = batch_size
    common.train.eval_repeats = True
    steps = scaling.num_steps(size, tokens_per_parameter, common)
    return rates.one_size(MODELS, size, steps, common, horizons=(0.5, 1.0), seeds=seeds)
