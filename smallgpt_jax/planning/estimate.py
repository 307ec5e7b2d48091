"""Estimates the memory and speed of training, for devices that need not be attached."""

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
from smallgpt_jax.planning import gpus, hlo, kernels, memory_formula
from smallgpt_jax.planning.compilation import Compiler
from smallgpt_jax.planning.determinism import unordered_operations
from smallgpt_jax.planning.roofline import Roofline

if TYPE_CHECKING:
    from smallgpt_jax.training.program import Program

_Progress = Callable[[str], contextlib.AbstractContextManager]  # called with what is compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory and speed of a training step, and memory of an evaluation step, per device.

    The speed is None without `collectives`, on CPUs, or with a kernel of unknown cost. Only TPUs
    have cycles, only GPUs have `kernels` and seconds of collectives; otherwise these fields are
    None.
    """

    parameters: int
    active_parameters: int
    # products and convolutions of the model; None if they cannot be counted
    flops_per_token: float | None
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
    # {kind: count and bytes}; None without fit or readable HLO
    collectives: dict[str, dict[str, int]] | None = None
    estimated_cycles: int | None = None  # see `HloModule.cycles`
    kernel_cycles: int | None = None  # roofline of the custom kernels
    kernels: dict[str, dict[str, float]] | None = None  # {kind: count and seconds}, see `Roofline`
    collective_seconds: float | None = None
    exposed_collective_seconds: float | None = None  # in which no kernel runs
    # GPUs: {operation whose threads add in no fixed order: how often}, of the training step
    unordered_operations: dict[str, int] | None = None
    estimated_step_seconds: float | None = None
    # without the optimizer (Chowdhery et al., arXiv 2204.02311, appendix B)
    estimated_mfu: float | None = None

    @property
    def peak_bytes(self) -> int:
        return max(self.needed_bytes, self.eval_needed_bytes or 0)


def estimate(program: "Program", progress: _Progress = contextlib.nullcontext) -> Estimate:
    """Compiles both steps. If one does not fit into a device's memory, `Estimate.fits` is False."""
    compiler = Compiler(program.mesh.devices.ravel(), program.compiler_options)
    known = _properties(program)
    started = time.monotonic()
    try:
        with progress("training step"):
            step = compiler.compile(program.lowered_train_step)
    except jax.errors.JaxRuntimeError as error:
        state_bytes = memory_formula.bytes_on_device(program.abstract_state)
        return Estimate(
            **known,
            argument_bytes=state_bytes,
            fits=False,
            needed_bytes=bytes_needed(error, state_bytes),  # raises other errors again
            compile_seconds=time.monotonic() - started,
            compiled_programs=compiler.compilations,
        )
    with progress("evaluation step"):
        eval_temp_bytes, eval_needed_bytes = evaluation_memory(program, compiler)
    seconds = time.monotonic() - started
    hbm = known["hbm_bytes"]
    if step.text:
        known |= _read_program(hlo.HloModule(step.text), program, known["flops_per_token"])
    fits = eval_temp_bytes is not None
    if hbm is not None:
        fits = fits and max(step.total_bytes, eval_needed_bytes) <= hbm
    return Estimate(
        **known,
        argument_bytes=step.argument_bytes,
        temp_bytes=step.temp_bytes,
        needed_bytes=step.total_bytes,
        eval_temp_bytes=eval_temp_bytes,
        eval_needed_bytes=eval_needed_bytes,
        fits=fits,
        compile_seconds=seconds,
        compiled_programs=compiler.compilations,
    )


def _properties(program: "Program") -> dict:
    """Returns the fields of an `Estimate` that need no compilation."""
    config, model, mesh = program.config, program.model, program.mesh
    train, state = config.train, program.abstract_state
    tokens = train.batch_size * config.model.context_length
    cost = flops.train_cost(model, program.objective.terms.values())
    flops_per_step = None
    if cost.flops is not None:
        flops_per_step = cost.flops * tokens + flops.update_flops(state.trained, program.optimizer)
    sequences = train.batch_size / (sharding.num_batch_shards(mesh) * train.microbatches)
    account = memory_formula.memory_breakdown(
        model, mesh, state, sequences, train.loss_chunks, config.data.separate_documents
    )
    if program.teacher:
        account["teacher"] = memory_formula.bytes_on_device(program.teacher.abstract_constants)
    device_kind = mesh.devices.flat[0].device_kind
    chip = chips.find_chip(device_kind)
    return dict(
        parameters=models.num_parameters(model),
        active_parameters=models.num_active_parameters(model),
        tokens_per_step=tokens,
        flops_per_token=cost.flops,
        flops_problem=cost.problem,
        flops_per_step=flops_per_step,
        devices=mesh.size,
        device_kind=device_kind,
        hbm_bytes=chip and int(chip.hbm),
        account=account,
    )


