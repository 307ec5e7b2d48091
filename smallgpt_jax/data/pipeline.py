"""Makes the batches of a run: packs a corpus into rows, shuffles the rows, and places batches on
the mesh's devices.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from smallgpt_jax.data import batches
from smallgpt_jax.data.corpus import Corpus, load_or_prepare, require_room
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import distributed, sharding
from smallgpt_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class DataPipeline:
    """The data of a run. A training batch depends only on the seed and the step."""

    corpus: Corpus
    train: batches.Mixture
    tokens_per_step: float  # without padding
    train_batches: Any  # item i: this process's rows of the batch for step i + 1
    validation_batches: Any
    test_batches: dict[int, Any]  # {further length of a probe: validation batches}
    row_numbers: (
        Any  # item i: the numbers of the rows in the batch for step i + 1; they index `train`
    )
    to_devices: Callable  # this process's rows → the global batch

    def row_numbers_at(self, step: int) -> list[int]:
        return list(self.row_numbers[step - 1])

    def with_vocab_size(self) -> Self:
        """Returns a pipeline for masked models, which draw ids of the tokenizer."""

        def add(batch: Batch) -> Batch:
            rows = len(batch.tokens_BxT1)
            return batch._replace(
                vocab_size_B=np.full(rows, self.corpus.tokenizer.vocab_size, np.int32)
            )

        return dataclasses.replace(
            self,
            train_batches=self.train_batches.map(add),
            validation_batches=self.validation_batches.map(add),
        )


def open_pipeline(
    data,
    mesh: jax.sharding.Mesh,
    *,
    context_length: int,
    vocab_size: int,
    batch_size: int,
    eval_steps: int,
    seed: int,
    corpus: Corpus | None = None,
) -> DataPipeline:
    """`corpus` is that of `data`; None opens it. Process 0 prepares a missing token store first.
    The others then open it, or prepare their own copy if they do not share its file system. Raises
    UserError if the text is missing, too short, or not the same in all processes.
    """
    corpus = (
        corpus or distributed.run_on_primary(lambda: load_or_prepare(data)) or load_or_prepare(data)
    )
    if corpus.tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"config.model.vocab_size={vocab_size}: must be at least "
            f"{corpus.tokenizer.vocab_size}, the vocabulary size of the tokenizer"
        )
    require_room(data, corpus, context_length)
    distributed.require_equal("the training text", json.dumps(corpus.description))
    train, validation = (
        corpus.pack(split, data.packing, data.separate_documents, context_length)
        for split in ("train", "validation")
    )
    tests = corpus.test_rows(context_length)
    rows = sharding.local_rows(mesh, batch_size)

    def to_devices(batch: Batch) -> Batch:
        return jax.tree.map(
            lambda local: sharding.global_batch(mesh, rows, batch_size, local), batch
        )

    return DataPipeline(
        corpus,
        train,
        batch_size * context_length * (1 - train.padding),
        batches.train_batches(train, batch_size, seed, rows),
        batches.validation_batches(validation, batch_size, eval_steps, rows),
        {
            length: batches.validation_batches(test, batch_size, eval_steps, rows)
            for length, test in tests.items()
        },
        batches.row_numbers(train, batch_size, seed),
        to_devices,
    )


def num_validation_targets(
    corpus: Corpus, data, *, context_length: int, batch_size: int, eval_steps: int
) -> int:
    """Returns the number of target tokens in one evaluation, summed over all processes."""
    validation = corpus.pack("validation", data.packing, data.separate_documents, context_length)
    return sum(
        int(np.sum(batch.loss_mask_BxT))
        for batch in batches.validation_batches(validation, batch_size, eval_steps)
    )
