"""TODO pgpt"""

from configs import base


def get_config(size: str = "paper"):
    config = base.get_config(size)
    config.model.architecture = "pgpt"
    config.model.num_paths = 2
    return config
