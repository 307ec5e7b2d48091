"""Comparison of ParallelGPT with one, two and four paths, ParallelGPT with equal path weights, and GPT.

    python -m smallgpt_jax.compare --config=configs/compare/paths.py --output=runs/paths

All runs have the same number of blocks. The path weights are learned, except in the run "2 equal paths". ParallelGPT
with one path is GPT with a dense layer before its blocks.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    common = base.recipe("pgpt", size)
    runs = {f"{paths} paths": {"model": {"num_paths": paths}} for paths in (2, 4)}
    runs["2 equal paths"] = {"model": {"num_paths": 2, "path_weights": "equal"}}
    runs["1 path"] = {"model": {"num_paths": 1}}
    runs["gpt"] = base.differences(base.recipe("gpt", size), common)
    return base.comparison(common, runs)
