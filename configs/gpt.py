"""GPT, the baseline of arXiv 2404.14462: 12 blocks.

    python -m smallgpt_jax.prepare --config=configs/gpt.py
    python -m smallgpt_jax.main --config=configs/gpt.py --workdir=runs/gpt

The model has 163,007,232 parameters. Training on 10.0B tokens takes 8.5e18 FLOPs, or 2.4 hours on
eight A100s at 40% of their peak speed. This project has not trained the model at full size. The
paper's authors logged a validation loss of 3.0742.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/gpt.py:quickstart --workdir=runs/gpt-quickstart
"""

from configs import base


def get_config(size: str = "paper"):
    return base.get_config(size, "gpt")
