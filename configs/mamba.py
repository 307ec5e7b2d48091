"""GPT with Mamba-2 in place of attention, in all blocks.

    python -m smallgpt_jax.prepare --config=configs/mamba.py
    python -m smallgpt_jax.main --config=configs/mamba.py --workdir=runs/mamba

The blocks are those of configs/llama.py with another mixer, so unlike in the paper (arXiv
2405.21060) they have MLPs. Nothing encodes positions, and the state does not grow with the context.
This is not a published model, and this project has not trained it at full size.

The quickstart size takes minutes on two CPU cores and downloads nothing:

    python -m smallgpt_jax.main --config=configs/mamba.py:quickstart --workdir=runs/mamba-quickstart
"""

from configs import llama
from smallgpt_jax.config.group import AT_START


def get_config(size: str = "paper"):
    config = llama.get_config(size)
    config.model.mixers = ("mamba",)
    config.model.position = "none"
    config.model.num_kv_heads = 0  # only attention has key-value heads
    config.model.mamba_state = {"paper": 128, "quickstart": 32, "tiny": 32}.get(size, AT_START)
    return config
