"""Packs documents into rows of context_length + 1 tokens.

A row's inputs are its first context_length tokens, and its targets are its last, unless the batch
has `targets_BxT`. With `separate_documents`, each token has a segment id: its document's number in
the row, from 1, or 0 for padding. Attention and ConvGPT's convolutions then do not cross documents,
and positions restart at each document.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from smallgpt_jax.data.store import Split


class Batch(NamedTuple):
    tokens_BxT1: np.ndarray  # int32
    # int32; None: tokens also attend to earlier documents in the row
    segment_ids_BxT: np.ndarray | None = None
    # bool: whether the loss includes the target; None: all targets
    loss_mask_BxT: np.ndarray | None = None
    targets_BxT: np.ndarray | None = None  # int32; None: tokens_BxT1[:, 1:]
    row_numbers_B: np.ndarray | None = None  # uint32: in the validation split; None in training
    # int32, equal in all rows: the ids below are those of the tokenizer. Only for masked models
    vocab_size_B: np.ndarray | None = None


class _Packing(Protocol):
    @property
    def num_rows(self) -> int: ...
    @property
    def padding(self) -> float: ...  # fraction of the input tokens
    @property
    def summary(self) -> str: ...  # message at the start of a run
    def read_rows(self, rows_B: np.ndarray) -> Batch: ...  # the rows with the numbers `rows_B`


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The packed rows of one or several token stores, numbered consecutively from 0."""

    packings: Sequence[_Packing]  # the rows of each store
    # fraction of the training rows that come from each store; their sum is 1
    weights: Sequence[float]

    @property
    def num_rows(self) -> int:
        return sum(packing.num_rows for packing in self.packings)

    @cached_property
    def padding(self) -> float:
        return sum(weight * packing.padding for packing, weight in zip(self.packings, self.weights))

    def epochs(self, rows: float) -> float:
        """Returns how often a store is read by `rows` training rows; of several, the one that is
        read most often.
        """
        shares = zip(self.packings, self.weights)
        return max(weight * rows / packing.num_rows for packing, weight in shares)

    @cached_property
    def first_rows(self) -> np.ndarray:
        ends = np.cumsum([packing.num_rows for packing in self.packings])
        return np.concatenate([[0], ends[:-1]])

    def packing_of(self, rows_B: np.ndarray) -> np.ndarray:
        """Returns the index of the packing that has each row, (B,)."""
        return np.searchsorted(self.first_rows, rows_B, side="right") - 1

    def read_rows(self, rows_B: np.ndarray) -> Batch:
        if len(self.packings) == 1:
            return self.packings[0].read_rows(rows_B)
        packing_of = self.packing_of(rows_B)
        batches = []
        for i, packing in enumerate(self.packings):
            rows_of_packing = rows_B[packing_of == i] - self.first_rows[i]
            batches.append(packing.read_rows(rows_of_packing))
        # The batches together have the rows sorted by packing; `order` is the inverse of this sort.
        order = np.argsort(np.argsort(packing_of, kind="stable"))
        joined = [
            None if arrays[0] is None else np.concatenate(arrays)[order] for arrays in zip(*batches)
        ]
        return Batch(*joined)


@dataclasses.dataclass(frozen=True)
class _SplitRows:
    split: Split
    context_length: int
    separate: bool  # adds segment ids

    @property
    def summary(self) -> str:
        split = self.split
        text = f"{split.folder.name}, {self.name}: {self.padding:.2%} padding"
        if not split.has_answers:
            return f"{text}, {self.cut_documents:.0%} of the documents split"
        text += f", {split.documents - self.left_out:,} examples"
        text += f", {np.mean(split.counted):.0%} of the tokens are answers"
        if not self.left_out:
            return text
        return f"{text}; {self.left_out:,} too long examples are left out"

    @cached_property
    def left_out(self) -> int:
        """Returns the number of examples that are longer than a row."""
        if not self.split.has_answers:
            return 0
        return int(np.sum(self.split.lengths > self.context_length))


