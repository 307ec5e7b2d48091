"""Does the order of the models on code hold for English?

    python -m smallgpt_jax.compare --config=configs/compare/english.py --output=runs/english

The text is the folder books/ (docs/books.md), with 10.7 M tokens for training, so 26 M tokens are
2.4 epochs; of the code in the other comparisons, they are 0.64. The size is 0.2M, the learning rates
are those of configs/compare/rates.py, and of windows the one that mixers.py chose. The presets,
after a colon, are `tiny` (seconds per run, for tests, on python_stdlib) and `0.2M` (six models, 26 M
tokens, 4 seeds, 24 runs, about 1e15 FLOPs).

Predictions, before the runs: conv is the worst, as on code past the transition. canon, hybrid and
windows are better than llama with each seed, and moe, too. Repeats are rarer in books, so no model's
loss falls by more than 0.1 within a quarter of the training after the first quarter, also not when
the second epoch begins: models of this size do not remember books.

docs/results/english.json has the runs, those of hybrid from CPUs, the others from a GPU. Against the
first prediction, llama is the worst, since no model copies; the others are better with each seed.
At the constant rate, no loss falls by more than 0.06 within a quarter after the first; the decay in
the last quarter lowers each by more than 0.1, which the prediction did not except.
"""

from configs.compare import base, rates, scaling

MODELS = ("llama", "moe", "conv", "hybrid", "canon", "windows")
# Preset → size, tokens, seeds.
PRESETS = {"tiny": ("20k", 16_384, 2), "0.2M": ("0.2M", 26_000_000, 4)}


def get_config(preset: str = "0.2M"):
    size, tokens, seeds = base.preset(preset, PRESETS)
    common = rates.common_config(preset)
    common.train.eval_repeats = True
    if preset != "tiny":
        common.data.source = "books/"
    steps = scaling.num_steps(size, tokens / scaling.num_parameters(size), common)
    return rates.one_size(MODELS, size, steps, common, horizons=(0.25, 0.5, 1.0), seeds=seeds)
