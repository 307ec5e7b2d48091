"""GPT, the baseline of arXiv 2404.14462: 12 blocks.

    python -m smallgpt_jax.prepare --config=configs/gpt.py
    python -m smallgpt_jax.main --config=configs/gpt.py --workdir=runs/gpt

163,007,232 parameters, 10.0B tokens, 8.5e18 FLOPs. Eight A100s would take 2.4 hours at 40% of their peak; this project
has not run it at full size. The paper's authors logged a validation loss of 3.0742.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/gpt.py:quickstart --workdir=runs/gpt-quickstart
"""

from configs import base


def get_config(size: str = "paper"):
    config = base.get_config(size)
    config.model.architecture = "gpt"
    return config
