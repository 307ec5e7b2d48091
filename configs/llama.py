"""GPT with Llama's block: RMSNorm, gated SiLU MLP, RoPE, grouped-query attention, no biases.

    python -m smallgpt_jax.prepare --config=configs/llama.py
    python -m smallgpt_jax.main --config=configs/llama.py --workdir=runs/llama

The model has the sizes of configs/gpt.py, except that its MLP has width 8/3 · d_model. The three
matrices of the gated MLP then have as many parameters as the two matrices of gpt's MLP. This is not
a published model, and this project has not trained it at full size.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/llama.py:quickstart --workdir=runs/llama-quickstart
"""

from configs import base
from smallgpt_jax.config.group import AT_START


def get_config(size: str = "paper"):
    config = base.get_config(size, "gpt")
    config.model.position = "rope"
    config.model.norm = "rms"
    config.model.mlp = "gated"
    config.model.activation = "silu"
    if size in base.SIZES:
        config.model.mlp_ratio = 8 / 3
        config.model.num_kv_heads = config.model.num_heads // (3 if size == "paper" else 2)
    else:
        config.model.num_kv_heads = AT_START
    return config
