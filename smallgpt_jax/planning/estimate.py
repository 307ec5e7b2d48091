"""Estimates the memory and speed of training, for devices that need not be attached."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from smallgpt_jax import models
from smallgpt_jax.devices import chips, sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.models import flops
from smallgpt_jax.output import print_error
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
    account: dict[str, float]  # bytes by purpose, by the formula of planning/memory_formula.py
    compile_seconds: float = 0.0
    compiled_programs: int = 0  # of the two steps; the others are stored, see `Compiler`
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


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What the compiler says of a step, in bytes per device."""

    argument_bytes: int
    temp_bytes: int | None  # None: the compiler has refused the step, because it does not fit
    needed_bytes: int
    text: str | None = None  # HLO; None if refused, or if it cannot be read


def estimate(program: "Program", progress: _Progress = contextlib.nullcontext) -> Estimate:
    """Compiles both steps. If one does not fit into a device's memory, `Estimate.fits` is False."""
    compiler = Compiler(program.mesh.devices.ravel(), program.compiler_options)
    state_bytes = memory_formula.bytes_on_device(program.abstract_state)
    started = time.monotonic()
    evaluation = None
    with progress("training step"):
        training = _compile_step(compiler, program.lowered_train_step, state_bytes)
    if training.temp_bytes is not None:  # otherwise, nothing more is asked
        with progress("evaluation step"):
            evaluation = evaluation_memory(program, compiler)
    seconds = time.monotonic() - started
    result = _estimate_memory(program, training, evaluation)
    speed = _speed(result, hlo.HloModule(training.text), program) if training.text else {}
    return dataclasses.replace(
        result, compile_seconds=seconds, compiled_programs=compiler.compilations, **speed
    )


def _compile_step(
    compiler: Compiler, lowered: jax.stages.Lowered, argument_bytes: int
) -> StepMemory:
    """Returns the memory of a step. `argument_bytes` count where the compiler refuses the step and
    only says its temporaries.
    """
    try:
        step = compiler.compile(lowered)
    except jax.errors.JaxRuntimeError as error:
        needed = bytes_needed(error, argument_bytes)  # raises errors other than a lack of memory
        return StepMemory(argument_bytes, None, needed)
    return StepMemory(step.argument_bytes, step.temp_bytes, step.total_bytes, step.text)


def evaluation_memory(program: "Program", compiler: Compiler) -> StepMemory:
    """Returns the memory of an evaluation step, beside which the rest of the state is kept."""
    state, size = program.abstract_state, memory_formula.bytes_on_device
    argument_bytes = size((state.evaluated, state.model_state))
    step = _compile_step(compiler, program.lower_eval_step(), argument_bytes)
    # not arguments of the step, but in the device's memory while it runs
    kept_bytes = size(state) - argument_bytes
    if program.teacher:
        kept_bytes += size(program.teacher.abstract_constants)
    return dataclasses.replace(step, needed_bytes=step.needed_bytes + kept_bytes)


def _estimate_memory(
    program: "Program", training: StepMemory, evaluation: StepMemory | None
) -> Estimate:
    """Returns the fields that need no HLO. `evaluation` is None if training was refused."""
    config, model, mesh = program.config, program.model, program.mesh
    train, state = config.train, program.abstract_state
    tokens = config.inputs_per_step
    cost = flops.train_cost(model, program.objective.terms.values())
    flops_per_step = None
    if cost.flops is not None:
        flops_per_step = cost.flops * tokens + flops.update_flops(state.trained, program.optimizer)
    sequences = train.batch_size / (sharding.num_batch_shards(mesh) * train.microbatches)
    formula = memory_formula.memory_breakdown(
        model, mesh, state, sequences, train.loss_chunks, config.data.separate_documents
    )
    if program.teacher:
        formula["teacher"] = memory_formula.bytes_on_device(program.teacher.abstract_constants)
    device_kind = mesh.devices.flat[0].device_kind
    chip = chips.find_chip(device_kind)
    hbm = int(chip.hbm) if chip else None
    steps = [step for step in (training, evaluation) if step]
    fits = all(step.temp_bytes is not None for step in steps)  # the compiler refused none
    if hbm is not None:  # on devices of unknown memory, what compiles counts as fitting
        fits = fits and all(step.needed_bytes <= hbm for step in steps)
    return Estimate(
        parameters=models.num_parameters(model),
        active_parameters=models.num_active_parameters(model),
        tokens_per_step=tokens,
        flops_per_token=cost.flops,
        flops_problem=cost.problem,
        flops_per_step=flops_per_step,
        devices=mesh.size,
        device_kind=device_kind,
        hbm_bytes=hbm,
        argument_bytes=training.argument_bytes,
        temp_bytes=training.temp_bytes,
        needed_bytes=training.needed_bytes,
        eval_temp_bytes=evaluation and evaluation.temp_bytes,
        eval_needed_bytes=evaluation and evaluation.needed_bytes,
        fits=fits,
        account=formula,
    )


