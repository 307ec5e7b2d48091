"""The settings of the C library's memory allocator."""

import os
import platform
import subprocess
import sys

import pytest

# Allocates, writes and frees 200 MB in a thread. Prints by how many MB this increases the memory of the process.
PROGRAM = """
import ctypes, pathlib, resource, threading
from smallgpt_jax.devices import host_memory

host_memory.configure()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [
    ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def run():
    before = resident_bytes()
    block = libc.malloc(200_000_000)
    libc.memset(block, 1, 200_000_000)
    libc.free(block)
    print((resident_bytes() - before) / 1e6)

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_freed_memory_is_kept_on_cpus():
    def kept_megabytes(**variables):
        inherited = {name: value for name, value in os.environ.items()
                     if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
        ran = subprocess.run([sys.executable, "-c", PROGRAM], env={**inherited, **variables}, capture_output=True,
                             text=True, check=True)
        return float(ran.stdout)

    assert 190 < kept_megabytes(JAX_PLATFORMS="cpu") < 210
    assert kept_megabytes(JAX_PLATFORMS="cuda") < 20
    assert kept_megabytes(JAX_PLATFORMS="cpu", MALLOC_TOP_PAD_="0") < 20  # the user's setting is kept
