"""The config of a run that is there: to go on with it, or to train an imported model further.

    python -m smallgpt_jax.main --config=configs/run.py:runs/mine --workdir=runs/mine --config.train.steps=4000
    python -m smallgpt_jax.main --config=configs/run.py:runs/gpt2 --workdir=runs/gpt2 --config.data.source=my_texts/

An imported model (smallgpt_jax.convert) has no settings but its own; the others are those of the paper's
recipe, with the model's tokenizer and a store in the cache folder. For a few million tokens of your own,
a learning rate of some 3e-5 and a few hundred steps of a small batch are a start.
"""

from pathlib import Path

from configs import base
from smallgpt_jax import workdir


def get_config(folder: str):
    config = base.get_config("paper")
    saved = workdir.read_config(Path(folder))
    if "data" not in saved:
        config.data.tokenizer, config.data.store = str(Path(folder) / workdir.TOKENIZER_FOLDER), ""
    for group, fields in saved.items():
        config[group].update(fields)
    return config
