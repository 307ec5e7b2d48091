"""Reads files written by `torch.save`, without PyTorch and without running code in the files.

A `.pt` file is a zip archive: a pickle of the saved object, and one member per storage, to which
its tensors refer. A pickle is a program: it can call any function by name, and even without calls,
it can work for years (a tuple that contains a tuple twice, forty levels deep, takes 2⁴⁰ steps to
hash). So Python's unpickler is not used. `_Interpreter` executes the opcodes that tensors need, in
a bounded number of steps each.

Sizes in the file are not trusted either. Tensors are views of the bytes read. The memory is
therefore at most a few times the file's size, plus a few hundred bytes per opcode.
"""

import math
import pickletools
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_reason

DTYPES = {
    f"torch.{name}Storage": np.dtype(dtype)
    for name, dtype in {
        "Float": np.float32,
        "Double": np.float64,
        "Half": np.float16,
        "BFloat16": ml_dtypes.bfloat16,
        "Long": np.int64,
        "Int": np.int32,
        "Short": np.int16,
        "Char": np.int8,
        "Byte": np.uint8,
        "Bool": np.bool_,
    }.items()
}
MAX_PICKLE_BYTES = 2**22  # a tensor takes about 150 bytes of the pickle
MAX_OPCODES = 2**19  # a tensor takes about 30 opcodes
MAX_KEY = 256  # characters in a key of a dictionary, such as the name of a tensor
MAX_AXES = 32
# The maximum total size of a file's tensors, as a multiple of the file size. In a valid file, it
# can be up to 2, because tied weights are stored once but count as two tensors.
MAX_SHARING = 8

# Opcodes that push their argument, or a constant.
VALUES = {
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
}
CONSTANTS = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
SKIPPED = {"PROTO", "FRAME", "STOP"}
PUTS, GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
TUPLE_SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Record:
    """Stand-in for an instance of a class that is not imported."""

    def __init__(self):
        self.attributes = {}


class Global(NamedTuple):
    """Stand-in for a function or class: one of FUNCTIONS or DTYPES, or a class whose instances are
    `Record`s.
    """

    name: str


FUNCTIONS = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)


class Storage(NamedTuple):
    """The flat buffer that tensors are views of."""

    content: bytes
    dtype: np.dtype

    def __len__(self) -> int:
        return len(self.content) // self.dtype.itemsize


