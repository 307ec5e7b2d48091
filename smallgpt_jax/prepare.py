"""Prepares the token store of a config: its text, tokenized, for `smallgpt_jax.main` to train on.

    python -m smallgpt_jax.prepare --config=configs/pgpt.py:quickstart

Training prepares the store itself if the source is local and under 1 GB. Larger and remote sources are prepared with
this command, once for all configs that use them. After an interruption, rerun the same command to resume. Parquet,
Zstandard, hf: and tfds: sources need: pip install -e '.[data]'
"""

from absl import flags

from smallgpt_jax import cli, data
from smallgpt_jax.output import best_effort

_CONFIG = cli.define_config()
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Tokenizer threads; default: one per core. The store does not depend on it.",
    lower_bound=1)
flags.mark_flag_as_required("config")


@best_effort("stdout")
def main() -> None:
    config = _CONFIG.value.data
    corpus = data.open_existing(config)
    status = "existing" if corpus else "new"
    for store in (corpus or data.prepare_corpus(config, _WORKERS.value)).stores:
        print(f"{status} token store: {store.folder}")


if __name__ == "__main__":
    cli.run(main)
