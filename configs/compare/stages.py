"""Comparison of LinearGPT and ConvGPT with different numbers of stages, attention heads and
convolution taps.

    python -m smallgpt_jax.compare --config=configs/compare/stages.py --output=runs/stages

The first run is the LinearGPT recipe, and the last run is the GPT recipe. Every other run is the
LinearGPT recipe with one change. The names of the runs mean:

- "halved n×": the model has n stages, each followed by a dense layer that halves the width. In the
  first run, n is the number of stages of the recipe.
- "last stage kept": the width is not halved after the last stage.
- "scaled heads": the number of heads halves from stage to stage, and the head width stays constant.
  This run is omitted if the number of heads cannot be halved often enough.
- "conv n": the model is a ConvGPT. Its width is halved by causal convolutions with n taps instead
  of dense layers.
- "gpt": the GPT recipe.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    common = base.recipe("lgpt", size)
    layers = common.model.num_layers
    recipe_stages = layers // common.model.blocks_per_stage
    runs = {
        f"halved {n}×": {"model": {"blocks_per_stage": layers // n}}
        for n in dict.fromkeys((recipe_stages, 1, 2, 4))
        if layers % n == 0
    }
    runs["last stage kept"] = {"model": {"compress_last_stage": False}}
    if common.model.num_heads % 2 ** (recipe_stages - 1) == 0:
        runs["scaled heads"] = {"model": {"stage_heads": "scaled"}}
    runs |= {
        **{
            f"conv {kernel}": {"model": {"architecture": "cgpt", "conv_kernel": kernel}}
            for kernel in (1, 3, 5)
        },
        "gpt": base.differences(base.recipe("gpt", size), common),
    }
    return base.comparison(common, runs)
