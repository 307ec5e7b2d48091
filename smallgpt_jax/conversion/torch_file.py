"""Reads what `torch.save` has written, without PyTorch, and without running anything that is in it.

A `.pt` file is a zip archive: a pickle that says what there is, and the numbers of each tensor in a
file of their own. A pickle can name any function and have it called; this reader knows the few names
that tensors need, makes an inert `Record` of the instances of a class that the caller expects, and
refuses all others.
"""

import io
import pickle
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from smallgpt_jax.errors import UserError

DTYPES = {
    "FloatStorage": np.float32, "DoubleStorage": np.float64, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8, "BoolStorage": np.bool_}


class Record:
    """What is left of an instance of a class that is not imported: its attributes."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.__dict__.update(state)


class Dictionary(dict):
    """An OrderedDict; torch hangs attributes onto the ones it writes."""


class StorageType(NamedTuple):
    dtype: type


def read(path: Path, records: Collection[str] = ()):
    """What was saved in `path`: tensors as NumPy arrays, instances of the classes named in `records`
    as `Record`s.

    Raises UserError if it is no such file, is damaged, or names anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise UserError(f"{path}: a zip archive, but not one that torch.save has written")
            root = pickles[0].removesuffix("data.pkl")
            byteorder = f"{root}byteorder"
            if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
                raise UserError(f"{path}: written on a big-endian machine, which is not supported")
            return _Unpickler(path, archive, root, records).load()
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: not a file of torch.save (since PyTorch 1.6), or cut short ({error})"
                        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # of all kinds: a pickle is a program, and this one is broken
        raise UserError(f"{path}: damaged, or not a checkpoint ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, archive: zipfile.ZipFile, root: str, records: Collection[str]):
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self._path, self._archive, self._root, self._records = path, archive, root, records
        self._storages = {}

    def find_class(self, module: str, name: str):
        if (module, name) == ("collections", "OrderedDict"):
            return Dictionary
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")):
            return tensor if name == "_rebuild_tensor_v2" else parameter
        if module == "torch" and name in DTYPES:
            return StorageType(DTYPES[name])
        if f"{module}.{name}" in self._records:
            return Record
        raise UserError(f"{self._path}: it wants {module}.{name} to be run, which a checkpoint has no need of; "
                        "nothing of it has been")

    def persistent_load(self, identifier):
        """The numbers of a storage, ("storage", type, key, device, size)."""
        _, storage_type, key, _, size = identifier
        if key not in self._storages:
            numbers = np.frombuffer(self._archive.read(f"{self._root}data/{key}"), storage_type.dtype)
            if len(numbers) != size:
                raise ValueError(f"data/{key} has {len(numbers)} numbers, not {size}")
            self._storages[key] = numbers
        return self._storages[key]


def tensor(storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_):
    """The tensor that lies in a storage like this. Raises ValueError if it reaches beyond it."""
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    if 0 not in shape and not (offset >= 0 and min(strides, default=0) >= 0 and last < len(storage)):
        raise ValueError("a tensor reaches beyond its storage")
    return np.lib.stride_tricks.as_strided(
        storage[offset:], shape, [stride * storage.itemsize for stride in strides]).copy()


def parameter(data: np.ndarray, *_):
    return data
