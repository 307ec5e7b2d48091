"""Reads the weight files of Hugging Face folders: safetensors, or a `pytorch_model.bin`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smallgpt_jax.conversion import torch_file
from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.storage.json_files import Each, Kind, read_json

# An index comes from somebody else, so it must not name files elsewhere.
_FILE_NAME = Kind(
    "the name of a safetensors file in the same folder",
    lambda name: (
        isinstance(name, str)
        and len(name) < 256
        and name == Path(name).name
        and name.endswith(".safetensors")
    ),
)
_MAX_HEADER_BYTES = 2**24  # of a safetensors file; a tensor takes about 100
_SINGLE, _INDEX, _PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


# The shapes are known before the weights are read, so that a config can be checked first.
class WeightFiles(NamedTuple):
    path: Path  # the file or the index, for error messages
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[], dict[str, np.ndarray]]


def open_weights(folder: Path) -> WeightFiles:
    """As in transformers, a single file precedes an index, which may be left from before."""
    if (folder / _SINGLE).is_file():
        return _open_safetensors(folder / _SINGLE, [folder / _SINGLE])
    if (folder / _INDEX).is_file():
        files = [folder / name for name in _indexed_names(folder / _INDEX)]
        return _open_safetensors(folder / _INDEX, files)
    path = folder / _PICKLED
    if not path.is_file():
        raise UserError(f"{folder}: no weights; expected {_SINGLE} or {_PICKLED}")
    tensors = torch_file.to_arrays(torch_file.read_torch_file(path), path)
    return WeightFiles(path, {name: x.shape for name, x in tensors.items()}, lambda: tensors)


def _indexed_names(index: Path) -> list[str]:
    content = read_json(
        index, {"weight_map": Each(_FILE_NAME)}, "expected an index of weight files"
    )
    names = set(content["weight_map"].values())
    if not names:
        raise UserError(f"{index}: the weight_map is empty")
    return sorted(names)


def _open_safetensors(path: Path, files: list[Path]) -> WeightFiles:
    safe_open = import_library("safetensors").safe_open

    def read(get: Callable) -> dict:
        """Returns {name: get(open file, name)} of all tensors."""
        tensors = {}
        for file in files:
            try:
                _require_short_header(file)
                with safe_open(file, framework="numpy") as opened:
                    tensors |= {name: get(opened, name) for name in opened.keys()}  # noqa: SIM118
            # SafetensorError, OSError, or KeyError for a dtype that NumPy lacks
            except Exception as error:
                raise UserError(
                    f"{file}: damaged, or not in the safetensors format ({short_reason(error)})"
                ) from None
        return tensors

    shapes = read(lambda opened, name: tuple(opened.get_slice(name).get_shape()))
    return WeightFiles(path, shapes, lambda: read(lambda opened, name: opened.get_tensor(name)))


def _require_short_header(path: Path) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"its header of {size:,} bytes is too large")
