"""Probes: synthetic tasks with exact answers. docs/data.md describes them.

A probe makes any number of examples at once from the random numbers of their rows. An example
consists of its inputs and of the answer at each input, or NO_ANSWER. Id 0 is the end-of-text token,
with which every example begins; the symbols of a probe have the ids from 1 on.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

NO_ANSWER = -1
_STEP = np.uint64(0x9E3779B97F4A7C15)  # of the states of SplitMix64


class RandomNumbers:
    """Random numbers that depend only on a stream and on the number of a row: SplitMix64 (Steele et
    al., 2014).

    Unlike NumPy's generators, it draws for all rows at once, and gives the same numbers in all
    versions. Each call draws further numbers.
    """

    def __init__(self, rows_B: np.ndarray, stream: int):
        # Rows are below 2⁴⁰, so no two streams have a seed in common.
        seeds_B = rows_B.astype(np.uint64) + np.uint64(stream << 40)
        self._states_B = _mix(seeds_B)
        self._count = 0

    def _bits(self, count: int) -> np.ndarray:
        """Returns (B, count) uint64."""
        first = self._count + 1
        self._count += count
        steps = np.arange(first, first + count, dtype=np.uint64)
        return _mix(self._states_B[:, None] + steps * _STEP)

    def integers(self, below: int, count: int) -> np.ndarray:
        """Returns (B, count) int64."""
        # The remainder favors small numbers by less than below / 2⁶⁴.
        return (self._bits(count) % np.uint64(below)).astype(np.int64)

    def fractions(self, count: int) -> np.ndarray:
        """Returns (B, count) float64, at least 0 and below 1."""
        return (self._bits(count) >> np.uint64(11)) * 2.0**-53  # a float64 has 53 bits

    def permutations(self, length: int) -> np.ndarray:
        """Returns (B, length): in each row, the integers below `length` in random order."""
        # Equal 64-bit keys, which would favor one order, do not occur in practice.
        return np.argsort(self._bits(length), axis=1)


def _mix(x: np.ndarray) -> np.ndarray:
    # The constants are SplitMix64's. Products overflow on purpose: they are modulo 2⁶⁴.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _next_tokens(
    sequences_BxL: np.ndarray, is_answer_L: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and answers of sequences in which each answer is the next token."""
    targets = sequences_BxL[:, 1:]
    is_counted = np.asarray(is_answer_L)[1:]
    return sequences_BxL[:, :-1], np.where(is_counted, targets, NO_ANSWER)


