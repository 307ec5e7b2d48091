"""How should a small GPT know the order of its tokens? Four answers, also read in longer contexts than trained in.

    python -m smallgpt_jax.compare --config=configs/compare/positions.py --output=runs/positions

Learned vectors end at the training context. The others can be read beyond it: the report has the loss at 2 and 4
times that, and with --config.compare.texts=NAME=FOLDER on other texts. Any architecture:
--config.model.architecture=lgpt and so on, with the fields that it needs.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    positions = {name: {"model": {"position": name}} for name in ("learned", "rope", "alibi", "none")}
    return base.comparison(base.recipe("gpt", size), positions, contexts=(1, 2, 4))
