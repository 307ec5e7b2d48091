"""Local folders with links, and the endings of the files in a folder."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from smallgpt_jax.data.text_files import ARCHIVE_SUFFIXES, ROW_SUFFIXES, content_suffix


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
    """If links give a folder several paths, keeps only its files under the shortest path."""
    folders = sorted({path.parent for path in paths}, key=lambda folder: (len(folder.parts), folder))
    real = {folder: os.path.realpath(folder) for folder in folders}
    shortest = {real[folder]: folder for folder in reversed(folders)}
    return [path for path in paths if shortest[real[path.parent]] == path.parent]


def count_endings(folder: Path, paths: Iterable[Path]) -> Counter:
    """Ignores hidden files and files in hidden folders."""
    return Counter(content_suffix(path) for path in paths
                   if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def suggest_endings(folder: Path, paths: Iterable[Path], endings: tuple[str, ...]) -> str:
    counts = count_endings(folder, paths)
    others = {ending: count for ending, count in counts.items() if ending not in ("", *endings, *ARCHIVE_SUFFIXES)}
    if not others:
        return ""
    ending = max(others, key=others.get)
    texts = ",".join([*(ending for ending in endings if ending not in ROW_SUFFIXES), ending])
    return f"; to read its {others[ending]:,} {ending} files as text, set --config.data.text_endings={texts}"
