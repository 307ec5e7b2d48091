"""Prepares a config's token store: the tokenized text that `smallgpt_jax.main` trains on.

    python -m smallgpt_jax.prepare --config=configs/pgpt.py:quickstart

`smallgpt_jax.main` prepares a missing store itself if the source is local and under 1 GB. Use this
command for larger and remote sources. Configs with the same data settings share one store. After an
interruption, rerun the same command to resume. Parquet, Zstandard, hf: and tfds: sources need: pip
install -c constraints.txt -e '.[data]'

To divide the work, run it with --shard=1/16 to --shard=16/16 on 16 machines that share the folder
config.data.store; then without --shard, which joins the shards.
"""

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.data.corpus import prepare, prepare_shard
from smallgpt_jax.output import best_effort

_CONFIG = cli.define_config()
_WORKERS = flags.DEFINE_integer(
    "workers",
    None,
    "Number of tokenizer threads. Default: one per core. Does not affect the store.",
    lower_bound=1,
)
_SHARD = flags.DEFINE_string(
    "shard",
    None,
    "Prepare only this part of the text, such as 3/16: the third of 16. Once all exist, rerun "
    "without this flag to join them.",
)
flags.mark_flag_as_required("config")


@best_effort("stdout")
def main() -> None:
    if _SHARD.value is not None:
        folder, is_new = prepare_shard(_CONFIG.value, shard=_SHARD.value, workers=_WORKERS.value)
        print(f"{'new' if is_new else 'existing'}: {folder}")
        return
    corpus, is_new = prepare(_CONFIG.value, workers=_WORKERS.value)
    for store in corpus.stores:
        print(f"{'new' if is_new else 'existing'} token store: {store.folder}")


if __name__ == "__main__":
    cli.run(main)
