"""Estimates the memory and speed of training. The programs are compiled for devices that need not
be attached.
"""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from smallgpt_jax import models
from smallgpt_jax.devices import chips, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import flops
from smallgpt_jax.planning import gpus, hlo, kernels, memory
from smallgpt_jax.planning.compilation import Compiler
from smallgpt_jax.planning.determinism import unordered_operations
from smallgpt_jax.planning.roofline import Roofline

if TYPE_CHECKING:
    from smallgpt_jax.training.program import Program

Progress = Callable[[str], contextlib.AbstractContextManager]  # called with what is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory and speed of a training step, and memory of an evaluation step, per device.

    The speed is None without `collectives`, on CPUs, or with a kernel of unknown cost. Only TPUs
    have cycles, only GPUs have `kernels` and seconds of collectives; otherwise these fields are
    None.
    """

    parameters: int
    active_parameters: int
    flops_per_token: (
        float | None
    )  # products and convolutions of the model; None if they cannot be counted
    flops_per_step: float | None  # with those of the optimizer
    flops_problem: str  # why the FLOPs cannot be counted
    tokens_per_step: int
    devices: int
    device_kind: str
    hbm_bytes: int | None
    argument_bytes: int
    temp_bytes: int | None = None
    needed_bytes: int  # of a training step
    eval_temp_bytes: int | None = None
    eval_needed_bytes: int | None = None  # with the optimizer state; None if training does not fit
    fits: bool
    account: dict[str, float]
    compile_seconds: float
    compiled_programs: int  # of the two steps; the others are stored, see `Compiler`
    collectives: dict[str, dict[str, int]] | None = (
        None  # {kind: count and bytes}; None without fit or readable HLO
    )
    estimated_cycles: int | None = None  # see `HloModule.cycles`
    kernel_cycles: int | None = None  # roofline of the custom kernels
    kernels: dict[str, dict[str, float]] | None = None  # {kind: count and seconds}, see `Roofline`
    collective_seconds: float | None = None
    exposed_collective_seconds: float | None = None  # in which no kernel runs
    # GPUs: {operation whose threads add in no fixed order: how often}, of the training step
    unordered_operations: dict[str, int] | None = None
    estimated_step_seconds: float | None = None
    estimated_mfu: float | None = (
        None  # without the optimizer (Chowdhery et al., arXiv 2204.02311, appendix B)
    )

    @property
    def peak_bytes(self) -> int:
        return max(self.needed_bytes, self.eval_needed_bytes or 0)


def estimate(program: "Program", progress: Progress = contextlib.nullcontext) -> Estimate:
    """Compiles both steps. If one does not fit into a device's memory, `Estimate.fits` is False."""
    state = program.abstract_state
    compiler = Compiler(program.mesh.devices.ravel(), program.compiler_options)
    known, started = properties(program), time.monotonic()
    try:
        with progress("training step"):
            step = compiler.compile(program.lowered_train_step)
    except jax.errors.JaxRuntimeError as error:
        return Estimate(
            **known,
            argument_bytes=memory.bytes_on_device(state),
            fits=False,
            needed_bytes=bytes_needed(error, memory.bytes_on_device(state)),
            compile_seconds=time.monotonic() - started,
            compiled_programs=compiler.compilations,
        )
    with progress("evaluation step"):
        eval_temp_bytes, eval_needed_bytes = evaluation_memory(program, compiler)
    seconds = time.monotonic() - started
    module, hbm = hlo.HloModule(step.text) if step.text else None, known["hbm_bytes"]
    return Estimate(
        **known,
        argument_bytes=step.argument_bytes,
        temp_bytes=step.temp_bytes,
        needed_bytes=step.total_bytes,
        eval_temp_bytes=eval_temp_bytes,
        eval_needed_bytes=eval_needed_bytes,
        fits=eval_temp_bytes is not None
        and (hbm is None or max(step.total_bytes, eval_needed_bytes) <= hbm),
        **(estimate_speed(module, program, known["flops_per_token"]) if module else {}),
        collectives=module and module.collectives(),
        unordered_operations=find_unordered(module, program),
        compile_seconds=seconds,
        compiled_programs=compiler.compilations,
    )


def find_unordered(module: hlo.HloModule | None, program: "Program") -> dict[str, int] | None:
    if module is None or program.mesh.devices.flat[0].platform != "gpu":
        return None
    return unordered_operations(module, program.config.train.deterministic)


