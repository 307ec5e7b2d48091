"""The platform for which a function is traced, and the processor of this machine."""

import contextlib
import functools
import os
import platform as platform_module
import re
import traceback
from pathlib import Path

import jax

from smallgpt_jax.errors import install_command


def platform(mesh=None) -> str:
    """Returns "cpu", "gpu" or "tpu": of `mesh`, the current mesh, or else JAX's default."""
    # the devices of a mesh may be those of another machine
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_mesh.abstract_device
    return device.platform if device else jax.default_backend()


def missing_devices_message(error: Exception) -> str:
    """Returns what to do if JAX finds no devices of JAX_PLATFORMS; "" for other errors."""
    requested = jax.config.jax_platforms
    if not requested or not isinstance(error, RuntimeError | AssertionError):
        return ""
    # JAX raises it from one place, for CUDA by an assertion without a text.
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    if Path(raised_in).name != "xla_bridge.py":
        return ""
    # names of platforms, with the extra that installs them
    extras = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}
    advice = "unset the variable"
    if requested in extras:
        advice += f", or, on a machine that has one, run {install_command(extras[requested])}"
    return f"JAX_PLATFORMS={requested}: JAX finds no such device; {advice}"


def step_options(device_platform: str, deterministic: bool) -> dict:
    """Returns the compiler options of training and evaluation steps."""
    if deterministic and device_platform == "gpu":
        return {"xla_gpu_deterministic_ops": True}
    return {}


def exchange_dtype(dtype: str) -> str:
    """Returns the dtype in which gradients are exchanged over `data`."""
    # Under a shard_map over some mesh axes, XLA's CPU compiler aborts on sums of bfloat16 arrays
    # (jaxlib 0.10.2: "Invalid binary instruction opcode copy").
    return "float32" if platform() == "cpu" else dtype


def faster_dtype() -> str:
    # on CPUs, bfloat16 only where it was measured (docs/speed.md); AMX was not
    flags = processor_flags()
    wins = platform() != "cpu" or ("avx512_bf16" in flags and "amx_bf16" not in flags)
    return "bfloat16" if wins else "float32"


@functools.cache
def has_bfloat16_instructions() -> bool:
    """Returns whether this processor has AVX512-BF16 or AMX."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(processor_flags())


def processor_flags() -> list[str]:
    return processor().get("flags", "").split()


# Fields of /proc/cpuinfo, on x86 and ARM. Hypervisors give several kinds of processors one name, so
# the name does not say which speed and which bits a program has.
_IDENTITY_FIELDS = (
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU part", "CPU variant", "CPU revision"),
)
_INSTRUCTION_SETS = ("sse", "ssse", "avx", "amx", "fma", "f16c", "bmi", "asimd", "sve")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def processor_identity() -> dict[str, str]:
    """Returns what the bits and the speed of a program depend on."""
    fields = processor() or {"model name": platform_module.processor()}
    identity = {name: fields[name] for name in _IDENTITY_FIELDS if name in fields}
    flags = fields.get("flags", fields.get("Features", "")).split()
    vector_flags = [flag for flag in flags if flag.startswith(_INSTRUCTION_SETS)]
    identity["instruction sets"] = " ".join(vector_flags)
    with contextlib.suppress(OSError):
        caches = sorted(_CACHES.glob("index*"))
        sizes = [(cache / "size").read_text("utf-8").strip() for cache in caches]
        identity["caches"] = " ".join(sizes)
    # XLA divides sums among the cores that the process may use: with another number of them, lgpt
    # had other bits from its sixth step on
    identity["cores"] = f"{_usable_cores()}"
    # XLA then uses fewer of the instruction sets, which changes bits as another processor does
    limits = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    if limits:
        identity["xla_cpu_max_isa"] = limits[-1]
    return identity


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> dict[str, str]:
    """Returns the fields of this machine's first processor; {} on systems without /proc."""
    fields = {}
    with contextlib.suppress(OSError):
        first, *_ = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")
        for line in first.splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return fields
