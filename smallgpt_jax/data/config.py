"""The config group `data`."""

import dataclasses
from typing import ClassVar

from smallgpt_jax.config.group import ConfigGroup, free, in_store, not_compiled, of_probe
from smallgpt_jax.data.probes import PROBES, Probe
from smallgpt_jax.errors import suggestion

SYNTHETIC = "synthetic:"  # prefix of config.data.source for probes
SYMBOLS = "symbols"  # the tokenizer of probes
_ENTRIES = {"bytes": 257, "gpt2": 50_257}  # of tokenizers, by config.data.tokenizer
_ROW_UNIT = 64  # suits matrix units, and divides among the devices of a mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigGroup):
    GROUP: ClassVar[str] = "data"

    # python_stdlib | python_packages | hf:NAME[:CONFIG] | tfds:NAME | path or glob of .txt, .jsonl
    # or .parquet files, which may be compressed (.gz, .bz2, .zst) or on gs://. Commas separate
    # several sources. Instead of text, synthetic:PROBE: the examples of a probe of data/probes.py,
    # with tokenizer "symbols", store "", packing "concat"
    source: str = in_store("hf:HuggingFaceFW/fineweb-edu:sample-10BT")
    # endings of the files in a folder that are read as plain text, such as .txt,.md,.rst. Files of
    # JSON lines and Parquet files are always read; of a glob, all files are read
    text_endings: str = in_store(".txt")
    # JSON field or Parquet column that contains the text
    text_field: str = in_store("text")
    # "text": the text of text_field. From JSON lines or hf: datasets, for fine-tuning on answers
    # (docs/tuning.md): "completion": the fields prompt and completion | "messages": the field
    # messages, a conversation
    format: str = in_store("text")
    # with "messages": file with a Jinja template that writes conversations as text; "": the
    # tokenizer's own template
    chat_template: str = in_store("")
    # if a file is not valid UTF-8: "refuse" it | "replace" the invalid bytes
    invalid_utf8: str = in_store("refuse", relaxable=True)
    # if lines or rows are invalid, too long or lack a field, or if text files are not UTF-8:
    # "refuse" the source | "skip" them
    invalid_items: str = in_store("refuse", relaxable=True)
    # a longer JSON line or row is invalid
    max_document_bytes: int = in_store(100_000_000, relaxable=True)
    # sentencepiece:SIZE | gpt2 | bytes | path of a tokenizer: a SentencePiece model, a
    # tokenizer.json of Hugging Face, or a folder | symbols (only for probes)
    tokenizer: str = in_store("gpt2")
    # fraction of documents for validation, selected by a hash of their text; of plain text, whole
    # files, if there are enough
    validation_fraction: float = in_store(0.01)
    # folder of the token store, local or gs://; an existing store is used unchanged. "": a store in
    # the cache folder, rebuilt when the source changes
    store: str = free("data/fineweb-edu")
    # existing token stores and their weights: "FOLDER=WEIGHT,FOLDER=WEIGHT,…". If set, it replaces
    # the fields source, tokenizer and store
    mixture: str = free("")
    # "concat": join all documents and cut the result into rows | "best_fit": put whole documents
    # into rows where they fit; cuts fewer documents, but needs some padding
    packing: str = "concat"
    # True: a token attends only to its own document, not to others in the row
    separate_documents: bool = False
    # of a probe: length of its examples. What it counts depends on the probe, for example the pairs
    # of synthetic:recall
    probe_length: int = of_probe(8)
    # of a probe: training examples have all lengths from this one to probe_length, equally often;
    # 0: only probe_length
    probe_min_length: int = of_probe(0)
    # of a probe: further lengths at which each evaluation measures the answers
    probe_test_lengths: tuple[int, ...] = of_probe(())
    # of a probe: number of different symbols in its examples, for example of keys and values
    # together in synthetic:recall; 0: the probe's default
    probe_symbols: int = of_probe(0)
    # of synthetic:inverse: scratch tokens per item of the permutation
    probe_scratch: int = of_probe(0)
    # seed of the order of the batches; -1: train.seed, which otherwise seeds only the initial weights
    # and random choices within steps. Runs of one data.seed read the same batches
    seed: int = not_compiled(-1)
    # threads that prefetch batches; 0: none
    workers: int = free(2)

    def validate(self) -> None:
        self.validate_range("workers")
        if not -1 <= self.seed < 2**32:
            self.refuse("seed", "must be -1, or at least 0 and below 2^32")
        self.validate_range("max_document_bytes", least=1)
        self.validate_choice("packing", ("concat", "best_fit"))
        self.validate_choice("format", ("text", "completion", "messages"))
        if self.chat_template and self.format != "messages":
            self.refuse("chat_template", 'needs config.data.format="messages"')
        self.validate_choice("invalid_utf8", ("refuse", "replace"))
        self.validate_choice("invalid_items", ("refuse", "skip"))
        self.validate_fraction("validation_fraction", above=True)
        if is_synthetic(self):
            self.validate_synthetic()

    def validate_synthetic(self) -> None:
        name = self.source.removeprefix(SYNTHETIC)
        if name not in PROBES:
            self.refuse(
                "source",
                f"no probe {name!r}; choose from {', '.join(PROBES)}{suggestion(name, PROBES)}",
            )
        if self.tokenizer != SYMBOLS:
            self.refuse(
                "tokenizer", f"cannot write the examples of {self.source}; set it to {SYMBOLS!r}"
            )
        required = {"store": "", "packing": "concat", "separate_documents": False, "format": "text"}
        for field, value in required.items():
            if getattr(self, field) != value:
                self.refuse(field, f"cannot be combined with {self.source}; set it to {value!r}")
        self.validate_probe(PROBES[name])

    def validate_probe(self, probe: type[Probe]) -> None:
        least, lengths = probe.least_length, (self.probe_length, *self.probe_test_lengths)
        self.validate_range("probe_length", least=least)
        if self.probe_min_length and not least <= self.probe_min_length <= self.probe_length:
            self.refuse(
                "probe_min_length",
                f"must be 0, or at least {least} and at most config.data.probe_length="
                f"{self.probe_length}",
            )
        # Their types are not checked before: `validate_types` looks only at the tuple.
        are_valid = all(type(length) is int and length >= least for length in lengths)
        if not are_valid or len(set(lengths)) < len(lengths):
            self.refuse(
                "probe_test_lengths",
                f"must be different integers of at least {least}, other than "
                "config.data.probe_length",
            )
        if self.probe_symbols and not probe.default_symbols:
            self.refuse("probe_symbols", f"{self.source} does not have this field; set it to 0")
        if self.probe_symbols and self.probe_symbols < probe.least_symbols:
            self.refuse("probe_symbols", f"must be 0, or at least {probe.least_symbols}")
        if self.probe_scratch and not probe.has_scratch:
            self.refuse("probe_scratch", f"{self.source} has no scratch tokens; set it to 0")
        self.validate_range("probe_scratch")


def stated_entries(tokenizer: str) -> int | None:
    """Returns the number of a tokenizer's entries if config.data.tokenizer says it; of
    sentencepiece:SIZE, which has fewer after training on very short texts, the most.
    """
    kind, _, size = tokenizer.partition(":")
    if kind == "sentencepiece" and size.isdecimal():
        return int(size)
    return _ENTRIES.get(tokenizer)


def embedding_rows(entries: int) -> int:
    """Returns the usual config.model.vocab_size for a tokenizer: 50,304 for the 50,257 of gpt2."""
    return -(-entries // _ROW_UNIT) * _ROW_UNIT


def is_synthetic(data) -> bool:
    return data.source.startswith(SYNTHETIC) and not data.mixture
