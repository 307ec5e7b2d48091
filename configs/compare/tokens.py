"""Tokens or size: does a smaller model with more tokens beat a larger one at equal FLOPs?

    python -m smallgpt_jax.compare --config=configs/compare/tokens.py --output=runs/tokens

configs/compare/scaling.py trains for 2.5 to 20 tokens per parameter of gpt, and its longest runs
are almost always the best at equal FLOPs. Here, each size is trained beyond, at the learning rates
of configs/compare/rates.py. The loss of repeats shows when a model learns to copy. Names are
MODEL@SIZE-TOKENS, with the most tokens per parameter.

docs/results/tokens.json has gpt and llama at 0.1M and 0.2M for 20 to 80 tokens per parameter. They
were trained with the rates of scaling.py.

The presets, after a colon, are `tiny` (seconds per run, for tests) and

- `0.33M`: llama, moe, conv and hybrid for 5, 10, 20 and 40 tokens per parameter, 3 seeds, about 4e14
  FLOPs
- `0.33M-others`: canon, mamba, delta, windows, x0 and canon windows (both) for the same tokens, 3
  seeds, about 6e14 FLOPs
- `0.2M`: moe and conv for 40 and 80 tokens per parameter, 2 seeds, about 1e14 FLOPs

Predictions, before the runs: at 1e13 FLOPs, 0.33M with 10 tokens per parameter is within 0.03 nats
of 0.2M with 20, for each model. With each, all runs that learn to copy have read 8 M tokens or
more, whatever their size. conv does not learn to copy.

docs/results/tokens033.json has the runs at 0.33M. Against the prediction, canon, moe and llama had
begun to copy after 6.6 M tokens; conv has not after 13.1 M.

docs/results/tokens02.json has conv at 0.2M, which has not begun to copy after 16.7 M tokens, as
predicted. moe at 0.2M is in docs/results/orders-cpu.json.

Predictions for what is left of 0.33M-others: canon's third seed copies after 6.6 M tokens, too. No
windows, x0 or delta is better than canon with 1.6e13 FLOPs; windows and x0 copy after 13.1 M tokens,
delta does not. canon windows, added when canon and windows were level at 1e13 FLOPs, has canon's
loss at equal tokens within 0.03, and so the lowest of all at 1e13, 1.6e13 and 2.4e13 FLOPs. Against
it, canon windows (docs/results/both.json, two seeds) copies later than canon and windows.
"""

from configs.compare import base, rates, scaling

# Preset → models, size, tokens per parameter of gpt, horizons, seeds.
PRESETS = {
    "tiny": (("moe", "conv"), "20k", 2, (0.5, 1.0), 2),
    "0.33M": (("llama", "moe", "conv", "hybrid"), "0.33M", 40, (0.125, 0.25, 0.5, 1.0), 3),
    "0.33M-others": (
        ("canon", "mamba", "delta", "windows", "x0", "canon windows"),
        "0.33M",
        40,
        (0.125, 0.25, 0.5, 1.0),
        3,
    ),
    "0.2M": (("moe", "conv"), "0.2M", 80, (0.5, 1.0), 2),
}


def get_config(preset: str = "0.33M"):
    models, size, tokens_per_parameter, horizons, seeds = base.preset(preset, PRESETS)
    common = rates.common_config(preset)
    common.train.eval_repeats = True
    steps = scaling.num_steps(size, tokens_per_parameter, common)
    runs = {}
    for model in models:
        fields = rates.run_fields(model, size, steps, rates.best_multiple(model))
        runs[f"{model}@{size}-{tokens_per_parameter}"] = fields
    return base.comparison(
        common,
        runs,
        budget="own",
        reference=next(iter(runs)),
        horizons=horizons,
        seeds=seeds,
        decoding=False,
    )
