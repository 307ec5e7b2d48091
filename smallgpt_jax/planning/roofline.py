"""Roofline of a compiled GPU program: an optimistic time for each kernel and collective, and for
one step.

A kernel takes the longer of two times: that of its matrix products at the peak speed of the matrix
units, and that of its operands and results at the speed of the memory. Other arithmetic, caches and
launches take no time. Products in a plain loop, without a library or Triton, and those of float32
arrays with precision="highest" have the peak speed without matrix units.

A collective sends its bytes around a ring of its devices at the speed of the slowest link, without
latency. It runs beside the kernels between its start and its end in the schedule; one collective
runs at a time.
"""

import collections
import dataclasses
import math
import re

from smallgpt_jax.planning.gpus import Gpu
from smallgpt_jax.planning.hlo import COLLECTIVES, Array, HloModule, Instruction

# Instructions without work: names of memory, constants, and the ends of asynchronous instructions.
FREE = (
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
    "add-dependency",
    "copy-done",
    "async-done",
)
SLICES = ("slice", "dynamic-slice", "gather")
UPDATED_OPERAND = {
    "dynamic-update-slice": 1,
    "scatter": 2,
}  # opcode → the operand with the new values
LIBRARIES = {"__cudnn$": "cuDNN", "__cublas$lt$": "cuBLASLt", "__cublas$": "cuBLAS"}
GENERATORS = {"__triton": "Triton", "__cudnn": "cuDNN"}
PLAIN_PRODUCTS = "plain loops with products"
# Speed of products of a dtype, relative to bfloat16. By default, XLA lets float32 products round to
# TF32.
SPEED = {"bf16": 1, "f16": 1, "f32": 1 / 2, "f8e4m3fn": 2, "f8e5m2": 2}
# Matrix products of cuDNN's attention, which computes the scores again for the gradient (arXiv
# 2205.14135)
ATTENTION_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds of kernels, of collectives, and of waiting for collectives."""

    kernels: float = 0.0
    collectives: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: "Clock") -> "Clock":
        return Clock(
            *(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other)))
        )

    def __mul__(self, times: int) -> "Clock":
        return Clock(*(times * seconds for seconds in dataclasses.astuple(self)))

    @property
    def total(self) -> float:
        return self.kernels + self.exposed


@dataclasses.dataclass(frozen=True)
class Roofline:
    module: HloModule
    gpu: Gpu
    gpus_per_host: int

    def clock(self, computation: str | None = None) -> Clock:
        """Returns the times of one execution of a computation; by default, of the program."""
        clock, link_is_free, ends = Clock(), 0.0, {}
        for instruction in self.module.computations[computation or self.module.entry]:
            kind, stage = collective_stage(instruction)
            if not kind:
                clock += self.called(instruction) or Clock(kernels=self.kernel_seconds(instruction))
                continue
            if stage != "done":
                seconds = self.collective_seconds(kind, instruction)
                link_is_free = ends[instruction.name] = max(clock.total, link_is_free) + seconds
                clock += Clock(collectives=seconds)
            if stage != "start":
                started = instruction.operands[0] if stage else instruction.name
                clock += Clock(exposed=max(0.0, ends.get(started, 0.0) - clock.total))
        return clock

    def called(self, instruction: Instruction) -> Clock | None:
        """Returns the times of a loop, a call or the longest branch of a conditional; None for a
        kernel.
        """
        if instruction.opcode == "fusion" or not instruction.calls:
            return None
        longest = max(map(self.clock, instruction.calls), key=lambda clock: clock.total)
        return longest * (
            self.module.trip_count(instruction) if instruction.opcode == "while" else 1
        )

    def collective_seconds(self, kind: str, instruction: Instruction) -> float:
        group = instruction.group or list(range(self.module.partitions))
        sent = ring_bytes(
            kind, sum(array.bytes for array in self.operands(instruction)), len(group)
        )
        is_on_one_host = len({device // self.gpus_per_host for device in group}) == 1
        return sent / (self.gpu.link if is_on_one_host else self.gpu.network)

    def kernels(self) -> dict[str, dict[str, float]]:
        """Returns {kind of kernel: {"count": executions, "seconds": of all executions}}."""
        found = collections.defaultdict(lambda: {"count": 0, "seconds": 0.0})
        for times, instruction in self.module.executed(fused=False):
            if kind := self.kind(instruction):
                found[kind]["count"] += times
                found[kind]["seconds"] += times * self.kernel_seconds(instruction)
        return dict(found)

    def kind(self, instruction: Instruction) -> str | None:
        """Returns None for an instruction that is not a kernel."""
        if (
            instruction.opcode in FREE
            or collective_stage(instruction)[0]
            or (instruction.calls and instruction.opcode != "fusion")
        ):
            return None
        if instruction.opcode == "custom-call":
            target = custom_call_target(instruction)
            return next(
                (name for prefix, name in LIBRARIES.items() if target.startswith(prefix)),
                "other calls",
            )
        generator = instruction.backend_config.get("fusion_backend_config", {}).get("kind", "")
        if name := next(
            (name for prefix, name in GENERATORS.items() if generator.startswith(prefix)), None
        ):
            return name
        if self.products(instruction):
            return PLAIN_PRODUCTS
        return "fusions" if instruction.opcode == "fusion" else "copies and others"

    def kernel_seconds(self, instruction: Instruction) -> float:
        if not (kind := self.kind(instruction)):
            return 0.0
        return max(
            self.product_seconds(kind, instruction), self.traffic(instruction) / self.gpu.bandwidth
        )

    def product_seconds(self, kind: str, instruction: Instruction) -> float:
        if products := ATTENTION_PRODUCTS.get(custom_call_target(instruction)):
            return (
                products
                * attention_flops(instruction, self.operands(instruction)[0])
                / self.gpu.chip.flops
            )
        return sum(
            self.product_flops(product) / self.product_speed(kind, product)
            for product in self.products(instruction)
        )

    def product_speed(self, kind: str, product: Instruction) -> float:
        """Returns the peak FLOP/s of a product. Matrix units round float32 operands."""
        dtype = self.operands(product)[0].dtype
        is_highest = re.search(r"operand_precision\W+(\w+\W+)?highest", product.line, re.IGNORECASE)
        if kind == PLAIN_PRODUCTS or (
            dtype == "f32" and is_highest
        ):  # JAX was asked for precision="highest"
            return self.gpu.vector_flops
        return self.gpu.chip.flops * SPEED.get(dtype, 1)

    def products(self, instruction: Instruction) -> list[Instruction]:
        if instruction.opcode == "fusion":
            return [
                product
                for i in self.module.computations[instruction.calls[0]]
                for product in self.products(i)
            ]
        is_product = instruction.opcode == "dot" or custom_call_target(instruction).startswith(
            "__cublas$"
        )
        return [instruction] if is_product else []

    def product_flops(self, product: Instruction) -> int:
        left = self.operands(product)[0]
        return (
            2
            * math.prod(product.arrays[0].shape)
            * math.prod(left.shape[axis] for axis in contracted_axes(product))
        )

    def operands(self, instruction: Instruction) -> list[Array]:
        return [
            array
            for name in instruction.operands
            for array in self.module.instructions[name].arrays
        ]

    def traffic(self, instruction: Instruction) -> int:
        """Returns the bytes that a kernel reads and writes. Of sliced or updated arrays, only the
        parts count.
        """
        if instruction.opcode == "fusion":
            return self.fusion_traffic(self.module.computations[instruction.calls[0]])
        if instruction.opcode in SLICES:
            return 2 * instruction.result_bytes
        if instruction.opcode in UPDATED_OPERAND:
            return 2 * self.written(instruction)
        return sum(array.bytes for array in self.operands(instruction)) + self.written(instruction)

    def fusion_traffic(self, body: list[Instruction]) -> int:
        users = collections.defaultdict(list)
        for instruction in body:
            for name in instruction.operands:
                users[name].append(instruction)
        root = next(i for i in body if i.is_root)
        results = (
            [self.module.instructions[name] for name in root.operands]
            if root.opcode == "tuple"
            else [root]
        )
        return sum(read_bytes(i, users) for i in body if i.opcode == "parameter") + sum(
            self.written(result) for result in results
        )

    def written(self, instruction: Instruction) -> int:
        if instruction.opcode == "bitcast" and instruction.operands:
            return self.written(self.module.instructions[instruction.operands[0]])
        if (position := UPDATED_OPERAND.get(instruction.opcode)) is not None:
            return self.module.instructions[instruction.operands[position]].result_bytes
        workspace = ("s8", "u8") if instruction.opcode == "custom-call" else ()
        return sum(array.bytes for array in instruction.arrays if array.dtype not in workspace)


def collective_stage(instruction: Instruction) -> tuple[str, str]:
    """Returns the kind of a collective and "start", "done" or, if synchronous, ""; ("", "") for
    other instructions.
    """
    found = re.fullmatch(rf"({'|'.join(COLLECTIVES)})(?:-(start|done))?", instruction.opcode)
    return (found[1], found[2] or "") if found else ("", "")


def ring_bytes(kind: str, operand_bytes: int, devices: int) -> float:
    """Returns the bytes that each device sends if data pass around a ring (Patarasuk and Yuan,
    2009).
    """
    share = (devices - 1) / devices
    return (
        operand_bytes
        * {
            "all-reduce": 2 * share,
            "all-gather": devices - 1,
            "reduce-scatter": share,
            "all-to-all": share,
            "collective-permute": 1,
        }[kind]
    )


def custom_call_target(instruction: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', instruction.line)
    return found[1] if found else ""


def contracted_axes(product: Instruction) -> list[int]:
    """Returns the axes of the left operand over which a product sums."""
    if product.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.line)[1].split(",")
    else:
        numbers = product.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
        axes = numbers["lhs_contracting_dimensions"]
    return [int(axis) for axis in axes if axis]


def attention_flops(call: Instruction, queries: Array) -> float:
    """Returns the FLOPs of one product of cuDNN's attention, which skips scores that the mask
    excludes.
    """
    settings = call.backend_config["cudnn_fmha_backend_config"]
    batch, heads, time, keys = map(int, settings["intermediate_tensor_shape"]["dimensions"])
    head_width = math.prod(queries.shape) // (batch * heads * time)
    scores = time * keys
    if "CAUSAL" in settings["mask_type"]:
        reach = min(int(settings["sliding_window_length"]) or keys, keys)
        scores = reach * (reach + 1) // 2 + (time - reach) * reach
    return 2 * batch * heads * scores * head_width


def read_bytes(parameter: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Returns the bytes of a fusion's operand that the fusion reads."""
    read = 0
    for user in users[parameter.name]:
        is_first = user.operands[0] == parameter.name
        if user.opcode == "bitcast":
            read += read_bytes(user, users)
        elif user.opcode in SLICES and is_first:
            read += user.result_bytes
        elif not (user.opcode in UPDATED_OPERAND and is_first):
            return parameter.result_bytes
    return min(read, parameter.result_bytes)
