"""Reads files that may come from somebody else, and not more than a number of bytes."""

from pathlib import Path

MAX_BYTES = 2**26  # the tokenizer.json of the largest vocabularies has 35 MB


def read_bounded(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a file. Raises ValueError if it is larger, or no file: a device may
    have no end.
    """
    if path.exists() and not path.is_file():
        raise ValueError("not a file")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)  # one more, which shows that the file is too large
    if len(content) > max_bytes:
        raise ValueError(f"larger than {max_bytes / 1e6:,.0f} MB")
    return content
