"""What accelerators can do, from their makers' data sheets, and TPU slices as the TPU compiler knows them."""

import dataclasses
import importlib.util
import math
import os
import re
from pathlib import Path

import jax
from jax.experimental import topologies

from smallgpt_jax.errors import UserError

GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device: `flops` dense bfloat16 FLOP/s, `hbm` bytes of memory, `hertz` the clock that the
    compiler's cycles are of (TPUs)."""

    flops: float
    hbm: float
    hertz: float | None = None


# The key is how JAX names the device; the name of a GPU goes on with its form and memory.
# TPUs: cloud.google.com/tpu/docs/system-architecture-tpu-vm; their clocks follow from the peak and the matrix
# units: v5e 4 units × 128² × 2 × 1.5 GHz = 197 TFLOP/s.
# GPUs: NVIDIA's published dense figures, half of those with sparsity; those of H100 PCIe, H100 NVL and H200 NVL have
# not been checked against the data sheets themselves.
CHIPS = {
    "TPU v4": Chip(275e12, 32 * GiB, 1.05e9),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), Chip(197e12, 16 * GiB, 1.5e9)),
    **dict.fromkeys(("TPU v5", "TPU v5p"), Chip(459e12, 95 * GiB, 1.75e9)),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), Chip(918e12, 32 * GiB, 1.75e9)),
    "NVIDIA A100": Chip(312e12, 80e9),
    "NVIDIA H100": Chip(989e12, 80e9),
    "NVIDIA H100 PCIe": Chip(756.5e12, 80e9),
    "NVIDIA H100 NVL": Chip(835.5e12, 94e9),
    "NVIDIA H200": Chip(989e12, 141e9),
    "NVIDIA H200 NVL": Chip(835.5e12, 141e9),
}
TPU_SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:4x4", "v5p": "v5p:2x2x1", "v6e": "v6e:4x4"}  # for example


def chip(device_kind: str) -> Chip | None:
    """The chip of that name, None if it is not known (a CPU); of names of GPUs the longest that fits counts."""
    fitting = [name for name in CHIPS if device_kind == name
               or (name.startswith("NVIDIA") and device_kind.startswith(name))]
    return CHIPS[max(fitting, key=len)] if fitting else None


def name(device: jax.Device) -> str:
    """What the device is called: of a CPU, the model that the system names."""
    if device.platform == "cpu" and (cpuinfo := Path("/proc/cpuinfo")).exists():
        models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines()
                  if line.startswith("model name")]
        return models[0] if models else device.device_kind
    return device.device_kind


def devices(topology: str) -> list[jax.Device]:
    """The devices of "v5e:4x4" and the like, for which programs can be compiled but not run, or of
    "cpu:8". To be called before JAX sees any device.

    Raises UserError for a topology that there is not, and when libtpu is not installed.
    """
    jax.config.update("jax_enable_compilation_cache", False)  # what is not run cannot be read from it
    kind, _, shape = topology.partition(":")
    if kind == "cpu" and re.fullmatch(r"[1-9]\d*", shape):
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(shape))
        return jax.devices()
    if kind not in TPU_SLICES or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        raise UserError(f"--topology={topology}: not known; there are {', '.join(TPU_SLICES.values())} and "
                        "other shapes of these chips, and cpu:N")
    return tpu_devices(topology)


def tpu_devices(topology: str) -> list[jax.Device]:
    if not importlib.util.find_spec("libtpu"):
        raise UserError("--topology: the TPU compiler is not installed: pip install '.[plan]'")
    kind, _, shape = topology.partition(":")
    jax.config.update("jax_platforms", "cpu")  # what computes here; the TPUs are only compiled for
    os.environ.update({  # ask no cloud, be quiet, let several such programs run at a time
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{kind}-{math.prod(map(int, shape.split('x')))}",
        "TPU_STDERR_LOG_LEVEL": "3", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"})
    one_device_a_chip = {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        return list(topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **one_device_a_chip).devices)
    except Exception as error:
        raise UserError(f"--topology={topology}: the TPU compiler knows no such slice "
                        f"({str(error).splitlines()[0]})") from None
