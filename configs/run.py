"""The config of an existing run, for continuing the run or fine-tuning an imported model.

    python -m smallgpt_jax.main --config=configs/run.py:runs/mine --workdir=runs/mine --config.train.steps=4000
    python -m smallgpt_jax.main --config=configs/run.py:runs/gpt2 --workdir=runs/gpt2 --config.data.source=my_texts/

The first command continues the run in runs/mine up to step 4,000. The second command fine-tunes an
imported model on the files in my_texts/.

In both commands, --workdir is the folder in --config. In another --workdir, a new run with the same
config starts at step 0. To train a model further in another folder, on other text or with another
context_length, first import it with `smallgpt_jax.convert --from=run`. The context_length of a
model with learned positions cannot be changed.

The saved config of an imported model has only the `model` group. For the other groups,
configs/run.py sets the model's own tokenizer, a token store in the cache folder, and values for
fine-tuning on a few million tokens.

A custom architecture, mixer, MLP, norm, objective, optimizer or schedule is used only with
--trust_custom_code, because a workdir of others may name any module.
"""

import re
import sys

from configs import base
from smallgpt_jax import models
from smallgpt_jax.run.config_file import read_groups
from smallgpt_jax.run.custom_code import refuse_training_code
from smallgpt_jax.run.names import TOKENIZER_FOLDER
from smallgpt_jax.storage.paths import as_path


def get_config(folder: str):
    path = as_path("--config=configs/run.py", folder)
    saved = read_groups(path)
    # absl reads a recipe before the flags that follow it.
    trust = any(
        re.fullmatch("--?trust_custom_code(=(true|t|1|yes|y))?", argument.lower())
        for argument in sys.argv
    )
    models.refuse_custom_code(saved["model"], path, trust)
    refuse_training_code(saved, path, trust)
    config = base.get_config("paper", saved["model"].get("architecture"))
    if "data" not in saved:
        config.data.tokenizer, config.data.store = str(path / TOKENIZER_FOLDER), ""
        config.optimizer.update(learning_rate=3e-5, **base.FOLLOW_STEPS)
        config.train.update(
            steps=300, batch_size=8, microbatches=1, eval_every=100, checkpoint_every=100
        )
    for group, fields in saved.items():
        config[group].update(fields)
    return config
