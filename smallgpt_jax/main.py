"""Trains the model of a config and writes the run to a workdir.

    python -m smallgpt_jax.main --config=configs/pgpt.py:quickstart --workdir=runs/pgpt

Rerun the same command to resume. Multi-process runs are detected on TPU pods and in Slurm steps.
Elsewhere, start each process with these flags:

    python -m smallgpt_jax.main … --coordinator=HOST:PORT --num_processes=2 --process_id=0

The run writes config.json, metrics.jsonl, TensorBoard event files, checkpoints/ and tokenizer/ to
the workdir. `smallgpt_jax.generate` needs no files outside the workdir.
"""

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.devices import distributed
from smallgpt_jax.training import messages, preemption
from smallgpt_jax.training.trained_run import train

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; created if necessary.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "Multi-process runs: HOST:PORT on which process 0 listens for the other processes.",
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "Multi-process runs: number of processes.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Multi-process runs: index of this process.", lower_bound=0
)
_JOIN_TIMEOUT = flags.DEFINE_integer(
    "join_timeout",
    300,
    "Multi-process runs: seconds to wait for the other processes.",
    lower_bound=1,
)
flags.mark_flags_as_required(["config", "workdir"])


def main() -> None:
    # Ctrl-C also ends a process that waits for the others.
    with preemption.handle_signals():
        distributed.initialize(
            _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _JOIN_TIMEOUT.value
        )
    # from here on, another process may die while this one waits for it
    with distributed.exit_on_peer_failure():
        train(_CONFIG.value, _WORKDIR.value)
        messages.print_final_message(_WORKDIR.value)


if __name__ == "__main__":
    with distributed.exit_at_once_on_error():
        cli.run(main)
