"""Settings of the C library's memory allocator."""

import contextlib
import ctypes
import importlib.util
import os
from pathlib import Path

import jax

from smallgpt_jax.devices import distributed

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def configure() -> None:
    """Makes glibc keep freed memory, if JAX runs on the CPU. Call it before threads exist."""
    # By default, glibc returns a program's temporary memory after each call, and the next training
    # step maps and zeroes it again: 26% of the CPU time of a step of gpt:quickstart with batch size
    # 32, 16% at width 256 (two cores of an AMD EPYC, a virtual machine, 2026-11-22). A process that
    # keeps its memory needs about twice as much.
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if is_set or not _runs_on_cpu():
        return
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)  # only the main arena, not a thread's, can keep blocks above 64 MB
        mallopt(_M_MMAP_MAX, 0)  # allocate large blocks from the arena
        mallopt(_M_TRIM_THRESHOLD, -1)  # never return the end of the arena


def _runs_on_cpu() -> bool:
    """Returns whether JAX will run on the CPU, without initializing its devices."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms == "cpu"
    return importlib.util.find_spec("jax_plugins") is None and not distributed.on_tpu_vm()


def available_bytes() -> int | None:
    """Returns the memory that programs can still get, also in a container; None if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(1024 * int(line.split()[1]))
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text("utf-8"))
        limits.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text("utf-8")))
    return max(0, min(limits)) if limits else None
