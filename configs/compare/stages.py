"""LinearGPT and ConvGPT: number and place of the halvings, heads per stage, and kernel of the convolutions.

    python -m smallgpt_jax.compare --config=configs/compare/stages.py --output=runs/stages

"halved n×" spreads the blocks over n stages; in all runs but "last stage kept" the width is also halved after the last
stage. The first run is the recipe itself. "scaled heads" keeps the width of heads and halves their number per stage
(left out where the number cannot be halved as often). Dense layers halve the width, in "conv" runs convolutions.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    common = base.recipe("lgpt", size)
    layers = common.model.num_layers
    recipe_stages = layers // common.model.blocks_per_stage
    runs = {f"halved {n}×": {"model": {"blocks_per_stage": layers // n}}
            for n in dict.fromkeys((recipe_stages, 1, 2, 4)) if layers % n == 0}
    runs["last stage kept"] = {"model": {"compress_last_stage": False}}
    if common.model.num_heads % 2**(recipe_stages - 1) == 0:
        runs["scaled heads"] = {"model": {"stage_heads": "scaled"}}
    runs |= {
        **{f"conv {kernel}": {"model": {"architecture": "cgpt", "conv_kernel": kernel}} for kernel in (1, 3, 5)},
        "gpt": base.differences(base.recipe("gpt", size), common)}
    return base.comparison(common, runs)
