"""Makes the token store of a recipe: its text, tokenized, for `smallgpt_jax.main` to train on.

    python -m smallgpt_jax.prepare --config=configs/pgpt.py:quickstart

Training makes the store by itself when the source is local and under 1 GB; a larger or a remote one
is prepared with this command first, once for all recipes that use it. Interrupted, the same command
goes on where it was. Parquet, Zstandard, hf: and tfds: sources need: pip install -e '.[data]'
"""

from absl import flags

from smallgpt_jax import cli, data
from smallgpt_jax.output import best_effort

_CONFIG = cli.define_config()
_WORKERS = flags.DEFINE_integer(
    "workers", None, "Threads that tokenize; all cores by default. The store does not depend on it.",
    lower_bound=1)
flags.mark_flag_as_required("config")


@best_effort("stdout")
def main() -> None:
    config = _CONFIG.value.data
    corpus = data.find(config)
    made = "is there already" if corpus else "is made"
    for store in (corpus or data.make(config, _WORKERS.value)).stores:
        print(f"the store {made}: {store.folder}")


if __name__ == "__main__":
    cli.run(main)
