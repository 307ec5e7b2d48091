"""Runs of several processes: how they find each other, and what they have to agree on.

Process 0 speaks and writes; the others compute. All of them run the same program on the same config.
"""

import contextlib
import faulthandler
import functools
import glob
import hashlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import reason

LOST_AFTER = 30  # seconds without a sign of life after which a process counts as dead


def join(coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: int) -> None:
    """Makes this process one of the `num_processes` of a run; call it before JAX sees any device.

    `coordinator` is the host:port that process 0 opens and the others connect to. With all three
    None they are found in a Slurm step of several tasks and on a TPU VM; elsewhere this process is
    the only one. From then on only process 0 prints. If the others have not come after `timeout`
    seconds, the process ends with exit status 1. Raises UserError for what cannot be a run.
    """
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise UserError(f"{' and '.join(missing)} must be given too: a run of several processes needs all "
                        "three flags")
    if not missing and not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id}: must be from 0 to {num_processes - 1}")
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator={coordinator}: must be HOST:PORT")
    if missing and not (in_slurm_step() or on_tpu_vm()):
        return

    def give_up():
        others = f"--coordinator={coordinator}" if coordinator else "the other processes of this job"
        print(f"error: {others}: no answer within {timeout} seconds (--join_timeout). Start all processes "
              "at about the same time, with the same flags but for --process_id", file=sys.stderr, flush=True)
        os._exit(1)

    jax.config.update("jax_enable_preemption_service", False)  # preemption.py does that for itself
    # JAX itself would end this process with a stack trace.
    watchdog = threading.Timer(timeout, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, initialization_timeout=10 * timeout,
            heartbeat_timeout_seconds=LOST_AFTER, shutdown_timeout_seconds=LOST_AFTER)
    except Exception as error:
        if not coordinator and not in_slurm_step():  # a TPU VM of its own, as notebooks have them
            return
        raise UserError(f"no run of several processes: {reason(error)}") from None
    finally:
        watchdog.cancel()
    faulthandler.disable()  # the stacks of all threads say nothing about another process that has died
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@contextlib.contextmanager
def ending_with_the_others() -> Iterator[None]:
    """Ends this process, with a message, when another one has gone while both compute together.

    What notices it may be the arithmetic that they share, at once, or, if that hangs, JAX's
    heartbeats after LOST_AFTER seconds, which abort the process with a message of their own.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises either
        if alone() or (isinstance(error, ValueError) and "Gloo" not in str(error)):
            raise
        print("error: another process of this run has ended, or cannot be reached any more "
              f"({reason(error)}).\nStart all of them again: they go on from the newest "
              "checkpoint", file=sys.stderr, flush=True)
        os._exit(1)  # whatever else there is to end would wait for the others


def in_slurm_step() -> bool:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def on_tpu_vm() -> bool:
    if jax.config.jax_platforms and "tpu" not in jax.config.jax_platforms:
        return False
    devices = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    vendors = {Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor")}
    return bool(devices and "0x1ae0" in vendors and importlib.util.find_spec("libtpu"))  # Google's


def look_for_no_tpu() -> None:
    """Where the TPU compiler is installed, for `plan`, but no TPU: JAX would search and complain."""
    others = jax.config.jax_platforms or importlib.util.find_spec("jax_plugins")
    if importlib.util.find_spec("libtpu") and not others and not on_tpu_vm():
        jax.config.update("jax_platforms", "cpu")


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def alone() -> bool:
    return jax.process_count() == 1


def ask_all(is_so: bool) -> jax.Array:
    """Whether it is so in any process. All of them call it, equally often; it starts to find out, and
    bool() of the result waits for the answer."""
    shardings, program = _asking()
    said = jax.make_array_from_process_local_data(shardings, np.full(jax.local_device_count(), is_so))
    # Simulated devices share a few threads, see program.Program.runnable.
    return jax.block_until_ready(program(said)) if jax.default_backend() == "cpu" else program(said)


@functools.cache
def _asking():
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    return (NamedSharding(mesh, PartitionSpec("all")),
            jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec())))


def any_of_them(is_so: bool) -> bool:
    """Whether it is so in any process."""
    return is_so if alone() else bool(ask_all(is_so))


def first(action: Callable[[], None]) -> None:
    """Process 0 does it while the others wait. What it raises ends all of them: nobody is left waiting
    for a process that has ended."""
    problem = None
    try:
        if is_first():
            action()
    except Exception as error:
        problem = error
    failed, = from_first((problem is not None,))
    if failed:
        raise problem or UserError("process 0 has ended; its message says why")


def from_first(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """What process 0 has for these numbers, in all processes."""
    if alone():
        return numbers
    return tuple(int(n) for n in multihost_utils.broadcast_one_to_all(np.array(numbers, np.int32)))


def check_same(what: str, text: str) -> None:
    """Raises UserError, in all processes, if `text` is not the same in each."""
    if alone():
        return
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    all_digests = multihost_utils.process_allgather(digest)
    if others := [i for i, other in enumerate(all_digests) if (other != all_digests[0]).any()]:
        raise UserError(f"process {others[0]} has {what} other than process 0's: all processes of a run "
                        "need the same")
