"""Reads the documents of a text source, in a fixed order.

A source is one of:

- `python_stdlib`: the source code of the Python standard library, which needs no download.
- The path of a file or folder, or a glob: files of JSON lines, Parquet or plain text, optionally compressed. The path
  is local or a gs:// URL.
- `hf:NAME[:CONFIG]`: the training split of a Hugging Face dataset, streamed.
- `tfds:NAME`: the training split of a TensorFlow dataset.

A source can also be a list of these, separated by commas.
"""

import glob
import hashlib
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from smallgpt_jax.data.datasets import hugging_face_parts, tfds_parts
from smallgpt_jax.data.parts import Part, Rules, document_batches
from smallgpt_jax.data.text_files import (
    ARCHIVE_SUFFIXES,
    COMPRESSED_SUFFIXES,
    ROW_SUFFIXES,
    TextFile,
    content_suffix,
    file_part,
    local_file,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.files import as_path
from smallgpt_jax.storage.object_storage import is_remote, list_files, name_path_in_errors

PASSAGE_CHARACTERS = (1024, 16_384)  # text files are split into passages; the length limit is in this range
# Folders that `python_stdlib` does not read: tests (many Python distributions omit them), generated tables, and
# installed packages.
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
                   "dist-packages", "__pycache__"}


def documents(source: str, text_endings: str, rules: Rules) -> Iterator[str]:
    """Yields the non-empty texts of a source, always in the same order.

    Raises UserError for the first invalid item, unless `rules` say to skip or repair invalid items.
    """
    for batch in document_batches(open_source(source, text_endings), rules):
        yield from batch.texts


def split_names(source: str) -> list[str]:
    """Splits a comma-separated list of sources. A path that contains commas is allowed if it is the only source."""
    if not source.strip():
        raise UserError("config.data.source: is empty; expected a file, folder, glob, hf:NAME or tfds:NAME")
    whole = Path(source).expanduser()
    if whole.exists():
        return [source]
    return [name.strip() for name in source.split(",") if name.strip()]


def is_dataset(name: str) -> bool:
    return name.startswith(("hf:", "tfds:"))


def is_local(source: str) -> bool:
    return not any(is_dataset(name) or is_remote(name) for name in split_names(source))


