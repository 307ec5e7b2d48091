"""Peak speed and memory of accelerators."""

import dataclasses

import jax

from smallgpt_jax.devices.platform import processor

GiB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    flops: float  # peak FLOP/s (bfloat16, dense)
    hbm: float  # bytes of memory
    hertz: float | None = None  # clock rate of TPUs, in Hz
    cores: int = 1  # per JAX device
    # bytes/s of the memory of TPUs; those of GPUs are in planning/gpus.py
    bandwidth: float | None = None


# A TPU's or GeForce's key is JAX's device_kind; another GPU's key is a prefix of the device_kind.
#
# TPUs: the figures are from cloud.google.com/tpu/docs/system-architecture-tpu-vm. The clock rate is
# computed from the peak speed and the number of matrix units. For v5e, 4 units × 128² × 2 × 1.5 GHz
# = 197 TFLOP/s.
#
# GPUs: the figures are from NVIDIA's data sheets and architecture white papers: dense, with sums in
# float32. Where a sheet gives only the speed with sparsity, such as 1,513 TFLOP/s for H100 PCIe,
# they are half of that.
CHIPS = {
    "TPU v4": Chip(275e12, 32 * GiB, 1.05e9, cores=2, bandwidth=1.2e12),
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), Chip(197e12, 16 * GiB, 1.5e9, bandwidth=819e9)),
    **dict.fromkeys(
        ("TPU v5", "TPU v5p"), Chip(459e12, 95 * GiB, 1.75e9, cores=2, bandwidth=2765e9)
    ),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), Chip(918e12, 32 * GiB, 1.75e9, bandwidth=1.6e12)),
    "NVIDIA A100": Chip(312e12, 80e9),
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), Chip(312e12, 40e9)),
    "NVIDIA H100": Chip(989e12, 80e9),
    "NVIDIA H100 PCIe": Chip(756.5e12, 80e9),
    "NVIDIA H100 NVL": Chip(835.5e12, 94e9),
    "NVIDIA H200": Chip(989e12, 141e9),
    "NVIDIA H200 NVL": Chip(835.5e12, 141e9),
    "NVIDIA B200": Chip(2250e12, 180e9),
    "NVIDIA L4": Chip(121e12, 24e9),
    "NVIDIA L40": Chip(181e12, 48e9),
    "NVIDIA L40S": Chip(362e12, 48e9),
    "NVIDIA GeForce RTX 3090": Chip(71e12, 24e9),
    "NVIDIA GeForce RTX 4090": Chip(165.2e12, 24e9),
    "NVIDIA GeForce RTX 5090": Chip(209.5e12, 32e9),
}


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of a `jax.Device.device_kind`; None if unknown."""
    if device_kind in CHIPS:
        return CHIPS[device_kind]
    # "D" or "Laptop GPU" after the name of a GeForce is another GPU, "PCIe" after H100 a variant
    if "GeForce" in device_kind:
        return None
    gpus = [name for name in CHIPS if name.startswith("NVIDIA") and device_kind.startswith(name)]
    return CHIPS[max(gpus, key=len)] if gpus else None


def device_name(device: jax.Device) -> str:
    fields = processor() if device.platform == "cpu" else {}
    return fields.get("model name", device.device_kind)
