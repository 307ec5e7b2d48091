"""A gpt with Llama's block: RMSNorm, gated SiLU MLP, rope, grouped-query attention, no biases.

    python -m smallgpt_jax.prepare --config=configs/llama.py
    python -m smallgpt_jax.main --config=configs/llama.py --workdir=runs/llama

Sizes of configs/gpt.py, with an MLP of 8/3 the width, so that its three matrices have as many parameters as gpt's two.
Not a published model; not run at full size by this project.

Minutes on two CPU cores, nothing to download:

    python -m smallgpt_jax.main --config=configs/llama.py:quickstart --workdir=runs/llama-quickstart
"""

from configs import base


def get_config(size: str = "paper"):
    config = base.get_config(size)
    config.model.architecture = "gpt"
    config.model.position = "rope"
    config.model.norm = "rms"
    config.model.mlp = "gated"
    config.model.mlp_ratio = 8 / 3
    config.model.activation = "silu"
    config.model.num_kv_heads = config.model.num_heads // (2 if size != "paper" else 3)
    return config
