"""Reads what `torch.save` has written, without PyTorch, and without running anything that is in it.

A `.pt` file is a zip archive: a pickle that says what there is, and the numbers of each tensor in a
file of their own. A pickle can name any function and have it called; this reader knows the few names
that tensors need, makes an inert `Record` of the instances of a class that the caller expects, and
refuses all others.

Nor does it trust any size: a member is read only if it is stored as it is and fits into the file, and
tensors are views of what was read. What a file makes this reader allocate is a few times its own size,
and at most some hundred bytes for each byte of its pickle, whose length is limited.
"""

import io
import math
import pickle
import pickletools
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
MAX_PICKLE_BYTES = 2**22  # a tensor takes some 150
MAX_SHARING = 8  # bytes of all tensors for each byte of the file: tied weights take two


class Record:
    """What is left of an instance of a class that is not imported: its attributes."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.__dict__.update(state)


class StorageType(NamedTuple):
    dtype: np.dtype


class Storage(NamedTuple):
    """The numbers that tensors are parts of."""

    content: bytes
    dtype: np.dtype

    def __len__(self) -> int:
        return len(self.content) // self.dtype.itemsize


class Members:
    """Reads members of a zip archive that are stored uncompressed, as torch.save writes them.

    All of them together are no larger than the archive: neither members that claim to be large nor
    members that overlap make a small file a large one.
    """

    def __init__(self, archive: zipfile.ZipFile, archive_bytes: int):
        self._archive, self._bytes_left = archive, archive_bytes

    def size(self, name: str) -> int:
        return self._archive.getinfo(name).file_size

    def read(self, name: str) -> bytes:
        info = self._archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"{name} is compressed, which torch.save never does")
        self._bytes_left -= info.file_size
        if self._bytes_left < 0:
            raise ValueError(f"{name} is larger than the file")
        return self._archive.read(info)


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
            archive_bytes = path.stat().st_size
            members = Members(archive, archive_bytes)
            byteorder = f"{root}byteorder"
            if byteorder in archive.namelist() and members.read(byteorder) != b"little":
                raise UserError(f"{path}: written on a big-endian machine, which is not supported")
            if members.size(pickles[0]) > MAX_PICKLE_BYTES:
                raise ValueError(f"{pickles[0]} is larger than {MAX_PICKLE_BYTES:,} bytes")
            program = members.read(pickles[0])
            check_pickle(program)
            return _Unpickler(path, program, members, root, records, MAX_SHARING * archive_bytes).load()
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: not a file of torch.save (since PyTorch 1.6), or cut short ({error})"
                        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # of all kinds: a pickle is a program, and this one is broken
        raise UserError(f"{path}: damaged, or not a checkpoint ({type(error).__name__}: {error})") from None


def check_pickle(program: bytes) -> None:
    """Raises ValueError if a pickle numbers its memo beyond the values it has, or is cut short.

    An unpickler has a table as long as the largest number, and room for a string before it is read.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
        if "PUT" in opcode.name and argument > count:
            raise ValueError(f"its pickle stores value {argument:,} of {count:,}")


def tensors_only(saved, path: Path) -> dict[str, np.ndarray]:
    """What was saved, if it is tensors by name. Raises UserError if not."""
    if not isinstance(saved, dict) or not all(
            isinstance(name, str) and isinstance(x, np.ndarray) for name, x in saved.items()):
        raise UserError(f"{path}: not a checkpoint: it holds more than tensors by name")
    return dict(saved)


class _Unpickler(pickle.Unpickler):
    """What a pickle may name is made anew for each file, so that none can change it for the next."""

    def __init__(self, path: Path, program: bytes, members: Members, root: str, records: Collection[str],
                 tensor_bytes: int):
        super().__init__(io.BytesIO(program))
        self._path, self._members, self._root, self._storages = path, members, root, {}
        self._tensor_bytes_left = tensor_bytes
        self._known = {
            # A dictionary that takes attributes: torch hangs some onto those it writes.
            "collections.OrderedDict": type("Dictionary", (dict,), {}),
            "torch._utils._rebuild_tensor_v2": lambda *arguments: self._tensor(*arguments[:4]),
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            **{f"torch.{name}": StorageType(np.dtype(dtype)) for name, dtype in DTYPES.items()},
            **{name: type("Record", (Record,), {}) for name in records}}

    def find_class(self, module: str, name: str):
        if f"{module}.{name}" not in self._known:
            raise UserError(f"{self._path}: it wants {module}.{name} to be run, which a checkpoint has no need of; "
                            "nothing of it has been")
        return self._known[f"{module}.{name}"]

    def persistent_load(self, identifier):
        """The numbers of a storage, ("storage", type, key, device, size)."""
        _, storage_type, key, _, size = identifier
        if not isinstance(storage_type, StorageType) or not isinstance(key, str) or not isinstance(size, int):
            raise ValueError("a storage of no known type")
        if key not in self._storages:
            name, dtype = f"{self._root}data/{key}", storage_type.dtype
            if self._members.size(name) != size * dtype.itemsize:
                raise ValueError(f"data/{key} has {self._members.size(name):,} bytes, not {size * dtype.itemsize:,}")
            self._storages[key] = Storage(self._members.read(name), dtype)
        return self._storages[key]

    def _tensor(self, *arguments) -> np.ndarray:
        x = tensor(*arguments)
        self._tensor_bytes_left -= x.nbytes
        if self._tensor_bytes_left < 0:
            raise ValueError(f"its tensors are more than {MAX_SHARING} times as large as the file")
        return x


def tensor(storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The tensor that is this part of a storage: a view, read-only.

    Raises ValueError if it reaches beyond it, or is larger: the arguments are whatever a file says.
    """
    is_sound = (type(storage) is Storage and type(shape) is tuple and type(strides) is tuple
                and len(shape) == len(strides)
                and all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)))
    if not is_sound:
        raise ValueError("a tensor of no known form")
    if 0 in shape:
        return np.empty(shape, storage.dtype)
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
    if last >= len(storage) or math.prod(shape) > len(storage):
        raise ValueError("a tensor reaches beyond its storage")
    itemsize = storage.dtype.itemsize
    return np.ndarray(shape, storage.dtype, storage.content, offset * itemsize,
                      [stride * itemsize for stride in strides])
