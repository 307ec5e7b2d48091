"""LinearGPT of arXiv 2404.14462: 6 stages of 2 blocks; after each stage, a dense layer halves the
width.

    python -m smallgpt_jax.prepare --config=configs/lgpt.py
    python -m smallgpt_jax.main --config=configs/lgpt.py --workdir=runs/lgpt

The model has 59,293,248 parameters. Training on 10.0B tokens takes 1.6e18 FLOPs, or 26 minutes on
eight A100s at 40% of their peak speed. This project has not trained the model at full size. The
paper's authors logged a validation loss of 4.3171 at step 5,000, where they stopped.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/lgpt.py:quickstart --workdir=runs/lgpt-quickstart
"""

from configs import base
from smallgpt_jax.config.group import AT_START


def get_config(size: str = "paper", architecture: str = "lgpt"):
    config = base.get_config(size, architecture)
    if size == "quickstart":
        # With d_model = 192, the last stage's output has width 48. With the usual 128 of the
        # quickstart, it would have width 32, and the model would learn little more than bigrams.
        config.model.d_model = 192
        config.optimizer.learning_rate = 1.5e-3
        config.optimizer.final_learning_rate = 1e-4
    elif size not in base.SIZES:
        config.model.blocks_per_stage = AT_START
    return config
