"""Functions for multi-process runs. All processes run the same program on the same config. Only
process 0, the primary process, writes files and prints. Those marked "(collective)" must be called
by all.
"""

import contextlib
import faulthandler
import functools
import glob
import hashlib
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from smallgpt_jax.devices import agreement
from smallgpt_jax.devices.agreement import PeerError, exchange
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.output import print_error

_Result = TypeVar("_Result")
_Json = TypeVar("_Json")
_HEARTBEAT_TIMEOUT = 30  # seconds without a heartbeat after which a process counts as dead


def initialize(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: int
) -> None:
    """Connects this process to the others within `timeout` seconds, and silences all but process 0.

    Call it before JAX initializes its devices. With None for the first three (`coordinator` is
    HOST:PORT of process 0), JAX detects them on TPU VMs and in Slurm steps of several tasks.
    """
    if not _has_other_processes(coordinator, num_processes, process_id):
        return

    def give_up():
        others = f"--coordinator={coordinator}" if coordinator else "other processes of this job"
        print_error(
            f"error: {others}: no answer within {timeout} seconds (--join_timeout); start all "
            "processes at about the same time, with the same flags except --process_id"
        )
        os._exit(1)

    if coordinator:
        _claim_process_id(coordinator, process_id)
    if coordinator and process_id == 0:
        _require_free_port(coordinator)
    jax.config.update("jax_enable_preemption_service", False)  # preemption.py handles the signals
    # This timer fires before JAX's own timeout, which would end the process with a stack trace.
    watchdog = threading.Timer(timeout, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=10 * timeout,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=_HEARTBEAT_TIMEOUT,
        )
    except Exception as error:
        if not coordinator and not _in_slurm_step():
            # a TPU VM that runs no job on several hosts (for example, a notebook): one process
            return
        reason = short_reason(error)
        raise UserError(f"multi-process run: cannot be initialized: {reason}") from None
    finally:
        watchdog.cancel()
    # stack traces of this process do not explain the failure of another process
    faulthandler.disable()
    if not is_primary():  # each line once, not once per process
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _has_other_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> bool:
    """Raises UserError for flags that do not fit together."""
    names = ("--coordinator", "--num_processes", "--process_id")
    values = (coordinator, num_processes, process_id)
    missing = [name for name, value in zip(names, values) if value is None]
    if 0 < len(missing) < 3:
        raise UserError(
            f"{' and '.join(missing)}: missing; a multi-process run needs --coordinator, "
            "--num_processes and --process_id"
        )
    if not missing and not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id}: expected 0 to {num_processes - 1}")
    if coordinator and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator={coordinator}: expected HOST:PORT")
    return not missing or _in_slurm_step() or on_tpu_vm()


def _claim_process_id(coordinator: str, process_id: int) -> None:
    """Raises UserError if another process of this machine has the same coordinator and id."""
    if sys.platform != "linux":
        return
    # JAX would abort both of them, and all others of their run.
    # An abstract address belongs to one socket of the machine, and is free once its process ends.
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0smallgpt_jax {coordinator} {process_id}")
    except OSError:
        raise UserError(
            f"--process_id={process_id}: another process with --coordinator={coordinator} has this "
            "id; give each process its own, or another coordinator to each run"
        ) from None
    _claims.append(claim)
    os.register_at_fork(after_in_child=claim.close)


_claims: list[socket.socket] = []  # are kept open until the process ends


def _require_free_port(coordinator: str) -> None:
    """JAX's service would end the process with a segmentation fault."""
    address = ("", int(coordinator.rpartition(":")[2]))
    has_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    try:
        socket.create_server(address, family=family, dualstack_ipv6=has_ipv6).close()
    except (OSError, OverflowError) as error:
        reason = f"the port cannot be used ({short_reason(error)})"
        raise UserError(f"--coordinator={coordinator}: {reason}; choose another") from None


