"""Benchmarks, through lm-evaluation-harness: its tasks and its arithmetic, our forward pass."""

import os

# Looked at when the libraries are imported. Of progress bars there is one of our own; of a hub that cannot be
# reached one error tells enough.
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
