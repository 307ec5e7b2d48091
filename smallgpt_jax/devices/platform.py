"""The platform for which the function being traced will be compiled, and the processor of this machine."""

import contextlib
import functools
from pathlib import Path

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": the platform of the current mesh or, if no mesh is set, JAX's default platform.

    In ahead-of-time compilation, the mesh may consist of devices that this machine does not have. The platform of the
    mesh can then differ from JAX's default platform.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def exchange_dtype(dtype: str) -> str:
    """Returns the dtype in which the shards of the mesh axis `data` exchange gradients.

    This is `dtype`, the compute dtype, but on CPUs it is float32: under a shard_map over some of the mesh axes, XLA's
    CPU compiler aborts on sums of bfloat16 arrays (jaxlib 0.10.2: "Invalid binary instruction opcode copy").
    """
    return "float32" if platform() == "cpu" else dtype


@functools.cache
def has_bfloat16_instructions() -> bool:
    """Returns whether this machine's processor multiplies bfloat16 matrices with AVX512-BF16 or AMX."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(processor().get("flags", "").split())


def processor() -> dict[str, str]:
    """Returns the fields of this machine's first processor in /proc/cpuinfo, or {} on systems without /proc."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
