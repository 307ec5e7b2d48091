"""Benchmarks: tasks and metrics of lm-evaluation-harness, run on models of this project."""

import os

# Set before tqdm and huggingface_hub are imported: no progress bars, and no warnings before the error if the hub is
# unreachable.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
