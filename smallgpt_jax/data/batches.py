"""Token batches: a pure function of (seed, step), whatever reads them.

The rows of a corpus are shuffled by index, anew in each epoch, and a step takes the next batch_size
of them: the batch of a step can be had without those before it. Several corpora are taken in turn,
each as often as its weight says.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property

import grain
import numpy as np

from smallgpt_jax.data.packing import Packing, Rows
from smallgpt_jax.errors import UserError

READ_AHEAD = 8  # batches


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The rows of several packings under one numbering, one packing after another."""

    packings: Sequence[Packing]
    weights: Sequence[float]  # how many of the rows of batches come from each; they sum to 1

    @property
    def num_rows(self) -> int:
        return sum(packing.num_rows for packing in self.packings)

    @cached_property
    def padding(self) -> float:
        """The share of the inputs of batches that is padding."""
        return sum(weight * packing.padding for packing, weight in zip(self.packings, self.weights))

    @cached_property
    def first_rows(self) -> np.ndarray:
        """The number of each packing's first row."""
        return np.cumsum([0] + [packing.num_rows for packing in self.packings])[:-1]

    def packing_of(self, rows_B: np.ndarray) -> np.ndarray:
        """Which packing each row is of."""
        return np.searchsorted(self.first_rows, rows_B, side="right") - 1

    def read(self, rows_B: np.ndarray) -> Rows:
        if len(self.packings) == 1:
            return self.packings[0].read(rows_B)
        packing_of = self.packing_of(rows_B)
        parts = [packing.read(rows_B[packing_of == i] - self.first_rows[i])
                 for i, packing in enumerate(self.packings)]
        order = np.argsort(np.argsort(packing_of, kind="stable"))  # back to the order of rows_B
        return Rows(*(None if arrays[0] is None else np.concatenate(arrays)[order]
                      for arrays in zip(*parts)))

    def shuffled(self, seed: int) -> grain.MapDataset:
        """Row numbers, endlessly: each packing's in a new order in each of its epochs."""
        orders = [grain.MapDataset.range(first, first + packing.num_rows).seed(seed + i).shuffle().repeat()
                  for i, (first, packing) in enumerate(zip(self.first_rows, self.packings))]
        return grain.MapDataset.mix(orders, self.weights) if len(orders) > 1 else orders[0]


@dataclasses.dataclass(frozen=True)
class ReadRows(grain.transforms.Map):
    """Row numbers (B,) → the rows among them that this process needs."""

    mixture: Mixture
    rows: slice | np.ndarray

    def map(self, numbers_B: np.ndarray) -> Rows:
        return self.mixture.read(numbers_B[self.rows])


def row_numbers(mixture: Mixture, batch_size: int, seed: int) -> grain.MapDataset:
    """Item `step` is the numbers of the rows of that step's batch, (batch_size,), endlessly.

    Raises UserError if a packing has fewer rows than one batch takes from it.
    """
    for packing, weight in zip(mixture.packings, mixture.weights):
        if packing.num_rows < batch_size * weight:
            raise UserError(
                f"the training text has {packing.split.tokens:,} tokens, {packing.num_rows:,} rows of "
                f"{packing.context_length} + 1; one batch takes {batch_size * weight:g} rows: use more text, "
                "or a smaller config.train.batch_size or config.model.context_length")
    return mixture.shuffled(seed).batch(batch_size, drop_remainder=True)


def train_batches(mixture: Mixture, batch_size: int, seed: int, rows: slice | np.ndarray = slice(None),
                  ) -> grain.MapDataset:
    """Item `step` is the batch of that step, endlessly.

    `rows` are those of the global batch that this process needs; only they are read.
    Raises UserError if there are fewer rows than one batch takes.
    """
    return row_numbers(mixture, batch_size, seed).map(ReadRows(mixture, rows))


def read_ahead(batches: grain.MapDataset, first_step: int, workers: int) -> Iterator[Rows]:
    """The batches from `first_step` on, read ahead by `workers` threads; by none if that is 0."""
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=READ_AHEAD if workers else 0)
    return iter(batches[first_step:].to_iter_dataset(options))


def validation_batches(mixture: Mixture, batch_size: int, limit: int, rows: slice | np.ndarray = slice(None),
                       ) -> grain.MapDataset:
    """`some_rows` in batches, at most `limit` (0: all).

    Items as `counted_batches` makes them. Raises UserError if a split has not one row.
    """
    for packing in mixture.packings:
        if not packing.num_rows:
            raise UserError(
                f"the validation text has {packing.split.tokens:,} tokens, fewer than one row of "
                f"{packing.context_length} + 1: use more text or a larger config.data.validation_fraction")
    return counted_batches(mixture, some_rows(mixture, limit * batch_size), batch_size, rows)


def some_rows(mixture: Mixture, limit: int) -> np.ndarray:
    """The numbers of the first `limit` rows (0: all) in one fixed shuffled order, each once; of several packings
    as many as their weights say."""
    most = int(min(packing.num_rows / weight for packing, weight in zip(mixture.packings, mixture.weights)))
    total = min(limit, most) if limit else most
    counts = np.diff(np.round(total * np.cumsum([0, *mixture.weights])).astype(int))  # their sum is `total`
    order = np.concatenate([
        first + np.random.default_rng(0).permutation(packing.num_rows)[:count]
        for first, packing, count in zip(mixture.first_rows, mixture.packings, counts)])
    return np.random.default_rng(0).permutation(order) if len(mixture.packings) > 1 else order


def counted_batches(mixture: Mixture, order: np.ndarray, batch_size: int, rows: slice | np.ndarray = slice(None),
                    ) -> grain.MapDataset:
    """The rows with the numbers in `order`, each once, as Rows in which `counts_BxT` is there: the last batch is
    filled up with rows that do not count."""
    def read(first: int) -> Rows:
        chosen = order[first:first + batch_size]
        counts_B = np.arange(batch_size) < len(chosen)
        batch = mixture.read(np.resize(chosen, batch_size)[rows])
        every = np.ones(batch.tokens_BxT1[:, 1:].shape, bool)
        counts_BxT = every if batch.counts_BxT is None else batch.counts_BxT
        return batch._replace(counts_BxT=counts_BxT & counts_B[rows][:, None])

    return grain.MapDataset.range(0, len(order), batch_size).map(read)
