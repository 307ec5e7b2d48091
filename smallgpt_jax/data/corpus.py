"""The text of a run: one token store, or a weighted mixture of several stores with the same
tokenizer.

A run on a probe has a `ProbeCorpus` in its place.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smallgpt_jax.config.recipes import ConfigLike, load_config
from smallgpt_jax.data import probe_corpus, tokenizers
from smallgpt_jax.data.config import DataConfig, embedding_rows, is_synthetic
from smallgpt_jax.data.packing import PACKINGS, Mixture
from smallgpt_jax.data.prepare import prepare_store
from smallgpt_jax.data.probe_corpus import ProbeCorpus
from smallgpt_jax.data.prompts import encode_example
from smallgpt_jax.data.shards import parse_shard, write_shard
from smallgpt_jax.data.store import METADATA, Split, TokenStore, open_store, unencoded_message
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.data.tokenizers import Tokenizer
from smallgpt_jax.errors import UserError, command_line, config_arguments
from smallgpt_jax.storage.json_files import POSITIVE
from smallgpt_jax.storage.paths import as_path

# Bytes of text; training does not prepare the stores of larger sources.
_PREPARE_LIMIT = 1_000_000_000
# Bytes of text from which on all sources, compressed ones too, have passages of the same length.
_SMALL_SOURCE = 20_000_000
_BEGINNING, _LAST_TOKENS = 64, 8  # tokens of a passage that are compared first, and not at all
# The schema of `Corpus.description`.
DESCRIPTION = (probe_corpus.DESCRIPTION, {"mixture": [{"weight": POSITIVE, **METADATA}]}, METADATA)


@dataclasses.dataclass(frozen=True)
class Corpus:
    stores: tuple[TokenStore, ...]
    weights: tuple[float, ...] = (1.0,)  # their sum is 1
    _packed: dict[tuple, Mixture] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def tokenizer(self) -> Tokenizer:
        return self.stores[0].tokenizer

    @property
    def description(self) -> dict:
        """Returns the metadata and weights of the stores, as written to store.json in a workdir."""
        if len(self.stores) == 1:
            return self.stores[0].metadata
        mixture = []
        for store, weight in zip(self.stores, self.weights):
            mixture.append({"weight": weight, **store.metadata})
        return {"mixture": mixture}

    def fingerprint(self, split: str) -> str:
        """Returns a hash of the content of `split` in all stores, and of their weights."""
        if len(self.stores) == 1:
            return self.stores[0].fingerprint(split)
        fingerprints = [store.fingerprint(split) for store in self.stores]
        content = json.dumps(list(zip(self.weights, fingerprints)))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def bytes_per_token(self, split: str) -> float:
        values = [of_store.bytes_per_token for of_store in self._splits(split)]
        return float(np.dot(self.weights, values))

    def _splits(self, name: str) -> list[Split]:
        return [getattr(store, name) for store in self.stores]

    @property
    def warning(self) -> str:
        return unencoded_message([store.metadata for store in self.stores])

    def pack(self, split: str, packing: str, separate: bool, context_length: int) -> Mixture:
        """Packs once, because runs that read the same corpus mostly pack it in the same way."""
        has_answers = any(store.train.has_answers for store in self.stores)
        if has_answers and packing != "best_fit":
            raise UserError(
                f"config.data.packing={packing!r}: cuts examples, which have a prompt and an "
                "answer; set --config.data.packing=best_fit"
            )
        arguments = (split, packing, separate, context_length)
        if arguments not in self._packed:
            pack = PACKINGS[packing]
            packed = [pack(of_store, context_length, separate) for of_store in self._splits(split)]
            self._packed[arguments] = Mixture(packed, self.weights)
        return self._packed[arguments]

    def test_rows(self, context_length: int) -> dict[int, Mixture]:
        """Returns further validation rows: none, unlike `ProbeCorpus`."""
        return {}


def same_text(one: dict, other: dict) -> bool:
    """Returns whether two `Corpus.description`s describe the same tokens, from any sources."""
    return _content(one) == _content(other)


def _content(description: dict) -> list[tuple]:
    stores = description.get("mixture", [description])
    return [(store.get("weight"), store["splits"], store["fingerprints"]) for store in stores]


def open_existing(data, spec: StoreSpec | None = None) -> Corpus | ProbeCorpus | None:
    """Returns the text of a config's group `data`; None if its token store does not exist. Raises
    UserError if the source or the settings of the store differ from `data`.
    """
    return ProbeCorpus.of(data) if is_synthetic(data) else _open_stores(data, spec)


def _open_stores(data, spec: StoreSpec | None) -> Corpus | None:
    if data.mixture:
        return open_mixture(data.mixture)
    store = (spec or StoreSpec.of(data)).open()
    return Corpus((store,)) if store else None


def load_or_prepare(data, vocab_size: int | None = None) -> Corpus | ProbeCorpus:
    """Returns the text of a config's group `data`. Prepares a missing store if its source is local
    and under 1 GB; else raises UserError with the command. Before, refuses a tokenizer that is too
    large for a model's `vocab_size`.
    """
    spec = StoreSpec.of(data)
    if corpus := open_existing(data, spec):
        return corpus
    if not spec.source.is_local or spec.source.num_bytes > _PREPARE_LIMIT:
        command = command_line("prepare", *(config_arguments() or ["--config=…"]))
        raise UserError(
            f"config.data.store: no token store of {spec.source.value!r} in {str(spec.folder)!r}; "
            f"prepare it first: {command}"
        )
    if vocab_size:
        require_rows(vocab_size, spec.tokenizer.vocab_size)
    return Corpus((prepare_store(spec),))


def require_rows(vocab_size: int, entries: int) -> None:
    """Raises UserError if a model has fewer rows in its embedding than its tokenizer entries."""
    if entries > vocab_size:
        raise UserError(
            f"config.model.vocab_size={vocab_size}: must be at least {entries}, the vocabulary size "
            f"of the tokenizer; set it to {embedding_rows(entries)}, or choose another "
            "config.data.tokenizer"
        )


def prepare(
    config: ConfigLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    workers: int | None = None,
) -> tuple[Corpus, bool]:
    """Tokenizes the text of a config; returns its token stores, and whether they are new.

    `config` is a recipe such as "gpt:quickstart", or its fields; `overrides` are further values,
    such as {"data.source": "my_texts/"}. `workers` is the number of threads; None: one per core.
    Rerun the same call to resume. Raises UserError.
    """
    data = DataConfig.from_fields(load_config(config, overrides).get("data", {}))
    return open_or_prepare(data, workers)


def prepare_shard(
    config: ConfigLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    shard: str,
    workers: int | None = None,
) -> tuple[Path, bool]:
    """Tokenizes a shard of the text of a config, such as "3/16": the third of 16.

    Returns its folder, beside config.data.store, and whether it is new. When all shards exist,
    `prepare` joins them; the store equals the one that a single machine makes. Rerun the same call
    to resume. Raises UserError.
    """
    data = DataConfig.from_fields(load_config(config, overrides).get("data", {}))
    if is_synthetic(data) or data.mixture:
        raise UserError("--shard: needs text to tokenize, not a probe or a mixture of stores")
    return write_shard(StoreSpec.of(data), parse_shard(shard), workers)


def open_or_prepare(data, workers: int | None = None, log=print) -> tuple[Corpus, bool]:
    """Returns the corpus, and whether its store is new. Resumes an interrupted preparation."""
    if is_synthetic(data):
        raise UserError(
            f"config.data.source={data.source!r}: a probe has no token store, because its "
            "examples are made during training; start the training"
        )
    spec = StoreSpec.of(data)
    if corpus := _open_stores(data, spec):
        return corpus, False
    return Corpus((prepare_store(spec, workers, log),)), True


def require_room(data, corpus: Corpus | ProbeCorpus, context_length: int) -> None:
    """Raises UserError for examples that do not fit into the context, unless
    config.data.invalid_items skips them.
    """
    # Packing would leave them out in silence.
    count, examples = 0, 0
    for store in corpus.stores:
        for split in (store.train, store.validation):
            if split.has_answers:
                count += int(np.sum(split.lengths > context_length))
                examples += split.documents
    if count and data.invalid_items != "skip":
        first = _find_long_example(data, corpus.tokenizer, context_length)
        raise UserError(
            f"{first}, more than the config.model.context_length={context_length}, as {count:,} "
            f"of {examples:,} examples; shorten them, or skip them with "
            "--config.data.invalid_items=skip"
        )


def _find_long_example(data, tokenizer: Tokenizer, context_length: int) -> str:
    """Returns the place and length of the source's first example that is too long."""
    if data.mixture:
        return f"{data.mixture}: an example is too long"
    spec = StoreSpec.of(data)
    for example in spec.source.examples(spec.rules):
        length = len(encode_example(example, tokenizer)[0])
        if length > context_length:
            return f"{example.where}: has {length:,} tokens"
    return f"{spec.folder}: an example is too long"  # the source has changed since