class Concat(_SplitRows):
    """Concatenates documents and cuts the result into rows. The last target of a row is the first
    input of the next.

    The tokens after the last full row are dropped. All others, except the first, are targets once
    per epoch.
    """

    name = "concat"
    padding = 0.0

    @property
    def num_rows(self) -> int:
        # − 1: the last input of the last row needs a target, too.
        return (self.split.tokens - 1) // self.context_length

    @property
    def cut_documents(self) -> float:
        """Returns the fraction of the documents that are split over several rows."""
        starts = np.asarray(self.split.starts)
        lasts = np.append(starts[1:], self.split.tokens) - 1  # the last token of each document
        is_cut = starts // self.context_length != lasts // self.context_length
        return float(np.mean(is_cut))

    def read_rows(self, rows_B: np.ndarray) -> Batch:
        length = self.context_length + 1
        tokens_BxT1 = np.empty((len(rows_B), length), np.int32)
        starts_B = rows_B.astype(np.int64) * self.context_length  # int32 would overflow
        for row, start in zip(tokens_BxT1, starts_B):
            row[:] = self.split.stream[start : start + length]
        self.split.check_ids(tokens_BxT1)
        if not self.separate:
            return Batch(tokens_BxT1)
        begins_BxT = tokens_BxT1[:, :-1] == self.split.begin_of_text
        begins_BxT[:, 0] = True  # the rest of a document that began in an earlier row
        return Batch(tokens_BxT1, np.cumsum(begins_BxT, axis=1, dtype=np.int32))


class BestFit(_SplitRows):
    """Packs whole documents into rows by best-fit decreasing (Ding et al., arXiv 2404.10830).

    Only documents longer than context_length tokens are cut. Every token of the split is an input
    once per epoch. The target of a token is the next token of the same document; the target of a
    document's last token is begin-of-text. Of a split of examples, those longer than context_length
    are left out, and the loss counts only answers. Packing needs about 130 bytes of memory per
    document. About 30 of these bytes stay in use after packing.
    """

    name = "best_fit"

    @property
    def num_rows(self) -> int:
        return len(self._pieces.first_piece) - 1

    @property
    def padding(self) -> float:
        tokens = int(self._pieces.lengths.sum())
        return 1 - tokens / max(self.num_rows * self.context_length, 1)

    @property
    def cut_documents(self) -> float:
        if self.split.has_answers:
            return 0.0
        return float(np.mean(self.split.lengths > self.context_length))

    @cached_property
    def _pieces(self) -> "_RowPieces":
        starts_D, lengths_D = np.asarray(self.split.starts), self.split.lengths
        if self.split.has_answers:
            fits_D = lengths_D <= self.context_length
            starts_D, lengths_D = starts_D[fits_D], lengths_D[fits_D]
        return pack_best_fit(starts_D, lengths_D, self.context_length)

    def read_rows(self, rows_B: np.ndarray) -> Batch:
        pieces, split = self._pieces, self.split
        shape = (len(rows_B), self.context_length)
        tokens_BxT1 = np.full((len(rows_B), self.context_length + 1), split.begin_of_text, np.int32)
        targets_BxT = np.full(shape, split.begin_of_text, np.int32)
        segment_ids_BxT = np.zeros(shape, np.int32)
        loss_mask_BxT = np.zeros(shape, bool)
        for b, row in enumerate(rows_B):
            first, last = pieces.first_piece[row : row + 2]
            offset = 0  # in the row, of the next piece
            row_pieces = zip(pieces.starts[first:last], pieces.lengths[first:last])
            for number, (start, length) in enumerate(row_pieces, start=1):
                # `text` is the piece and the token after it, the target of the piece's last token.
                # If the piece ends a document, this token is the begin-of-text of the next
                # document. At the end of the split, no token follows, and the target keeps its
                # initial value, begin-of-text.
                text = split.stream[start : start + length + 1]
                tokens_BxT1[b, offset : offset + len(text)] = text
                targets_BxT[b, offset : offset + len(text) - 1] = text[1:]
                in_row = slice(offset, offset + length)
                segment_ids_BxT[b, in_row] = number
                loss_mask_BxT[b, in_row] = True
                if split.counted is not None:
                    loss_mask_BxT[b, in_row] = split.counted[start : start + length]
                offset += length
        split.check_ids(tokens_BxT1)
        split.check_ids(targets_BxT)
        segments = segment_ids_BxT if self.separate else None
        return Batch(tokens_BxT1, segments, loss_mask_BxT, targets_BxT)


