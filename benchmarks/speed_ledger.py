"""The ledger of speeds, docs/results/speed.jsonl: one line per measurement on an idle machine.

`benchmarks/train_step.py --ledger` appends a line. docs/speeds.py makes the tables of docs/speed.md.
"""

import contextlib
import datetime
import json
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import numpy as np

from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.atomic import append_line

LEDGER = Path(__file__).parents[1] / "docs" / "results" / "speed.jsonl"
_MAX_LOAD = 0.5  # processes that may run beside the benchmark, mean of the last minute
# Rows, inputs and outputs of the product: the MLP of 8 blocks of width 256.
_PRODUCT = (4096, 256, 1024)
_CALLS, _ROUNDS = 3, 15


def require_idle() -> float:
    load = os.getloadavg()[0]
    if load > _MAX_LOAD:
        raise UserError(
            f"--ledger: other programs are running (load of the last minute: {load:.1f}); rerun "
            f"when it is at most {_MAX_LOAD}"
        )
    return load


def describe_machine() -> dict:
    """Returns what the speeds may depend on; None: unknown on this system."""
    processor = _processor()
    return {
        "processor": processor.get("model name"),
        "family": _integer(processor.get("cpu family")),
        "model": _integer(processor.get("model")),
        "stepping": _integer(processor.get("stepping")),
        "cores": os.cpu_count(),
        "caches": _caches(),
        "huge_pages": _selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        "gflops": _in_new_process(_product_gflops, cores=None),
        # Two virtual cores that share a core are hardly faster than one of them.
        "gflops_of_one_core": _in_new_process(_product_gflops, cores=1),
        "copy_gigabytes_per_second": _in_new_process(_copy_speed, cores=None),
    }


def stolen_seconds() -> float | None:
    """Returns for how long the host has run others in place of this virtual machine, all cores
    together, since its start.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = int(Path("/proc/stat").read_text("utf-8").split("\n")[0].split()[8])
        return ticks / os.sysconf("SC_CLK_TCK")
    return None


def append(entry: dict) -> None:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    append_line(LEDGER, json.dumps({"date": date, **entry}))


def _processor() -> dict[str, str]:
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return fields


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _caches() -> dict[str, str]:
    """Returns such as {"L1 Data": "48K", "L2 Unified": "2048K"}."""
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (folder / name).read_text("utf-8").strip() for name in ("level", "type", "size")
        )
        caches[f"L{level} {kind}"] = size
    return caches


def _selected(path: str) -> str | None:
    """Returns "madvise" for "always [madvise] never"."""
    with contextlib.suppress(OSError):
        return Path(path).read_text("utf-8").partition("[")[2].partition("]")[0]
    return None


def _in_new_process(function, cores: int | None) -> float:
    """Calls `function` in a process of its own, because XLA has as many threads as it may use
    cores when it starts.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, function, cores), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise UserError("--ledger: the measurement of a product has failed; see above") from None
    finally:
        process.join()


def _serve(sender, function, cores: int | None) -> None:
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    sender.send(function())


def _product_gflops() -> float:
    import jax

    jax.config.update("jax_platforms", "cpu")
    rows, inputs, outputs = _PRODUCT
    rng = np.random.default_rng(0)
    x = jax.numpy.asarray(rng.standard_normal((rows, inputs), np.float32))
    w = jax.numpy.asarray(rng.standard_normal((inputs, outputs), np.float32))
    product = jax.jit(jax.numpy.matmul)

    def run() -> None:
        for _ in range(_CALLS):
            product(x, w).block_until_ready()

    return 2 * rows * inputs * outputs * _CALLS / _median_seconds(run) / 1e9


def _copy_speed() -> float:
    """Returns GB/s read and written by one thread, of arrays larger than most caches."""
    source, target = np.ones(2**27, np.float32), np.empty(2**27, np.float32)
    return 2 * source.nbytes / _median_seconds(lambda: np.copyto(target, source)) / 1e9


def _median_seconds(function) -> float:
    seconds = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
