"""The data of a run: a corpus, packed and shuffled, as batches on the devices of a mesh."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from smallgpt_jax import data as corpora
from smallgpt_jax import distributed, sharding
from smallgpt_jax.data import batches
from smallgpt_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class DataPipeline:
    """What a run reads. Batches are functions of the step alone."""

    corpus: corpora.Corpus
    train: batches.Mixture
    tokens_per_step: float  # padding left out
    train_batches: Any  # item `step` − 1: the rows of that batch that this process needs
    validation_batches: Any
    row_numbers: Any  # item `step` − 1: which rows of `train` are that step's batch
    to_devices: Callable  # such rows → the global batch

    def row_numbers_of(self, step: int) -> list[int]:
        """Returns which rows of the training split are the batch of a step."""
        return list(self.row_numbers[step - 1])


def open_pipeline(data, mesh: jax.sharding.Mesh, *, context_length: int, vocab_size: int, batch_size: int,
                  eval_steps: int, seed: int) -> DataPipeline:
    """Returns the data of a config's `data` group, for this process's devices of the mesh.

    Process 0 prepares the store where there is none; the others then find it, or prepare the same one again if they do
    not see its files. Raises UserError if there is no text, too little of it, or another one in another process.
    """
    if data.workers < 0:
        raise UserError(f"config.data.workers={data.workers}: must not be negative")
    distributed.first(lambda: corpora.find_or_make(data))
    corpus = corpora.find_or_make(data)
    if corpus.tokenizer.vocab_size > vocab_size:
        raise UserError(f"config.model.vocab_size={vocab_size}: the tokenizer of the text has "
                        f"{corpus.tokenizer.vocab_size:,} entries")
    distributed.check_same("a text", json.dumps(corpus.description))
    rows = sharding.local_rows(mesh, batch_size)
    train, validation = (pack(corpus, split, data, context_length) for split in ("train", "validation"))

    def to_devices(batch):
        return jax.tree.map(lambda local: sharding.global_batch(mesh, rows, batch_size, local), batch)

    return DataPipeline(
        corpus, train, batch_size * context_length * (1 - train.padding),
        batches.train_batches(train, batch_size, seed, rows),
        batches.validation_batches(validation, batch_size, eval_steps, rows),
        batches.row_numbers(train, batch_size, seed), to_devices)


def pack(corpus: corpora.Corpus, split: str, data, context_length: int) -> batches.Mixture:
    """Returns the rows of a split as a config's `data` group packs them."""
    return batches.Mixture(
        corpus.packed(split, data.packing, data.separate_documents, context_length), corpus.weights)


def num_validation_targets(corpus: corpora.Corpus, data, *, context_length: int, batch_size: int,
                           eval_steps: int) -> int:
    """Returns how many targets one evaluation counts, on all processes together."""
    validation = pack(corpus, "validation", data, context_length)
    return sum(int(np.sum(batch.counts_BxT))
               for batch in batches.validation_batches(validation, batch_size, eval_steps))
