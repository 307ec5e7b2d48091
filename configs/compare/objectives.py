"""Comparison of training objectives of a small GPT at equal tokens: docs/objectives.md.

    python -m smallgpt_jax.compare --config=configs/compare/objectives.py --output=runs/objectives

The validation losses of causal, mtp and ftp compare with each other. Those of prefix and masked are
losses of other tokens, and the report's ranking does not apply to them; their models are for
comparisons on tuned tasks (benchmarks/objectives.py). The section "Inside the models" has the
similarity of neighbours, which FTP is expected to raise. The text is python_packages
(docs/data.md).
"""

from configs.compare import base

RUNS = {
    "causal": {},
    "prefix": {"objective": "prefix"},
    "masked": {"objective": "masked"},
    "mtp": {"future_tokens": 1},
    "ftp": {"future_tokens": 8, "future_head": "ftp"},
}


def get_config(size: str = "quickstart"):
    common = base.recipe("gpt", size)
    common.model.vocab_size += 8  # for the mask token
    if size == "quickstart":
        common.model.d_model = 64
        common.data.update(source="python_packages", validation_fraction=0.01)
        common.train.update(steps=800, eval_every=200)
    return base.comparison(
        common,
        {name: {"train": fields} for name, fields in RUNS.items()},
        seeds=3,
        decoding=False,
        diagnose=True,
    )