def _last_tokens(sequences_BxL: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs and answers of sequences whose last `count` tokens are the answers."""
    length = sequences_BxL.shape[1]
    return _next_tokens(sequences_BxL, np.arange(length) >= length - count)


def _join(*parts: np.ndarray | int) -> np.ndarray:
    """Returns a sequence per row: the end-of-text token and the parts. Integers are tokens that all
    rows share.
    """
    rows = next(len(part) for part in parts if not isinstance(part, int))
    columns = [
        np.full((rows, 1), part) if isinstance(part, int) else part
        for part in (0, *parts)  # 0: end-of-text
    ]
    return np.concatenate(columns, axis=1)


@dataclasses.dataclass(frozen=True)
class Probe:
    # of config.data.probe_symbols; 0: the probe does not have this field
    default_symbols: ClassVar[int] = 0
    least_symbols: ClassVar[int] = 2
    least_length: ClassVar[int] = 1
    has_scratch: ClassVar[bool] = False
    unit: ClassVar[str]  # what the length counts
    # spelling of the ids from 1 on; a property, if it depends on the fields
    symbols: ClassVar[tuple[str, ...]]

    num_symbols: int
    scratch: int
    max_length: int  # of all examples

    def num_inputs(self, length: int) -> int:
        raise NotImplementedError

    def examples(self, numbers: RandomNumbers, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and answers, both (B, num_inputs)."""
        raise NotImplementedError

    def problem(self) -> str:
        """Returns why there are no examples of `max_length`, or ""."""
        return ""


class Recall(Probe):
    """Multi-query associative recall (after Arora et al., arXiv 2312.04927): key–value pairs, then
    as many of the keys, drawn at random. The answer is the key's value. If each key came once, the
    values that are left would tell much.
    """

    default_symbols = 64
    unit = "key–value pairs"

    @cached_property
    def symbols(self):
        return tuple(f"{kind}{i}" for kind in "kv" for i in range(self.num_symbols // 2))

    def num_inputs(self, length):
        return 4 * length

    def examples(self, numbers, length):
        count = self.num_symbols // 2  # of different keys, and of different values
        keys = 1 + numbers.permutations(count)[:, :length]
        values = 1 + count + numbers.integers(count, length)
        pairs = np.stack([keys, values], axis=2)  # (B, length, 2)
        asked = numbers.integers(length, length)  # numbers of pairs
        queries = np.take_along_axis(pairs, asked[:, :, None], axis=1)
        text = np.concatenate([pairs, queries], axis=1)  # (B, 2 · length, 2)
        # end-of-text and the pairs, then keys that ask, each followed by its value
        is_answer = [False] * (1 + 2 * length) + [False, True] * length
        return _next_tokens(_join(text.reshape(len(text), -1)), is_answer)

    def problem(self):
        if 2 * self.max_length <= self.num_symbols:
            return ""
        return f"{self.max_length} pairs need {2 * self.max_length} symbols, half of them keys"


class Copy(Probe):
    """Symbols, a separator, and the same symbols again."""

    default_symbols = 16
    unit = "symbols"

    @cached_property
    def symbols(self):
        return (*map(str, range(self.num_symbols)), "|")

    def num_inputs(self, length):
        return 2 * length + 1

    def examples(self, numbers, length):
        text = 1 + numbers.integers(self.num_symbols, length)
        return _last_tokens(_join(text, 1 + self.num_symbols, text), length)


class Inverse(Probe):
    """A permutation, scratch tokens, and at the last inputs the inverse permutation (after arXiv
    2509.24125).

    Without scratch tokens, the answer at an input often depends on later inputs, which a causal
    model cannot see.
    """

    has_scratch = True
    unit = "items"

    @cached_property
    def symbols(self):
        return (*(str(1 + i) for i in range(self.max_length)), "_")

    def num_inputs(self, length):
        return 1 + (1 + self.scratch) * length

    def examples(self, numbers, length):
        permutation = numbers.permutations(length)
        blank = 1 + self.max_length  # the symbol "_"
        scratch = np.full((len(permutation), self.scratch * length), blank)
        inputs = _join(1 + permutation, scratch)
        # The answers are no tokens of the text, so a model cannot copy earlier ones.
        answers = np.full(inputs.shape, NO_ANSWER)
        answers[:, -length:] = 1 + np.argsort(permutation, axis=1)  # the inverse permutation
        return inputs, answers


class Boolean(Probe):
    """Points and the values of a random conjunction at these points (after Bhattamishra et al.,
    arXiv 2310.03016).

    Each variable is in the conjunction, negated in it, or absent. Half of the points are drawn so
    that they satisfy it. The values at the first half of the points are not counted: they do not
    yet determine the conjunction.
    """

    default_symbols = 4
    least_symbols = 1
    unit = "points"
    symbols = "0", "1", "="

    def num_inputs(self, length):
        return (self.num_symbols + 2) * length

    def examples(self, numbers, length):
        variables = self.num_symbols
        # (B, 1, variables). 0: negated, 1: in the conjunction, 2: absent
        literals = numbers.integers(3, variables)[:, None]
        points = numbers.integers(2, length * variables).reshape(-1, length, variables)
        satisfies = numbers.integers(2, length)[:, :, None].astype(bool)
        points = np.where(satisfies & (literals < 2), literals, points)
        values = ((points == literals) | (literals == 2)).all(axis=2, keepdims=True)
        marks = np.full_like(values, 3, int)  # the symbol "="
        text = np.concatenate([1 + points, marks, 1 + values], axis=2)
        is_answer = [False]  # of end-of-text
        for i in range(length):
            is_in_second_half = 2 * i >= length - 1
            is_answer += [False] * (variables + 1) + [is_in_second_half]
        return _next_tokens(_join(text.reshape(len(text), -1)), is_answer)


class Life(Probe):
    """A board of Conway's Life on a torus, a separator, and the board one generation later (after
    arXiv 2409.12182).
    """

    least_length = 3
    unit = "rows and columns"
    symbols = ".", "#", "|"

    def num_inputs(self, length):
        return 2 * length**2 + 1

    def examples(self, numbers, length):
        cells = length**2
        density = numbers.fractions(1)  # so that sparse and dense boards are as frequent as others
        board = (numbers.fractions(cells) < density).astype(int)
        after = _next_generation(board.reshape(-1, length, length)).reshape(board.shape)
        return _last_tokens(_join(1 + board, 3, 1 + after), cells)  # 3: the symbol "|"


def _next_generation(boards_BxHxW: np.ndarray) -> np.ndarray:
    neighbors = sum(
        np.roll(boards_BxHxW, shift, axis=(1, 2))
        for shift in itertools.product((-1, 0, 1), repeat=2)
        if shift != (0, 0)
    )
    return ((neighbors == 3) | (boards_BxHxW == 1) & (neighbors == 2)).astype(int)


class Addition(Probe):
    """Two numbers and their sum. Digits are written from the least significant on, so carries go to
    the right.
    """

    default_symbols = 10
    unit = "digits"

    @cached_property
    def symbols(self):
        return (*map(str, range(self.num_symbols)), "+", "=")

    def num_inputs(self, length):
        return 3 * length + 3

    def examples(self, numbers, length):
        base = self.num_symbols
        one, other = numbers.integers(base, length), numbers.integers(base, length)
        total = np.zeros((len(one), length + 1), int)
        total[:, :length] = one + other
        for place in range(length):
            total[:, place + 1] += total[:, place] // base  # the carry
        total %= base
        plus, equals = 1 + base, 2 + base  # the symbols after the digits
        return _last_tokens(_join(1 + one, plus, 1 + other, equals, 1 + total), length + 1)


class _StateTracking(Probe):
    """Elements of a group, and at each of them the product of all up to it, the first one first."""

    unit = "elements"
    # (G, G): the element that applies the row's element, then the column's
    products: ClassVar[np.ndarray]

    def num_inputs(self, length):
        return 1 + length

    def examples(self, numbers, length):
        elements = numbers.integers(len(self.symbols), length)
        states = elements.copy()
        for place in range(1, length):
            before, element = states[:, place - 1], elements[:, place]
            states[:, place] = self.products[before, element]
        inputs = _join(1 + elements)
        answers = np.full(inputs.shape, NO_ANSWER)
        answers[:, 1:] = 1 + states  # none at end-of-text, the first input
        return inputs, answers


class Parity(_StateTracking):
    """Bits, and at each of them the parity of the bits up to it."""

    unit = "bits"
    symbols = "0", "1"
    products = np.array([[0, 1], [1, 0]])


class S5(_StateTracking):
    """Permutations of five items, and at each of them the product of all up to it."""

    unit = "permutations"
    symbols = tuple(map("".join, itertools.permutations("12345")))

    @cached_property
    def products(self):
        elements = list(itertools.permutations(range(5)))
        number_of = {element: i for i, element in enumerate(elements)}
        products = np.empty((len(elements), len(elements)), int)
        for i, first in enumerate(elements):
            for j, second in enumerate(elements):
                products[i, j] = number_of[tuple(second[item] for item in first)]
        return products


PROBES = {
    "recall": Recall,
    "copy": Copy,
    "inverse": Inverse,
    "boolean": Boolean,
    "life": Life,
    "addition": Addition,
    "parity": Parity,
    "s5": S5,
}
