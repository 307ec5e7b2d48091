"""LinearGPT of arXiv 2404.14462: 6 stages of 2 blocks, with a dense layer after each stage that halves the width.

    python -m smallgpt_jax.prepare --config=configs/lgpt.py
    python -m smallgpt_jax.main --config=configs/lgpt.py --workdir=runs/lgpt

59,293,248 parameters, 10.0B tokens, 1.6e18 FLOPs. Eight A100s would take 26 minutes at 40% of their peak; this project
has not run it at full size. The paper's authors logged a validation loss of 4.3171 at step 5,000, where they stopped.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/lgpt.py:quickstart --workdir=runs/lgpt-quickstart
"""

from configs import base


def get_config(size: str = "paper"):
    config = base.get_config(size)
    config.model.architecture = "lgpt"
    config.model.blocks_per_stage = 2  # divides num_layers
    config.model.compress_last_stage = True  # halve the width after the last stage, too
    config.model.stage_heads = "fixed"  # number of heads per stage: "fixed" | "scaled": halved with the width
    if size == "quickstart":
        config.model.d_model = 192  # gives output width 48; with 32, the head learns little more than word pairs
        config.optimizer.learning_rate = 1.5e-3
        config.optimizer.final_learning_rate = 1e-4
    return config
