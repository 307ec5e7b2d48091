"""Roofline of a compiled GPU program: an optimistic time per kernel, collective and step."""

import collections
import dataclasses
import math
import re

from smallgpt_jax.planning.gpus import Gpu
from smallgpt_jax.planning.hlo import COLLECTIVES, Array, HloModule, Instruction

# Instructions without work: names of memory, constants, and the ends of asynchronous instructions.
_FREE = (
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("opt-barrier", "partition-id", "replica-id", "add-dependency", "copy-done", "async-done"),
)
_SLICES = ("slice", "dynamic-slice", "gather")
# Operations that change their first operand in place, and which operand has the new values
_NEW_VALUES_OPERAND = {"dynamic-update-slice": 1, "scatter": 2}
_LIBRARIES = {"__cudnn$": "cuDNN", "__cublas$lt$": "cuBLASLt", "__cublas$": "cuBLAS"}
_GENERATORS = {"__triton": "Triton", "__cudnn": "cuDNN"}
PLAIN_PRODUCTS = "plain loops with products"
# Speed of products of a dtype, relative to bfloat16. By default, XLA lets float32 products round to
# TF32.
_SPEED = {"bf16": 1, "f16": 1, "f32": 1 / 2, "f8e4m3fn": 2, "f8e5m2": 2}
# Matrix products of cuDNN's attention, which computes the scores again for the gradient (arXiv
# 2205.14135)
_ATTENTION_PRODUCTS = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}


@dataclasses.dataclass(frozen=True)
class Clock:
    """Seconds of kernels, of collectives, and of waiting for collectives."""

    kernels: float = 0.0
    collectives: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: "Clock") -> "Clock":
        return Clock(
            self.kernels + other.kernels,
            self.collectives + other.collectives,
            self.exposed + other.exposed,
        )

    def __mul__(self, times: int) -> "Clock":
        return Clock(times * self.kernels, times * self.collectives, times * self.exposed)

    @property
    def total(self) -> float:
        """The time that passes: of the collectives, what no kernel hides."""
        return self.kernels + self.exposed