def properties(program: "Program") -> dict:
    """Returns the fields of an `Estimate` that need no compilation."""
    config, model, mesh, teacher = program.config, program.model, program.mesh, program.teacher
    kind = mesh.devices.flat[0].device_kind
    chip, cost = chips.find_chip(kind), flops.train_cost(model, program.objective.terms.values())
    sequences = config.train.batch_size / (
        sharding.num_batch_shards(mesh) * config.train.microbatches
    )
    tokens, state = config.train.batch_size * config.model.context_length, program.abstract_state
    account = memory.memory_breakdown(
        model, mesh, state, sequences, config.train.loss_chunks, config.data.separate_documents
    )
    return dict(
        parameters=models.num_parameters(model),
        active_parameters=models.num_active_parameters(model),
        tokens_per_step=tokens,
        flops_per_token=cost.flops,
        flops_problem=cost.problem,
        flops_per_step=None
        if cost.flops is None
        else (cost.flops * tokens + flops.update_flops(state.trained, program.optimizer)),
        devices=mesh.size,
        device_kind=kind,
        hbm_bytes=chip and int(chip.hbm),
        account=account
        | ({"teacher": memory.bytes_on_device(teacher.abstract_constants)} if teacher else {}),
    )


def evaluation_memory(program: "Program", compiler: Compiler) -> tuple[int | None, int]:
    """Returns the bytes of an evaluation step's temporaries and the total bytes that evaluation
    needs.

    The first number is None if the step does not fit into memory. The second number includes the
    optimizer state, which stays in memory during evaluation.
    """
    state = program.abstract_state
    optimizer_bytes = memory.bytes_on_device((state.opt_state, state.ema))
    try:
        step = compiler.compile(program.lower_eval_step())
    except jax.errors.JaxRuntimeError as error:
        return None, bytes_needed(error, memory.bytes_on_device(state.params)) + optimizer_bytes
    return step.temp_bytes, step.total_bytes + optimizer_bytes


# The TPU compiler's two error messages for a program that does not fit into memory.
TOO_LARGE = re.compile(
    r"Used ([\d.]+)([KMGT]) of [\d.]+\w hbm"
    r"|HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM"
)


def bytes_needed(error: Exception, argument_bytes: int) -> int:
    """Returns the bytes that a program needs according to the compiler's out-of-memory error.

    Some error messages count only the temporaries. Then `argument_bytes`, the bytes of the
    program's arguments, are added. Re-raises other errors.
    """
    found = TOO_LARGE.search(str(error))
    if not found:
        raise error
    size, unit = found[1] or found[3], found[2] or found[4]
    return int(float(size) * 1024 ** (1 + "KMGT".index(unit))) + (argument_bytes if found[3] else 0)


def estimate_speed(
    module: hlo.HloModule, program: "Program", flops_per_token: float | None
) -> dict:
    """Returns the known speed fields of an `Estimate`."""
    config, devices = program.config, program.mesh.devices.ravel()
    chip, gpu = chips.find_chip(devices[0].device_kind), gpus.find_gpu(devices[0].device_kind)
    if gpu:
        roofline = Roofline(
            module, gpu, sum(device.process_index == devices[0].process_index for device in devices)
        )
        clock = roofline.clock()
        known = dict(
            kernels=roofline.kernels(),
            collective_seconds=clock.collectives,
            exposed_collective_seconds=clock.exposed,
            estimated_step_seconds=clock.total,
        )
    elif chip and chip.hertz:
        known = tpu_speed(module, config.model.context_length, chip)
    else:
        known = {}
    seconds = known.get("estimated_step_seconds")
    if not flops_per_token or not seconds:
        return known
    flops_per_device = (
        flops_per_token * config.train.batch_size * config.model.context_length / len(devices)
    )
    return known | {"estimated_mfu": flops_per_device / (seconds * chip.flops)}


def tpu_speed(module: hlo.HloModule, positions: int, chip: chips.Chip) -> dict:
    """Returns {} if the module calls a kernel of unknown cost."""
    calls = [
        (times, kernels.kernel_seconds(call.line, positions, chip))
        for times, call in module.kernels()
    ]
    if any(seconds is None for _, seconds in calls):
        return {}
    cycles, kernel_cycles = (
        module.cycles(),
        round(chip.hertz * sum(times * seconds for times, seconds in calls)),
    )
    return dict(
        estimated_cycles=cycles,
        kernel_cycles=kernel_cycles,
        estimated_step_seconds=(cycles + kernel_cycles) / chip.hertz,
    )


def largest_batch(
    build: Callable[[int], "Program"],
    divisor: int,
    hbm: float,
    log: Callable[[str], None],
    progress: Progress = contextlib.nullcontext,
) -> int:
    """Returns the largest batch size, a multiple of `divisor`, that fits into `hbm` bytes per
    device.

    Compiles few programs: interpolates the memory linearly between a batch size that fits and one
    that does not.
    """
    needed: dict[int, int] = {}

    def fits(sequences: int) -> bool:
        result = estimate(build(sequences * divisor), progress)
        needed[sequences] = result.peak_bytes
        log(
            f"{sequences} sequences per device at a time: {result.peak_bytes / chips.GiB:.2f} GiB"
            + ("" if result.fits else ", does not fit")
        )
        return result.fits

    if not fits(1):
        raise UserError(
            "not even one sequence per device fits into memory; use more devices with "
            "config.mesh.fsdp, config.model.remat='full', or a smaller model"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        slope = (needed[high] - needed[low]) / (high - low)
        guess = low + int((hbm - needed[low]) / slope) if slope > 0 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * divisor
