"""Comparison of four position encodings of a small GPT, within and beyond the training context.

    python -m smallgpt_jax.compare --config=configs/compare/positions.py --output=runs/positions

The report contains the loss at the context length of training and at 2 and 4 times this length. The
run with learned positions is evaluated only at the context length of training, because it has no
embeddings for later positions. With --config.compare.texts=NAME=FOLDER, the report also contains
the loss on other texts. To use another architecture, for example lgpt, set
--config.model.architecture=lgpt and the fields that this architecture needs.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    positions = {
        name: {"model": {"position": name}} for name in ("learned", "rope", "alibi", "none")
    }
    return base.comparison(base.recipe("gpt", size), positions, contexts=(1, 2, 4))
