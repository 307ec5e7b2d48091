"""Does the answer for 0.65M hold at twice the size?

    python -m smallgpt_jax.compare --config=configs/compare/larger.py --output=runs/larger

The models that configs/compare/transition.py leaves open at 1e14 FLOPs, beside llama, at 1.3M
parameters, for 5, 10 and 20 tokens per parameter of gpt; the last is 26 M tokens. The presets, after
a colon, are `tiny` (seconds per run, for tests) and `1.3M` (15 runs, about 3e15 FLOPs).

Predictions, before the runs, from one seed of each model at 0.65M: after 26 M tokens, moe has 1.86,
canon and hybrid 1.87, windows 1.89, llama 1.93, each within 0.04. moe, canon, hybrid and windows are
within 0.04 of each other at equal tokens, and llama is the worst with each seed. Half the tokens
with twice the size of transition.py (equal FLOPs) is worse for each model.

docs/results/larger.json has the runs. Four of the five losses were as predicted within 0.03; llama
has 2.03, since one seed copies late, and is the worst with each seed. Against the predictions, canon
and windows are 0.05 apart, and better with twice the size and half the tokens.
"""

from configs.compare import base, rates, scaling

MODELS = ("llama", "moe", "canon", "windows", "hybrid")
# Preset → size, tokens per parameter of gpt, seeds.
PRESETS = {"tiny": ("20k", 2, 2), "1.3M": ("1.3M", 20, 3)}


def get_config(preset: str = "1.3M"):
    size, tokens_per_parameter, seeds = base.preset(preset, PRESETS)
    common = rates.common_config(preset)
    common.train.eval_repeats = True
    steps = scaling.num_steps(size, tokens_per_parameter, common)
    return rates.one_size(MODELS, size, steps, common, horizons=(0.25, 0.5, 1.0), seeds=seeds)