def _read_program(module: hlo.HloModule, program: "Program", flops_per_token: float | None) -> dict:
    """Returns the fields of an `Estimate` that the text of the training step tells."""
    fields = _estimate_speed(module, program, flops_per_token)
    fields["collectives"] = module.collectives()
    if program.mesh.devices.flat[0].platform == "gpu":
        deterministic = program.config.train.deterministic
        fields["unordered_operations"] = unordered_operations(module, deterministic)
    return fields


def evaluation_memory(program: "Program", compiler: Compiler) -> tuple[int | None, int]:
    """Returns the bytes of the temporaries, None if they do not fit, and of all that is needed."""
    state = program.abstract_state
    # it stays in memory during evaluation
    optimizer_bytes = memory_formula.bytes_on_device((state.opt_state, state.ema))
    try:
        step = compiler.compile(program.lower_eval_step())
    except jax.errors.JaxRuntimeError as error:
        return None, bytes_needed(
            error, memory_formula.bytes_on_device(state.params)
        ) + optimizer_bytes
    return step.temp_bytes, step.total_bytes + optimizer_bytes


# The TPU compiler's two error messages for a program that does not fit into memory.
_TOO_LARGE = re.compile(
    r"Used ([\d.]+)([KMGT]) of [\d.]+\w hbm"
    r"|HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM"
)


def bytes_needed(error: Exception, argument_bytes: int) -> int:
    """Returns the bytes that a program needs by the compiler's error; re-raises other errors."""
    sizes = _TOO_LARGE.search(str(error))
    if not sizes:
        raise error
    total, total_unit, temporaries, temporaries_unit = sizes.groups()
    if total:
        return _bytes(total, total_unit)
    # this message counts only the temporaries
    return _bytes(temporaries, temporaries_unit) + argument_bytes


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * 1024 ** (1 + "KMGT".index(unit)))


def _estimate_speed(
    module: hlo.HloModule, program: "Program", flops_per_token: float | None
) -> dict:
    """Returns the known speed fields of an `Estimate`."""
    config, devices = program.config, program.mesh.devices.ravel()
    first = devices[0]
    chip = chips.find_chip(first.device_kind)  # a TPU or GPU
    gpu = gpus.find_gpu(first.device_kind)  # None for TPUs
    speed = {}
    if gpu:
        on_first_host = [d for d in devices if d.process_index == first.process_index]
        roofline = Roofline(module, gpu, gpus_per_host=len(on_first_host))
        clock = roofline.clock()
        speed = dict(
            kernels=roofline.kernels(),
            collective_seconds=clock.collectives,
            exposed_collective_seconds=clock.exposed,
            estimated_step_seconds=clock.total,
        )
    elif chip and chip.hertz:  # a TPU
        speed = tpu_speed(module, config.model.context_length, chip)
    seconds = speed.get("estimated_step_seconds")
    if flops_per_token and seconds:
        tokens = config.train.batch_size * config.model.context_length
        flops_per_device = flops_per_token * tokens / len(devices)
        speed["estimated_mfu"] = flops_per_device / (seconds * chip.flops)
    return speed


def tpu_speed(module: hlo.HloModule, positions: int, chip: chips.Chip) -> dict:
    """Returns {} if the module calls a kernel of unknown cost."""
    kernel_seconds = 0.0
    for times, call in module.kernels():
        seconds = kernels.kernel_seconds(call.line, positions, chip)
        if seconds is None:
            return {}
        kernel_seconds += times * seconds
    cycles, kernel_cycles = module.cycles(), round(chip.hertz * kernel_seconds)
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
    progress: _Progress = contextlib.nullcontext,
) -> int:
    """Returns the largest multiple of `divisor` sequences that fits into `hbm` bytes per device."""
    needed: dict[int, int] = {}

    def fits(sequences: int) -> bool:
        result = estimate(build(sequences * divisor), progress)
        needed[sequences] = result.peak_bytes
        gibibytes = f"{result.peak_bytes / chips.GiB:.2f} GiB"
        suffix = "" if result.fits else ", does not fit"
        log(f"{sequences} sequences per device at a time: {gibibytes}{suffix}")
        return result.fits

    if not fits(1):
        raise UserError(
            "not even one sequence per device fits into memory; use more devices with "
            "config.mesh.fsdp, config.model.remat='full', or a smaller model"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    # interpolates between what fits and what does not, to compile few programs
    while high - low > 1:
        slope = (needed[high] - needed[low]) / (high - low)
        guess = (low + high) // 2
        if slope > 0:
            guess = low + int((hbm - needed[low]) / slope)
        middle = min(max(guess, low + 1), high - 1)
        if fits(middle):
            low = middle
        else:
            high = middle
    return low * divisor
