"""The config of a run that is there: to go on with it, or to train an imported model further.

    python -m smallgpt_jax.main --config=configs/run.py:runs/mine --workdir=runs/mine --config.train.steps=4000
    python -m smallgpt_jax.main --config=configs/run.py:runs/gpt2 --workdir=runs/gpt2 --config.data.source=my_texts/

Into another --workdir it trains the same recipe from the beginning; a trained model goes on in another folder, with
other text, after `smallgpt_jax.convert --from=run`; there it can also get another context_length, unless its
positions are learned. An imported model (smallgpt_jax.convert) has no settings but
its own; it gets its tokenizer, a store in the cache folder and, as a start for a few million tokens of your own,
the few steps of a small batch that stand below.
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