@dataclasses.dataclass(frozen=True)
class Roofline:
    module: HloModule
    gpu: Gpu
    gpus_per_host: int

    def clock(self, computation: str | None = None) -> Clock:
        """Returns the times of one execution of a computation; by default, of the program."""
        # A collective runs beside the kernels between its start and its end in the schedule; one
        # collective runs at a time.
        clock = Clock()
        link_is_free = 0.0  # the time at which the last collective so far ends
        ends = {}  # {name of a collective: the time at which it ends}
        for instruction in self.module.computations[computation or self.module.entry]:
            kind, stage = _collective_stage(instruction)
            if not kind:  # a kernel, a loop or a call
                called = self._called(instruction)
                clock += called or Clock(kernels=self._kernel_seconds(instruction))
                continue
            # "" is both: the start of a synchronous collective, and its end
            if stage in ("start", ""):
                seconds = self._collective_seconds(kind, instruction)
                link_is_free = max(clock.total, link_is_free) + seconds
                ends[instruction.name] = link_is_free
                clock += Clock(collectives=seconds)
            if stage in ("done", ""):
                started = instruction.operands[0] if stage == "done" else instruction.name
                clock += Clock(exposed=max(0.0, ends.get(started, 0.0) - clock.total))
        return clock

    def _called(self, instruction: Instruction) -> Clock | None:
        """Returns the times of a loop, a call or the longest branch; None for a kernel."""
        if instruction.opcode == "fusion" or not instruction.calls:
            return None
        longest = max(map(self.clock, instruction.calls), key=lambda clock: clock.total)
        if instruction.opcode == "while":  # all times, as often as the body runs
            return longest * self.module.trip_count(instruction)
        return longest

    def _collective_seconds(self, kind: str, instruction: Instruction) -> float:
        # around a ring of the devices, at the speed of the slowest link, without latency
        group = instruction.group or list(range(self.module.partitions))
        operand_bytes = sum(array.bytes for array in self._operands(instruction))
        sent = ring_bytes(kind, operand_bytes, len(group))
        is_on_one_host = len({device // self.gpus_per_host for device in group}) == 1
        return sent / (self.gpu.link if is_on_one_host else self.gpu.network)

    def kernels(self) -> dict[str, dict[str, float]]:
        """Returns {kind of kernel: {"count": executions, "seconds": of all executions}}."""
        sums = collections.defaultdict(lambda: {"count": 0, "seconds": 0.0})
        for times, instruction in self.module.executed(fused=False):
            kind = self._kind(instruction)
            if kind:
                sums[kind]["count"] += times
                sums[kind]["seconds"] += times * self._kernel_seconds(instruction)
        return dict(sums)

    def _kind(self, instruction: Instruction) -> str | None:
        """Returns who makes a kernel, such as "cuBLAS"; None for an instruction that is none."""
        # loops, branches and calls take the time of what they run
        calls_others = instruction.calls and instruction.opcode != "fusion"
        if instruction.opcode in _FREE or calls_others or _collective_stage(instruction)[0]:
            return None
        if instruction.opcode == "custom-call":
            return _by_prefix(_LIBRARIES, custom_call_target(instruction)) or "other calls"
        config = instruction.backend_config.get("fusion_backend_config", {})
        generator = _by_prefix(_GENERATORS, config.get("kind", ""))
        if generator:
            return generator
        if self._products(instruction):
            return PLAIN_PRODUCTS
        return "fusions" if instruction.opcode == "fusion" else "copies and others"

    def _kernel_seconds(self, instruction: Instruction) -> float:
        kind = self._kind(instruction)
        if not kind:
            return 0.0
        # other arithmetic, caches and launches take no time
        memory_seconds = self._traffic(instruction) / self.gpu.bandwidth
        return max(self._product_seconds(kind, instruction), memory_seconds)

    def _product_seconds(self, kind: str, instruction: Instruction) -> float:
        """Returns the seconds of a kernel's matrix products; 0 without products."""
        num_products = _ATTENTION_PRODUCTS.get(custom_call_target(instruction))
        if num_products:  # cuDNN's attention computes in 16 bits, at the chip's peak
            queries = self._operands(instruction)[0]
            return num_products * _attention_flops(instruction, queries) / self.gpu.chip.flops
        return sum(
            self._product_flops(product) / self._product_speed(kind, product)
            for product in self._products(instruction)
        )

    def _product_speed(self, kind: str, product: Instruction) -> float:
        """Returns the peak FLOP/s of a product. Matrix units round float32 operands."""
        dtype = self._operands(product)[0].dtype
        # JAX was asked for precision="highest"
        is_highest = re.search(r"operand_precision\W+(\w+\W+)?highest", product.line, re.IGNORECASE)
        # products in a plain loop, without a library or Triton, do not use matrix units either
        if kind == PLAIN_PRODUCTS or (dtype == "f32" and is_highest):
            return self.gpu.vector_flops
        return self.gpu.chip.flops * _SPEED.get(dtype, 1)

    def _products(self, instruction: Instruction) -> list[Instruction]:
        """Returns the matrix products of a kernel."""
        if instruction.opcode == "fusion":
            body = self.module.computations[instruction.calls[0]]
            return [product for fused in body for product in self._products(fused)]
        is_cublas = custom_call_target(instruction).startswith("__cublas$")
        return [instruction] if instruction.opcode == "dot" or is_cublas else []

    def _product_flops(self, product: Instruction) -> int:
        left = self._operands(product)[0]
        terms = math.prod(left.shape[axis] for axis in _contracted_axes(product))
        return 2 * math.prod(product.arrays[0].shape) * terms

    def _operands(self, instruction: Instruction) -> list[Array]:
        arrays = []
        for name in instruction.operands:
            arrays += self.module.instructions[name].arrays
        return arrays

    def _traffic(self, instruction: Instruction) -> int:
        """Returns the bytes that a kernel reads and writes; of sliced or updated arrays, the parts."""
        if instruction.opcode == "fusion":
            return self._fusion_traffic(self.module.computations[instruction.calls[0]])
        if instruction.opcode in _SLICES:  # reads the part and writes it
            return 2 * instruction.result_bytes
        if instruction.opcode in _NEW_VALUES_OPERAND:  # reads the new values and writes them
            return 2 * self._written(instruction)
        read = sum(array.bytes for array in self._operands(instruction))
        return read + self._written(instruction)

    def _fusion_traffic(self, body: list[Instruction]) -> int:
        """Returns the bytes that a fusion reads and writes; intermediate results stay in registers."""
        users = collections.defaultdict(list)
        for instruction in body:
            for name in instruction.operands:
                users[name].append(instruction)
        root = next(instruction for instruction in body if instruction.is_root)
        results = [root]
        if root.opcode == "tuple":  # a fusion of several results
            results = [self.module.instructions[name] for name in root.operands]
        parameters = [instruction for instruction in body if instruction.opcode == "parameter"]
        read = sum(_read_bytes(parameter, users) for parameter in parameters)
        return read + sum(map(self._written, results))

    def _written(self, instruction: Instruction) -> int:
        """Returns the bytes of an instruction's results that are new."""
        if instruction.opcode == "bitcast" and instruction.operands:
            return self._written(self.module.instructions[instruction.operands[0]])
        if instruction.opcode in _NEW_VALUES_OPERAND:
            values = instruction.operands[_NEW_VALUES_OPERAND[instruction.opcode]]
            return self.module.instructions[values].result_bytes
        # Library calls return their scratch memory as arrays of bytes.
        workspace = ("s8", "u8") if instruction.opcode == "custom-call" else ()
        return sum(array.bytes for array in instruction.arrays if array.dtype not in workspace)


def _by_prefix(names: dict[str, str], text: str) -> str | None:
    return next((name for prefix, name in names.items() if text.startswith(prefix)), None)


def _collective_stage(instruction: Instruction) -> tuple[str, str]:
    """Returns a collective's kind and "start", "done" or, if synchronous, ""; or ("", "")."""
    kind, _, stage = instruction.opcode.rpartition("-")
    if kind in COLLECTIVES and stage in ("start", "done"):
        return kind, stage
    return (instruction.opcode, "") if instruction.opcode in COLLECTIVES else ("", "")


def ring_bytes(kind: str, operand_bytes: int, devices: int) -> float:
    """Returns the bytes that each device sends, for an operand of `operand_bytes` on each device.

    Reductions and gathers pass data around a ring (Patarasuk and Yuan, 2009).
    """
    # The operand is cut into one part per device; a device need not send its own part.
    others = (devices - 1) / devices
    operands_sent = {
        "all-reduce": 2 * others,  # a reduce-scatter, then an all-gather of the sums
        "all-gather": devices - 1,  # its operand is one part, its result has all
        "reduce-scatter": others,
        "all-to-all": others,
        "collective-permute": 1,
    }
    return operand_bytes * operands_sent[kind]


def custom_call_target(instruction: Instruction) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', instruction.line)
    return target[1] if target else ""


def _contracted_axes(product: Instruction) -> list[int]:
    """Returns the axes of the left operand over which a product sums."""
    if product.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.line)[1].split(",")
    else:
        numbers = product.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
        axes = numbers["lhs_contracting_dimensions"]
    return [int(axis) for axis in axes if axis]


def _attention_flops(call: Instruction, queries: Array) -> float:
    """Returns the FLOPs of one product of cuDNN's attention, which skips masked scores."""
    settings = call.backend_config["cudnn_fmha_backend_config"]
    batch, heads, time, keys = map(int, settings["intermediate_tensor_shape"]["dimensions"])
    head_width = math.prod(queries.shape) // (batch * heads * time)
    scores = time * keys
    if "CAUSAL" in settings["mask_type"]:
        reach = min(int(settings["sliding_window_length"]) or keys, keys)
        # the first `reach` queries see 1, 2, … keys, the others `reach`
        scores = reach * (reach + 1) // 2 + (time - reach) * reach
    return 2 * batch * heads * scores * head_width


def _read_bytes(parameter: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Returns the bytes that a fusion reads of an operand; `users`: {name: its result's users}."""
    read = 0
    for user in users[parameter.name]:
        is_first = user.operands[0] == parameter.name
        if user.opcode == "bitcast":
            read += _read_bytes(user, users)
        elif user.opcode in _SLICES and is_first:  # gathers and slices read only their results
            read += user.result_bytes
        elif user.opcode in _NEW_VALUES_OPERAND and is_first:
            continue  # changed in place, not read
        else:  # needs all of it
            return parameter.result_bytes
    return min(read, parameter.result_bytes)
