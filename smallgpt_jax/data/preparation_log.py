"""Messages during and after the preparation of a token store."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from smallgpt_jax.data.encoding import EncodedBatch
from smallgpt_jax.data.parts import DocumentBatch
from smallgpt_jax.data.store import DOCUMENTS, SPLITS
from smallgpt_jax.data.unfinished_store import format_skipped
from smallgpt_jax.formatting import duration, millions

PROGRESS_SECONDS = 10  # minimum time between progress messages


def log_progress(batches: Iterator[tuple[DocumentBatch, dict[str, EncodedBatch]]], first: float, log) -> Iterator:
    """Yields `batches`. Logs progress from the fraction `first` on, speed and remaining time every PROGRESS_SECONDS."""
    started = logged = time.monotonic()
    tokens = 0
    for batch, encoded in batches:
        yield batch, encoded
        tokens += sum(len(split.tokens) for split in encoded.values())
        if time.monotonic() - logged >= PROGRESS_SECONDS:
            logged = time.monotonic()
            seconds = logged - started
            left = seconds * (1 - batch.done) / (batch.done - first) if batch.done > first else None
            log(f"  {batch.done:4.0%}   {millions(tokens)} tokens, {tokens / seconds:,.0f} tokens/s"
                + (f", {duration(left)} left" if left is not None else ""))


def size_message(folder: Path, metadata: dict, seconds: float) -> str:
    splits = metadata["splits"]
    starts = [np.append(np.fromfile(folder / f"{name}{DOCUMENTS}", np.int64), splits[name]["tokens"])
              for name in SPLITS]
    lengths = np.concatenate([np.diff(s) for s in starts])
    median, most, longest = (int(x) for x in np.quantile(lengths, (0.5, 0.95, 1), method="nearest"))
    tokens = sum(split["tokens"] for split in splits.values())
    text_bytes = sum(split["text_bytes"] for split in splits.values())
    lines = [f"{metadata['made_from']['source']}: {len(lengths):,} documents, "
             f"{millions(splits['train']['tokens'])} tokens for training, "
             f"{millions(splits['validation']['tokens'])} for validation, "
             f"{text_bytes / tokens:.2f} bytes per token ({duration(seconds)})",
             f"tokens per document: median {median:,}, 95% at most {most:,}, longest {longest:,}"]
    if metadata["skipped"]:
        lines.append(f"skipped: {format_skipped(metadata['skipped'])}")
    return "\n".join(lines)
