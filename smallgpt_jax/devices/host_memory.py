"""Settings of the C library's memory allocator."""

import contextlib
import ctypes
import glob
import importlib.util
import os
import pkgutil
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
    if not keeps_freed_memory():
        return
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)  # only the main arena, not a thread's, can keep blocks above 64 MB
        mallopt(_M_MMAP_MAX, 0)  # allocate large blocks from the arena
        mallopt(_M_TRIM_THRESHOLD, -1)  # never return the end of the arena


def keeps_freed_memory() -> bool:
    """Returns whether JAX will run on the CPU, and the user has not configured the allocator."""
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    return not is_set and _runs_on_cpu()


def _runs_on_cpu() -> bool:
    """Returns whether JAX will run on the CPU, without initializing its devices."""
    if jax.config.jax_platforms:
        return jax.config.jax_platforms == "cpu"
    return not _finds_plugin_device() and not distributed.on_tpu_vm()


def _finds_plugin_device() -> bool:
    """Returns whether an installed plugin of JAX may find its device."""
    spec = importlib.util.find_spec("jax_plugins")
    if spec is None:
        return False
    plugins = [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    if not all(name.startswith("xla_cuda") for name in plugins):
        return True
    # The extra `plan-gpu` installs CUDA's plugin on machines without a GPU, too, where training
    # that does not keep its memory is only 0.6 times as fast (docs/speed.md).
    return bool(glob.glob("/dev/nvidia[0-9]*")) or Path("/dev/dxg").exists()


def available_bytes() -> int | None:
    """Returns the memory that programs can still get, also in a container; None if unknown."""
    limits = []
    with contextlib.suppress(OSError):  # not Linux
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        limits += [
            1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
        ]
    with contextlib.suppress(OSError, ValueError):  # "max" without a limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text("utf-8"))
        limits.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text("utf-8")))
    return max(0, min(limits)) if limits else None
