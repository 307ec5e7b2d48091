"""Where text comes from: a source name → its documents, one after another.

`python_stdlib` is the source of the Python standard library, which every machine with Python has.
A path, folder or glob names local files: JSON lines (`.jsonl`, one document a line) or else plain
text. `hf:NAME[:CONFIG]` streams the training split of a Hugging Face dataset.
"""

import codecs
import glob
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.errors import UserError

TEXT_SUFFIXES = (".txt", ".jsonl")  # what a folder is searched for
PASSAGE_CHARACTERS = (1024, 16_384)  # of the passages that text files are cut into: least, most

# Left out: tests, because many distributions of Python leave them out too; tables that are not
# written by hand; what is not the standard library's own.
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
                   "dist-packages", "__pycache__"}


def documents(source: str, text_field: str, invalid_utf8: str) -> Iterator[str]:
    """The texts of a source, always in the same order, none of them empty.

    `invalid_utf8`: "refuse" raises UserError at a file that is not UTF-8, "replace" reads what is
    not as U+FFFD.
    """
    if invalid_utf8 not in ("refuse", "replace"):
        raise UserError(f"config.data.invalid_utf8={invalid_utf8!r}: must be 'refuse' or 'replace'")
    if source.startswith("hf:"):
        yield from hugging_face_documents(source, text_field)
        return
    empty = True
    passage = min(max(size(source) // 100, PASSAGE_CHARACTERS[0]), PASSAGE_CHARACTERS[1])
    for path in local_files(source):
        if path.suffix == ".jsonl":
            texts = json_lines(path, text_field, invalid_utf8)
        elif source == "python_stdlib":
            texts = [decode(path.read_bytes(), path, "replace")]
        else:
            texts = passages(decode(read_bytes(path), path, invalid_utf8), passage)
        for text in texts:
            if text:
                empty = False
                yield text
    if empty:
        raise UserError(f"config.data.source={source!r}: there is no text in it; every file is empty")


def is_local(source: str) -> bool:
    return not source.startswith(("hf:", "tfds:"))


def local_files(source: str) -> list[Path]:
    """The files of a local source, sorted. Raises UserError if there are none."""
    if source == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return sorted(path for path in root.rglob("*.py")
                      if not STDLIB_LEFT_OUT & set(path.relative_to(root).parts))
    if source.startswith("tfds:"):
        raise UserError(f"config.data.source={source!r}: TFDS datasets cannot be read yet; write the "
                        "texts to a .jsonl file and name that")
    path = Path(source).expanduser()
    if path.is_dir():
        paths = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
        if not paths:
            raise UserError(f"config.data.source={source!r}: no {' or '.join(TEXT_SUFFIXES)} file in "
                            "this folder")
    elif path.is_file():
        paths = [path]
    else:
        paths = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not paths:
            raise UserError(f"config.data.source={source!r}: no such file")
    if refused := [p for p in paths if p.suffix in (".parquet", ".gz", ".bz2", ".zst", ".zip")]:
        raise UserError(f"{refused[0]}: {refused[0].suffix} files cannot be read yet; unpack it to "
                        ".txt or .jsonl")
    return paths


def fingerprint(source: str) -> str:
    """Changes when the source does: files by path, size and time; the standard library by version."""
    if source == "python_stdlib" or not is_local(source):
        return f"{source} {sys.version if source == 'python_stdlib' else ''}"
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in local_files(source)]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def passages(text: str, most: int) -> Iterator[str]:
    """Cuts a text into documents of at most `most` characters, at blank lines where it can.

    A file that is one long book would otherwise be one document, wholly in the training or wholly
    in the validation split. The price is an end-of-text every 16 thousand characters (more often
    in a source of less than 1.6 MB, so that it has some hundred documents).
    """
    start = 0
    while len(text) - start > most:
        half = start + most // 2
        cuts = (text.rfind(mark, half, start + most) + len(mark) for mark in ("\n\n", "\n", " "))
        end = next((cut for cut in cuts if cut > half), start + most)
        yield text[start:end]
        start = end
    yield text[start:]


def json_lines(path: Path, text_field: str, invalid_utf8: str) -> Iterator[str]:
    """The `text_field` of each line's object; blank lines are passed over."""
    with open_binary(path) as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            start, offset = offset, offset + len(line)
            if not line.strip():
                continue
            try:
                item = json.loads(decode(line, path, invalid_utf8, start, number))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not JSON: {error.msg}") from None
            if not isinstance(item, dict) or not isinstance(item.get(text_field), str):
                fields = ", ".join(item) if isinstance(item, dict) else type(item).__name__
                raise UserError(f"{path}, line {number}: no text in the field {text_field!r} (it has: "
                                f"{fields}); set --config.data.text_field")
            yield refuse_surrogates(item[text_field], f"{path}, line {number}", invalid_utf8)


def decode(data: bytes, path: Path, invalid_utf8: str, offset: int = 0, line: int = 1) -> str:
    """UTF-8 → text, of the part of a file that begins at byte `offset` in line `line`.

    Says how many bytes of it are not UTF-8, and where in the file the first of them stands.
    """
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
        data, offset = data[len(codecs.BOM_UTF8):], len(codecs.BOM_UTF8)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if invalid_utf8 == "replace":
            return data.decode("utf-8", errors="replace")
        escaped = data.decode("utf-8", errors="surrogateescape")
        count = sum(1 for c in escaped if "\udc80" <= c <= "\udcff")
        line += data.count(b"\n", 0, error.start)
        raise UserError(
            f"{path}: {count} byte{'s are' if count > 1 else ' is'} not UTF-8, the first at byte "
            f"{offset + error.start} (line {line}). Convert the file, or set "
            "--config.data.invalid_utf8=replace") from None


def refuse_surrogates(text: str, where: str, invalid_utf8: str) -> str:
    """JSON can spell half a surrogate pair (\\ud800), which is no text in any encoding."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        if invalid_utf8 == "replace":
            return text.encode(errors="replace").decode()
        raise UserError(f"{where}: half a surrogate pair at character {error.start}. Mend the file, "
                        "or set --config.data.invalid_utf8=replace") from None


def open_binary(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def read_bytes(path: Path) -> bytes:
    with open_binary(path) as file:
        return file.read()


def hugging_face_documents(source: str, text_field: str) -> Iterator[str]:
    """Streams the training split of `hf:NAME[:CONFIG]` through `datasets`."""
    try:
        import datasets
    except ImportError:
        raise UserError("config.data.source='hf:…' needs the datasets library: "
                        "pip install -e '.[hf]'") from None
    name, *config = source.removeprefix("hf:").split(":", 1)
    try:
        rows = datasets.load_dataset(name, *config, split="train", streaming=True)
        for row in rows:
            if text_field not in row:
                raise UserError(f"{source}: its rows have no field {text_field!r} (they have: "
                                f"{', '.join(row)}); set --config.data.text_field")
            if row[text_field]:
                yield row[text_field]
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise UserError(f"{source}: {str(error).splitlines()[0]}") from error


def size(source: str) -> int:
    """Bytes of a local source's files."""
    return sum(path.stat().st_size for path in local_files(source))
