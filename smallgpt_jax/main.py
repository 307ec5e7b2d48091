"""Trains a model: one recipe in, one workdir out.

    python -m smallgpt_jax.main --config=configs/pgpt.py:quickstart --workdir=runs/pgpt

The same command again continues where the workdir left off. On a TPU pod or in a Slurm step the
processes of a run find each other; elsewhere each is told of the others:

    python -m smallgpt_jax.main … --coordinator=HOST:PORT --num_processes=2 --process_id=0

What is left in the workdir: config.json,
metrics.jsonl, TensorBoard files, checkpoints/ and tokenizer/; `smallgpt_jax.generate` needs no more.
"""

from absl import flags

from smallgpt_jax import cli, distributed, summary, train

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it is not there.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "Several processes: HOST:PORT that process 0 opens and the others connect to.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Several processes: how many.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Several processes: which one this is, from 0 on.",
                                   lower_bound=0)
_JOIN_TIMEOUT = flags.DEFINE_integer(
    "join_timeout", 300, "Several processes: seconds to wait for the others at the start.", lower_bound=1)
flags.mark_flags_as_required(["config", "workdir"])


def main() -> None:
    distributed.join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _JOIN_TIMEOUT.value)
    with distributed.ending_with_the_others():
        train.train(_CONFIG.value, _WORKDIR.value)
        summary.closing(_WORKDIR.value)


if __name__ == "__main__":
    cli.run(main)
