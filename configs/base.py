"""The config that all recipes start from.

Its fields, and their values at size `paper`, are declared and documented in

- `model`: smallgpt_jax/models/config.py; fields of one architecture: pgpt.py, lgpt.py, cgpt.py
  beside it
- `data`: smallgpt_jax/data/config.py
- `mesh`: smallgpt_jax/devices/sharding.py
- `optimizer`, `train`: smallgpt_jax/run/config.py

A recipe (`gpt.py`, `pgpt.py`, `lgpt.py`, `cgpt.py`, or your own) changes some of them. In
`--config=configs/pgpt.py:quickstart`, the word after the colon is the size:

- `paper`: the full recipe of arXiv 2404.14462, with 10B tokens of FineWeb-Edu, for GPUs or TPUs.
- `quickstart`: a small model, trained on the source code of Python's standard library. Takes
  minutes on two CPU cores and downloads nothing.
- `tiny`: a smaller model, trained in seconds, for testing a change or a machine.
"""

from ml_collections import ConfigDict

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import GROUPS

SIZES = ("paper", "quickstart", "tiny")
# The learning rate decays until the last step, to a tenth of its peak.
FOLLOW_STEPS = {"warmup_steps": -1, "decay_steps": -1, "final_learning_rate": -1.0}


def get_config(size: str, architecture: str = "gpt") -> ConfigDict:
    """Returns the fields of all groups, with the values of a size. `architecture` may have fields
    of its own.
    """
    groups = GROUPS | {"model": models.find_architecture(architecture).Config}
    config = ConfigDict({name: group.config_dict() for name, group in groups.items()})
    config.model.architecture = architecture
    if size == "quickstart":
        quickstart(config)
    elif size == "tiny":
        tiny(config)
    elif size != "paper":
        raise UserError(f"--config: no size {size!r}; choose from {', '.join(SIZES)}")
    config.lock()
    config.model.unlock()  # a recipe may name another architecture and add its fields
    return config


def quickstart(config: ConfigDict) -> None:
    config.model.vocab_size = 1024
    config.model.context_length = 128
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.d_model = 128
    config.model.dtype = "float32"
    config.data.source = "python_stdlib"
    config.data.tokenizer = "sentencepiece:1024"
    config.data.validation_fraction = 0.1
    config.data.store = ""
    config.optimizer.learning_rate = 3e-3
    config.optimizer.update(FOLLOW_STEPS)
    config.train.steps = 2000
    config.train.batch_size = 8
    config.train.microbatches = 1
    config.train.loss_chunks = 4
    config.train.log_every = 25
    config.train.eval_every = 500
    config.train.eval_steps = 64
    config.train.checkpoint_every = 500


def tiny(config: ConfigDict) -> None:
    quickstart(config)
    config.model.vocab_size = 512
    config.model.context_length = 64
    config.model.d_model = 64
    config.model.scan_layers = True
    config.data.tokenizer = "bytes"
    config.optimizer.warmup_fraction = 0.125
    config.train.steps = 40
    config.train.log_every = 10
    config.train.eval_every = 20
    config.train.eval_steps = 4
    config.train.checkpoint_every = 20