@contextlib.contextmanager
def exit_on_peer_failure() -> Iterator[None]:
    """Exits with status 1 if another process has died."""
    # if an operation hangs, JAX aborts after _HEARTBEAT_TIMEOUT
    try:
        yield
    # JAX raises either of the first two
    except (jax.errors.JaxRuntimeError, ValueError, PeerError) as error:
        if is_single_process() or (isinstance(error, ValueError) and "Gloo" not in str(error)):
            raise
        print_error(
            "error: another process of this run has exited or is unreachable "
            f"({short_reason(error)}).\nRestart all processes to resume from the newest checkpoint"
        )
        os._exit(1)  # a regular exit would wait for the other processes


@contextlib.contextmanager
def exit_at_once_on_error() -> Iterator[None]:
    """Ends a process of a run of several as soon as it has printed its error."""
    # At a regular exit, JAX waits for the other processes for 30 seconds, and then aborts all of
    # them. So their next collective fails at once; see `exit_on_peer_failure`.
    try:
        yield
    except SystemExit as ended:
        if ended.code and agreement.num_processes() > 1:
            _exit(ended.code)
        raise
    except Exception as error:
        if agreement.num_processes() > 1:
            traceback.print_exception(error)
            _exit(1)
        raise


def _exit(status: int) -> None:
    agreement.leave()
    # os._exit writes no buffers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _in_slurm_step() -> bool:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def on_tpu_vm() -> bool:
    if jax.config.jax_platforms and "tpu" not in jax.config.jax_platforms:
        return False
    devices = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    files = glob.glob("/sys/bus/pci/devices/*/vendor")
    vendors = {Path(path).read_text("utf-8").strip() for path in files}
    has_google_device = bool(devices) and "0x1ae0" in vendors
    return has_google_device and importlib.util.find_spec("libtpu") is not None


def skip_tpu_search() -> None:
    """Keeps JAX from searching for a TPU where libtpu is installed only for `plan`."""
    # it would log errors
    others = jax.config.jax_platforms or importlib.util.find_spec("jax_plugins")
    if importlib.util.find_spec("libtpu") and not others and not on_tpu_vm():
        jax.config.update("jax_platforms", "cpu")


def is_primary() -> bool:
    return jax.process_index() == 0


def is_single_process() -> bool:
    return jax.process_count() == 1


def start_any_process(condition: bool) -> jax.Array:
    """Returns whether any has `condition` (collective); on accelerators, only bool() waits."""
    shardings, program = _compiled_any()
    local = np.full(jax.local_device_count(), condition)
    result = program(jax.make_array_from_process_local_data(shardings, local))
    # On CPUs, wait here, because programs on simulated devices can deadlock (see
    # program.Program._wait_if_simulated).
    return jax.block_until_ready(result) if jax.default_backend() == "cpu" else result


@functools.cache
def _compiled_any():
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("all")), jax.jit(jnp.any, out_shardings=everywhere)


def any_process(condition: bool) -> bool:
    """Returns whether `condition` is true in any process (collective)."""
    return condition if is_single_process() else bool(start_any_process(condition))


def run_on_primary(action: Callable[[], _Result]) -> _Result | None:
    """Runs `action` on process 0 while the others wait (collective); all raise its error."""
    result = failure = None
    try:
        if is_primary():
            result = action()
    except Exception as error:
        failure = error
    if any(exchange("failed" if failure else "")):
        raise failure or UserError("process 0 has failed; see its message")
    return result


def from_primary(value: _Json) -> _Json:
    """Returns the `value` of process 0, of a type that JSON has, in all processes (collective)."""
    return json.loads(exchange(json.dumps(value))[0])


def require_equal(what: str, text: str) -> None:
    """Raises UserError in all processes if `text`, called `what`, differs (collective)."""
    is_short = len(text) < 80  # shown in the message
    texts = exchange(text if is_short else hashlib.sha256(text.encode()).hexdigest())
    for process, other in enumerate(texts):
        if other != texts[0]:
            values = f" ({other}; there {texts[0]})" if is_short else ""
            raise UserError(
                f"process {process}: {what} differs from process 0's{values}; use the same in all "
                "processes"
            )
