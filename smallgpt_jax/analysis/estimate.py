"""What training and evaluation will need and cost on devices that are not there: the compiled programs, measured."""

import dataclasses
import math
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from smallgpt_jax import models, sharding
from smallgpt_jax.analysis import chips, flops, hlo, memory
from smallgpt_jax.errors import UserError

if TYPE_CHECKING:
    from smallgpt_jax.program import Program


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One training step, and the memory of one evaluation step. Bytes, cycles and collectives are those of one device.

    `needed_bytes` are all that training needs, `eval_needed_bytes` all that is in memory while an evaluation step
    runs, the optimizer's state included; the latter is None where training does not fit already.
    `estimated_cycles` are the compiler's own, summed over the program, without kernels and without
    waiting for collectives; `kernel_cycles` a roofline of the kernels (see `kernel_seconds`). None
    where the compiler makes no estimate (CPUs), where the program does not fit, and with `collectives` where the
    compiled program cannot be read.
    """

    parameters: int
    flops_per_token: float
    flops_per_step: float
    tokens_per_step: int
    devices: int
    device_kind: str
    hbm_bytes: int | None
    argument_bytes: int
    temp_bytes: int | None
    needed_bytes: int
    eval_temp_bytes: int | None
    eval_needed_bytes: int | None
    fits: bool
    account: dict[str, float]
    compile_seconds: float
    collectives: dict[str, dict[str, int]] | None
    estimated_cycles: int | None
    kernel_cycles: int | None
    estimated_step_seconds: float | None
    estimated_mfu: float | None

    @property
    def peak_bytes(self) -> int:
        return max(self.needed_bytes, self.eval_needed_bytes or 0)


def estimate(program: "Program") -> Estimate:
    """Compiles the training and the evaluation step of `program` for its devices and reads off what they take.

    Raises UserError for what cannot be trained there, but not for what does not fit.
    """
    config, model, mesh = program.config, program.model, program.mesh
    state, kind = program.abstract_state(), mesh.devices.flat[0].device_kind
    chip = chips.chip(kind)
    per_token = flops.train_flops_per_token(model)
    tokens = config.train.batch_size * config.model.context_length
    sequences = config.train.batch_size / (sharding.batch_parts(mesh) * config.train.microbatches)
    known = dict(
        parameters=models.num_parameters(model), flops_per_token=per_token, flops_per_step=per_token * tokens,
        tokens_per_step=tokens, devices=mesh.size, device_kind=kind, hbm_bytes=chip and int(chip.hbm),
        account=memory.account(model, mesh, state, sequences, config.train.loss_chunks,
                               config.data.separate_documents))
    started = time.monotonic()
    try:
        step, text = compile_and_read(program)
    except jax.errors.JaxRuntimeError as error:
        return Estimate(
            **known, argument_bytes=memory.bytes_on_device(state), temp_bytes=None,
            needed_bytes=bytes_needed(error, memory.bytes_on_device(state)), eval_temp_bytes=None,
            eval_needed_bytes=None, fits=False, **UNKNOWN_SPEED, collectives=None,
            compile_seconds=time.monotonic() - started)
    eval_temp_bytes, eval_needed_bytes = evaluation_memory(program, state)
    seconds = time.monotonic() - started
    needs = step.memory_analysis()
    return Estimate(
        **known, argument_bytes=needs.argument_size_in_bytes, temp_bytes=needs.temp_size_in_bytes,
        needed_bytes=total_bytes(needs), eval_temp_bytes=eval_temp_bytes, eval_needed_bytes=eval_needed_bytes,
        fits=eval_temp_bytes is not None and (chip is None or eval_needed_bytes <= chip.hbm),
        **(speed(text, config.model.context_length, chip, per_token * tokens / mesh.size)
           if text and chip and chip.hertz else UNKNOWN_SPEED),
        collectives=text.collectives() if text else None, compile_seconds=seconds)


def compile_and_read(program: "Program") -> tuple[jax.stages.Compiled, hlo.Program | None]:
    """Returns the compiled training step and its text, None if that cannot be read."""
    if program.mesh.devices.flat[0].platform != "tpu":
        step = program.compile_train_step()
        return step, hlo.Program(step.as_text())
    with tempfile.TemporaryDirectory() as dump:
        step = program.compile_train_step({"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        return step, read_program(step, Path(dump))


def read_program(program: jax.stages.Compiled, dump: Path) -> hlo.Program | None:
    """Returns the text of a compiled training step: that of the TPU compiler's dump, else its own; None without both.

    Both are the same, but for TPU v5p and v6e `as_text()` can fail, and then writes a stack trace to standard error
    (libtpu 0.0.51, jaxlib 0.10.2: "async-update instruction should have 1 operands but sees 3").
    """
    # Of the step only: the compiler dumps its trials of single kernels too.
    if dumped := next(dump.glob("*.jit_train_step.*.after_codegen.txt"), None):
        return hlo.Program(dumped.read_text())
    try:
        return hlo.Program(program.as_text())
    except jax.errors.JaxRuntimeError:
        return None


def evaluation_memory(program: "Program", state) -> tuple[int | None, int]:
    """Returns the bytes of an evaluation step's temporaries, None if they do not fit, and of all that is in memory
    meanwhile."""
    optimizer_bytes = memory.bytes_on_device(state.opt_state)
    try:
        needs = program.compile_eval_step().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return None, bytes_needed(error, memory.bytes_on_device(state.params)) + optimizer_bytes
    return needs.temp_size_in_bytes, total_bytes(needs) + optimizer_bytes


def total_bytes(needs) -> int:
    """Of a program's arguments, temporaries and those results that do not take an argument's place."""
    return (needs.argument_size_in_bytes + needs.temp_size_in_bytes
            + needs.output_size_in_bytes - needs.alias_size_in_bytes)


# What the TPU compiler says of a program that is too large, in its two forms.
TOO_LARGE = re.compile(r"Used ([\d.]+)([KMGT]) of [\d.]+\w hbm"
                       r"|HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM")


def bytes_needed(error: Exception, argument_bytes: int) -> int:
    """The memory that a program with such arguments needs, of the compiler's refusal; raises it if it is another."""
    found = TOO_LARGE.search(str(error))
    if not found:
        raise error
    size, unit = found[1] or found[3], found[2] or found[4]
    return int(float(size) * 1024 ** (1 + "KMGT".index(unit))) + (argument_bytes if found[3] else 0)


