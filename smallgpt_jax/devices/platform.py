"""The platform for which the function being traced will be compiled, and the processor of this machine."""

import contextlib
import functools
from pathlib import Path

import jax


def platform() -> str:
    """Returns "cpu", "gpu" or "tpu": of the current mesh (ahead of time, of another machine), or JAX's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def exchange_dtype(dtype: str) -> str:
    """Gradients are exchanged over `data` in float32 on CPUs: under a shard_map over some mesh axes, XLA's CPU compiler
    aborts on sums of bfloat16 arrays (jaxlib 0.10.2: "Invalid binary instruction opcode copy").
    """
    return "float32" if platform() == "cpu" else dtype


@functools.cache
def has_bfloat16_instructions() -> bool:
    """Returns whether this processor has AVX512-BF16 or AMX."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(processor().get("flags", "").split())


def processor() -> dict[str, str]:
    """Returns the fields of this machine's first processor in /proc/cpuinfo, or {} on systems without /proc."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
