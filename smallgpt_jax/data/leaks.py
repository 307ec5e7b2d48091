"""Finds training documents of one store that are validation documents of another.

A document is selected for validation if the hash of its text is below the store's validation_fraction. Stores with the
same fraction therefore agree on every document. With different fractions, the store with the smaller one may train on
documents on which the other one is evaluated.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from smallgpt_jax.data.store import Split, TokenStore
from smallgpt_jax.errors import UserError


def refuse_leaks(field: str, stores: Sequence[TokenStore]) -> None:
    """Raises UserError for leaks between `stores`, which have the same tokenizer. The message begins with `field`."""
    fractions = [store.metadata["made_from"]["validation_fraction"] for store in stores]
    for one, fraction in zip(stores, fractions):
        for other, other_fraction in zip(stores, fractions):
            if fraction < other_fraction and (leaked := count_leaks(one.train, other.validation)):
                raise UserError(
                    f"{field}: {leaked:,} of the {one.train.documents:,} training documents of {str(one.folder)!r} are "
                    f"validation documents of {str(other.folder)!r}; prepare all stores with the same "
                    "config.data.validation_fraction")


def count_leaks(train: Split, validation: Split) -> int:
    lengths = np.unique(validation.lengths)
    hashes = set(document_hashes(validation, lengths))
    return sum(digest in hashes for digest in document_hashes(train, lengths))


def document_hashes(split: Split, lengths: np.ndarray) -> Iterator[bytes]:
    found = np.isin(split.lengths, lengths)
    for start, length in zip(split.starts[found].tolist(), split.lengths[found].tolist()):
        ids = split.stream[start:start + length].astype(np.uint32)
        yield hashlib.blake2b(ids, digest_size=16).digest()