class _RowPieces(NamedTuple):
    """Pieces sorted by row: whole documents, or at most context_length tokens of longer ones."""

    starts: np.ndarray  # (pieces,) int64, the offset of each piece in the split's stream, in tokens
    lengths: np.ndarray  # (pieces,) int64, in tokens
    # (rows + 1,), index of each row's first piece; last entry: number of pieces
    first_piece: np.ndarray


def pack_best_fit(starts_D: np.ndarray, lengths_D: np.ndarray, row_length: int) -> _RowPieces:
    """Returns the assignment of documents to rows of `row_length` tokens by best-fit decreasing."""
    # A document of 10 tokens and rows of 4: pieces at 0, 4 and 8, of 4, 4 and 2 tokens.
    pieces_D = -(-lengths_D // row_length)
    document = np.repeat(np.arange(len(starts_D)), pieces_D)
    first_piece_D = np.cumsum(pieces_D) - pieces_D
    offset = row_length * (np.arange(len(document)) - first_piece_D[document])
    starts = starts_D[document] + offset
    lengths = np.minimum(lengths_D[document] - offset, row_length)

    longest_first = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[longest_first], lengths[longest_first]
    row_of = _place_pieces(lengths, row_length)
    by_row = np.argsort(row_of, kind="stable")
    num_rows = int(np.max(row_of, initial=-1)) + 1
    first_piece = np.searchsorted(row_of[by_row], np.arange(num_rows + 1))
    return _RowPieces(starts[by_row], lengths[by_row], first_piece)


def _place_pieces(lengths: np.ndarray, row_length: int) -> np.ndarray:
    """Returns the row of each piece; `lengths` descend.

    Each piece goes into the fullest row that has room for it. Of equally full rows, the one that
    became so full first is chosen. Pieces of the same length are placed together: the Python loop
    runs over lengths, not over pieces.
    """
    negative_lengths = -lengths  # ascending, for searchsorted
    row_of = np.empty(len(lengths), np.int64)
    rows_by_room = {}  # number of tokens that still fit → rows with this much room
    num_rows = first = 0
    while first < len(lengths):
        length = int(lengths[first])
        last = int(np.searchsorted(negative_lengths, -length, side="right"))
        while first < last:  # the pieces from first to last - 1 have this length
            # The fullest rows with room for a piece; empty rows, if there are none.
            room = min((room for room in rows_by_room if room >= length), default=row_length)
            pieces_per_row = room // length
            needed = -(-(last - first) // pieces_per_row)
            rows = rows_by_room.pop(room, None)
            if rows is None:
                rows = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            elif needed < len(rows):  # the others keep their room
                rows, rows_by_room[room] = rows[:needed], rows[needed:]
            count = min(last - first, len(rows) * pieces_per_row)
            row_of[first : first + count] = np.repeat(rows, pieces_per_row)[:count]
            first += count
            pieces_in_last = count - (len(rows) - 1) * pieces_per_row
            for filled, pieces in ((rows[:-1], pieces_per_row), (rows[-1:], pieces_in_last)):
                left = room - pieces * length
                if left and len(filled):  # full rows are done
                    others = rows_by_room.get(left, filled[:0])
                    rows_by_room[left] = np.concatenate([others, filled])
    return row_of


PACKINGS = {packing.name: packing for packing in (Concat, BestFit)}
