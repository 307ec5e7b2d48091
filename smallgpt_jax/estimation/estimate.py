"""Estimates the memory and speed of training. The programs are compiled for devices that need not be attached."""

import contextlib
import dataclasses
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from smallgpt_jax import models
from smallgpt_jax.analysis import chips, flops, memory
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.estimation import gpus, hlo, kernels
from smallgpt_jax.estimation.roofline import Roofline
from smallgpt_jax.formatting import duration

if TYPE_CHECKING:
    from smallgpt_jax.training.program import Program

PROGRESS_SECONDS = 30.0  # interval of the messages during a compilation
# On a GPU, XLA times cuBLASLt and Triton for each product and takes the faster. Without one, all Triton products would
# have the same tiles.
GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory and speed of a training step, and memory of an evaluation step, per device.

    The speed is None without `collectives`, on CPUs, or with a kernel of unknown cost. Only TPUs have cycles, only GPUs
    have `kernels` and seconds of collectives; otherwise these fields are None.
    """

    parameters: int
    active_parameters: int
    flops_per_token: float | None  # products and convolutions of the model; None if they cannot be counted
    flops_per_step: float | None  # with those of the optimizer
    flops_problem: str  # why the FLOPs cannot be counted
    tokens_per_step: int
    devices: int
    device_kind: str
    hbm_bytes: int | None
    argument_bytes: int
    temp_bytes: int | None
    needed_bytes: int  # of a training step
    eval_temp_bytes: int | None
    eval_needed_bytes: int | None  # with the optimizer state; None if training does not fit
    fits: bool
    account: dict[str, float]
    compile_seconds: float
    collectives: dict[str, dict[str, int]] | None  # {kind: count and bytes}; None without fit or readable HLO
    estimated_cycles: int | None  # see `HloModule.cycles`
    kernel_cycles: int | None  # roofline of the custom kernels
    kernels: dict[str, dict[str, float]] | None  # {kind: count and seconds}, see `Roofline`
    collective_seconds: float | None
    exposed_collective_seconds: float | None  # in which no kernel runs
    estimated_step_seconds: float | None
    estimated_mfu: float | None  # without the optimizer (Chowdhery et al., arXiv 2204.02311, appendix B)

    @property
    def peak_bytes(self) -> int:
        return max(self.needed_bytes, self.eval_needed_bytes or 0)


def estimate(program: "Program", log: Callable[[str], None] = lambda line: None) -> Estimate:
    """Compiles both steps. If one does not fit into a device's memory, `Estimate.fits` is False."""
    config, model, mesh = program.config, program.model, program.mesh
    state, kind = program.abstract_state, mesh.devices.flat[0].device_kind
    chip = chips.find_chip(kind)
    teacher = program.teacher
    cost = flops.train_cost(model, teacher and teacher.model)
    tokens = config.train.batch_size * config.model.context_length
    model_flops = None if cost.flops is None else cost.flops * tokens
    sequences = config.train.batch_size / (sharding.num_batch_shards(mesh) * config.train.microbatches)
    known = dict(
        parameters=models.num_parameters(model),
        active_parameters=models.num_active_parameters(model), tokens_per_step=tokens,
        flops_per_token=cost.flops, flops_problem=cost.problem,
        flops_per_step=None if cost.flops is None else (
            model_flops + flops.update_flops(state.trained, program.optimizer)),
        devices=mesh.size, device_kind=kind, hbm_bytes=chip and int(chip.hbm),
        account=memory.memory_breakdown(model, mesh, state, sequences, config.train.loss_chunks,
                                        config.data.separate_documents)
        | ({"teacher": memory.bytes_on_device(teacher.abstract_constants)} if teacher else {}))
    started = time.monotonic()
    try:
        with progress("compiling the training step", log):
            step, text = compile_and_read(program)
    except jax.errors.JaxRuntimeError as error:
        return Estimate(
            **known, argument_bytes=memory.bytes_on_device(state), temp_bytes=None,
            needed_bytes=bytes_needed(error, memory.bytes_on_device(state)), eval_temp_bytes=None,
            eval_needed_bytes=None, fits=False, **UNKNOWN_SPEED, collectives=None,
            compile_seconds=time.monotonic() - started)
    with progress("compiling the evaluation step", log):
        eval_temp_bytes, eval_needed_bytes = evaluation_memory(program, state)
    seconds = time.monotonic() - started
    memory_stats = step.memory_analysis()
    return Estimate(
        **known, argument_bytes=memory_stats.argument_size_in_bytes, temp_bytes=memory_stats.temp_size_in_bytes,
        needed_bytes=total_bytes(memory_stats), eval_temp_bytes=eval_temp_bytes, eval_needed_bytes=eval_needed_bytes,
        fits=eval_temp_bytes is not None and (
            chip is None or max(total_bytes(memory_stats), eval_needed_bytes) <= chip.hbm),
        **(estimate_speed(text, program, model_flops and model_flops / mesh.size) if text else UNKNOWN_SPEED),
        collectives=text.collectives() if text else None, compile_seconds=seconds)


