"""GPUs that programs can be compiled for without a GPU, and their properties."""

import dataclasses

from smallgpt_jax.devices.chips import Chip, find_chip

KiB, MiB = 2**10, 2**20
# Compute capability → (float32 lanes per core, bytes of shared memory per core, threads per core),
# from the CUDA C++ programming guide, section "Compute Capabilities". A core is a streaming
# multiprocessor.
_CORES = {
    (8, 0): (64, 164 * KiB, 2048),
    (8, 6): (128, 100 * KiB, 1536),
    (8, 9): (128, 100 * KiB, 1536),
    (9, 0): (128, 228 * KiB, 2048),
    (10, 0): (128, 228 * KiB, 2048),
    (12, 0): (128, 100 * KiB, 1536),
}
CUDNN = (9, 10)  # major and minor version for which programs are compiled
PCIE_4, PCIE_5 = 32e9, 64e9  # bytes/s of 16 lanes, per direction


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Published properties. Rates are bytes per second; those of links are per direction."""

    kind: str  # JAX's device_kind
    capability: tuple[int, int]
    cores: int
    hertz: float  # boost clock
    cache: int  # bytes of the level 2 cache
    bandwidth: float  # of the memory
    link: float  # to the GPUs of the same host: NVLink, or PCIe
    # to other hosts, per GPU, in NVIDIA's DGX machines; None if not published
    network: float | None = None

    @property
    def chip(self) -> Chip:
        return find_chip(self.kind)

    @property
    def vector_flops(self) -> float:
        """Peak FLOP/s of float32 without matrix units."""
        lanes, _, _ = _CORES[self.capability]
        # a multiplication and an addition per lane and cycle
        return 2 * self.cores * lanes * self.hertz


# From NVIDIA's data sheets and architecture white papers.
GPUS = {
    "a100-40": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41e9, 40 * MiB, 1555e9, 300e9, 25e9),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41e9, 40 * MiB, 2039e9, 300e9, 25e9),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98e9, 50 * MiB, 3350e9, 450e9, 50e9),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 1.98e9, 50 * MiB, 4800e9, 450e9, 50e9),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 1.965e9, 126 * MiB, 8000e9, 900e9, 50e9),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 2.04e9, 48 * MiB, 300e9, PCIE_4),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 2.52e9, 96 * MiB, 864e9, PCIE_4),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695e9, 6 * MiB, 936e9, PCIE_4),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52e9, 72 * MiB, 1008e9, PCIE_4),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407e9, 96 * MiB, 1792e9, PCIE_5),
}


def find_gpu(device_kind: str) -> Gpu | None:
    return next((gpu for gpu in GPUS.values() if gpu.kind == device_kind), None)


def target_config(gpu: Gpu) -> str:
    """Returns the compiler's description of a GPU, a GpuTargetConfigProto as text."""
    # openxla/xla, stream_executor/device_description.proto. The limits of a block are equal for all
    # GPUs; it can use all shared memory of a core but 1 KiB.
    lanes, shared, threads = _CORES[gpu.capability]
    major, minor = gpu.capability
    # instructions that exist on this capability only, such as Hopper's products (sm_90a)
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
          shared_memory_per_block: {48 * KiB} shared_memory_per_block_optin: {shared - KiB}
          shared_memory_per_core: {shared}
          core_count: {gpu.cores} fpus_per_core: {lanes} clock_rate_ghz: {gpu.hertz / 1e9}
          block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          memory_bandwidth: {gpu.bandwidth:.0f} l2_cache_size: {gpu.cache}
          device_memory_size: {gpu.chip.hbm:.0f}
          cuda_compute_capability {{
            major: {major} minor: {minor} feature_extension: {extension}
          }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
        device_description_str: "{gpu.kind}"
        """
