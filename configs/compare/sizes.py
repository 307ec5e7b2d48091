"""Rules of sizes: are learning rate, batch and depth that they choose near the best?

    python -m smallgpt_jax.compare --config=configs/compare/sizes.py --output=runs/sizes

docs/sizes.md has the rules. Each model is trained as they say, and with one change at a time: half
and twice the learning rate, half and twice the batch, two blocks fewer and more. With another batch
or depth, what follows from it changes, too: learning rate, weight decay, steps, width. All runs of
a size have the same number of parameters and tokens, within 3%. Names are "MODEL CHANGE@SIZE".

The presets, after a colon, are `tiny` (seconds per run, for tests), `45k` (35 runs, 20 tokens per
parameter, about 1e13 FLOPs), `0.2M` (35 runs, about 2e14 FLOPs) and `0.65M` (35 runs, about 2e15
FLOPs), with one seed.

Prediction, before the first runs: at 0.2M, no change makes a model better by more than 0.02 nats,
except that gpt, pgpt and moe, with learned positions, are better at twice the rate. Against it,
these three were better with 2 blocks than with 4, which were the fewest of the rules then
(docs/results/sizes.json), and llama with half the batch (docs/results/batches.json). The rules have
changed since; with them, it holds, and twice the rate is worse (docs/results/dial.json).

Prediction for 0.65M with three seeds, of which there is no record yet: where all seeds copy with the
rule and with a change, no change is better by more than 0.03. docs/results/sizes065.json has one
seed. By it, the rule gives each path of pgpt two blocks, because with one it did not learn to copy,
and rounds batches up where that adds an eighth at most.
"""

from configs.compare import base

MODELS = ("gpt", "llama", "pgpt", "moe", "hybrid")
PRESETS = {"tiny": "0.1M@1", "45k": "45k", "0.2M": "0.2M", "0.65M": "0.65M"}  # preset → size
ROWS = 512  # of each evaluation


def get_config(preset: str = "0.2M"):
    size = base.preset(preset, PRESETS)
    common = sized("gpt", size, {})
    runs = {}
    for model in ("gpt", "hybrid") if preset == "tiny" else MODELS:
        for change, fields in changes(model, size).items():
            name = f"{model} {change}" if change else model
            runs[f"{name}@{size.partition('@')[0]}"] = base.differences(
                sized(model, size, fields), common
            )
    return base.comparison(
        common, runs, budget="own", reference=next(iter(runs)), seeds=1, decoding=False
    )


def changes(model: str, size: str) -> dict[str, dict]:
    """Returns {name of a change: the fields that it sets}."""
    rule = sized(model, size, {})
    rate, depth = rule.optimizer.learning_rate, rule.model.num_layers
    # One block in four of hybrid has attention: with 2, none has.
    least = 4 if model == "hybrid" else 2
    depths = (depth - 2, depth + 2) if depth > least else (depth + 2, depth + 4)
    changed = {"": {}}
    for multiple in (0.5, 2):
        batch = round(multiple * rule.train.batch_size)
        changed[f"{multiple:g}x rate"] = {"optimizer": {"learning_rate": multiple * rate}}
        changed[f"{multiple:g}x batch"] = {"train": {"batch_size": batch}}
    for blocks in depths:
        changed[f"{blocks} blocks"] = {"model": {"num_layers": blocks}}
    return changed


def sized(model: str, size: str, change: dict[str, dict]):
    config = base.recipe(model, size, change)
    config.train.microbatches = 1
    config.train.eval_steps = max(1, ROWS // config.train.batch_size)
    return config
