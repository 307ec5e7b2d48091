"""Benchmarks: the tasks and metrics of lm-evaluation-harness, the forward pass of this project."""

import os

# Read by the libraries on import: hide their progress bars, and raise a single error for an unreachable hub.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