def open_mixture(text: str) -> Corpus:
    """Returns the corpus of the mixture "FOLDER=WEIGHT,FOLDER=WEIGHT,…".

    Raises UserError if the stores have different tokenizers, or if one trains on validation
    documents of another.
    """
    field = f"config.data.mixture={text!r}"
    stores, weights = [], []
    for item in map(str.strip, text.split(",")):
        folder, weight = _parse_mixture_item(field, item)
        weights.append(weight)
        stores.append(open_store(as_path("config.data.mixture", folder)))
        first, newest = stores[0], stores[-1]
        if tokenizers.fingerprint(newest.tokenizer) != tokenizers.fingerprint(first.tokenizer):
            raise UserError(
                f"{field}: the stores {str(first.folder)!r} and {folder!r} have different "
                "tokenizers; prepare both with the same one: "
                f"--config.data.tokenizer={first.folder / 'tokenizer'}"
            )
    _refuse_leaks(field, stores)
    total = sum(weights)
    return Corpus(tuple(stores), tuple(weight / total for weight in weights))


def _parse_mixture_item(field: str, item: str) -> tuple[str, float]:
    folder, _, text = item.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not folder or not 0 < weight < float("inf"):
        raise UserError(f"{field}: {item!r} is not FOLDER=WEIGHT with a weight above 0")
    return folder, weight


