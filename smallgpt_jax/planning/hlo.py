"""Collectives and cycle estimates of a compiled program, parsed from its HLO text."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator

import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# "  ROOT %dot.1 = f32[2,3]{1,0} dot(%a, %b), …": the groups are the first fields of `Instruction`.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)")
# "ENTRY %main (p: f32[2,3]) -> f32[2] {"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the array, without padding. Tokens, which order effects, have none."""
        if self.dtype == "pred":
            return math.prod(self.shape)
        bits = re.search(r"\d+", self.dtype)  # of bf16, s4, f8e4m3fn
        if not bits:
            return 0
        return math.ceil(int(bits[0]) * math.prod(self.shape) / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str  # text of the result's type
    opcode: str
    arguments: str  # text of the operands
    line: str  # text of the whole instruction

    @property
    def operands(self) -> list[str]:
        """The names of the instructions whose results are the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    @property
    def is_root(self) -> bool:
        """Whether the result of the instruction is that of its computation."""
        return self.line.lstrip().startswith("ROOT ")

    @property
    def is_kernel(self) -> bool:
        return 'custom_call_target="tpu_custom_call"' in self.line

    @property
    def backend_config(self) -> dict:
        """The settings that the GPU compiler chose for the instruction; {} if there are none."""
        text = self.line.partition("backend_config=")[2]
        return json.JSONDecoder().raw_decode(text)[0] if text else {}

    @property
    def calls(self) -> list[str]:
        """The names of the computations that the instruction runs, except reduction functions."""
        # other instructions, such as reduce, apply to_apply to pairs of numbers
        keys = "body|calls|to_apply" if self.opcode == "call" else "body|calls"
        names = re.findall(rf"\b(?:{keys})=%?([\w.\-]+)", self.line)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        if branches:
            names += [name.strip(" %") for name in branches[1].split(",")]
        return names

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 for custom kernels and collectives, which have none."""
        cycles = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(cycles[1]) if cycles else 0

    @property
    def channel(self) -> str:
        """The channel id, which all parts of an asynchronous collective share, or else `line`."""
        channel = re.search(r"channel_id=(\d+)", self.line)
        return channel[1] if channel else self.line

    @property
    def group(self) -> list[int]:
        """The devices of a collective's first replica group; [] if all devices are one group."""
        # The groups (0, 1) and (2, 3) are {{0,1},{2,3}}, [2,2]<=[4] or mesh['x'=2,'y'=2] {'y'}; the
        # groups (0, 2) and (1, 3) are {{0,2},{1,3}}, [2,2]<=[2,2]T(1,0) or mesh['x'=2,'y'=2] {'x'}.
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", self.line)
        if listed:
            return _numbers(listed[1])
        # [groups,size]<=[lengths]T(order): the devices, as an array of these lengths whose axes are
        # transposed, in rows of `size`
        iota = re.search(
            r"replica_groups=\[[\d,]*?(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.line
        )
        if iota:
            lengths = _numbers(iota[2])
            order = _numbers(iota[3]) if iota[3] else list(range(len(lengths)))
            return _first_group(lengths, order, int(iota[1]))
        mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", self.line)
        if mesh:
            names, lengths = zip(*re.findall(r"'(\w+)'=(\d+)", mesh[1]))
            lengths = list(map(int, lengths))
            # the devices of a group differ in the named axes, which come last
            group_axes = [names.index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
            other_axes = [axis for axis in range(len(names)) if axis not in group_axes]
            size = math.prod(lengths[axis] for axis in group_axes)
            return _first_group(lengths, other_axes + group_axes, size)
        return []

    @property
    def is_reduce_scatter(self) -> bool:
        """Whether it is a TPU's reduce-scatter: a fusion of an all-reduce and a slice."""
        return self.opcode == "fusion" and any("all-reduce-scatter" in name for name in self.calls)

    @property
    def arrays(self) -> list[Array]:
        """The result's arrays."""
        return [
            Array(dtype, tuple(_numbers(lengths))) for dtype, lengths in _ARRAY.findall(self.shape)
        ]

    @property
    def result_bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _first_group(lengths: list[int], order: list[int], size: int) -> list[int]:
    """Returns the first `size` devices of a mesh, (*lengths,), whose axes are put into `order`."""
    devices = np.arange(math.prod(lengths)).reshape(lengths).transpose(order)
    return devices.ravel()[:size].tolist()


class HloModule:
    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.instructions: dict[str, Instruction] = {}  # names are unique in a module
        partitions = re.match(r"HloModule .*num_partitions=(\d+)", text)
        self.partitions = int(partitions[1]) if partitions else 1
        # computations with one instruction per line
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                entry, name = start.groups()
                body = self.computations[name] = []
                if entry:
                    self.entry = name
            elif fields := _INSTRUCTION.match(line):
                instruction = Instruction(*fields.groups(), line)
                body.append(instruction)
                self.instructions[instruction.name] = instruction

    def collectives(self) -> dict[str, dict[str, int]]:
        """Returns {kind: {"count": executions, "bytes": of all results}}."""
        # (kind, executions, bytes) of collectives outside and inside fusions. Outside, each name
        # counts, because all collectives of a shard_map have one channel. Inside, all of a channel
        # and shape are parts of one asynchronous collective.
        outside, inside = {}, {}
        unfused = {instruction.name for _, instruction in self.executed(fused=False)}
        for times, instruction in self.executed():
            # Counts the "-done" instruction of an asynchronous collective. The result of its
            # "-start" instruction also includes the operands.
            kind = instruction.opcode.removesuffix("-done")
            if instruction.is_reduce_scatter:
                kind = "reduce-scatter"
            # a collective of one device only copies
            if kind not in COLLECTIVES or len(self._started(instruction).group) == 1:
                continue
            executed = kind, times, times * instruction.result_bytes
            if instruction.name in unfused:
                outside[instruction.channel, instruction.shape, instruction.name] = executed
            else:
                inside[instruction.channel, instruction.shape] = executed
        for channel, shape, _ in outside:  # the same collective, outside of the fusions, too
            inside.pop((channel, shape), None)
        collectives = {}
        for kind, times, size in [*outside.values(), *inside.values()]:
            sums = collectives.setdefault(kind, {"count": 0, "bytes": 0})
            sums["count"] += times
            sums["bytes"] += size
        return collectives

    def _started(self, instruction: Instruction) -> Instruction:
        """Returns the "-start" of a GPU's "-done" instruction, which does not state the groups."""
        is_done = instruction.opcode.endswith("-done") and "replica_groups" not in instruction.line
        return self.instructions[instruction.operands[0]] if is_done else instruction

    def cycles(self) -> int:
        """Returns the compiler's estimate, without custom kernels and waiting for collectives."""
        return sum(times * instruction.cycles for times, instruction in self.executed(fused=False))

    def kernels(self) -> list[tuple[int, Instruction]]:
        """Returns the calls of Pallas kernels as pairs (number of executions, instruction)."""
        return [(times, i) for times, i in self.executed() if i.is_kernel]

    def executed(
        self, fused: bool = True, name: str | None = None, times: int = 1
    ) -> Iterator[tuple[int, Instruction]]:
        """Yields (number of executions, instruction) for the computation `name`, by default the
        program's entry, and all that it calls; those inside fusions only with `fused`. `times` is
        how often the computation itself is executed.
        """
        # Nested loops multiply: what is called in the body of a loop is executed once per iteration.
        for instruction in self.computations[name or self.entry]:
            yield times, instruction
            if instruction.is_reduce_scatter:  # one collective; what it calls describes the sum
                continue
            for called in instruction.calls:
                if instruction.opcode == "while":
                    yield from self.executed(fused, called, times * self.trip_count(instruction))
                elif fused or instruction.opcode != "fusion":
                    yield from self.executed(fused, called, times)

    def trip_count(self, loop: Instruction) -> int:
        """Returns a loop's iterations, as annotated, or as its condition compares them."""
        annotation = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line)
        if annotation:
            return int(annotation[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.line)[1]
        lines = "\n".join(instruction.line for instruction in self.computations[condition])
        # the counter is compared with the bound, and begins at 0, as that of `jax.lax.scan`
        return max(map(int, re.findall(r"constant\((\d+)\)", lines)), default=1)
