"""Token batches: a pure function of (seed, step), whatever reads them.

The training stream is cut into windows of context_length + 1 tokens that overlap by one, so that
every token is a target once an epoch. The windows are shuffled by index, anew in each epoch, and a
step takes the next batch_size of them: the batch of a step can be had without those before it.
"""

import dataclasses
from collections.abc import Iterator

import grain
import numpy as np

from smallgpt_jax.data.store import Split
from smallgpt_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class ReadWindows(grain.transforms.Map):
    """Window indices (B,) → the tokens of those at `rows`, (rows, context_length + 1) int32."""

    split: Split
    context_length: int
    rows: slice | np.ndarray

    def map(self, windows_B: np.ndarray) -> np.ndarray:
        starts = windows_B[self.rows].astype(np.int64) * self.context_length
        return self.split.read(starts, self.context_length + 1)


def train_batches(
    split: Split, context_length: int, batch_size: int, seed: int,
    rows: slice | np.ndarray = slice(None),
) -> grain.MapDataset:
    """Item `step` is the batch of that step, endlessly: (rows, context_length + 1) int32.

    `rows` are those of the global batch that this process needs; only they are read.
    Raises UserError if the split has fewer windows than one batch.
    """
    windows = num_windows(split, context_length)
    if windows < batch_size:
        raise UserError(
            f"the training text has {split.tokens:,} tokens, one batch takes {batch_size} × "
            f"{context_length} + 1: use more text, or a smaller config.train.batch_size or "
            "config.model.context_length")
    return (grain.MapDataset.range(windows).seed(seed).shuffle().repeat()
            .batch(batch_size, drop_remainder=True)
            .map(ReadWindows(split, context_length, rows)))


def prefetched(batches: grain.MapDataset, first_step: int) -> Iterator[np.ndarray]:
    """The batches from `first_step` on, read ahead by threads."""
    ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(batches[first_step:].to_iter_dataset(ahead))


def validation_batches(
    split: Split, context_length: int, batch_size: int, limit: int,
    rows: slice | np.ndarray = slice(None),
) -> grain.MapDataset:
    """The split's first `limit` batches (0: all) in one fixed shuffled order, each window once.

    An item is tokens (rows, context_length + 1) int32 and which of the rows count, (rows,) bool:
    the last batch is filled up with rows that do not.
    Raises UserError if the split has not one window.
    """
    windows = num_windows(split, context_length)
    if not windows:
        raise UserError(
            f"the validation text has {split.tokens:,} tokens, fewer than one window of "
            f"{context_length} + 1: use more text or a larger config.data.validation_fraction")
    order = np.random.default_rng(0).permutation(windows)
    if limit:
        order = order[:limit * batch_size]
    read = ReadWindows(split, context_length, rows)

    def batch(first: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = order[first:first + batch_size]
        counts_B = np.arange(batch_size) < len(chosen)
        return read.map(np.resize(chosen, batch_size)), counts_B[rows]

    return grain.MapDataset.range(0, len(order), batch_size).map(batch)


def num_windows(split: Split, context_length: int) -> int:
    return (split.tokens - 1) // context_length
