"""Makes the batches of a run: packs a corpus into rows, shuffles the rows, and places batches on
the mesh's devices. `data`, `model` and `train` are the groups of a run's config.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np

from smallgpt_jax.data import batches
from smallgpt_jax.data.corpus import Corpus, load_or_prepare, require_room, require_rows
from smallgpt_jax.data.packing import Batch, Mixture
from smallgpt_jax.data.probe_corpus import ProbeCorpus
from smallgpt_jax.devices import distributed, sharding


@dataclasses.dataclass(frozen=True)
class DataPipeline:
    """The data of a run. A training batch depends only on the seed and the step."""

    corpus: Corpus | ProbeCorpus
    train: Mixture
    tokens_per_step: float  # without padding
    train_batches: Any  # item i: this process's rows of the batch for step i + 1
    validation_batches: Any
    test_batches: dict[int, Any]  # {further length of a probe: validation batches}
    # item i: the numbers of the rows in the batch for step i + 1; they index `train`
    row_numbers: Any
    to_devices: Callable  # this process's rows → the global batch

    def row_numbers_at(self, step: int) -> list[int]:
        return list(self.row_numbers[step - 1])

    def with_vocab_size(self) -> Self:
        """Returns a pipeline for masked models, which draw ids of the tokenizer."""

        def add(batch: Batch) -> Batch:
            vocab_size = self.corpus.tokenizer.vocab_size
            # One per row, because all arrays of a batch are sharded along their rows.
            return batch._replace(
                vocab_size_B=np.full(len(batch.tokens_BxT1), vocab_size, np.int32)
            )

        return dataclasses.replace(
            self,
            train_batches=self.train_batches.map(add),
            validation_batches=self.validation_batches.map(add),
        )


def make_pipeline(
    mesh: jax.sharding.Mesh,
    data,
    model,
    train,
    seed: int,
    corpus: Corpus | ProbeCorpus | None,
) -> DataPipeline:
    """Returns the data of a run. `seed` is that of the order of the batches. `corpus` is that of
    `data`; None opens it.

    Process 0 prepares a missing token store first. The others then open it, or prepare their own
    copy if they do not share its file system. Raises UserError if the text is missing, too short,
    or not the same in all processes.
    """
    if not corpus:
        load = functools.partial(load_or_prepare, data, model.vocab_size)
        # `run_on_primary` returns None in the other processes, after process 0 has prepared it.
        corpus = distributed.run_on_primary(load) or load()
    require_rows(model.vocab_size, corpus.tokenizer.vocab_size)
    require_room(data, corpus, model.context_length)
    distributed.require_equal("the training text", json.dumps(corpus.description))
    train_rows = _pack(corpus, "train", data, model)
    batch_size = train.batch_size
    local_rows = sharding.local_rows(mesh, batch_size)

    def validate_on(mixture: Mixture):
        return batches.validation_batches(mixture, batch_size, train.eval_steps, local_rows)

    def to_devices(batch: Batch) -> Batch:
        return jax.tree.map(
            lambda local: sharding.global_batch(mesh, local_rows, batch_size, local), batch
        )

    return DataPipeline(
        corpus=corpus,
        train=train_rows,
        tokens_per_step=batch_size * model.context_length * (1 - train_rows.padding),
        train_batches=batches.train_batches(train_rows, batch_size, seed, local_rows),
        validation_batches=validate_on(_pack(corpus, "validation", data, model)),
        test_batches={
            length: validate_on(mixture)
            for length, mixture in corpus.test_rows(model.context_length).items()
        },
        row_numbers=batches.row_numbers(train_rows, batch_size, seed),
        to_devices=to_devices,
    )


def num_validation_targets(corpus: Corpus, data, model, train) -> int:
    """Returns the number of target tokens in one evaluation, summed over all processes."""
    evaluation = batches.validation_batches(
        _pack(corpus, "validation", data, model), train.batch_size, train.eval_steps
    )
    return sum(int(np.sum(batch.loss_mask_BxT)) for batch in evaluation)


def _pack(corpus: Corpus | ProbeCorpus, split: str, data, model) -> Mixture:
    return corpus.pack(split, data.packing, data.separate_documents, model.context_length)
