"""Trains a model: one recipe in, one workdir out.

    python -m smallgpt_jax.main --config=configs/pgpt.py:quickstart --workdir=runs/pgpt

The same command again continues where the workdir left off. What is left there: config.json,
metrics.jsonl, TensorBoard files, checkpoints/ and tokenizer/; `smallgpt_jax.generate` needs no more.
"""

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.train import train

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it is not there.")
flags.mark_flags_as_required(["config", "workdir"])


def main() -> None:
    train(_CONFIG.value, _WORKDIR.value)


if __name__ == "__main__":
    cli.run(main)
