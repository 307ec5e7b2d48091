"""A gpt with the block of Llama: RMSNorm, gated SiLU MLP, rope, shared keys and values, no biases.

    python -m smallgpt_jax.prepare --config=configs/llama.py
    python -m smallgpt_jax.main --config=configs/llama.py --workdir=runs/llama

With the sizes of configs/gpt.py and an MLP of 8/3 the width, so that its three matrices have the parameters of gpt's
two; it is not a published model. This project has not run it at full size.

Minutes on two CPU cores, no data needed:

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
