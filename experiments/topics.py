"""Texts with topics: pieces of Python's standard library, whose topic is the package that they are
from.

tuning_task.py and topic_probe.py import it. It defines no flags. The text depends on the version of
Python.
"""

import hashlib
import random
import sysconfig
from pathlib import Path

TOPICS = ("asyncio", "email", "idlelib", "importlib", "multiprocessing", "tkinter", "xml")
TEST_FILES = 0.3  # fraction of the files
SPLITS = ("train", "test")


def pieces(characters: int, counts: dict[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Returns {split: [(topic, text)]}, with `counts[split]` texts per topic, in random order.

    A text consists of whole lines, with at most `characters` ASCII characters and at least half as
    many. No file is in both splits.
    """
    rng, found = random.Random(0), {split: [] for split in SPLITS}
    for topic in TOPICS:
        texts = {split: [] for split in SPLITS}
        for path in files_of(topic):
            texts[split_of(path)] += cut(path.read_text(encoding="utf-8"), characters)
        for split in SPLITS:
            distinct = sorted(set(texts[split]))
            found[split] += [(topic, text) for text in rng.sample(distinct, counts[split])]
    for split in SPLITS:
        rng.shuffle(found[split])
    return found


def library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def files_of(topic: str) -> list[Path]:
    return sorted(
        path
        for path in (library() / topic).rglob("*.py")
        if not any("test" in part for part in path.relative_to(library() / topic).parts[:-1])
    )


def split_of(path: Path) -> str:
    name = path.relative_to(library()).as_posix()
    return "test" if hashlib.sha256(name.encode()).digest()[0] < 256 * TEST_FILES else "train"


def cut(text: str, characters: int) -> list[str]:
    found, lines = [], ""
    for line in text.splitlines(keepends=True):
        if len(lines) + len(line) > characters:
            found.append(lines)
            lines = ""
        lines += line
    return [
        piece
        for piece in (*found, lines)
        if characters / 2 <= len(piece) <= characters and piece.isascii()
    ]
