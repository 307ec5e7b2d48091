"""Measures the speed of `prepare` and of the data loader, in tokens per second.

    python benchmarks/data.py --source='texts/*.jsonl' --gpt2=FOLDER

- `prepare` reads files and writes a token store, on all cores, with each kind of tokenizer. GPT-2's
  is also compared with tiktoken, which encodes the same documents with one thread per core.
- The data loader reads a token store on disk and yields shuffled, packed batches, with and without
  separate documents (segment ids). For comparison, a plain NumPy loader copies random windows from
  a memory map.

Prints a table. FOLDER contains GPT-2's encoder.json and vocab.bpe. Without --gpt2, tiktoken
downloads these files.
"""

import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.data import batches, packing, prepare, store, tokenizer_folder, tokenizers
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.parts import Rules
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError

_SOURCE = flags.DEFINE_string(
    "source", "python_stdlib", "Source of the text, in the format of config.data.source."
)
_GPT2 = flags.DEFINE_string(
    "gpt2", "gpt2", "GPT-2's tokenizer, in the format of config.data.tokenizer."
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 3, "Rounds per measurement; the median is reported.", lower_bound=1
)
_SECONDS = flags.DEFINE_float(
    "seconds", 2.0, "Seconds per round of a loader measurement.", lower_bound=0.1
)

RULES = dict(
    text_field="text", invalid_utf8="replace", invalid_items="skip", max_document_bytes=10**8
)
SHAPES = (
    (8, 128),
    (16, 256),
    (512, 1024),
)  # (rows, tokens per row): quickstart, a size in between, paper


def rounds_of(measure) -> list[float]:
    return [measure() for _ in range(_ROUNDS.value)]


def prepare_source(folder: Path, tokenizer: str) -> store.TokenStore:
    data = DataConfig(
        store=str(folder),
        source=_SOURCE.value,
        tokenizer=tokenizer,
        validation_fraction=0.05,
        **RULES,
    )
    return prepare.prepare_store(StoreSpec.of(data), log=lambda _: None)


def prepare_rate(tokenizer: str, folder: Path) -> float:
    started = time.perf_counter()
    token_store = prepare_source(folder / f"{time.monotonic_ns()}", tokenizer)
    return (token_store.train.tokens + token_store.validation.tokens) / (
        time.perf_counter() - started
    )


def tiktoken_rate(tokenizer: tokenizers.GPT2) -> float:
    """Returns the tokens per second of tiktoken's `encode_ordinary_batch`. The documents are in
    memory.
    """
    texts = list(Source(_SOURCE.value).documents(Rules(**RULES)))
    started = time.perf_counter()
    encoded = tokenizer._encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count())
    return sum(map(len, encoded)) / (time.perf_counter() - started)


def loader_rate(batches_of_tokens, tokens: int) -> float:
    next(batches_of_tokens)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < _SECONDS.value:
        next(batches_of_tokens)
        count += 1
    return count * tokens / (time.perf_counter() - started)


def random_windows(split: store.Split, rows: int, positions: int):
    """Yields batches (inputs, targets) of random windows, which are copied one by one from a memory
    map.
    """
    stream = np.memmap(split.folder / f"{split.name}{store.TOKENS}", split.dtype, "r")
    rng = np.random.default_rng(0)
    while True:
        places = rng.integers(0, len(stream) - positions - 1, rows)
        yield (
            np.stack([stream[i : i + positions].astype(np.int64) for i in places]),
            np.stack([stream[i + 1 : i + 1 + positions].astype(np.int64) for i in places]),
        )


def open_loader(
    split: store.Split, kind: str, separate: bool, rows: int, positions: int, first: int
):
    mixture = batches.Mixture([packing.PACKINGS[kind](split, positions, separate)], [1.0])
    return batches.read_ahead(batches.train_batches(mixture, rows, seed=0), first, workers=2)


def main() -> None:
    results = {"machine": platform.machine(), "cpus": os.cpu_count(), "source": _SOURCE.value}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        megabytes = Source(_SOURCE.value).num_bytes / 1e6
        print(f"prepare: {megabytes:.0f} MB of text on {os.cpu_count()} cores, in M tokens/s")
        for name, spec in (
            ("bytes", "bytes"),
            ("sentencepiece:4096", "trained"),
            ("gpt2", _GPT2.value),
        ):
            if spec == "trained":  # training the tokenizer is not measured
                tokenizer = TokenizerSource(name).make(
                    Source(_SOURCE.value).documents(Rules(**RULES))
                )
                tokenizer_folder.save(tokenizer, folder / "sentencepiece")
                spec = str(folder / "sentencepiece")
            try:
                rates = results[f"prepare {name}"] = rounds_of(
                    lambda spec=spec: prepare_rate(spec, folder)
                )
            except UserError as error:
                print(f"  {name:20} skipped: {error}")
                continue
            print(f"  {name:20} {statistics.median(rates) / 1e6:8.2f}", flush=True)
        if "prepare gpt2" in results:
            tokenizer = TokenizerSource(_GPT2.value).make()
            rates = results["tiktoken batch"] = rounds_of(lambda: tiktoken_rate(tokenizer))
            ratio = statistics.median(results["prepare gpt2"]) / statistics.median(rates)
            results["prepare gpt2 / tiktoken batch"] = ratio
            print(
                f"  tiktoken             {statistics.median(rates) / 1e6:8.2f}   ratio of "
                f"prepare's speed to tiktoken's: {ratio:.2f}"
            )

        token_store = prepare_source(folder / "store", str(folder / "sentencepiece"))
        print(
            "loader, in M tokens/s\n  rows × tokens      "
            + "".join(
                f"{head:>22}"
                for head in (
                    "NumPy, random windows",
                    "concat",
                    "concat, separate",
                    "best_fit, separate",
                )
            )
        )
        for rows, positions in SHAPES:
            loaders = {"numpy": lambda: random_windows(token_store.train, rows, positions)} | {
                kind + ", separate" * separate: lambda kind=kind, separate=separate: open_loader(
                    token_store.train,
                    kind,
                    separate,
                    rows,
                    positions,
                    first=1000 if rows < 100 else 0,
                )
                for kind, separate in (("concat", False), ("concat", True), ("best_fit", True))
            }
            row = {
                name: statistics.median(
                    rounds_of(lambda make=make: loader_rate(make(), rows * positions))
                )
                for name, make in loaders.items()
            }
            results[f"loader {rows}x{positions}"] = row
            print(
                f"  {rows:4} × {positions:<12}"
                + "".join(f"{rate / 1e6:22.1f}" for rate in row.values()),
                flush=True,
            )
    print(json.dumps(results))


if __name__ == "__main__":
    cli.run(main)
