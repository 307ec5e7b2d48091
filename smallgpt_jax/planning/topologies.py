"""Devices that programs can be compiled for on a machine that does not have them."""

import contextlib
import importlib.util
import math
import os
import re
import signal
import threading
from collections.abc import Iterator

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.extend.backend import clear_backends

from smallgpt_jax.devices.chips import CHIPS
from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.planning.gpus import CUDNN, GPUS, target_config

# Generation → slices that Google Cloud offers. The TPU compiler also knows slices of other shapes,
# such as v4:1x1x1.
_FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP_SLICES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4"),
    *("4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
)
_TPU_SLICES = {"v4": _DEEP_SLICES, "v5e": _FLAT_SLICES, "v5p": _DEEP_SLICES, "v6e": _FLAT_SLICES}
_TPU_SHAPE = r"[1-9]\d*(x[1-9]\d*){1,2}"
_GPUS_PER_HOST = 8  # at most, in NVIDIA's DGX machines
_GPU_SHAPE = rf"([1-9]\d*x)?[1-{_GPUS_PER_HOST}]"  # hosts × GPUs per host
# What `topology_devices` changes for the whole process.
_SETTINGS = ("jax_enable_compilation_cache", "jax_platforms", "jax_num_cpu_devices")
_VARIABLES = (
    *("TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"),
    *("TPU_STDERR_LOG_LEVEL", "ALLOW_MULTIPLE_LIBTPU_LOAD"),
)
CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # of the extras plan-gpu and cuda
_CUDNN_VERSION = 10_000 * CUDNN[0] + 100 * CUDNN[1]


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """Undoes what `topology_devices` changes, so that a notebook can plan and train."""
    # not public; jax.distributed asks the same
    was_initialized = xla_bridge.backends_are_initialized()
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        yield
    finally:
        if not was_initialized:  # JAX searches for its devices anew
            clear_backends()
        for name, value in settings.items():
            jax.config.update(name, value)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """libtpu installs handlers that print stack traces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def topology_devices(topology: str) -> list[jax.Device]:
    """Returns the devices of a topology such as "v5e:4x4", "h100:8", "h200:2x8" (two hosts) or
    "cpu:8", for which programs can be compiled, but not run. Raises UserError for an unknown
    topology, without its compiler, or if JAX already runs with fewer CPU devices.
    """
    kind, _, shape = topology.partition(":")
    is_cpu = kind == "cpu" and re.fullmatch(r"[1-9]\d*", shape)
    is_tpu = kind in _TPU_SLICES and re.fullmatch(_TPU_SHAPE, shape)
    is_gpu = kind in GPUS and re.fullmatch(_GPU_SHAPE, shape)
    if is_gpu and "x" in shape:  # several hosts, for GPUs that servers connect
        is_gpu = GPUS[kind].network is not None
    if not (is_cpu or is_tpu or is_gpu):
        raise UserError(
            f"--topology={topology}: unknown; choose {', '.join(_similar_topologies(topology))}"
        )
    # the cache cannot hold programs for absent devices
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_platforms", "cpu")  # compiling for TPUs and GPUs needs neither
    if is_cpu:
        return _cpu_devices(int(shape))
    return gpu_devices(kind, shape) if is_gpu else tpu_devices(topology)


def _similar_topologies(text: str) -> list[str]:
    """Returns the topologies that an unknown or refused one may stand for."""
    return _similar_gpus(text.lower()) or _similar_tpus(text.lower()) or _examples()


def _similar_gpus(text: str) -> list[str]:
    kind, _, shape = text.partition(":")
    # "h100-80gb" begins with h100; "a100" is the beginning of a100-40 and a100-80
    beginnings = [name for name in GPUS if kind.startswith(name)]
    names = [max(beginnings, key=len)] if beginnings else []
    if kind and not names:
        names = [name for name in GPUS if name.startswith(kind)]
    return [f"{name}:{near}" for name in names for near in _similar_shapes(name, shape)]


def _similar_tpus(text: str) -> list[str]:
    """Returns slices with as many chips: "v5e-16" and "v5litepod-16" → ["v5e:4x4"]."""
    # "v5litepod-16" → generation "v5e", rest "-16"
    text = re.sub("lite(pod)?", "e", text)
    named = re.search("|".join(_TPU_SLICES), text)
    if not named:
        return []
    generation, rest = named[0], text[named.end() :]
    sides = re.findall(r"\d+", rest)
    number = math.prod(map(int, sides)) if sides else 0
    if rest.startswith("-"):
        # Google Cloud's names, such as "v4-8", count cores
        number //= CHIPS[f"TPU {generation}"].cores
    equal = []
    for shape in _TPU_SLICES[generation]:
        is_refused = rest == f":{shape}"  # the compiler has just refused this slice
        if math.prod(map(int, shape.split("x"))) == number and not is_refused:
            equal.append(shape)
    return [f"{generation}:{shape}" for shape in equal or _TPU_SLICES[generation]]


def _examples() -> list[str]:
    tpus = []
    for name, slices in _TPU_SLICES.items():
        tpus.append(f"{name}:{'4x4' if '4x4' in slices else slices[0]}")
    return [*tpus, *(f"{name}:{_GPUS_PER_HOST}" for name in GPUS), "cpu:N"]


def _similar_shapes(gpu: str, shape: str) -> list[str]:
    """Returns shapes of topologies of a GPU that are near a shape that was refused: "16" → ["2x8"]."""
    numbers = re.findall(r"\d+", shape)
    number = math.prod(map(int, numbers)) if numbers else 0
    hosts, rest = divmod(number, _GPUS_PER_HOST)
    on_one_host = ["1", str(_GPUS_PER_HOST)]
    if GPUS[gpu].network is None:
        return on_one_host
    if hosts > 1 and not rest:
        return [f"{hosts}x{_GPUS_PER_HOST}"]
    return [*on_one_host, f"2x{_GPUS_PER_HOST}"]


def _cpu_devices(count: int) -> list[jax.Device]:
    if not xla_bridge.backends_are_initialized():  # else it is too late
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"--topology=cpu:{count}: JAX already runs in this process, with fewer CPU devices "
            f"({len(devices)}); restart it, or use the command smallgpt_jax.plan"
        )
    return devices[:count]


def gpu_devices(kind: str, shape: str) -> list[jax.Device]:
    if not any(importlib.util.find_spec(name) for name in CUDA_PLUGINS):
        raise UserError(
            f"--topology: the GPU compiler is not installed; run {install_command('plan-gpu')}, "
            "in an environment of its own: with it, each JAX program warns that there is no GPU"
        )
    # not public, and imported here: a change of JAX must not affect TPUs
    from jax._src.cudnn import fused_attention_stablehlo

    # Makes JAX compile calls of cuDNN without cuDNN. JAX asks for nothing but its version; the
    # package and that of cuBLAS, which it needs, are a download of more than 1 GB.
    fused_attention_stablehlo.check_cudnn_version = lambda: _CUDNN_VERSION
    hosts, _, per_host = shape.rpartition("x")
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            target_config=target_config(GPUS[kind]),
            topology=f"1x{hosts or 1}x{per_host}",
        )
        return list(description.devices)
    except NotImplementedError as error:  # JAX does not load a plugin of another version
        raise UserError(
            f"--topology: JAX cannot load the GPU compiler ({str(error).splitlines()[0]}); it must "
            f"have the version of jax: {install_command('plan-gpu')}"
        ) from None


def tpu_devices(topology: str) -> list[jax.Device]:
    if not importlib.util.find_spec("libtpu"):
        raise UserError(
            f"--topology: the TPU compiler is not installed; run {install_command('plan')}"
        )
    kind, _, shape = topology.partition(":")
    # With these variables, libtpu sends no queries to the metadata server, writes no log, and can
    # run in several processes at a time.
    accelerator = f"{kind}-{math.prod(map(int, shape.split('x')))}"
    os.environ.update(zip(_VARIABLES, ("1", "localhost", accelerator, "3", "1")))
    # The two cores of a v4 chip are one device of JAX, as on a machine that has them.
    one_device_per_chip = {"chip_config_name": "megacore"} if kind == "v4" else {}
    try:
        with _signal_handlers_kept():
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=topology, **one_device_per_chip
            )
            return list(description.devices)
    except Exception as error:
        raise UserError(
            f"--topology={topology}: the TPU compiler has no such slice "
            f"({str(error).splitlines()[0]}); choose {', '.join(_similar_topologies(topology))}"
        ) from None
