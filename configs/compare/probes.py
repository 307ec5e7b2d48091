"""Comparison of the architectures on a probe: a synthetic task with exact answers (docs/data.md).

    python -m smallgpt_jax.compare --config=configs/compare/probes.py:recall --output=runs/probe-recall

The word after the colon is a probe: recall, copy, inverse, inverse-scratch, boolean, life,
addition, parity or s5. The report contains the exact match of each run at the length of training
and, for most probes, at a further length. The runs have equal numbers of tokens, and the models of
size `quickstart` at half their widths. Models with learned positions cannot answer beyond the
length of training, because these positions are not trained.

With "gpt rope" alone and one seed, each probe takes at most ten minutes on two CPU cores:

    python -m smallgpt_jax.compare --config=configs/compare/probes.py:copy --output=runs/probe-copy \
        --config.compare.names='gpt rope' --config.compare.seeds=1

The sizes tiny, quickstart and paper, which all comparisons have, select the recall probe; tiny
trains for 40 steps.
"""

from configs import base as recipes
from configs.compare import base
from smallgpt_jax.data.config import SYMBOLS, SYNTHETIC
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.errors import UserError

# {probe: (training steps, fields of `data` without "probe_")}
PROBES = {
    "recall": (1500, {"length": 8, "min_length": 1, "test_lengths": (12,)}),
    "copy": (4000, {"length": 16, "min_length": 1, "test_lengths": (24,)}),
    "inverse": (1500, {"length": 8}),
    "inverse-scratch": (1500, {"length": 8, "scratch": 1}),
    "boolean": (1500, {"length": 12}),
    "life": (1500, {"length": 5}),
    "addition": (2000, {"length": 8, "min_length": 1, "test_lengths": (12,)}),
    "parity": (1500, {"length": 16, "min_length": 1, "test_lengths": (24,)}),
    "s5": (1500, {"length": 8, "min_length": 1, "test_lengths": (12,)}),
}
RUNS = {
    "gpt learned": "gpt",
    "gpt rope": "gpt",
    "llama": "llama",
    "pgpt": "pgpt",
    "lgpt": "lgpt",
    "cgpt": "cgpt",
    "moe": "moe",
}  # {run: recipe}


def get_config(size: str = "recall"):
    probe = "recall" if size in recipes.SIZES else size
    if probe not in PROBES:
        raise UserError(f"--config: no probe {probe!r}; choose from {', '.join(PROBES)}")
    steps, fields = PROBES[probe]
    common = task(probe.partition("-")[0], **fields)
    common.train.steps = 40 if size == "tiny" else steps
    runs = {name: {"model": model_of(recipe)} for name, recipe in RUNS.items()}
    runs["gpt rope"]["model"]["position"] = "rope"
    return base.comparison(common, runs, reference="gpt rope", decoding=False)


def task(probe: str, **fields):
    """Returns the config of a gpt on a probe. The fields are those of `data` without "probe_"."""
    config = base.recipe("gpt", "quickstart")
    config.data.update(
        source=SYNTHETIC + probe,
        tokenizer=SYMBOLS,
        **{f"probe_{name}": value for name, value in fields.items()},
    )
    corpus = load_or_prepare(config.data)
    config.model.update(
        vocab_size=corpus.tokenizer.vocab_size,
        d_model=64,
        num_heads=2,
        context_length=corpus.probe.num_inputs(corpus.probe.max_length),
    )
    config.optimizer.name = (
        "muon"  # with AdamW, recall stays for thousands of steps where it knows only the values
    )
    config.train.update(batch_size=64, loss_chunks=1, eval_every=250, eval_steps=16)
    return config


def model_of(recipe: str) -> dict:
    """Returns the fields of a recipe's quickstart model that differ from gpt's, at half the width
    and heads.
    """
    fields = base.differences(
        base.recipe(recipe, "quickstart"), base.recipe("gpt", "quickstart")
    ).get("model", {})
    return {
        name: value // 2 if name in ("d_model", "num_kv_heads") else value
        for name, value in fields.items()
    }
