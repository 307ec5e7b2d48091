"""Peak speed and memory of accelerators, and descriptions of devices that programs can be compiled for."""

import dataclasses
import importlib.util
import math
import os
import re

import jax
from jax.experimental import topologies

from smallgpt_jax.devices.platform import processor
from smallgpt_jax.errors import UserError, install_command

GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peak FLOP/s (bfloat16, dense), bytes of memory and, for TPUs, clock rate in Hz and cores per JAX device."""

    flops: float
    hbm: float
    hertz: float | None = None
    cores: int = 1


# A TPU's key is JAX's device_kind; a GPU's key is a prefix of the device_kind.
#
# TPUs: the figures are from cloud.google.com/tpu/docs/system-architecture-tpu-vm. The clock rate is computed from the
# peak speed and the number of matrix units. For v5e, 4 units × 128² × 2 × 1.5 GHz = 197 TFLOP/s.
#
# GPUs: the figures are from NVIDIA's data sheets. For H100 PCIe, H100 NVL and H200 NVL, the sheets give the speed with
# sparsity (1,513, 1,671 and 1,671 TFLOP/s). The table below has the dense speed, which is half of that.
CHIPS = {
    "TPU v4": Chip(275e12, 32 * GiB, 1.05e9, cores=2),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), Chip(197e12, 16 * GiB, 1.5e9)),
    **dict.fromkeys(("TPU v5", "TPU v5p"), Chip(459e12, 95 * GiB, 1.75e9, cores=2)),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), Chip(918e12, 32 * GiB, 1.75e9)),
    "NVIDIA A100": Chip(312e12, 80e9),
    "NVIDIA H100": Chip(989e12, 80e9),
    "NVIDIA H100 PCIe": Chip(756.5e12, 80e9),
    "NVIDIA H100 NVL": Chip(835.5e12, 94e9),
    "NVIDIA H200": Chip(989e12, 141e9),
    "NVIDIA H200 NVL": Chip(835.5e12, 141e9),
}
# Generation → slices that Google Cloud offers. The TPU compiler also knows slices of other shapes, such as v4:1x1x1.
FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
DEEP_SLICES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
TPU_SLICES = {"v4": DEEP_SLICES, "v5e": FLAT_SLICES, "v5p": DEEP_SLICES, "v6e": FLAT_SLICES}


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`, for a GPU by the longest matching prefix; None if unknown."""
    matching = [name for name in CHIPS if device_kind == name
                or (name.startswith("NVIDIA") and device_kind.startswith(name))]
    return CHIPS[max(matching, key=len)] if matching else None


def device_name(device: jax.Device) -> str:
    fields = processor() if device.platform == "cpu" else {}
    return fields.get("model name", device.device_kind)


def topology_devices(topology: str) -> list[jax.Device]:
    """Returns the devices of a topology such as "v5e:4x4" or "cpu:8".

    Programs can be compiled for the TPUs of a topology, but not run. Must be called before JAX initializes its
    backends. Raises UserError for an unknown topology, or for TPUs if libtpu is not installed.
    """
    kind, _, shape = topology.partition(":")
    is_cpu = kind == "cpu" and re.fullmatch(r"[1-9]\d*", shape)
    if not is_cpu and (kind not in TPU_SLICES or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape)):
        raise UserError(f"--topology={topology}: unknown; choose {', '.join(similar_topologies(topology))}")
    jax.config.update("jax_enable_compilation_cache", False)  # the cache cannot hold programs for absent devices
    if is_cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", int(shape))
        return jax.devices()
    return tpu_devices(topology)


def similar_topologies(text: str) -> list[str]:
    """Returns the topologies that a text may stand for: "v5e-16" and "v5litepod-16" → ["v5e:4x4"]."""
    generation, rest = re.sub("lite(pod)?", "e", text.lower()), ""
    if found := re.search("|".join(TPU_SLICES), generation):
        generation, rest = found[0], generation[found.end():]
    if generation not in TPU_SLICES:
        return [*(f"{name}:{'4x4' if '4x4' in slices else slices[0]}" for name, slices in TPU_SLICES.items()), "cpu:N"]
    sides = re.findall(r"\d+", rest)
    number = math.prod(map(int, sides)) if sides else 0
    if rest.startswith("-"):
        number //= CHIPS[f"TPU {generation}"].cores  # Google Cloud's names, such as "v4-8", count cores
    slices = TPU_SLICES[generation]
    equal = [shape for shape in slices if math.prod(map(int, shape.split("x"))) == number and rest != f":{shape}"]
    return [f"{generation}:{shape}" for shape in equal or slices]


def tpu_devices(topology: str) -> list[jax.Device]:
    if not importlib.util.find_spec("libtpu"):
        raise UserError(f"--topology: the TPU compiler is not installed; run {install_command('plan')}")
    kind, _, shape = topology.partition(":")
    jax.config.update("jax_platforms", "cpu")  # compiling for TPUs needs no TPU
    # With these variables, libtpu sends no queries to the metadata server, writes no log, and can run in several
    # processes at a time.
    os.environ.update({
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{kind}-{math.prod(map(int, shape.split('x')))}",
        "TPU_STDERR_LOG_LEVEL": "3", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"})
    one_device_per_chip = {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        return list(topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **one_device_per_chip).devices)
    except Exception as error:
        raise UserError(f"--topology={topology}: the TPU compiler has no such slice "
                        f"({str(error).splitlines()[0]}); choose {', '.join(similar_topologies(topology))}") from None
