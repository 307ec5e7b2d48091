"""Reads what `torch.save` has written, without PyTorch, and without running anything that is in it.

A `.pt` file is a zip archive: a pickle that says what there is, and the numbers of each tensor in a
file of their own. A pickle can name any function and have it called; this reader knows the few names
that tensors need, makes an inert `Record` of the instances of a class that the caller expects, and
refuses all others.
"""

import io
import math
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


class StorageType(NamedTuple):
    dtype: type


class Storage(NamedTuple):
    """The numbers that tensors lie in."""

    numbers: np.ndarray


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


def tensors_only(saved, path: Path) -> dict[str, np.ndarray]:
    """What was saved, if it is tensors by name. Raises UserError if not."""
    if not isinstance(saved, dict) or not all(
            isinstance(name, str) and isinstance(x, np.ndarray) for name, x in saved.items()):
        raise UserError(f"{path}: not a checkpoint: it holds more than tensors by name")
    return dict(saved)


class _Unpickler(pickle.Unpickler):
    """What a pickle may name is made anew for each file, so that none can change it for the next."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, root: str, records: Collection[str]):
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self._path, self._archive, self._root, self._storages = path, archive, root, {}
        self._known = {
            # A dictionary that takes attributes: torch hangs some onto those it writes.
            "collections.OrderedDict": type("Dictionary", (dict,), {}),
            "torch._utils._rebuild_tensor_v2": lambda *arguments: tensor(*arguments[:4]),
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            **{f"torch.{name}": StorageType(dtype) for name, dtype in DTYPES.items()},
            **{name: type("Record", (Record,), {}) for name in records}}

    def find_class(self, module: str, name: str):
        if f"{module}.{name}" not in self._known:
            raise UserError(f"{self._path}: it wants {module}.{name} to be run, which a checkpoint has no need of; "
                            "nothing of it has been")
        return self._known[f"{module}.{name}"]

    def persistent_load(self, identifier):
        """The numbers of a storage, ("storage", type, key, device, size)."""
        _, storage_type, key, _, size = identifier
        if not isinstance(storage_type, StorageType) or not isinstance(key, str):
            raise ValueError("a storage of no known type")
        if key not in self._storages:
            numbers = np.frombuffer(self._archive.read(f"{self._root}data/{key}"), storage_type.dtype)
            if len(numbers) != size:
                raise ValueError(f"data/{key} has {len(numbers)} numbers, not {size}")
            self._storages[key] = Storage(numbers)
        return self._storages[key]


def tensor(storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The tensor that lies in a storage like this.

    Raises ValueError if it reaches beyond it, or is larger: the arguments are whatever a file says.
    """
    is_sound = (type(storage) is Storage and type(shape) is tuple and type(strides) is tuple
                and len(shape) == len(strides)
                and all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)))
    if not is_sound:
        raise ValueError("a tensor of no known form")
    if 0 in shape:
        return np.empty(shape, storage.numbers.dtype)
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
    if last >= len(storage.numbers) or math.prod(shape) > len(storage.numbers):
        raise ValueError("a tensor reaches beyond its storage")
    return np.lib.stride_tricks.as_strided(
        storage.numbers[offset:], shape, [stride * storage.numbers.itemsize for stride in strides]).copy()
