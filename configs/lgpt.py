"""TODO lgpt"""

from configs import base


def get_config(size: str = "paper"):
    config = base.get_config(size)
    config.model.architecture = "lgpt"
    config.model.blocks_per_stage = 2
    config.model.compress_last_stage = True
    config.model.stage_heads = "fixed"
    return config
