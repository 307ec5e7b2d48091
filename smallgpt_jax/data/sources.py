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
import shlex
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.data.datasets import hugging_face_parts, tfds_parts
from smallgpt_jax.data.parts import Part, Rules, document_batches
from smallgpt_jax.data.text_files import (
    ARCHIVE_SUFFIXES,
    COMPRESSED_SUFFIXES,
    TEXT_SUFFIXES,
    TextFile,
    content_suffix,
    file_part,
    local_file,
)
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import as_path
from smallgpt_jax.object_storage import is_remote, list_files, name_path_in_errors

PASSAGE_CHARACTERS = (1024, 16_384)  # text files are split into passages; the length limit is in this range
# Folders that `python_stdlib` does not read: tests (many Python distributions omit them), generated tables, and
# installed packages.
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
                   "dist-packages", "__pycache__"}


def documents(source: str, text_field: str, invalid_utf8: str, invalid_items: str) -> Iterator[str]:
    """Yields the non-empty texts of a source, always in the same order.

    Raises UserError for the first invalid item, unless the arguments say to skip or repair invalid items (see `Rules`).
    """
    rules = Rules(text_field, invalid_utf8, invalid_items)
    for batch in document_batches(open_source(source), rules):
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


def open_source(source: str) -> list[Part]:
    """Returns the parts of a source. Raises UserError if the source does not exist or has no files."""
    passage = min(max(num_bytes(source) // 100, PASSAGE_CHARACTERS[0]), PASSAGE_CHARACTERS[1])
    parts = []
    for name in split_names(source):
        if name.startswith("hf:"):
            parts += hugging_face_parts(name)
        elif name.startswith("tfds:"):
            parts += tfds_parts(name)
        else:
            parts += [file_part(file, name, passage) for file in find_files(name)]
    return parts


def find_files(name: str) -> list[TextFile]:
    """Returns the files of a source that is not a dataset, sorted. Raises UserError if there are none."""
    files = find_remote_files(name) if is_remote(name) else list(map(local_file, find_local_files(name)))
    if refused := [file.path for file in files if file.path.suffix.lower() in ARCHIVE_SUFFIXES]:
        raise UserError(f"{refused[0]}: {refused[0].suffix} archives are not supported; unpack it, or compress single "
                        f"files as {', '.join(COMPRESSED_SUFFIXES)}")
    return files


def find_remote_files(name: str) -> list[TextFile]:
    """Returns the files of a file, folder or glob in object storage, sorted. Raises UserError if there are none."""
    path, is_pattern = as_path("config.data.source", name), glob.has_magic(name)
    with name_path_in_errors(f"config.data.source={name!r}"):
        found = list_files(path, is_pattern)
    files = [TextFile(file, str(file), *entry) for file, entry in found.items()
             if is_pattern or file == path or content_suffix(file) in TEXT_SUFFIXES]
    if not files:
        raise UserError(f"config.data.source={name!r}: no such file, and no folder with {', '.join(TEXT_SUFFIXES)} "
                        "files")
    return sorted(files)


def find_local_files(name: str) -> list[Path]:
    """Returns the files of one local source, sorted. Raises UserError if there are none."""
    if name == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return sorted(path for path in root.rglob("*.py")
                      if not STDLIB_EXCLUDED & set(path.relative_to(root).parts))
    path = as_path("config.data.source", name)
    if path.is_dir():
        found = [Path(folder, file) for folder, files in walk_folders(path) for file in files]
        paths = sorted(p for p in found if content_suffix(p) in TEXT_SUFFIXES and p.is_file())
        if not paths:
            raise UserError(f"config.data.source={name!r}: folder contains no {', '.join(TEXT_SUFFIXES)} file"
                            + suggest_glob(path, found))
        return paths
    if path.is_file():
        return [path]
    matches = map(Path, glob.glob(str(path), recursive=True))
    paths = drop_linked_duplicates(sorted(match for match in matches if match.is_file()))
    if not paths:
        raise UserError(f"config.data.source={name!r}: no such file")
    return paths


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


def suggest_glob(folder: Path, paths: list[Path]) -> str:
    """Returns a hint for an error message: a glob for the files in `folder` that have the most common suffix.

    Hidden files, archives and files without a suffix are ignored. Returns "" if there are no other files.
    """
    shown = (path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    suffixes = Counter(path.suffix for path in shown if path.suffix and path.suffix.lower() not in ARCHIVE_SUFFIXES)
    if not suffixes:
        return ""
    suffix, count = suffixes.most_common(1)[0]
    pattern = shlex.quote(f"{glob.escape(str(folder))}/**/*{suffix}")
    return f"; to read its {count:,} {suffix} files as text, set --config.data.source={pattern}"


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


def num_bytes(source: str) -> int:
    """Returns the total size of a source's files in bytes. Datasets count as 0."""
    return sum(file.size for name in split_names(source) if not is_dataset(name) for file in find_files(name))


def fingerprint(source: str) -> str:
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
            described += [tuple(file[1:]) for file in find_files(name)]
    return hashlib.sha256(repr(described).encode()).hexdigest()
