"""How documents become rows of context_length + 1 tokens: `concat` and `best_fit`.

A row's inputs are its first context_length tokens, its targets the last as many. Where documents are
to be kept apart, segments number those of its inputs, from 1 on; 0 is padding. Attention, positions
and ConvGPT's convolutions follow from them.
"""

import dataclasses
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from smallgpt_jax.data.store import Split


class Rows(NamedTuple):
    tokens_BxT1: np.ndarray  # int32
    segments_BxT: np.ndarray | None = None  # int32; None: documents of a row see those before them
    counts_BxT: np.ndarray | None = None  # bool, which targets count in the loss; None: all
    targets_BxT: np.ndarray | None = None  # int32; None: the target of each input is the token after it


class Packing(Protocol):
    """The rows of one epoch of a split, each at a place that never changes."""

    num_rows: int
    padding: float  # the share of inputs that are padding
    cut_documents: float  # the share of documents that do not lie in one row whole

    def read(self, rows_B: np.ndarray) -> Rows:
        """The rows with these numbers."""


@dataclasses.dataclass(frozen=True)
class Concat:
    """Documents joined, each behind its end-of-text, and cut into windows that overlap by one token:
    every token but the first is a target once. What does not fill a last window is left out."""

    split: Split
    context_length: int
    separate: bool  # keep the documents of a row apart

    padding = 0.0

    @property
    def num_rows(self) -> int:
        return (self.split.tokens - 1) // self.context_length

    @property
    def cut_documents(self) -> float:
        starts = np.asarray(self.split.starts)
        ends = np.append(starts[1:], self.split.tokens)
        return float(np.mean(starts // self.context_length != (ends - 1) // self.context_length))

    def read(self, rows_B: np.ndarray) -> Rows:
        stream, length = self.split.stream, self.context_length + 1
        tokens_BxT1 = np.empty((len(rows_B), length), np.int32)
        for row, start in zip(tokens_BxT1, rows_B.astype(np.int64) * self.context_length):
            row[:] = stream[start:start + length]
        if not self.separate:
            return Rows(tokens_BxT1)
        begins_BxT = tokens_BxT1[:, :-1] == self.split.end_of_text
        begins_BxT[:, 0] = True
        return Rows(tokens_BxT1, np.cumsum(begins_BxT, axis=1, dtype=np.int32))


@dataclasses.dataclass(frozen=True)
class BestFit:
    """Whole documents, put together so that rows are filled: only a document longer than a row is cut
    (Ding et al., arXiv 2404.10830, best-fit decreasing).

    Every token of the split is an input once per epoch and has its target: the next token of its document,
    after the last one an end-of-text, whatever follows in the row. Cost: some 30 bytes of memory a document,
    130 while they are put together.
    """

    split: Split
    context_length: int
    separate: bool

    @property
    def num_rows(self) -> int:
        return len(self._plan.first_piece) - 1

    @property
    def padding(self) -> float:
        return 1 - self.split.tokens / (self.num_rows * self.context_length)

    @property
    def cut_documents(self) -> float:
        lengths = np.diff(np.asarray(self.split.starts), append=self.split.tokens)
        return float(np.mean(lengths > self.context_length))

    @cached_property
    def _plan(self) -> "Plan":
        return plan(np.asarray(self.split.starts), self.split.tokens, self.context_length)

    def read(self, rows_B: np.ndarray) -> Rows:
        stream, mark, room = self.split.stream, self.split.end_of_text, self.context_length
        tokens_BxT1 = np.full((len(rows_B), room + 1), mark, np.int32)
        targets_BxT = np.full((len(rows_B), room), mark, np.int32)
        segments_BxT = np.zeros((len(rows_B), room), np.int32)
        for tokens, targets, segments, row in zip(tokens_BxT1, targets_BxT, segments_BxT, rows_B):
            first, last = self._plan.first_piece[row:row + 2]
            place = 0
            pieces = zip(self._plan.starts[first:last], self._plan.lengths[first:last])
            for number, (start, length) in enumerate(pieces, start=1):
                # One token more, which is the target of the last one: the next one of a cut document, or the
                # end-of-text that begins the next document of the split (the last document has none there).
                text = stream[start:start + length + 1]
                tokens[place:place + len(text)] = text
                targets[place:place + len(text) - 1] = text[1:]
                segments[place:place + length] = number
                place += length
        return Rows(tokens_BxT1, segments_BxT if self.separate else None, segments_BxT > 0, targets_BxT)


class Plan(NamedTuple):
    """Pieces of a split's documents, row by row."""

    starts: np.ndarray  # (pieces,) int64, where in the stream each begins
    lengths: np.ndarray  # (pieces,) int64, at most a row's
    first_piece: np.ndarray  # (rows + 1,), the number of each row's first piece


def plan(starts_D: np.ndarray, tokens: int, room: int) -> Plan:
    """Best-fit decreasing: the longest piece first, each into the row where it leaves the least room.

    Pieces of one length are placed together, so the cost depends on their number only through
    NumPy. Rows that are equally full are taken in order.
    """
    lengths_D = np.diff(starts_D, append=tokens)
    pieces_D = -(-lengths_D // room)
    document = np.repeat(np.arange(len(starts_D)), pieces_D)
    part = np.arange(len(document)) - np.repeat(np.cumsum(pieces_D) - pieces_D, pieces_D)
    starts = starts_D[document] + part * room
    lengths = np.minimum(lengths_D[document] - part * room, room)

    by_length = np.argsort(-lengths, kind="stable")
    negative = -lengths[by_length]  # ascending
    row_of = np.empty(len(lengths), np.int64)  # in the order of by_length
    with_room = {}  # room left → rows
    num_rows = first = 0
    while first < len(negative):
        length = -int(negative[first])
        last = int(np.searchsorted(negative, -length, side="right"))
        while first < last:
            fitting = min((left for left in with_room if left >= length), default=None)
            if fitting is None:
                each = room // length
                rows = np.arange(num_rows, num_rows - (-(last - first) // each))
                num_rows += len(rows)
                left = room
            else:
                left, rows = fitting, with_room.pop(fitting)
                each = left // length
                used = -(-(last - first) // each)
                if used < len(rows):
                    with_room[left] = rows[used:]
                    rows = rows[:used]
            count = min(last - first, len(rows) * each)
            row_of[first:first + count] = np.repeat(rows, each)[:count]
            first += count
            in_last = count - (len(rows) - 1) * each
            for taken, some in ((each, rows[:-1]), (in_last, rows[-1:])):
                if len(some) and left > taken * length:
                    rest = left - taken * length
                    with_room[rest] = np.concatenate([with_room.get(rest, some[:0]), some])
    by_row = np.argsort(row_of, kind="stable")
    order = by_length[by_row]
    first_piece = np.searchsorted(row_of[by_row], np.arange(num_rows + 1))
    return Plan(starts[order], lengths[order], first_piece)


PACKINGS = {"concat": Concat, "best_fit": BestFit}
