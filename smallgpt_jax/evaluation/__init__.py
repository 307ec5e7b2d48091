"""Benchmarks, through lm-evaluation-harness: its tasks and its arithmetic, our forward pass."""

import os

# Of the harness's progress bars: there is one of our own. It is looked at when tqdm is imported.
os.environ.setdefault("TQDM_DISABLE", "1")
