"""Messages during and after the preparation of a token store."""

import time
from pathlib import Path

import numpy as np

from smallgpt_jax.data.store import SPLITS, documents_file
from smallgpt_jax.formatting import duration, millions

PROGRESS_SECONDS = 10  # minimum time between progress messages


class PreparationLog:
    """Logs progress, speed and remaining time every PROGRESS_SECONDS, and the size of the finished store."""

    def __init__(self, log, done: float):
        self._log, self._first, self._tokens = log, done, 0
        self._started = self._logged = time.monotonic()

    def update(self, done: float, tokens: int) -> None:
        self._tokens += tokens
        if time.monotonic() - self._logged < PROGRESS_SECONDS:
            return
        self._logged = time.monotonic()
        seconds = time.monotonic() - self._started
        left = seconds * (1 - done) / (done - self._first) if done > self._first else None
        self._log(f"  {done:4.0%}   {millions(self._tokens)} tokens, "
                  f"{self._tokens / seconds:,.0f} tokens/s"
                  + (f", {duration(left)} left" if left is not None else ""))

    def finish(self, folder: Path, metadata: dict) -> None:
        self._log(size_message(folder, metadata, time.monotonic() - self._started))


def size_message(folder: Path, metadata: dict, seconds: float) -> str:
    splits = metadata["splits"]
    starts = [np.append(np.fromfile(documents_file(folder, name), np.int64), splits[name]["tokens"])
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


def format_skipped(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