def _refuse_leaks(field: str, stores: Sequence[TokenStore]) -> None:
    """Raises UserError if one of `stores`, which have the same tokenizer, trains on validation
    documents of another.

    A document is for validation if its hash, or that of its file, is below the store's
    validation_fraction. So stores with the same fraction agree, but one with a smaller fraction may
    train on validation documents of another, and so may stores of which one holds out whole files, or
    that cut the same files into passages of different lengths.
    """
    for one, other in itertools.permutations(stores, 2):
        fraction = one.metadata["made_from"]["validation_fraction"]
        other_fraction = other.metadata["made_from"]["validation_fraction"]
        same_kind = _splits_by_file(one) == _splits_by_file(other)
        if same_kind and fraction >= other_fraction:
            continue
        leaked = _count_leaks(one.train, other.validation)
        if leaked:
            advice = "prepare all stores with the same config.data.validation_fraction"
            if not same_kind:
                advice = "leave what both have out of one of them"
            documents = one.train.documents
            raise UserError(
                f"{field}: {leaked:,} of the {documents:,} training documents of "
                f"{str(one.folder)!r} are validation documents of {str(other.folder)!r}; {advice}"
            )
    for one, other in itertools.combinations(stores, 2):
        fractions = {store.metadata["made_from"]["validation_fraction"] for store in (one, other)}
        by_file = _splits_by_file(one) and _splits_by_file(other)
        if by_file and len(fractions) == 1:
            continue  # whole files are in the same split of both, however they are cut
        if _cut_same_files(one, other):
            raise UserError(
                f"{field}: the stores {str(one.folder)!r} and {str(other.folder)!r} have the same "
                "files in passages of different lengths, so that each may train on validation text "
                "of the other; leave what both have out of one of them"
            )


def _cut_same_files(one: TokenStore, other: TokenStore) -> bool:
    """Returns whether a passage of one store is the beginning of a longer one of the other."""
    smaller, larger = sorted((one, other), key=_text_bytes)
    has_passages = "plain_text" in one.metadata and "plain_text" in other.metadata
    if not has_passages or _text_bytes(smaller) > _SMALL_SOURCE:
        return False
    passages = collections.defaultdict(list)  # {beginning: passages}
    for ids in _passages(smaller):
        passages[ids[:_BEGINNING].tobytes()].append(ids)
    for ids in _passages(larger):
        for same in passages.get(ids[:_BEGINNING].tobytes(), ()):
            # The last tokens of a passage may be others where the text goes on.
            common = min(len(same), len(ids)) - _LAST_TOKENS
            if len(same) != len(ids) and np.array_equal(same[:common], ids[:common]):
                return True
    return False


def _text_bytes(store: TokenStore) -> int:
    return store.train.text_bytes + store.validation.text_bytes


def _passages(store: TokenStore) -> Iterator[np.ndarray]:
    """Yields the tokens of the documents that are long enough to be cut from a longer text."""
    for split in (store.train, store.validation):
        for start, length in zip(split.starts.tolist(), split.lengths.tolist()):
            if length > _BEGINNING + _LAST_TOKENS:
                # the dtype of the stores can differ
                yield split.stream[start : start + length].astype(np.uint32)


def _splits_by_file(store: TokenStore) -> bool:
    return store.metadata.get("plain_text", {}).get("split_by_file", False)


def _count_leaks(train: Split, validation: Split) -> int:
    # Only documents of the same length can be equal: so few of the training split are hashed.
    lengths = np.unique(validation.lengths)
    hashes = set(_document_hashes(validation, lengths))
    return sum(digest in hashes for digest in _document_hashes(train, lengths))


def _document_hashes(split: Split, of_lengths: np.ndarray) -> Iterator[bytes]:
    starts, lengths = split.starts, split.lengths
    has_length = np.isin(lengths, of_lengths)
    for start, length in zip(starts[has_length].tolist(), lengths[has_length].tolist()):
        ids = split.stream[start : start + length]
        ids = ids.astype(np.uint32)  # the dtype of the stores can differ
        yield hashlib.blake2b(ids.data, digest_size=16).digest()
