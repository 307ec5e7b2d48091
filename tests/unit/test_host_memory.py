"""The settings of the C library's memory allocator."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from smallgpt_jax.devices import distributed, host_memory

# A command whose threads allocate, write and free 200 MB and less one after another. Prints by how
# many MB this increases the memory of the process, and how many threads got new memory.
PROGRAM = """
import ctypes, pathlib, resource, threading
from smallgpt_jax import cli
from smallgpt_jax.output import best_effort

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [
    ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
increases, new, finished = [], [], threading.Event()

def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def run(num_bytes, is_done):
    before = resident_bytes()
    block = libc.malloc(num_bytes)
    libc.memset(block, 1, num_bytes)
    new.append(resident_bytes() - before > 100e6)
    libc.free(block)
    increases.append((resident_bytes() - before) / 1e6)
    is_done.set()
    finished.wait()  # keeps the arena of this thread

@best_effort("stdout")
def main():
    # Each needs less than the one before, as small objects may take a part of its freed block.
    for num_bytes in (200_000_000, 190_000_000, 180_000_000, 170_000_000):
        is_done = threading.Event()
        threading.Thread(target=run, args=(num_bytes, is_done)).start()
        is_done.wait()
    finished.set()
    print(sum(increases), sum(new))

cli.run(main)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_freed_memory_is_kept_on_cpus():
    def kept_megabytes_and_new_blocks(**variables):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
        }
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**inherited, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return [*map(float, ran.stdout.split())]

    kept, new_blocks = kept_megabytes_and_new_blocks(JAX_PLATFORMS="cpu")
    assert 190 < kept < 210 and new_blocks == 1  # the other threads use it again
    for variables in ({"JAX_PLATFORMS": "cuda"}, {"JAX_PLATFORMS": "cpu", "MALLOC_TOP_PAD_": "0"}):
        kept, new_blocks = kept_megabytes_and_new_blocks(**variables)
        assert kept < 20 and new_blocks == 4


@pytest.mark.parametrize(
    ("plugin", "devices", "keeps"),
    [
        ("xla_cuda12", [], True),  # of the extra `plan-gpu`
        ("xla_cuda13", ["/dev/nvidia0"], False),
        ("xla_other", [], False),
    ],
)
def test_a_plugin_without_its_gpu_does_not_count(plugin, devices, keeps, tmp_path, monkeypatch):
    (tmp_path / "jax_plugins" / plugin).mkdir(parents=True)
    (tmp_path / "jax_plugins" / plugin / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    no_platforms = SimpleNamespace(config=SimpleNamespace(jax_platforms=None))
    monkeypatch.setattr(host_memory, "jax", no_platforms)
    monkeypatch.setattr(distributed, "on_tpu_vm", lambda: False)
    monkeypatch.setattr(host_memory.glob, "glob", lambda pattern: devices)
    assert host_memory.keeps_freed_memory() == keeps
