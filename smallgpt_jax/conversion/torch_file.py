"""Reads files written by `torch.save`, without PyTorch and without running code in the files.

A `.pt` file is a zip archive. One member is a pickle of the saved object, in which each tensor refers to a storage.
Each storage is a member of its own. A pickle can call any function by name. This reader therefore allows only the few
names that tensors need, and the classes that the caller expects. Instances of these classes become inert `Record`s.

Sizes in the file are not trusted either. Members must be uncompressed and not larger than the file. Tensors are views
of the bytes read. The memory is therefore at most a few times the file's size, plus a few hundred bytes per byte of the
pickle. The length of the pickle is limited, too.
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
MAX_PICKLE_BYTES = 2**22  # a tensor takes about 150 bytes of the pickle
# The maximum total size of a file's tensors, as a multiple of the file size. In a valid file, it can be up to 2,
# because tied weights are stored once but count as two tensors.
MAX_SHARING = 8


class Record:
    """Stand-in for an instance of a class that is not imported. It has the instance's attributes, but no methods."""

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        self.__dict__.update(state)


class StorageType(NamedTuple):
    """Stand-in for a torch storage class, such as FloatStorage."""

    dtype: np.dtype


class Storage(NamedTuple):
    """The flat buffer that tensors are views of."""

    content: bytes
    dtype: np.dtype

    def __len__(self) -> int:
        return len(self.content) // self.dtype.itemsize


class Members:
    """Reads the members of a zip archive. The members must be uncompressed, as torch.save writes them.

    Raises ValueError once the total size of the members read exceeds the archive's size. This bounds the memory even if
    an archive declares false sizes or overlapping members.
    """

    def __init__(self, archive: zipfile.ZipFile, archive_bytes: int):
        self._archive, self._bytes_left = archive, archive_bytes

    def size(self, name: str) -> int:
        return self._archive.getinfo(name).file_size

    def read(self, name: str) -> bytes:
        info = self._archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"{name} is compressed; torch.save does not compress")
        self._bytes_left -= info.file_size
        if self._bytes_left < 0:
            raise ValueError(f"{name} is larger than the file")
        return self._archive.read(info)


def read_torch_file(path: Path, records: Collection[str] = ()):
    """Returns the object saved in `path`, with tensors as NumPy arrays.

    Instances of the classes named in `records` become `Record`s. Raises UserError for damaged files, for files not
    written by `torch.save`, and for pickles that name any other class or function, except those that tensors need.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise UserError(f"{path}: a zip archive, but not written by torch.save")
            root = pickles[0].removesuffix("data.pkl")
            archive_bytes = path.stat().st_size
            members = Members(archive, archive_bytes)
            byteorder = f"{root}byteorder"
            if byteorder in archive.namelist() and members.read(byteorder) != b"little":
                raise UserError(f"{path}: written on a big-endian machine; not supported")
            if members.size(pickles[0]) > MAX_PICKLE_BYTES:
                raise ValueError(f"{pickles[0]} is larger than {MAX_PICKLE_BYTES:,} bytes")
            program = members.read(pickles[0])
            check_pickle(program)
            return _Unpickler(path, program, members, root, records, MAX_SHARING * archive_bytes).load()
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: not written by torch.save (PyTorch 1.6 or later), or truncated ({error})"
                        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # a pickle is a program, so a broken one can raise anything
        raise UserError(f"{path}: damaged, or not a checkpoint ({type(error).__name__}: {error})") from None


def check_pickle(program: bytes) -> None:
    """Raises ValueError for pickles with which the unpickler could allocate too much memory.

    The unpickler's memo is as long as the largest memo index, so an index must not exceed the number of preceding
    opcodes. The unpickler allocates the declared length of a string before it reads the string, so truncated pickles
    are refused.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
        if "PUT" in opcode.name and argument > count:
            raise ValueError(f"its pickle has memo index {argument:,} after {count:,} opcodes")


def require_tensors(saved, path: Path) -> dict[str, np.ndarray]:
    """Returns `saved` if it is a dictionary of tensors. Raises UserError if not."""
    if not isinstance(saved, dict) or not all(
            isinstance(name, str) and isinstance(x, np.ndarray) for name, x in saved.items()):
        raise UserError(f"{path}: not a checkpoint (expected a dictionary of named tensors)")
    return dict(saved)


class _Unpickler(pickle.Unpickler):
    """Unpickler that replaces a few known classes and functions by stand-ins, and refuses all others.

    The stand-ins are created anew for each file. If a pickle changes a stand-in, other files are not affected.
    """

    def __init__(self, path: Path, program: bytes, members: Members, root: str, records: Collection[str],
                 tensor_bytes: int):
        super().__init__(io.BytesIO(program))
        self._path, self._members, self._root, self._storages = path, members, root, {}
        self._tensor_bytes_left = tensor_bytes
        self._known = {
            # A subclass of dict, because torch sets attributes on state dicts.
            "collections.OrderedDict": type("Dictionary", (dict,), {}),
            "torch._utils._rebuild_tensor_v2": lambda *arguments: self._tensor(*arguments[:4]),
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            **{f"torch.{name}": StorageType(np.dtype(dtype)) for name, dtype in DTYPES.items()},
            **{name: type("Record", (Record,), {}) for name in records}}

    def find_class(self, module: str, name: str):
        if f"{module}.{name}" not in self._known:
            raise UserError(f"{self._path}: refused: its pickle names {module}.{name}, which no checkpoint needs; no "
                            "code was run")
        return self._known[f"{module}.{name}"]

    def persistent_load(self, identifier):
        """Returns the storage with the identifier ("storage", type, key, device, size)."""
        _, storage_type, key, _, size = identifier
        if not isinstance(storage_type, StorageType) or not isinstance(key, str) or not isinstance(size, int):
            raise ValueError("unknown storage type")
        if key not in self._storages:
            name, dtype = f"{self._root}data/{key}", storage_type.dtype
            if self._members.size(name) != size * dtype.itemsize:
                raise ValueError(f"data/{key} has {self._members.size(name):,} bytes, not {size * dtype.itemsize:,}")
            self._storages[key] = Storage(self._members.read(name), dtype)
        return self._storages[key]

    def _tensor(self, *arguments) -> np.ndarray:
        x = view_storage(*arguments)
        self._tensor_bytes_left -= x.nbytes
        if self._tensor_bytes_left < 0:
            raise ValueError(f"its tensors are more than {MAX_SHARING} times as large as the file")
        return x


def view_storage(storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Returns a read-only view of a storage. `offset` and `strides` are in elements.

    The arguments come from the file unchecked. Raises ValueError if they are invalid, if the view reaches beyond the
    storage, or if the view has more elements than the storage.
    """
    is_valid = (type(storage) is Storage and type(shape) is tuple and type(strides) is tuple
                and len(shape) == len(strides)
                and all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)))
    if not is_valid:
        raise ValueError("invalid tensor arguments")
    if 0 in shape:
        return np.empty(shape, storage.dtype)
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
    if last >= len(storage) or math.prod(shape) > len(storage):
        raise ValueError("a tensor reaches beyond its storage")
    itemsize = storage.dtype.itemsize
    return np.ndarray(shape, storage.dtype, storage.content, offset * itemsize,
                      [stride * itemsize for stride in strides])