# The TPU compiler's error for a program that does not fit into memory, in either of two forms.
_TOO_LARGE = re.compile(
    r"(Used |HLO temporaries \()([\d.]+)([KMGT])( of [\d.]+\w hbm|\) exceeds available HBM)"
)


def bytes_needed(error: Exception, argument_bytes: int) -> int:
    """Returns the bytes that a program needs by the compiler's error; re-raises other errors."""
    message = _TOO_LARGE.search(str(error))
    if not message:
        raise error
    what, number, unit, _ = message.groups()
    size = int(float(number) * 1024 ** (1 + "KMGT".index(unit)))
    # the second form does not count the arguments
    return size if what == "Used " else size + argument_bytes


def _speed(result: Estimate, module: hlo.HloModule, program: "Program") -> dict[str, Any]:
    """Returns the fields of the estimate that are read from the training step's HLO."""
    devices = program.mesh.devices.ravel()
    chip = chips.find_chip(result.device_kind)  # a TPU or GPU
    gpu = gpus.find_gpu(result.device_kind)  # None for TPUs
    fields: dict[str, Any] = {"collectives": module.collectives()}
    seconds = None
    if devices[0].platform == "gpu":
        is_ordered = program.config.train.deterministic
        fields["unordered_operations"] = unordered_operations(module, is_ordered)
    if gpu:
        on_first_host = [d for d in devices if d.process_index == devices[0].process_index]
        roofline = Roofline(module, gpu, gpus_per_host=len(on_first_host))
        clock = roofline.clock()
        seconds = clock.total
        fields["kernels"] = roofline.kernels()
        fields["collective_seconds"] = clock.collectives
        fields["exposed_collective_seconds"] = clock.exposed
    elif chip and chip.hertz:  # a TPU
        cycles = tpu_cycles(module, program.config.model.context_length, chip)
        if cycles:
            seconds = sum(cycles) / chip.hertz
            fields["estimated_cycles"], fields["kernel_cycles"] = cycles
    if result.flops_per_token and seconds:
        flops_per_device = result.flops_per_token * result.tokens_per_step / result.devices
        fields["estimated_mfu"] = flops_per_device / (seconds * chip.flops)
    return {**fields, "estimated_step_seconds": seconds}


class TpuCycles(NamedTuple):
    compiled: int  # by the compiler's annotations, without custom kernels
    kernels: int  # of the custom kernels, at the chip's peak speed


def tpu_cycles(module: hlo.HloModule, positions: int, chip: chips.Chip) -> TpuCycles | None:
    """Returns the cycles of a program; None if it calls a kernel of unknown cost."""
    kernel_seconds = 0.0
    for times, call in module.kernels():
        seconds = kernels.kernel_seconds(call.line, positions, chip)
        if seconds is None:
            return None
        kernel_seconds += times * seconds
    return TpuCycles(module.cycles(), round(chip.hertz * kernel_seconds))


def largest_batch(
    build: Callable[[int], "Program"],
    divisor: int,
    hbm: float,
    progress: _Progress = contextlib.nullcontext,
) -> int:
    """Returns the largest multiple of `divisor` sequences that fits into `hbm` bytes per device.

    `build` makes the program of a batch size; `divisor` is the batch size that has one sequence per
    device at a time.
    """
    needed: dict[int, int] = {}  # bytes by sequences per device

    def fits(sequences: int) -> bool:
        result = estimate(build(sequences * divisor), progress)
        needed[sequences] = result.peak_bytes
        gibibytes = f"{result.peak_bytes / chips.GiB:.2f} GiB"
        line = f"{sequences} sequences per device at a time: {gibibytes}"
        print_error(line if result.fits else f"{line}, does not fit")
        return result.fits

    if not fits(1):
        raise UserError(
            "not even one sequence per device fits into memory; use more devices with "
            "config.mesh.fsdp, config.model.remat='full', or a smaller model"
        )
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    # `low` fits and `high` does not. Bytes grow almost linearly with the batch, so interpolation
    # finds the limit with few compilations.
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
