"""Comparison of the four architectures of arXiv 2404.14462 at equal budgets.

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --output=runs/paper

Trains the four quickstart recipes on the same number of tokens, with three seeds each, and writes
runs/paper/report.html. With two seeds, this took half an hour to an hour on two CPU cores. To use
another budget (flops, parameters or seconds), set it on the command line:

    python -m smallgpt_jax.compare --config=configs/compare/paper.py --config.compare.budget=flops --output=runs/flops

To train at the paper's size, on GPUs or TPUs, use --config=configs/compare/paper.py:paper.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    config = base.recipes(("gpt", "pgpt", "lgpt", "cgpt"), size)
    config.runs.cgpt.model.conv_kernel = (
        1  # the paper's value; at the quickstart size, the cgpt recipe has 3
    )
    if size == "tiny":
        config.compare.seeds = 2
    return config
