"""Imports of tensorboardX, which writes event files and has the checksum of TFRecords."""

import contextlib
import sys


@contextlib.contextmanager
def without_torch():
    # tensorboardX would import PyTorch for images, which takes 1.3 seconds.
    hides = "torch" not in sys.modules
    if hides:
        sys.modules["torch"] = None
    try:
        yield
    finally:
        if hides:
            del sys.modules["torch"]
