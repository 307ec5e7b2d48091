"""Collectives and cycle estimates of a compiled program, parsed from the HLO text of `jax.stages.Compiled.as_text()`.

The text is a sequence of computations with one instruction per line. Those in a loop's body count per iteration.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Instruction:
    shape: str  # text of the result's type
    opcode: str
    line: str  # text of the whole instruction

    @property
    def calls(self) -> list[str]:
        """The names of the computations that the instruction runs, except reduction functions."""
        keys = "body|calls" + ("|to_apply" if self.opcode == "call" else "")
        found = re.findall(rf"\b(?:{keys})=%?([\w.\-]+)", self.line)
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.line):
            found += [name.strip(" %") for name in branches[1].split(",")]
        return found

    @property
    def cycles(self) -> int:
        """The compiler's cycle estimate for the instruction; 0 for custom kernels and collectives, which have none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(found[1]) if found else 0

    @property
    def channel(self) -> str:
        """The channel id, or `line` if there is none. All instructions of an asynchronous collective share the id."""
        found = re.search(r"channel_id=(\d+)", self.line)
        return found[1] if found else self.line

    @property
    def is_local(self) -> bool:
        """Whether each replica group has only one device. Such a collective only copies its operand."""
        return bool(re.search(r"replica_groups=(\{(\{\d+\},?)+\}|\[\d+,1\])", self.line))

    @property
    def is_reduce_scatter(self) -> bool:
        """Whether the instruction is a reduce-scatter on a TPU: a fusion of an all-reduce and a slice."""
        return self.opcode == "fusion" and any("all-reduce-scatter" in name for name in self.calls)

    @property
    def is_kernel(self) -> bool:
        return 'custom_call_target="tpu_custom_call"' in self.line

    @property
    def result_bytes(self) -> int:
        """The total bytes of the result's arrays, without padding."""
        return sum(math.ceil(bits(dtype) * math.prod(int(n) for n in sizes.split(",") if n) / 8)
                   for dtype, sizes in _ARRAY.findall(self.shape))


def bits(dtype: str) -> int:
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8 if dtype == "pred" else 0


class HloModule:
    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                body = self.computations[start[2]] = []
                if start[1]:
                    self.entry = start[2]
            elif instruction := _INSTRUCTION.match(line):
                body.append(Instruction(instruction[1], instruction[2], line))

    def collectives(self) -> dict[str, dict[str, int]]:
        """Returns {kind: {"count": executions, "bytes": of all results}}, without groups of a single device."""
        # {(channel, shape of the result): collective}. Several instructions of one asynchronous collective have the
        # same key, and count once. The channel alone is no key: all collectives of a shard_map share it.
        channels = {}
        for times, instruction in self.executed():
            # Counts the "-done" instruction of an asynchronous collective. The result of its "-start" instruction also
            # includes the operands.
            kind = instruction.opcode.removesuffix("-done")
            if instruction.is_reduce_scatter:
                kind = "reduce-scatter"
            if kind in COLLECTIVES and not instruction.is_local:
                channels[instruction.channel, instruction.shape] = kind, times, times * instruction.result_bytes
        found = {}
        for kind, times, size in channels.values():
            entry = found.setdefault(kind, {"count": 0, "bytes": 0})
            entry["count"] += times
            entry["bytes"] += size
        return found

    def cycles(self) -> int:
        """Returns the compiler's cycle estimate, without custom kernels and without waiting for collectives."""
        return sum(times * instruction.cycles for times, instruction in self.executed(fused=False))

    def kernels(self) -> list[tuple[int, Instruction]]:
        """Returns the calls of Pallas kernels as pairs (number of executions, instruction)."""
        return [(times, i) for times, i in self.executed() if i.is_kernel]

    def executed(self, fused: bool = True, name: str | None = None,
                 times: int = 1) -> Iterator[tuple[int, Instruction]]:
        """Yields (number of executions, instruction) for each instruction of a computation and of those it calls.

        `name` is the computation's name. The default is the entry of the module. `times` is the number of executions
        of the computation itself. With `fused`, instructions inside fusions are included.
        """
        for instruction in self.computations[name or self.entry]:
            yield times, instruction
            for called in instruction.calls:
                if instruction.is_reduce_scatter:
                    continue
                if instruction.opcode == "while":
                    yield from self.executed(fused, called, times * self.trip_count(instruction))
                elif fused or instruction.opcode != "fusion":
                    yield from self.executed(fused, called, times)

    def trip_count(self, loop: Instruction) -> int:
        """Returns a loop's iterations, from the compiler's annotation or else the constant in its condition."""
        if annotation := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.line):
            return int(annotation[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.line)[1]
        bounds = [re.search(r"constant\((\d+)\)", i.line) for i in self.computations[condition]]
        return max((int(bound[1]) for bound in bounds if bound), default=1)
