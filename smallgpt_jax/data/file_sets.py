"""The files of a path in a text source. They are listed once per `FileSet`, when they are first needed."""

import abc
import dataclasses
import glob
import sys
import sysconfig
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from smallgpt_jax.data.folders import count_endings, drop_linked_duplicates, suggest_endings, walk_folders
from smallgpt_jax.data.parts import Member, Part
from smallgpt_jax.data.text_files import (
    ARCHIVE_SUFFIXES,
    COMPRESSED_SUFFIXES,
    TextFile,
    content_suffix,
    file_part,
    local_file,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.object_storage import RemoteFile, is_remote, list_files, name_path_in_errors
from smallgpt_jax.storage.paths import as_path

STANDARD_LIBRARY = "python_stdlib"
# Folders of the standard library that are not read: tests (many Python distributions omit them), generated tables, and
# installed packages.
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
                   "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class FileSet(Member):
    """A file, a folder with its subfolders, or a glob."""

    name: str
    endings: tuple[str, ...]  # of the files in a folder that are read; an ending of compressed files may follow

    @cached_property
    def path(self) -> Path:
        return as_path("config.data.source", self.name)

    @property
    @abc.abstractmethod
    def is_folder(self) -> bool:
        """Whether only files with one of the `endings` are read."""

    @property
    @abc.abstractmethod
    def paths(self) -> Iterable[Path]:
        """The files that the path names, including those in a folder that are not read."""

    @abc.abstractmethod
    def find(self) -> list[TextFile]:
        """Returns the files that are read. Raises UserError if there are none."""

    @cached_property
    def files(self) -> list[TextFile]:
        """Returns the files that are read, sorted. Raises UserError if there are none."""
        files = self.find()
        if refused := [file.path for file in files if file.path.suffix.lower() in ARCHIVE_SUFFIXES]:
            raise UserError(f"{refused[0]}: {refused[0].suffix} archives are not supported; unpack it, or compress "
                            f"single files as {', '.join(COMPRESSED_SUFFIXES)}")
        return files

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def identity(self) -> list:
        return [(file.location, file.size, file.version) for file in self.files]

    def parts(self, passage: int) -> list[Part]:
        return [file_part(file, passage) for file in self.files]

    def message(self) -> str:
        """Returns how many files of a folder are read and how many are not, by ending; "" if it is no folder."""
        if not self.is_folder:
            return ""
        counts = count_endings(self.path, self.paths)
        read, other = (", ".join(f"{count:,} {ending or 'without ending'}" for ending, count in counts.most_common()
                                 if (ending in self.endings) == is_read) for is_read in (True, False))
        return (f"{self.name}: files read: {read or 'none'}; files not read: {other or 'none'}"
                + suggest_endings(self.path, self.paths, self.endings))


class LocalFiles(FileSet):
    is_local = True

    @cached_property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    @cached_property
    def folders(self) -> list[tuple[str, list[str]]]:
        return list(walk_folders(self.path)) if self.is_folder else []

    @cached_property
    def paths(self) -> list[Path]:
        if self.is_folder:
            return sorted(path for parent, names in self.folders for name in names
                          if (path := Path(parent, name)).is_file())
        if self.path.is_file():
            return [self.path]
        matches = map(Path, glob.glob(str(self.path), recursive=True))
        return drop_linked_duplicates(sorted(match for match in matches if match.is_file()))

    def find(self) -> list[TextFile]:
        read = [path for path in self.paths if not self.is_folder or content_suffix(path) in self.endings]
        if not read and self.is_folder:
            raise UserError(f"config.data.source={self.name!r}: folder contains no {', '.join(self.endings)} file"
                            + suggest_endings(self.path, self.paths, self.endings))
        if not read:
            raise UserError(f"config.data.source={self.name!r}: no such file")
        return list(map(local_file, read))

    def enclosing_folder(self, path: Path) -> Path | None:
        if is_remote(path):
            return None
        around = set(path.resolve().parents)
        return next((folder for found, _ in self.folders if (folder := Path(found).resolve()) in around), None)

    def absolute_name(self) -> str:
        return str(self.path.absolute())


class RemoteFiles(FileSet):
    """Files in object storage. A glob matches whole paths, and all of its files are read."""

    is_local = False

    @cached_property
    def is_pattern(self) -> bool:
        return glob.has_magic(self.name)

    @property
    def is_folder(self) -> bool:
        return not self.is_pattern and self.path not in self.paths

    @cached_property
    def paths(self) -> dict[Path, RemoteFile]:
        with name_path_in_errors(f"config.data.source={self.name!r}"):
            return list_files(self.path, self.is_pattern)

    def find(self) -> list[TextFile]:
        # Beside an object, there can be a folder of the same name.
        read = [TextFile(path, str(path), *entry) for path, entry in self.paths.items()
                if self.is_pattern or path == self.path or content_suffix(path) in self.endings]
        if not read:
            raise UserError(f"config.data.source={self.name!r}: no such file, and no folder with "
                            f"{', '.join(self.endings)} files" + suggest_endings(self.path, self.paths, self.endings))
        return sorted(read)

    def enclosing_folder(self, path: Path) -> Path | None:
        return self.path if self.path in path.parents else None


class StandardLibrary(LocalFiles):
    is_folder = False

    @cached_property
    def path(self) -> Path:
        return Path(sysconfig.get_path("stdlib"))

    @cached_property
    def paths(self) -> list[Path]:
        return sorted(path for path in self.path.rglob("*.py")
                      if not STDLIB_EXCLUDED & set(path.relative_to(self.path).parts))

    @property
    def identity(self) -> list:
        return [(self.name, sys.version)]

    def parts(self, passage: int) -> list[Part]:
        return [file_part(file, passage, is_code=True) for file in self.files]