class Members:
    """Reads uncompressed members of a zip archive, as torch.save writes them, in total at most the
    archive's size.

    This bounds the memory even if an archive declares false sizes or overlapping members.
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
    """Returns the saved object, with NumPy arrays. Instances of the classes in `records` become
    `Record`s.
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
            return _Interpreter(path, members, root, records, MAX_SHARING * archive_bytes).run(
                program
            )
    except zipfile.BadZipFile as error:
        raise UserError(
            f"{path}: not written by torch.save (PyTorch 1.6 or later), or truncated "
            f"({short_reason(error)})"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # a broken pickle can lead to any error
        raise UserError(
            f"{path}: damaged, or not a checkpoint ({type(error).__name__}: {short_reason(error)})"
        ) from None


def is_key(value) -> bool:
    """Whether a value may be the key of a dictionary. Hashing and comparing other values could take
    forever.
    """
    return (
        len(value) <= MAX_KEY if type(value) is str else type(value) is int and 0 <= value < 2**31
    )


def require_tensors(saved, path: Path) -> dict[str, np.ndarray]:
    if not isinstance(saved, dict) or not all(
        isinstance(name, str) and isinstance(x, np.ndarray) for name, x in saved.items()
    ):
        raise UserError(f"{path}: not a checkpoint (expected a dictionary of named tensors)")
    return dict(saved)


class _Interpreter:
    """Executes a pickle. Each opcode takes a number of steps that does not depend on the values
    made before it.

    So nothing is copied, compared or hashed, except short keys of dictionaries.
    """

    def __init__(
        self, path: Path, members: Members, root: str, records: Collection[str], tensor_bytes: int
    ):
        self._path, self._members, self._root, self._records = path, members, root, records
        self._tensor_bytes_left, self._storages = tensor_bytes, {}
        self._stack, self._marks, self._memo = [], [], {}

    def run(self, program: bytes):
        for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
            if count == MAX_OPCODES:
                raise ValueError(f"its pickle has more than {MAX_OPCODES:,} opcodes")
            self._execute(opcode.name, argument)
        return self._stack.pop()

    def _execute(self, name: str, argument) -> None:
        stack = self._stack
        if name in VALUES:
            if isinstance(argument, int) and argument.bit_length() > 63:
                raise ValueError("an integer does not fit into 64 bits")
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name]())
        elif name in PUTS:
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in GETS:
            stack.append(self._memo[argument])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in TUPLE_SIZES or name == "TUPLE":
            stack.append(tuple(self._pop_items(TUPLE_SIZES.get(name))))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop_items(1 if name == "APPEND" else None)
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop_items(2 if name == "SETITEM" else None)
            target = self._top(dict)
            if len(items) % 2 or not all(map(is_key, items[::2])):
                raise ValueError("a key of a dictionary is not a name")
            target.update(zip(items[::2], items[1::2]))
        elif name == "GLOBAL":
            stack.append(self._find_global(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(self._find_global(*self._pop_items(2)))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(self._call(*self._pop_items(2)))
        elif name == "BUILD":
            (state,) = self._pop_items(1)
            if (
                type(state) is dict and type(stack[-1]) is Record
            ):  # torch's attributes of dictionaries are ignored
                stack[-1].attributes = state
        elif name == "BINPERSID":
            stack.append(self._storage(*self._pop_items(1)))
        elif name not in SKIPPED:
            raise ValueError(f"its pickle has the opcode {name}, which no checkpoint needs")

    def _pop_items(self, count: int | None) -> list:
        """Removes the last `count` values from the stack, or with None, all values after the last
        mark.
        """
        start = len(self._stack) - count if count else self._marks.pop()
        if not (self._marks[-1] if self._marks else 0) <= start <= len(self._stack):
            raise ValueError("its pickle takes values that it has not made")
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _top(self, kind: type):
        if type(self._stack[-1]) is not kind:
            raise ValueError(f"expected a {kind.__name__}")
        return self._stack[-1]

    def _find_global(self, module: str, name: str):
        full = f"{module}.{name}"
        if full not in (*FUNCTIONS, *DTYPES, *self._records):
            raise UserError(
                f"{self._path}: refused: its pickle names {full[:100]}, which no checkpoint "
                "needs; no code was run"
            )
        return Global(full)

    def _call(self, function, arguments):
        if type(function) is not Global or type(arguments) is not tuple:
            raise ValueError("its pickle calls what is not a function")
        if function.name in self._records and not arguments:
            return Record()
        match function.name, arguments:
            case "collections.OrderedDict", ():
                return {}
            case "torch._utils._rebuild_parameter", (data, *_):
                return data
            case "torch._utils._rebuild_tensor_v2", (storage, offset, shape, strides, *_):
                return self._tensor(storage, offset, shape, strides)
        raise ValueError(f"unexpected arguments of {function.name}")

    def _storage(self, identifier):
        """Returns the storage with the identifier ("storage", type, key, device, size)."""
        _, storage_type, key, _, size = identifier
        dtype = DTYPES.get(storage_type.name) if type(storage_type) is Global else None
        if dtype is None or type(size) is not int or not is_key(key):
            raise ValueError("unknown storage type")
        if key not in self._storages:
            name = f"{self._root}data/{key}"
            if self._members.size(name) != size * dtype.itemsize:
                raise ValueError(
                    f"data/{key} has {self._members.size(name):,} bytes, not "
                    f"{size * dtype.itemsize:,}"
                )
            self._storages[key] = Storage(self._members.read(name), dtype)
        return self._storages[key]

    def _tensor(self, *arguments) -> np.ndarray:
        x = view_storage(*arguments)
        self._tensor_bytes_left -= x.nbytes
        if self._tensor_bytes_left < 0:
            raise ValueError(f"its tensors are more than {MAX_SHARING} times as large as the file")
        return x


def view_storage(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Returns a read-only view. The arguments come from the file unchecked; `offset` and `strides`
    are in elements.
    """
    is_valid = (
        type(storage) is Storage
        and type(shape) is tuple
        and type(strides) is tuple
        and len(shape) == len(strides) <= MAX_AXES
        and all(type(number) is int and number >= 0 for number in (offset, *shape, *strides))
    )
    if not is_valid:
        raise ValueError("invalid tensor arguments")
    if 0 in shape:
        return np.empty(shape, storage.dtype)
    last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
    if last >= len(storage) or math.prod(shape) > len(storage):
        raise ValueError("a tensor reaches beyond its storage")
    itemsize = storage.dtype.itemsize
    return np.ndarray(
        shape,
        storage.dtype,
        storage.content,
        offset * itemsize,
        [stride * itemsize for stride in strides],
    )