def open_source(source: str, text_endings: str) -> list[Part]:
    """Returns the parts of a source. Raises UserError if the source does not exist or has no files.

    `text_endings` is the field of the same name of the config's `data` group.
    """
    passage = min(max(num_bytes(source, text_endings) // 100, PASSAGE_CHARACTERS[0]), PASSAGE_CHARACTERS[1])
    parts = []
    for name in split_names(source):
        if name.startswith("hf:"):
            parts += hugging_face_parts(name)
        elif name.startswith("tfds:"):
            parts += tfds_parts(name)
        else:
            parts += [file_part(file, name, passage) for file in find_files(name, text_endings)]
    return parts


def endings_read(text_endings: str) -> tuple[str, ...]:
    """Returns the endings of the files in a folder that are read. An ending of compressed files may follow them."""
    endings = tuple(filter(None, (ending.strip().lower() for ending in text_endings.split(","))))
    for ending in endings:
        if not re.fullmatch(r"\.[^./\\\s]+", ending):
            raise UserError(f"config.data.text_endings={text_endings!r}: {ending!r} is no ending; expected endings "
                            "such as .txt,.md,.rst")
        if ending in (*ROW_SUFFIXES, *COMPRESSED_SUFFIXES, *ARCHIVE_SUFFIXES):
            raise UserError(f"config.data.text_endings={text_endings!r}: {ending} files are not plain text; remove this"
                            " ending")
    return (*endings, *ROW_SUFFIXES)


def find_files(name: str, text_endings: str) -> list[TextFile]:
    """Returns the files of a source that is not a dataset, sorted. Raises UserError if there are none."""
    endings = endings_read(text_endings)
    files = (find_remote_files(name, endings) if is_remote(name) else
             list(map(local_file, find_local_files(name, endings))))
    if refused := [file.path for file in files if file.path.suffix.lower() in ARCHIVE_SUFFIXES]:
        raise UserError(f"{refused[0]}: {refused[0].suffix} archives are not supported; unpack it, or compress single "
                        f"files as {', '.join(COMPRESSED_SUFFIXES)}")
    return files


def find_remote_files(name: str, endings: tuple[str, ...]) -> list[TextFile]:
    """Returns the files of a file, folder or glob in object storage, sorted. Raises UserError if there are none."""
    path, is_pattern = as_path("config.data.source", name), glob.has_magic(name)
    with name_path_in_errors(f"config.data.source={name!r}"):
        found = list_files(path, is_pattern)
    files = [TextFile(file, str(file), *entry) for file, entry in found.items()
             if is_pattern or file == path or content_suffix(file) in endings]
    if not files:
        raise UserError(f"config.data.source={name!r}: no such file, and no folder with {', '.join(endings)} files"
                        + suggest_endings(path, list(found), endings))
    return sorted(files)


def find_local_files(name: str, endings: tuple[str, ...]) -> list[Path]:
    """Returns the files of one local source, sorted. Raises UserError if there are none."""
    if name == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return sorted(path for path in root.rglob("*.py")
                      if not STDLIB_EXCLUDED & set(path.relative_to(root).parts))
    path = as_path("config.data.source", name)
    if path.is_dir():
        found = list_folder(path)
        paths = [file for file in found if content_suffix(file) in endings]
        if not paths:
            raise UserError(f"config.data.source={name!r}: folder contains no {', '.join(endings)} file"
                            + suggest_endings(path, found, endings))
        return paths
    if path.is_file():
        return [path]
    matches = map(Path, glob.glob(str(path), recursive=True))
    paths = drop_linked_duplicates(sorted(match for match in matches if match.is_file()))
    if not paths:
        raise UserError(f"config.data.source={name!r}: no such file")
    return paths


def list_folder(folder: Path) -> list[Path]:
    """Returns all files in a local folder and its subfolders, sorted."""
    return sorted(path for parent, names in walk_folders(folder) for name in names
                  if (path := Path(parent, name)).is_file())


def walk_folders(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields `root` and each folder below it, with the names of the files in it. Follows symbolic links to folders.

    A folder reached through several links is yielded once, so the function returns even if links form a cycle.
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
            waiting += [link for name in names if os.path.islink(link := os.path.join(folder, name))]
            yield folder, files


def drop_linked_duplicates(paths: list[Path]) -> list[Path]:
    """Returns `paths` without the duplicates that come from symbolic links to folders.

    If a folder has several paths, only its files under the shortest path are kept.
    """
    folders = sorted({path.parent for path in paths}, key=lambda folder: (len(folder.parts), folder))
    real = {folder: os.path.realpath(folder) for folder in folders}
    shortest = {real[folder]: folder for folder in reversed(folders)}
    return [path for path in paths if shortest[real[path.parent]] == path.parent]


def count_endings(folder: Path, paths: Iterable[Path]) -> Counter:
    """Returns the number of files by ending. Ignores hidden files and files in hidden folders."""
    return Counter(content_suffix(path) for path in paths
                   if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def suggest_endings(folder: Path, paths: list[Path], endings: tuple[str, ...]) -> str:
    """Returns a hint that names the most common ending among the files that are not read, or ""."""
    counts = count_endings(folder, paths)
    others = {ending: count for ending, count in counts.items() if ending not in ("", *endings, *ARCHIVE_SUFFIXES)}
    if not others:
        return ""
    ending = max(others, key=others.get)
    texts = ",".join([*(ending for ending in endings if ending not in ROW_SUFFIXES), ending])
    return f"; to read its {others[ending]:,} {ending} files as text, set --config.data.text_endings={texts}"


def folder_messages(source: str, text_endings: str) -> Iterator[str]:
    """Yields a line for each folder of a source: how many files are read and how many are not, by ending."""
    endings = endings_read(text_endings)
    for name in split_names(source):
        if is_dataset(name) or name == "python_stdlib" or (glob.has_magic(name) and is_remote(name)):
            continue
        folder = as_path("config.data.source", name)
        if not folder.is_dir():
            continue
        paths = list(list_files(folder)) if is_remote(folder) else list_folder(folder)
        counts = count_endings(folder, paths)
        read, other = (", ".join(f"{count:,} {ending or 'without ending'}" for ending, count in counts.most_common()
                                 if (ending in endings) == is_read) for is_read in (True, False))
        yield f"{name}: files read: {read or 'none'}; files not read: {other or 'none'}" + suggest_endings(
            folder, paths, endings)


def find_enclosing_folder(source: str, path: Path) -> Path | None:
    """Returns a folder of `source` that contains `path`, or None if there is none.

    If there is one, files written to `path` could later be read as text of the source.
    """
    if is_remote(path):
        return next((folder for name in split_names(source) if is_remote(name)
                     and (folder := as_path("config.data.source", name)) in path.parents), None)
    around = set(path.resolve().parents)
    return next((folder for name in split_names(source) if is_local(name)
                 for found, _ in walk_folders(Path(name).expanduser())
                 if (folder := Path(found).resolve()) in around), None)


def num_bytes(source: str, text_endings: str) -> int:
    """Returns the total size of a source's files in bytes. Datasets count as 0."""
    return sum(file.size for name in split_names(source) if not is_dataset(name)
               for file in find_files(name, text_endings))


def fingerprint(source: str, text_endings: str) -> str:
    """Returns a hash of a source.

    The hash covers:

    - local files: path, size and modification time
    - files in object storage: path, size and generation
    - `python_stdlib`: the Python version
    - datasets: only the name
    """
    described = []
    for name in split_names(source):
        if name == "python_stdlib":
            described.append((name, sys.version))
        elif is_dataset(name):
            described.append(name)
        else:
            described += [tuple(file[1:]) for file in find_files(name, text_endings)]
    return hashlib.sha256(repr(described).encode()).hexdigest()
