"""Comparison of GPT and ParallelGPT, with one, two or four paths and with learned or equal path
weights.

    python -m smallgpt_jax.compare --config=configs/compare/paths.py --output=runs/paths

All runs have the same number of blocks:

- ParallelGPT with one, two and four paths, and learned path weights. With one path, it is GPT with
  a dense layer before the blocks.
- ParallelGPT with two paths and equal path weights.
- GPT.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    common = base.recipe("pgpt", size)
    runs = {f"{paths} paths": {"model": {"num_paths": paths}} for paths in (2, 4)}
    runs["2 equal paths"] = {"model": {"num_paths": 2, "path_weights": "equal"}}
    runs["1 path"] = {"model": {"num_paths": 1}}
    runs["gpt"] = base.differences(base.recipe("gpt", size), common)
    return base.comparison(common, runs)
