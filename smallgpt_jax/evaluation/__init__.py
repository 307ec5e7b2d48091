"""Benchmarks: tasks and metrics of lm-evaluation-harness, run on models of this project."""

import os

# tqdm and huggingface_hub read these variables when they are imported. The variables turn off
# progress bars, and the warnings that would be printed before the error message if the hub is
# unreachable.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
