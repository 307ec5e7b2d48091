"""Benchmarks: tasks and metrics of lm-evaluation-harness, run on models of this project."""

import os

# These must be set before tqdm and huggingface_hub are imported. They turn off progress bars, and the warnings that
# would precede the error message if the hub is unreachable.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
