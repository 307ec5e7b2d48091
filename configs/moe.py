"""GPT with a mixture of experts in place of each MLP, as in DeepSeek-V3: 16 routed experts and a
shared one.

    python -m smallgpt_jax.prepare --config=configs/moe.py
    python -m smallgpt_jax.main --config=configs/moe.py --workdir=runs/moe

Each token uses the shared expert and three routed experts. The width of an expert is d_model, a
quarter of the width of gpt's MLP. The model has 347,179,776 parameters. Each token uses 163,154,688
of them. Because of the routers, these parameters and the training FLOPs per token are 0.1% more
than in configs/gpt.py. This project has not trained the model at full size.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/moe.py:quickstart --workdir=runs/moe-quickstart
"""

from configs import base


def get_config(size: str = "paper"):
    config = base.get_config(size, "gpt")
    config.model.mlp = "moe"
    if size in base.SIZES:
        config.model.mlp_ratio = 1.0
    config.model.expert_scale = 2.5
    return config
