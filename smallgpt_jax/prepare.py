"""Makes the token store of a recipe: its text, tokenized, for `smallgpt_jax.main` to train on.

    python -m smallgpt_jax.prepare --config=configs/pgpt.py:quickstart

Training makes the store by itself when the source is local and under 1 GB; a larger or a remote one
is prepared with this command first, once for all recipes that use it.
"""

from absl import flags

from smallgpt_jax import cli, data

_CONFIG = cli.define_config()
flags.mark_flag_as_required("config")


def main() -> None:
    config = _CONFIG.value.data
    if store := data.find(config):
        print(f"the store is there already: {store.folder}")
    else:
        print(f"the store: {data.make(config).folder}")


if __name__ == "__main__":
    cli.run(main)
