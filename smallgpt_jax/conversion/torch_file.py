"""Reads files written by `torch.save`, with PyTorch but without running code that a file names."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.formatting import short_reason

# The maximum total size of a file's tensors, as a multiple of the file size. In a valid file, it
# can be up to 2, because tied weights are stored once but count as two tensors.
_MAX_SHARING = 8


class Attributes:
    """Stand-in for an instance of a class that is not imported."""


def read_torch_file(path: Path, classes: Sequence[str] = ()):
    """Returns the saved object. Instances of `classes`, such as "models.GPTConfig", become
    `Attributes`; files that name any other class or function than tensors need are refused.
    """
    torch = import_library("torch", "torch")
    try:
        with (
            torch.serialization.safe_globals([_stand_in(name) for name in classes]),
            warnings.catch_warnings(action="ignore"),
        ):
            # mmap: no tensor is read before its size is checked
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # a broken file can lead to any error, with advice on other settings
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{path}: refused: its pickle names {named[1][:100]}, which no checkpoint needs; "
                "no code was run"
            ) from None
        raise UserError(
            f"{path}: damaged, or not written by torch.save (PyTorch 1.6 or later)"
        ) from None


def to_arrays(tensors, path: Path) -> dict[str, np.ndarray]:
    """Returns views of the file's tensors. Raises UserError for other objects than tensors."""
    torch = import_library("torch", "torch")
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(x, torch.Tensor) for name, x in tensors.items()
    ):
        raise UserError(f"{path}: not a checkpoint (expected a dictionary of named tensors)")
    try:
        arrays = {name: _to_array(x.detach(), torch) for name, x in tensors.items()}
    except (RuntimeError, TypeError) as error:
        raise UserError(f"{path}: has a tensor that is not dense ({short_reason(error)})") from None
    if sum(x.nbytes for x in arrays.values()) > _MAX_SHARING * path.stat().st_size:
        raise UserError(
            f"{path}: damaged, its tensors are more than {_MAX_SHARING} times as large as the file"
        )
    return arrays


def _to_array(x, torch) -> np.ndarray:
    if x.dtype == torch.bfloat16:  # which NumPy itself does not have
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def _stand_in(full_name: str) -> type:
    """PyTorch recognizes a class by its module and name."""
    module, _, name = full_name.rpartition(".")
    return type(name, (Attributes,), {"__module__": module})
