"""Batches of tokens as a pure function of (seed, step).

Each epoch has a new random order of the row numbers; step n reads the n-th group of batch_size
numbers. Any batch can therefore be read without reading the earlier batches. The rows of several
token stores are interleaved in proportion to the weights of the stores.
"""

from collections.abc import Iterator

import grain
import numpy as np

from smallgpt_jax.data.packing import Batch, BestFit, Concat, Mixture
from smallgpt_jax.errors import UserError

_READ_AHEAD = 8  # batches


def _shuffled(mixture: Mixture, seed: int) -> grain.MapDataset:
    """Returns endless row numbers: every pass over the rows of a packing has a new order."""
    orders = []
    for i, (first, packing) in enumerate(zip(mixture.first_rows, mixture.packings)):
        numbers = grain.MapDataset.range(first, first + packing.num_rows)
        # With one seed, stores with equal numbers of rows would have the same order.
        orders.append(numbers.seed(seed + i).shuffle().repeat())
    if len(orders) == 1:
        return orders[0]
    return grain.MapDataset.mix(orders, mixture.weights)


def row_numbers(mixture: Mixture, batch_size: int, seed: int) -> grain.MapDataset:
    """Returns an endless dataset: item i has the row numbers of the batch of step i + 1, (B,)."""
    for packing, weight in zip(mixture.packings, mixture.weights):
        wanted = batch_size * weight
        if packing.num_rows < wanted:
            raise UserError(
                f"config.train.batch_size: one batch takes {wanted:g} rows of "
                f"{packing.context_length} + 1 tokens, but the training split has "
                f"{packing.num_rows:,} rows ({packing.split.tokens:,} tokens); use more text, or "
                f"a smaller config.train.batch_size or config.model.context_length{_left_out(packing)}"
            )
    return _shuffled(mixture, seed).batch(batch_size, drop_remainder=True)


def train_batches(
    mixture: Mixture, batch_size: int, seed: int, rows: slice | np.ndarray = slice(None)
) -> grain.MapDataset:
    """Returns an endless dataset of training batches. Item i is this process's `rows` of the batch
    of step i + 1.

    Raises UserError if one batch needs more rows from a store than the store has.
    """
    return row_numbers(mixture, batch_size, seed).map(
        lambda numbers_B: mixture.read_rows(numbers_B[rows])
    )


def read_ahead(batches: grain.MapDataset, first: int, workers: int) -> Iterator[Batch]:
    # Without threads, nothing can be read ahead. Grain uses no more threads than its buffer's size.
    buffer = max(_READ_AHEAD, workers) if workers else 0
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=buffer)
    return iter(batches[first:].to_iter_dataset(options))


def validation_batches(
    mixture: Mixture, batch_size: int, limit: int, rows: slice | np.ndarray = slice(None)
) -> grain.IterDataset:
    """Returns at most `limit` batches of a validation split, or all if `limit` is 0."""
    for packing in mixture.packings:
        if not packing.num_rows:
            raise UserError(
                "config.data.validation_fraction: the validation split has "
                f"{packing.split.tokens:,} tokens, but one row needs {packing.context_length} + "
                f"1; use more text, or a larger fraction{_left_out(packing)}"
            )
    return masked_batches(mixture, sample_rows(mixture, limit * batch_size), batch_size, rows)


def _left_out(packing: Concat | BestFit) -> str:
    if not packing.left_out:
        return ""
    examples = packing.split.documents
    return f"; the context is too short for {packing.left_out:,} of {examples:,} examples"


def sample_rows(mixture: Mixture, limit: int) -> np.ndarray:
    """Returns at most `limit` distinct row numbers, in a fixed random order; with 0, as many as the
    weights allow.

    Each store contributes rows in proportion to its weight.
    """
    # The store with the fewest rows per weight is used up first.
    rows_per_weight = [
        packing.num_rows / weight for packing, weight in zip(mixture.packings, mixture.weights)
    ]
    most = int(min(rows_per_weight))
    total = min(limit, most) if limit else most
    # Rounded sums, not rounded counts: so the counts add up to `total`.
    ends = np.round(total * np.cumsum([0, *mixture.weights]))
    counts = np.diff(ends.astype(int))
    samples = []
    for first, packing, count in zip(mixture.first_rows, mixture.packings, counts):
        # Not the seed of the run: all runs are evaluated on the same rows.
        order = np.random.default_rng(0).permutation(packing.num_rows)
        samples.append(first + order[:count])
    if len(samples) == 1:
        return samples[0]
    return np.random.default_rng(0).permutation(np.concatenate(samples))


def masked_batches(
    mixture: Mixture,
    row_numbers_R: np.ndarray,
    batch_size: int,
    rows: slice | np.ndarray = slice(None),
) -> grain.IterDataset:
    """Returns this process's `rows` of batches with loss masks and row numbers. The last batch is
    filled with rows that its loss mask excludes.
    """

    def read(first: int) -> Batch:
        numbers = row_numbers_R[first : first + batch_size]
        is_included_B = np.arange(batch_size) < len(numbers)
        numbers_B = np.resize(numbers, batch_size)[rows]  # repeats the numbers of a short batch
        batch = mixture.read_rows(numbers_B)
        loss_mask_BxT = batch.loss_mask_BxT
        if loss_mask_BxT is None:
            loss_mask_BxT = np.ones(batch.tokens_BxT1[:, 1:].shape, bool)
        return batch._replace(
            loss_mask_BxT=loss_mask_BxT & is_included_B[rows][:, None],
            row_numbers_B=numbers_B.astype(np.uint32),
        )

    # Grain's own buffer of 500 batches would take gigabytes.
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=_READ_AHEAD)
    return (
        grain.MapDataset.range(0, len(row_numbers_R), batch_size).map(read).to_iter_dataset(options)
    )
