"""The files of a path in a text source. They are listed once per `_FileSet`, when they are first
needed.
"""

import abc
import dataclasses
import glob
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from smallgpt_jax.data.parts import Member, Part
from smallgpt_jax.data.text_files import (
    ARCHIVE_SUFFIXES,
    COMPRESSED_SUFFIXES,
    ROW_SUFFIXES,
    TextFile,
    content_suffix,
    file_part,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.paths import as_path

STANDARD_LIBRARY = "python_stdlib"
# Folders of the standard library that are not read: tests (many Python distributions omit them),
# generated tables, and installed packages.
_STDLIB_EXCLUDED = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


@dataclasses.dataclass(frozen=True)
class _FileSet(Member):
    """A file, a folder with its subfolders, or a glob. Subclasses have two further properties:

    `is_folder`: whether only files with one of the `endings` are read
    `paths`: the files that the path names, including those in a folder that are not read
    """

    name: str
    # of the files in a folder that are read; an ending of compressed files may follow
    endings: tuple[str, ...]

    @cached_property
    def path(self) -> Path:
        return as_path("config.data.source", self.name)

    @abc.abstractmethod
    def describe(self, path: Path) -> TextFile: ...

    @cached_property
    def files(self) -> list[TextFile]:
        """Returns the files that are read. Raises UserError if there are none, and for archives."""
        read = list(filter(self.is_read, self.paths))
        if not read:
            why = "no such file"
            if self.is_folder:
                why = f"folder contains no {', '.join(self.endings)} file{self.suggest_endings()}"
            raise UserError(f"config.data.source={self.name!r}: {why}")
        for path in read:
            suffix = content_suffix(path)  # .tar of x.tar.gz
            if suffix in ARCHIVE_SUFFIXES:
                raise UserError(
                    f"{path}: {suffix} archives are not supported; unpack it, or compress "
                    f"single files as {', '.join(COMPRESSED_SUFFIXES)}"
                )
        return sorted(map(self.describe, read))

    @property
    def num_plain_texts(self) -> int:
        return sum(content_suffix(file.path) not in ROW_SUFFIXES for file in self.files)

    @property
    def identity(self) -> list:
        return [(file.location, file.size, file.version) for file in self.files]

    def parts(self, max_passage: int) -> list[Part]:
        return [file_part(file, max_passage) for file in self.files]

    def message(self) -> str:
        """Returns how many files of a folder are read and how many not; "" if it is no folder."""
        if not self.is_folder:
            return ""
        read, other = [], []
        for ending, count in self.count_endings():
            names = read if ending in self.endings else other
            names.append(f"{count:,} {ending or 'without ending'}")
        if hidden := sum(map(self.is_hidden, self.paths)):
            other.append(f"{hidden:,} hidden")
        return (
            f"{self.name}: files read: {', '.join(read) or 'none'}; files not read: "
            f"{', '.join(other) or 'none'}{self.suggest_endings()}"
        )

    def is_hidden(self, path: Path) -> bool:
        """Returns whether a file or a folder around it, inside the source, is such as .git."""
        return any(name.startswith(".") for name in path.relative_to(self.path).parts)

    def is_read(self, path: Path) -> bool:
        # In object storage, an object can have the name of a folder.
        if not self.is_folder or path == self.path:
            return True
        return content_suffix(path) in self.endings and not self.is_hidden(path)

    def count_endings(self) -> list[tuple[str, int]]:
        """Returns the endings and how often they occur, the most frequent first. Ignores hidden
        files.
        """
        visible = (path for path in self.paths if not self.is_hidden(path))
        return Counter(map(content_suffix, visible)).most_common()

    def suggest_endings(self) -> str:
        for ending, count in self.count_endings():
            if ending not in ("", *self.endings, *ARCHIVE_SUFFIXES):
                endings = [known for known in self.endings if known not in ROW_SUFFIXES]
                return (
                    f"; to read its {count:,} {ending} files as text, set "
                    f"--config.data.text_endings={','.join([*endings, ending])}"
                )
        return ""


class LocalFiles(_FileSet):
    is_local = True

    @cached_property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @cached_property
    def folders(self) -> list[tuple[str, list[str]]]:
        """Returns the folders of the source, each with the names of its files."""
        return list(_walk_folders(self.path)) if self.is_folder else []

    @cached_property
    def paths(self) -> list[Path]:
        if self.is_folder:
            paths = [Path(parent, name) for parent, names in self.folders for name in names]
        elif self.path.is_file():
            paths = [self.path]
        else:
            paths = map(Path, glob.glob(str(self.path), recursive=True))
        return _drop_linked_duplicates(sorted(path for path in paths if path.is_file()))

    def describe(self, path: Path) -> TextFile:
        stat = path.stat()
        return TextFile(path, str(path.resolve()), stat.st_size, stat.st_mtime_ns)

    def enclosing_folder(self, path: Path) -> Path | None:
        if object_storage.is_remote(path):
            return None
        enclosing = set(path.resolve().parents)
        folders = (Path(folder).resolve() for folder, _ in self.folders)
        return next((folder for folder in folders if folder in enclosing), None)

    def absolute_name(self) -> str:
        return str(self.path.absolute())


class RemoteFiles(_FileSet):
    """Files in object storage. A glob matches whole paths, and all of its files are read."""

    is_local = False

    @cached_property
    def is_pattern(self) -> bool:
        return glob.has_magic(self.name)

    @cached_property
    def is_folder(self) -> bool:
        return not self.is_pattern and bool(self.paths.keys() - {self.path})

    @cached_property
    def paths(self) -> dict[Path, object_storage.RemoteFile]:
        with object_storage.name_path_in_errors(f"config.data.source={self.name!r}"):
            return object_storage.list_files(self.path, self.is_pattern)

    def describe(self, path: Path) -> TextFile:
        return TextFile(path, str(path), *self.paths[path])

    def enclosing_folder(self, path: Path) -> Path | None:
        return self.path if self.path in path.parents else None


class StandardLibrary(LocalFiles):
    is_folder = False

    @cached_property
    def path(self) -> Path:
        return Path(sysconfig.get_path("stdlib"))

    @cached_property
    def paths(self) -> list[Path]:
        return sorted(
            path
            for path in self.path.rglob("*.py")
            if not _STDLIB_EXCLUDED & set(path.relative_to(self.path).parts)
        )

    num_plain_texts = 0  # each file is one document

    @property
    def identity(self) -> list:
        return [(self.name, sys.version)]

    def parts(self, max_passage: int) -> list[Part]:
        return [file_part(file, max_passage, is_code=True) for file in self.files]


def _walk_folders(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields `root` and each folder below it, with the names of the files in it. Follows symbolic
    links to folders.

    A folder reached through several links is yielded once, so the function returns even if links
    form a cycle.
    """
    seen, waiting = set(), [str(root)]
    for start in waiting:  # the loop body appends to `waiting`
        for folder, names, files in os.walk(start):
            real = os.path.realpath(folder)
            if real in seen:
                names.clear()  # do not walk the subfolders again
                continue
            seen.add(real)
            names.sort()
            subfolders = (os.path.join(folder, name) for name in names)
            waiting += filter(os.path.islink, subfolders)  # os.walk does not follow links
            yield folder, files


def _drop_linked_duplicates(paths: list[Path]) -> list[Path]:
    """If links give a file several paths, keeps only the shortest one."""
    kept = {}
    for path in sorted(paths, key=lambda path: (len(path.parts), path)):
        stat = path.stat()
        # Some file systems have no numbers of files.
        identity = (stat.st_dev, stat.st_ino) if stat.st_ino else os.path.realpath(path)
        kept.setdefault(identity, path)
    return sorted(kept.values())
