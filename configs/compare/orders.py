"""Initial weights or order of the batches: which half of the seed decides when a model learns to
copy?

    python -m smallgpt_jax.compare --config=configs/compare/orders.py --output=runs/orders

Each of three initial weights (train.seed) is trained with each of three orders of the batches
(data.seed), as in PolyPythias (arXiv 2503.09543), for 80 tokens per parameter of gpt. Names are
"MODEL order ORDER@SIZE"; each has one order, so a report pairs them by the initial weights. The
presets, after a colon, are `tiny` (seconds per run, for tests) and `0.2M` (pgpt and moe, 18 runs,
about 5e14 FLOPs).

Predictions, before the runs: after 80 tokens per parameter, the order explains more than half of
the variance of moe's losses; pgpt learns to copy in no more than three of nine runs, and neither
half explains more than half of its variance.

docs/results/orders.json has the runs, trained on a GPU; orders-cpu.json has nine of them, trained on
CPUs. pgpt copies in two of nine, and neither half explains a fifth of its variance, as predicted.
Against the prediction, the order explains 6% of moe's variance on the GPU, and the weights 66%. Other
runs of moe copy on CPUs, so rounding decides, too.
"""

from configs.compare import base, rates, scaling

MODELS = ("pgpt", "moe")
ORDERS = (1337, 1338, 1339)
# Preset → size, tokens per parameter of gpt, orders.
PRESETS = {"tiny": ("20k", 2, ORDERS[:2]), "0.2M": ("0.2M", 80, ORDERS)}


def get_config(preset: str = "0.2M"):
    size, tokens_per_parameter, orders = base.preset(preset, PRESETS)
    common = rates.common_config(preset)
    common.train.eval_repeats = True
    steps = scaling.num_steps(size, tokens_per_parameter, common)
    runs = {}
    for model in MODELS:
        for order in orders:
            fields = rates.run_fields(model, size, steps, rates.best_multiple(model))
            runs[f"{model} order {order}@{size}"] = {**fields, "data": {"seed": order}}
    return base.comparison(
        common,
        runs,
        budget="own",
        reference=next(iter(runs)),
        horizons=(0.5, 1.0),
        seeds=len(orders),
        decoding=False,
    )
