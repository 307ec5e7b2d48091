"""Runs of several processes: how they find each other, and what they have to agree on.

Process 0 speaks and writes; the others compute. All of them run the same program on the same config.
"""

import glob
import hashlib
import importlib.util
import os
import re
import sys
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

from smallgpt_jax.errors import UserError

WAIT = 60  # seconds that a process waits for the others when it starts; SMALLGPT_JOIN_SECONDS changes it
LOST_AFTER = 30  # seconds without a sign of life after which a process counts as dead


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Makes this process one of the `num_processes` of a run; call it before JAX sees any device.

    `coordinator` is the host:port that process 0 opens and the others connect to. With all three
    None they are found in a Slurm step of several tasks and on a TPU VM; elsewhere this process is
    the only one. From then on only process 0 prints. Ends the process if the others do not come.
    """
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise UserError(f"{' and '.join(missing)} must be given too: a run of several processes needs all "
                        "three flags")
    if not missing and not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id}: must be from 0 to {num_processes - 1}")
    if missing and not (in_slurm_step() or on_tpu_vm()):
        return
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator={coordinator}: must be HOST:PORT")

    def give_up():
        others = f"--coordinator={coordinator}" if coordinator else "the other processes of this job"
        print(f"error: {others}: no answer within {seconds} seconds. Start all processes at about the same "
              "time, with the same flags but for --process_id", file=sys.stderr, flush=True)
        os._exit(1)

    # JAX itself would end this process with a stack trace.
    seconds = int(os.environ.get("SMALLGPT_JOIN_SECONDS", WAIT))
    watchdog = threading.Timer(seconds, give_up)
    watchdog.start()
    jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=10 * seconds,
                               heartbeat_timeout_seconds=LOST_AFTER)
    watchdog.cancel()
    if jax.process_index() != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def in_slurm_step() -> bool:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def on_tpu_vm() -> bool:
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(chips and importlib.util.find_spec("libtpu"))


def look_for_no_tpu() -> None:
    """Where the TPU compiler is installed, for `plan`, but no TPU: JAX would search and complain."""
    has_gpu = glob.glob("/dev/nvidia[0-9]*")
    if importlib.util.find_spec("libtpu") and not (on_tpu_vm() or has_gpu or jax.config.jax_platforms):
        jax.config.update("jax_platforms", "cpu")


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def wait_for_all(where: str) -> None:
    """Returns when all processes have come to this place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def from_first(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """What process 0 has for these numbers, in all processes."""
    if jax.process_count() == 1:
        return numbers
    return tuple(int(n) for n in multihost_utils.broadcast_one_to_all(np.array(numbers, np.int32)))


def check_same(what: str, text: str) -> None:
    """Raises UserError, in all processes, if `text` is not the same in each."""
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    all_digests = multihost_utils.process_allgather(digest)
    if others := [i for i, other in enumerate(all_digests) if (other != all_digests[0]).any()]:
        raise UserError(f"process {others[0]} has {what} other than process 0's: all processes of a run "
                        "need the same")
