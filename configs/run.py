"""The config of an existing run: to continue it, or to fine-tune an imported model.

    python -m smallgpt_jax.main --config=configs/run.py:runs/mine --workdir=runs/mine --config.train.steps=4000
    python -m smallgpt_jax.main --config=configs/run.py:runs/gpt2 --workdir=runs/gpt2 --config.data.source=my_texts/

With another --workdir it trains the same recipe from step 0. To continue a trained model in another folder, on other
text or, unless its positions are learned, with another context_length, first import it: `smallgpt_jax.convert
--from=run`. The config of an imported model has its `model` group only; the rest comes from here: its own tokenizer, a
store in the cache folder, and the settings below, a start for a few million tokens.
"""

from configs import base
from smallgpt_jax import workdir
from smallgpt_jax.files import local_path


def get_config(folder: str):
    config = base.get_config("paper")
    path = local_path("--config=configs/run.py", folder)
    saved = workdir.read_config(path)
    if "data" not in saved:
        config.data.tokenizer, config.data.store = str(path / workdir.TOKENIZER_FOLDER), ""
        config.optimizer.update(learning_rate=3e-5, final_learning_rate=3e-6, warmup_steps=20, decay_steps=300)
        config.train.update(steps=300, batch_size=8, microbatches=1, eval_every=100, checkpoint_every=100)
    for group, fields in saved.items():
        config[group].update(fields)
    return config
