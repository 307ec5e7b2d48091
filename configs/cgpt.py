"""ConvGPT of arXiv 2404.14462: LinearGPT with a causal convolution where it has a dense layer.

    python -m smallgpt_jax.prepare --config=configs/cgpt.py
    python -m smallgpt_jax.main --config=configs/cgpt.py --workdir=runs/cgpt

59,293,248 parameters, 10.0B tokens, 1.6e18 FLOPs (26 minutes on eight A100s at 40% of their peak; that
is arithmetic, this project has not run it at full size). The paper's authors logged
a validation loss of 4.3163 at step 5,000, where they stopped.

Minutes on two CPU cores, no data needed:

    python -m smallgpt_jax.main --config=configs/cgpt.py:quickstart --workdir=runs/cgpt-quickstart
"""

from configs import base


def get_config(size: str = "paper"):
    config = base.get_config(size)
    config.model.architecture = "cgpt"
    config.model.blocks_per_stage = 2
    config.model.compress_last_stage = True
    config.model.stage_heads = "fixed"
    if size == "quickstart":
        config.model.d_model = 192  # the head then reads 48; with 32 it learns little but word pairs
        config.optimizer.learning_rate = 1.5e-3
        config.optimizer.final_learning_rate = 1e-4
    # The paper's kernel of 1 is a dense layer, which makes ConvGPT LinearGPT; the small sizes show a convolution.
    config.model.conv_kernel = 1 if size == "paper" else 3
    return config
