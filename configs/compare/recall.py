"""Comparison of mixers on multi-query associative recall (MQAR, Arora et al., arXiv 2312.04927).

    python -m smallgpt_jax.compare --config=configs/compare/recall.py --output=runs/recall

Sequences have up to 16 pairs of a key and a value, and the report contains the answers for 4, 8 and
16 pairs. The models have two blocks and, within 3%, equal numbers of parameters. The states of
"delta" and "mamba" have 1,152 numbers per block. In "delta narrow", a head has 4 numbers per key in
place of 24, so that it cannot tell many keys apart. The mixer of "conv" has no state. "hybrid" has
a block with delta, then one with attention.

The size tiny trains for 40 steps; quickstart and paper are the same.
"""

from configs import base as recipes
from configs.compare import base, probes
from smallgpt_jax.errors import UserError

RUNS = {
    "attention": {"position": "rope"},
    "delta": {"mixers": ("delta",), "delta_head_dim": 24, "delta_value_ratio": 1},
    "delta narrow": {"mixers": ("delta",), "delta_head_dim": 4, "delta_value_ratio": 9},
    "mamba": {"mixers": ("mamba",), "mamba_state": 18, "mamba_expand": 1},
    "conv": {"mixers": ("conv",)},
    "hybrid": {"mixers": ("delta", "attention"), "delta_head_dim": 24, "delta_value_ratio": 1},
}


def get_config(size: str = "quickstart"):
    if size not in recipes.SIZES:
        raise UserError(f"--config: no size {size!r}; choose from {', '.join(recipes.SIZES)}")
    common = probes.task("recall", length=16, min_length=1, test_lengths=(4, 8))
    common.model.update(num_layers=2, position="none")
    common.train.steps = 40 if size == "tiny" else 1500
    return base.comparison(
        common, {name: {"model": fields} for name, fields in RUNS.items()}, seeds=1, decoding=False
    )
