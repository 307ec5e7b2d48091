"""Comparison of four position encodings for a small GPT, also beyond the training context.

    python -m smallgpt_jax.compare --config=configs/compare/positions.py --output=runs/positions

Except for learned positions, which end at the training context, the report also has the loss at 2 and 4 times the
training context. With --config.compare.texts=NAME=FOLDER, it also has the loss on other texts. For another
architecture, set --config.model.architecture=lgpt and the fields that this architecture needs.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    positions = {name: {"model": {"position": name}} for name in ("learned", "rope", "alibi", "none")}
    return base.comparison(base.recipe("gpt", size), positions, contexts=(1, 2, 4))
