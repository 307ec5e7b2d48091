"""The config group `data`."""

import dataclasses
from typing import ClassVar

from smallgpt_jax.config_group import ConfigGroup, free, in_store


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigGroup):
    GROUP: ClassVar[str] = "data"

    # python_stdlib | hf:NAME[:CONFIG] | tfds:NAME | path or glob of .txt, .jsonl or .parquet files, which may be
    # compressed (.gz, .bz2, .zst) or on gs://. Commas separate several sources
    source: str = in_store("hf:HuggingFaceFW/fineweb-edu:sample-10BT")
    # JSON field or Parquet column that contains the text
    text_field: str = in_store("text")
    # if a file is not valid UTF-8: "refuse" it | "replace" the invalid bytes
    invalid_utf8: str = in_store("refuse", relaxable=True)
    # if lines or rows are invalid or lack text_field: "refuse" the source | "skip" them
    invalid_items: str = in_store("refuse", relaxable=True)
    # sentencepiece:SIZE | gpt2 | bytes | path of a tokenizer: a SentencePiece model, a tokenizer.json of Hugging Face,
    # or a folder
    tokenizer: str = in_store("gpt2")
    # fraction of documents for validation, selected by a hash of their text
    validation_fraction: float = in_store(0.01)
    # folder of the token store, local or gs://; an existing store is used unchanged. "": a store in the cache folder,
    # rebuilt when the source changes
    store: str = free("data/fineweb-edu")
    # existing token stores and their weights: "FOLDER=WEIGHT,FOLDER=WEIGHT,…". If set, it replaces the fields source,
    # tokenizer and store
    mixture: str = free("")
    # "concat": join all documents and cut the result into rows | "best_fit": put whole documents into rows where they
    # fit; cuts fewer documents, but needs some padding
    packing: str = "concat"
    # True: a token attends only to its own document, not to others in the row
    separate_documents: bool = False
    # threads that prefetch batches; 0: none
    workers: int = free(2)

    def validate(self) -> None:
        self.validate_range("workers")
