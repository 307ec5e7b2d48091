"""The corpus of a run on a probe: rows of examples, which are made when a batch is read.

The example in a row depends only on the row's number. The order of the rows, and with it resumption
and the rows of each process, is that of text (batches.py). There are so many training rows that
runs do not repeat any.
"""

import dataclasses
import hashlib
import json
import math
from functools import cached_property

import numpy as np

from smallgpt_jax.data.config import SYNTHETIC
from smallgpt_jax.data.packing import Batch, Mixture
from smallgpt_jax.data.probes import NO_ANSWER, PROBES, Probe, RandomNumbers
from smallgpt_jax.data.tokenizers import Symbols
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.json_files import TEXT, Each, integer

_NUM_ROWS = {"train": 2**30, "validation": 2**14}
_STREAMS = {"train": 1, "validation": 2}  # of random numbers
_FINGERPRINT_ROWS = 64
_LENGTHS_STREAM = 3  # of the lengths of training examples
DESCRIPTION = {
    "probe": {
        "name": TEXT,
        "length": integer(1),
        "min_length": integer(1),
        "max_length": integer(1),
        "symbols": integer(0),
        "scratch": integer(0),
    },
    "splits": Each({"rows": integer(1)}),
    "fingerprints": Each(TEXT),
}


@dataclasses.dataclass(frozen=True)
class _ExampleRows:
    """A `Packing` with one example per row. All lengths from `min_length` to `length` are equally
    frequent.
    """

    name: str  # of the probe
    probe: Probe
    split: str
    min_length: int
    length: int
    context_length: int

    @property
    def num_rows(self) -> int:
        return _NUM_ROWS[self.split]

    @cached_property
    def padding(self) -> float:
        lengths = range(self.min_length, self.length + 1)
        inputs = [self.probe.num_inputs(length) for length in lengths]
        return 1 - float(np.mean(inputs)) / self.context_length

    @property
    def summary(self) -> str:
        lengths = f"{self.length}"
        if self.min_length < self.length:
            lengths = f"{self.min_length} to {self.length}"
        return f"{SYNTHETIC}{self.name}, {lengths} {self.probe.unit}: {self.padding:.2%} padding"

    def read_rows(self, rows_B: np.ndarray) -> Batch:
        tokens_BxT1 = np.zeros((len(rows_B), self.context_length + 1), np.int32)
        answers_BxT = np.full((len(rows_B), self.context_length), NO_ANSWER, np.int32)
        num_lengths = self.length + 1 - self.min_length
        longer_Bx1 = RandomNumbers(rows_B, _LENGTHS_STREAM).integers(num_lengths, 1)
        lengths_B = self.min_length + longer_Bx1[:, 0]
        for length in np.unique(lengths_B):
            has_length_B = lengths_B == length
            numbers = RandomNumbers(rows_B[has_length_B], _STREAMS[self.split])
            inputs, answers = self.probe.examples(numbers, int(length))
            tokens_BxT1[has_length_B, : inputs.shape[1]] = inputs
            answers_BxT[has_length_B, : inputs.shape[1]] = answers
        is_answer_BxT = answers_BxT != NO_ANSWER
        return Batch(tokens_BxT1, None, is_answer_BxT, np.where(is_answer_BxT, answers_BxT, 0))


@dataclasses.dataclass(frozen=True)
class ProbeCorpus:
    """Has the interface of `Corpus`. Validation examples have the length `length`."""

    name: str
    probe: Probe
    min_length: int
    length: int
    test_lengths: tuple[int, ...]

    stores = ()

    @classmethod
    def of(cls, data) -> "ProbeCorpus":
        """Returns the corpus of a config's group `data`. Raises UserError if the probe has no
        examples with these options.
        """
        name = data.source.removeprefix(SYNTHETIC)
        kind = PROBES[name]
        max_length = max([data.probe_length, *data.probe_test_lengths])
        probe = kind(data.probe_symbols or kind.default_symbols, data.probe_scratch, max_length)
        if problem := probe.problem():
            raise UserError(
                f"config.data.probe_symbols={probe.num_symbols}: {problem}; increase it, or "
                "decrease config.data.probe_length"
            )
        min_length = data.probe_min_length or data.probe_length
        return cls(name, probe, min_length, data.probe_length, tuple(data.probe_test_lengths))

    @cached_property
    def tokenizer(self) -> Symbols:
        return Symbols(self.probe.symbols)

    @cached_property
    def description(self) -> dict:
        probe = self.probe
        return {
            "probe": {
                "name": self.name,
                "length": self.length,
                "min_length": self.min_length,
                "max_length": probe.max_length,
                "symbols": probe.num_symbols,
                "scratch": probe.scratch,
            },
            "splits": {split: {"rows": rows} for split, rows in _NUM_ROWS.items()},
            "fingerprints": {split: self.fingerprint(split) for split in _NUM_ROWS},
        }

    def fingerprint(self, split: str) -> str:
        """Returns a hash of the first examples, as the options and the probe's code make them."""
        rows = self._rows(split, self.length, self.probe.num_inputs(self.length))
        batch = rows.read_rows(np.arange(_FINGERPRINT_ROWS))
        digest = hashlib.blake2b(json.dumps(self.probe.symbols).encode(), digest_size=16)
        for array in (batch.tokens_BxT1, batch.targets_BxT, batch.loss_mask_BxT):
            digest.update(array.tobytes())
        return digest.hexdigest()

    @property
    def warning(self) -> str:
        return ""

    def bytes_per_token(self, split: str) -> float:
        return math.nan  # examples are not text

    def pack(self, split: str, packing: str, separate: bool, context_length: int) -> Mixture:
        return Mixture([self._rows(split, self.length, context_length)], [1.0])

    def test_rows(self, context_length: int) -> dict[int, Mixture]:
        """Returns {length: validation rows} for the further lengths."""
        return {
            length: Mixture([self._rows("validation", length, context_length)], [1.0])
            for length in self.test_lengths
        }

    def _rows(self, split: str, length: int, context_length: int) -> _ExampleRows:
        needed = self.probe.num_inputs(length)
        if needed > context_length:
            field = "probe_length" if length == self.length else "probe_test_lengths"
            raise UserError(
                f"config.data.{field}: an example of {length} {self.probe.unit} has {needed:,} "
                f"tokens, more than config.model.context_length={context_length}; use a longer "
                "context or shorter examples"
            )
        min_length = self.min_length if split == "train" else length
        return _ExampleRows(self.name, self.probe, split, min_length, length, context_length)
