"""Four position encodings for a small GPT, also evaluated beyond the training context.

    python -m smallgpt_jax.compare --config=configs/compare/positions.py --output=runs/positions

Learned positions end at the training context. For the others the report has the loss at 2 and 4 times that length, and
with --config.compare.texts=NAME=FOLDER on further texts. --config.model.architecture=lgpt, with the fields it needs,
compares them in another architecture.
"""

from configs.compare import base


def get_config(size: str = "quickstart"):
    positions = {name: {"model": {"position": name}} for name in ("learned", "rope", "alibi", "none")}
    return base.comparison(base.recipe("gpt", size), positions, contexts=(1, 2, 4))
