"""ConvGPT of arXiv 2404.14462: LinearGPT with causal convolutions instead of dense layers between
its stages.

    python -m smallgpt_jax.prepare --config=configs/cgpt.py
    python -m smallgpt_jax.main --config=configs/cgpt.py --workdir=runs/cgpt

The model has 59,293,248 parameters. Training on 10.0B tokens takes 1.6e18 FLOPs, or 26 minutes on
eight A100s at 40% of their peak speed. This project has not trained the model at full size. The
paper's authors logged a validation loss of 4.3163 at step 5,000, where they stopped.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/cgpt.py:quickstart --workdir=runs/cgpt-quickstart
"""

from configs import lgpt


def get_config(size: str = "paper"):
    config = lgpt.get_config(size, "cgpt")
    config.model.conv_kernel = (
        1 if size == "paper" else 3
    )  # with the paper's 1, ConvGPT is LinearGPT
    return config
