"""ParallelGPT of arXiv 2404.14462: two parallel paths of 6 blocks, combined by a learned weighted
sum.

    python -m smallgpt_jax.prepare --config=configs/pgpt.py
    python -m smallgpt_jax.main --config=configs/pgpt.py --workdir=runs/pgpt

The model has 164,188,417 parameters. Training on 10.0B tokens takes 8.6e18 FLOPs, or 2.4 hours on
eight A100s at 40% of their peak speed. This project has not trained the model at full size. The
paper's authors logged a validation loss of 3.2680.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/pgpt.py:quickstart --workdir=runs/pgpt-quickstart
"""

from configs import base


def get_config(size: str = "paper"):
    return base.get_config(size, "pgpt")
