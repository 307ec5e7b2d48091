"""Llama's block with Gated DeltaNet in three of four blocks, and attention in the fourth (as in
Qwen3-Next).

    python -m smallgpt_jax.prepare --config=configs/hybrid.py
    python -m smallgpt_jax.main --config=configs/hybrid.py --workdir=runs/hybrid

The blocks are those of configs/llama.py, with another mixer. Each head of Gated DeltaNet has keys
of 3/4 of attention's head width, and values of twice that width, so the mixer has 6·d_model²
parameters (arXiv 2412.06464, section 3.4). Its state does not grow with the context. This is not a
published model, and this project has not trained it at full size.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/hybrid.py:quickstart --workdir=runs/hybrid-quickstart
"""

from configs import base, llama
from smallgpt_jax.config.group import AT_START


def get_config(size: str = "paper"):
    config = llama.get_config(size)
    config.model.mixers = ("delta", "delta", "delta", "attention")
    config.model.delta_head_dim = AT_START
    if size in base.SIZES:
        config.model.delta_head_dim = 3 * config.model.d_model // (4 * config.model.num_heads)
    return config