@contextlib.contextmanager
def progress(text: str, log: Callable[[str], None]) -> Iterator[None]:
    """Logs `text` and, every PROGRESS_SECONDS inside the context, `text` with the time since the start."""
    started, is_done = time.monotonic(), threading.Event()

    def repeat():
        while not is_done.wait(PROGRESS_SECONDS):
            log(f"{text}: {duration(time.monotonic() - started)}")

    log(text)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def compile_and_read(program: "Program") -> tuple[jax.stages.Compiled, hlo.HloModule | None]:
    """Returns the compiled training step and its HLO. The HLO is None if it cannot be read."""
    if program.mesh.devices.flat[0].platform != "tpu":
        step = program.compile_train_step(compiler_options(program))
        return step, hlo.HloModule(step.as_text())
    with tempfile.TemporaryDirectory() as dump:
        step = program.compile_train_step({"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        return step, read_hlo(step, Path(dump))


def compiler_options(program: "Program") -> dict | None:
    return GPU_OPTIONS if program.mesh.devices.flat[0].platform == "gpu" else None


def read_hlo(step: jax.stages.Compiled, dump: Path) -> hlo.HloModule | None:
    """Returns the HLO of a training step from the TPU compiler's dump, else from `as_text()`; None if unreadable.

    `as_text()` can fail for TPU v5p and v6e, with a stack trace on standard error (libtpu 0.0.51, jaxlib 0.10.2:
    "async-update instruction should have 1 operands but sees 3").
    """
    # The dump also contains single-kernel programs, which the compiler uses for autotuning.
    if dumped := next(dump.glob("*.jit_train_step.*.after_codegen.txt"), None):
        return hlo.HloModule(dumped.read_text())
    try:
        return hlo.HloModule(step.as_text())
    except jax.errors.JaxRuntimeError:
        return None


def evaluation_memory(program: "Program", state) -> tuple[int | None, int]:
    """Returns the bytes of an evaluation step's temporaries and the total bytes that evaluation needs.

    The first number is None if the step does not fit into memory. The second number includes the optimizer state, which
    stays in memory during evaluation.
    """
    optimizer_bytes = memory.bytes_on_device((state.opt_state, state.ema))
    try:
        memory_stats = program.compile_eval_step(compiler_options(program)).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return None, bytes_needed(error, memory.bytes_on_device(state.params)) + optimizer_bytes
    return memory_stats.temp_size_in_bytes, total_bytes(memory_stats) + optimizer_bytes


def total_bytes(memory_stats) -> int:
    """Returns the bytes of a program's `memory_analysis()`. Results that share an argument's memory count once."""
    return (memory_stats.argument_size_in_bytes + memory_stats.temp_size_in_bytes
            + memory_stats.output_size_in_bytes - memory_stats.alias_size_in_bytes)


# The TPU compiler's two error messages for a program that does not fit into memory.
TOO_LARGE = re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+\w hbm"
                       r"|HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM")


def bytes_needed(error: Exception, argument_bytes: int) -> int:
    """Returns the bytes that a program needs according to the compiler's out-of-memory error.

    Some error messages count only the temporaries. Then `argument_bytes`, the bytes of the program's arguments, are
    added. Re-raises other errors.
    """
    found = TOO_LARGE.search(str(error))
    if not found:
        raise error
    size, unit = found[1] or found[3], found[2] or found[4]
    return int(float(size) * 1024 ** (1 + "KMGT".index(unit))) + (argument_bytes if found[3] else 0)


UNKNOWN_SPEED = dict.fromkeys((
    "estimated_cycles", "kernel_cycles", "kernels", "collective_seconds", "exposed_collective_seconds",
    "estimated_step_seconds", "estimated_mfu"))


def estimate_speed(module: hlo.HloModule, program: "Program", flops_per_device: float | None) -> dict:
    """Returns the speed fields of an `Estimate`."""
    devices = program.mesh.devices.ravel()
    chip, gpu = chips.find_chip(devices[0].device_kind), gpus.find_gpu(devices[0].device_kind)
    if gpu:
        per_host = sum(device.process_index == devices[0].process_index for device in devices)
        known = gpu_speed(Roofline(module, gpu, per_host))
    elif chip and chip.hertz:
        known = tpu_speed(module, program.config.model.context_length, chip)
    else:
        known = {}
    seconds = known.get("estimated_step_seconds")
    mfu = flops_per_device / (seconds * chip.flops) if flops_per_device and seconds else None
    return UNKNOWN_SPEED | known | {"estimated_mfu": mfu}


def gpu_speed(roofline: Roofline) -> dict:
    clock = roofline.clock()
    return dict(kernels=roofline.kernels(), collective_seconds=clock.collectives,
                exposed_collective_seconds=clock.exposed, estimated_step_seconds=clock.total)


def tpu_speed(module: hlo.HloModule, positions: int, chip: chips.Chip) -> dict:
    """Returns {} if the module calls a kernel of unknown cost."""
    calls = [(times, kernels.kernel_seconds(call.line, positions, chip)) for times, call in module.kernels()]
    if any(seconds is None for _, seconds in calls):
        return {}
    cycles, kernel_cycles = module.cycles(), round(chip.hertz * sum(times * seconds for times, seconds in calls))
    return dict(estimated_cycles=cycles, kernel_cycles=kernel_cycles,
                estimated_step_seconds=(cycles + kernel_cycles) / chip.hertz)


def largest_batch(build: Callable[[int], "Program"], divisor: int, hbm: float, log: Callable[[str], None]) -> int:
    """Returns the largest batch size, a multiple of `divisor`, that fits into `hbm` bytes per device.

    Compiles few programs: interpolates the memory linearly between a batch size that fits and one that does not.
    """
    needed: dict[int, int] = {}

    def fits(sequences: int) -> bool:
        result = estimate(build(sequences * divisor), log)
        needed[sequences] = result.peak_bytes
        log(f"{sequences} sequences per device at a time: {result.peak_bytes / chips.GiB:.2f} GiB"
            + ("" if result.fits else ", does not fit"))
        return result.fits

    if not fits(1):
        raise UserError("not even one sequence per device fits into memory; use more devices with config.mesh.fsdp, "
                        "config.model.remat='full', or a smaller model")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        slope = (needed[high] - needed[low]) / (high - low)
        guess = low + int((hbm - needed[low]) / slope) if slope > 0 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * divisor