UNKNOWN_SPEED = dict.fromkeys(("estimated_cycles", "kernel_cycles", "estimated_step_seconds", "estimated_mfu"))


def speed(program: hlo.Program, positions: int, chip: chips.Chip, flops_a_device: float) -> dict:
    cycles = program.cycles()
    kernel_cycles = round(chip.hertz * sum(
        times * kernel_seconds(call.line, positions, chip) for times, call in program.kernels()))
    seconds = (cycles + kernel_cycles) / chip.hertz
    return dict(estimated_cycles=cycles, kernel_cycles=kernel_cycles, estimated_step_seconds=seconds,
                estimated_mfu=flops_a_device / (seconds * chip.flops))


# Products of (rows, positions) × (positions, head width) that each of the kernels takes. The last is what the
# TPU compiler itself makes of plain attention: scores (its first operand) to weights, times values.
KERNEL_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4, "splash_mqa_fwd": 2,
                   "splash_mqa_dq": 3, "splash_mqa_dkv": 4, "online-softmax": 1}


def kernel_seconds(line: str, positions: int, chip: chips.Chip) -> float:
    """A roofline for a call of an attention kernel on that many positions: its products at peak speed.

    Counted as the matrix unit takes them: of splash attention the (512 × 512) blocks on and below the
    diagonal, heads filled up to 128. Its reads and writes of memory take less time than that; those of
    "online-softmax", which reads the scores, take more, and are left out. Raises ValueError for a kernel
    that is not known here.
    """
    name = next((name for name in KERNEL_PRODUCTS if name in line), None)
    if not name:
        raise ValueError(f"a kernel of unknown cost: {line[:200]}")
    is_splash = name != "online-softmax"
    shapes = re.findall(r"\w+\[(\d+(?:,\d+){3,})\]", line.split("operand_layout_constraints=")[1])
    # The last two stand in either order.
    *rows_and_heads, width, length = map(int, shapes[0 if is_splash else 1].split(","))
    head_width = width * length // positions
    blocks = positions // math.gcd(positions, 512)
    computed = (blocks + 1) / (2 * blocks) if is_splash else 1
    return (KERNEL_PRODUCTS[name] * 2 * math.prod(rows_and_heads) * computed * positions**2
            * max(head_width, 128) / chip.flops)


def largest_batch(build: Callable[[int], "Program"], parts: int, hbm: float, say: Callable[[str], None]) -> int:
    """Returns the largest batch size with which training and evaluation still fit into `hbm` bytes.

    `build` returns the program with a batch size, `parts` divides all batch sizes. Few compilations: between one that
    fits and one that does not, where memory would end if it grew evenly. Raises UserError if not even one sequence
    fits.
    """
    needed: dict[int, int] = {}

    def fits(sequences: int) -> bool:
        result = estimate(build(sequences * parts))
        needed[sequences] = result.peak_bytes
        say(f"  {sequences} a device: {result.peak_bytes / chips.GiB:.2f} GiB"
            + ("" if result.fits else ", does not fit"))
        return result.fits

    if not fits(1):
        raise UserError("not even one sequence a device fits: use more devices with config.mesh.fsdp, "
                        "config.model.remat='full', or a smaller model")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        slope = (needed[high] - needed[low]) / (high - low)
        guess = low + int((hbm - needed[low]) / slope) if slope > 0 else (low + high) // 2
        middle = min(max(guess, low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * parts
