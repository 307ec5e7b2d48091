"""Comparison of the architectures on a probe: a synthetic task with exact answers (docs/data.md).

    python -m smallgpt_jax.compare --config=configs/compare/probes.py:recall --output=runs/probe-recall

The word after the colon is a probe: recall, copy, inverse, inverse-scratch, boolean, life, addition, parity or s5. The
report contains the exact match of each run at the length of training and, for most probes, at a further length. All
runs have the same width, the same number of blocks and equal numbers of tokens. Models with learned positions cannot
answer beyond the length of training, because they never trained these positions.

With "gpt rope" alone and one seed, each probe takes at most ten minutes on two CPU cores:

    python -m smallgpt_jax.compare --config=configs/compare/probes.py:copy --output=runs/probe-copy \
        --config.compare.names='gpt rope' --config.compare.seeds=1

The sizes tiny, quickstart and paper, which all comparisons have, select the recall probe; tiny trains for 40 steps.
"""

from configs import base as recipes
from configs.compare import base
from smallgpt_jax.data.config import SYMBOLS, SYNTHETIC
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.errors import UserError

# {probe: (training steps, fields of `data` without "probe_")}
PROBES = {
    "recall": (5000, {"length": 8, "min_length": 1, "test_lengths": (16,), "symbols": 32}),
    "copy": (3000, {"length": 16, "min_length": 1, "test_lengths": (32,)}),
    "inverse": (3000, {"length": 8}),
    "inverse-scratch": (3000, {"length": 8, "scratch": 1}),
    "boolean": (3000, {"length": 16}),
    "life": (3000, {"length": 6}),
    "addition": (3000, {"length": 8, "min_length": 1, "test_lengths": (12,)}),
    "parity": (3000, {"length": 16, "min_length": 1, "test_lengths": (24,)}),
    "s5": (3000, {"length": 8, "min_length": 1, "test_lengths": (12,)}),
}
RUNS = {"gpt learned": "gpt", "gpt rope": "gpt", "llama": "llama", "pgpt": "pgpt", "lgpt": "lgpt", "cgpt": "cgpt",
        "moe": "moe"}  # {run: recipe}


def get_config(size: str = "recall"):
    probe = "recall" if size in recipes.SIZES else size
    if probe not in PROBES:
        raise UserError(f"--config: no probe {probe!r}; choose from {', '.join(PROBES)}")
    steps, fields = PROBES[probe]
    common = base.recipe("gpt", "quickstart")
    common.data.update(source=SYNTHETIC + probe.partition("-")[0], tokenizer=SYMBOLS,
                       **{f"probe_{name}": value for name, value in fields.items()})
    corpus = load_or_prepare(common.data)
    common.model.vocab_size = corpus.tokenizer.vocab_size
    common.model.context_length = corpus.probe.num_inputs(corpus.probe.max_length)
    common.train.update(steps=40 if size == "tiny" else steps, batch_size=64, loss_chunks=1, eval_steps=16)
    runs = {name: {"model": model_of(recipe)} for name, recipe in RUNS.items()}
    runs["gpt rope"]["model"]["position"] = "rope"
    return base.comparison(common, runs, reference="gpt rope", decoding=False)


def model_of(recipe: str) -> dict:
    """Returns the fields of a recipe's model that differ from gpt's."""
    return base.differences(base.recipe(recipe, "quickstart"), base.recipe("gpt", "quickstart")).get("model", {})
