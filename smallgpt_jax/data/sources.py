"""Where text comes from: a source name → its documents, one after another.

`python_stdlib` is the source of the Python standard library, which every machine with Python has.
A path, folder or glob names local files: JSON lines, Parquet, or plain text, also compressed.
`hf:NAME[:CONFIG]` streams the training split of a Hugging Face dataset, `tfds:NAME` reads that of a
TensorFlow dataset. Several of these are separated by commas.

A source is a list of parts (files, shards); a place in it is a part's number and how many of its
items have been read, so that reading can go on where it was interrupted.
"""

import bz2
import codecs
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import os
import shlex
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.data import tfrecord
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import local_path
from smallgpt_jax.formatting import reason

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
KINDS = (".txt", *JSON_SUFFIXES, ".parquet")  # what a folder is searched for, each also compressed
COMPRESSED = (".gz", ".bz2", ".zst")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".xz")
PASSAGE_CHARACTERS = (1024, 16_384)  # of the passages that text files are cut into: least, most
BLOCK_BYTES = 1_000_000  # of a text file, read in one go
BATCH_CHARACTERS = 1_000_000  # that are tokenized in one go
PARQUET_ROWS = 128  # read in one go
NOT_UTF8 = {"not UTF-8", "half a surrogate pair"}  # reasons to skip an item that invalid_utf8="replace" takes away

# Left out: tests, because many distributions of Python leave them out too; tables that are not
# written by hand; what is not the standard library's own.
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages",
                   "dist-packages", "__pycache__"}


class Skipped(NamedTuple):
    """An item that is left out, and why."""

    reason: str


Item = str | Skipped


class Place(NamedTuple):
    """How far a source has been read: the number of whole parts, and of items of the next one."""

    parts: int = 0
    items: int = 0


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is a document: fields of the config's `data` group."""

    text_field: str
    invalid_utf8: str  # "refuse" | "replace"
    invalid_items: str  # "refuse" | "skip"

    def __post_init__(self):
        for field, allowed in (("invalid_utf8", ("refuse", "replace")),
                               ("invalid_items", ("refuse", "skip"))):
            if getattr(self, field) not in allowed:
                raise UserError(f"config.data.{field}={getattr(self, field)!r}: must be "
                                f"{' or '.join(map(repr, allowed))}")

    def refuse(self, where: str, why: str, mend: str) -> Skipped:
        """Raises UserError for an item that is no document, or says that it is left out."""
        if self.invalid_items == "skip":
            return Skipped(why.split(":")[0])
        raise UserError(f"{where}: {why}; {mend}, or leave such items out: --config.data.invalid_items=skip")


@dataclasses.dataclass(frozen=True)
class Part:
    """One file of a source, or one shard.

    `read(rules)` gives its items, in an order that never changes, and a function that tells how much
    of the part has been read so far, from 0 to 1.
    """

    name: str
    size: int  # in bytes; 0 if that is not known
    read: Callable[[Rules], tuple[Iterator[Item], Callable[[], float]]]
    version: tuple = ()  # what else changes when its items do, as far as that is known


class Batch(NamedTuple):
    """Some documents in a row, what was left out between them, and where reading goes on."""

    texts: list[str]
    skipped: Counter
    place: Place
    done: float  # the share of the source that has been read, 0 to 1
    digest: str  # of what has been read of the source up to `place`


class Digest:
    """Of what has been read of a source: its whole parts by their descriptions, the next one by its items."""

    def __init__(self, parts: Iterable[Part] = ()):
        self._parts, self._items = hashlib.sha256(), hashlib.sha256()
        for part in parts:
            self.end(part)

    def add(self, item: Item) -> None:
        what, text = ("text", item) if isinstance(item, str) else ("skipped", item.reason)
        self._items.update(f"{what} {len(text)} ".encode())
        self._items.update(text.encode())

    def end(self, part: Part) -> None:
        self._parts.update(repr((part.name, part.size, part.version)).encode())
        self._items = hashlib.sha256()

    def hexdigest(self) -> str:
        return self._parts.hexdigest() + self._items.hexdigest()


def digest_before(parts: list[Part], rules: Rules, place: Place) -> str:
    """Returns the digest of a source up to `place`, as a Batch has it. Raises UserError as reading does."""
    digest = Digest(parts[:place.parts])
    for part in parts[place.parts:place.parts + 1]:
        for item in itertools.islice(part.read(rules)[0], place.items):
            digest.add(item)
    return digest.hexdigest()


def batches(parts: list[Part], rules: Rules, start: Place = Place(0, 0), size: int | None = None,  # noqa: B008
            ) -> Iterator[Batch]:
    """The documents from `start` on, in batches of about `size` (BATCH_CHARACTERS) characters."""
    size = size or BATCH_CHARACTERS
    weights = [part.size for part in parts] if any(part.size for part in parts) else [1] * len(parts)
    total, before = sum(weights), sum(weights[:start.parts])  # the weight of the parts that have been read
    digest = Digest(parts[:start.parts])
    texts, skipped, characters = [], Counter(), 0
    for number, part in enumerate(parts[start.parts:], start.parts):
        items, progress = part.read(rules)
        first = start.items if number == start.parts else 0
        for count, item in enumerate(items, 1):
            digest.add(item)
            if count <= first:
                continue
            if item and isinstance(item, str):
                texts.append(item)
                characters += len(item)
            else:
                skipped[item.reason if item else "empty"] += 1
            if characters >= size:
                yield Batch(texts, skipped, Place(number, count),
                            (before + weights[number] * progress()) / total, digest.hexdigest())
                texts, skipped, characters = [], Counter(), 0
        digest.end(part)
        before += weights[number]
    yield Batch(texts, skipped, Place(len(parts)), 1.0, digest.hexdigest())


def documents(source: str, text_field: str, invalid_utf8: str, invalid_items: str) -> Iterator[str]:
    """The texts of a source, always in the same order, none of them empty.

    Raises UserError at the first item that is no document, as the rules say.
    """
    rules = Rules(text_field, invalid_utf8, invalid_items)
    for batch in batches(open_source(source), rules):
        yield from batch.texts


# ---------------------------------------------------------------------- names

def names(source: str) -> list[str]:
    """What a list of sources consists of. A path may have commas in it if it is the only one."""
    if not source.strip():
        raise UserError("config.data.source is empty: name a file, a folder, a glob, hf:NAME or tfds:NAME")
    whole = Path(source).expanduser()
    if whole.exists():
        return [source]
    return [name.strip() for name in source.split(",") if name.strip()]


def is_local(source: str) -> bool:
    return not any(name.startswith(("hf:", "tfds:")) for name in names(source))


def open_source(source: str) -> list[Part]:
    """The parts of a source. Raises UserError if there is no such source, or nothing in it."""
    passage = min(max(size(source) // 100, PASSAGE_CHARACTERS[0]), PASSAGE_CHARACTERS[1])
    parts = []
    for name in names(source):
        if name.startswith("hf:"):
            parts += hugging_face_parts(name)
        elif name.startswith("tfds:"):
            parts += tfds_parts(name)
        else:
            parts += [file_part(path, name, passage) for path in local_files(name)]
    return parts


def local_files(name: str) -> list[Path]:
    """The files of one local source, sorted. Raises UserError if there are none."""
    if name == "python_stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return sorted(path for path in root.rglob("*.py")
                      if not STDLIB_LEFT_OUT & set(path.relative_to(root).parts))
    path = local_path("config.data.source", name)
    if path.is_dir():
        found = [Path(folder, file) for folder, files in walk(path) for file in files]
        paths = sorted(p for p in found if kind(p) in KINDS and p.is_file())
        if not paths:
            raise UserError(f"config.data.source={name!r}: no {', '.join(KINDS)} file in this folder"
                            + glob_for(path, found))
    elif path.is_file():
        paths = [path]
    else:
        paths = each_folder_once(sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()))
        if not paths:
            raise UserError(f"config.data.source={name!r}: no such file")
    if refused := [p for p in paths if p.suffix.lower() in ARCHIVES]:
        raise UserError(f"{refused[0]}: archives of the kind {refused[0].suffix} cannot be read; unpack it, "
                        f"or compress single files as {', '.join(COMPRESSED)}")
    return paths


def walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder below `root` with the names of its files; links to folders are followed.

    A folder that several links lead to is yielded once, so links in a circle come to an end.
    """
    seen, waiting = set(), [str(root)]
    for start in waiting:  # which grows by the links that are found
        for folder, names, files in os.walk(start):
            real = os.path.realpath(folder)
            if real in seen:
                names.clear()  # those below have been seen too
                continue
            seen.add(real)
            names.sort()
            waiting += [link for name in names if os.path.islink(link := os.path.join(folder, name))]
            yield folder, files


def each_folder_once(paths: list[Path]) -> list[Path]:
    """Returns the paths without those that lead, through links, to a folder that a shorter path leads to."""
    folders = sorted({path.parent for path in paths}, key=lambda folder: (len(folder.parts), folder))
    real = {folder: os.path.realpath(folder) for folder in folders}
    shortest = {real[folder]: folder for folder in reversed(folders)}
    return [path for path in paths if shortest[real[path.parent]] == path.parent]


def glob_for(folder: Path, paths: list[Path]) -> str:
    """Returns the advice to name the files of a folder by a glob, with the ending that most of them have."""
    shown = (path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    endings = Counter(path.suffix for path in shown if path.suffix and path.suffix.lower() not in ARCHIVES)
    if not endings:
        return ""
    ending, count = endings.most_common(1)[0]
    pattern = shlex.quote(f"{glob.escape(str(folder))}/**/*{ending}")
    return f"; to read its {count:,} {ending} files as text, set --config.data.source={pattern}"


def kind(path: Path) -> str:
    """The suffix that tells what is in a file, whatever it is compressed with."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED), "")


def folder_around(source: str, path: Path) -> Path | None:
    """The folder of a source that `path` lies in, if there is one: what is made there would become text."""
    around = set(path.resolve().parents)
    return next((folder for name in names(source) if is_local(name)
                 for found, _ in walk(Path(name).expanduser()) if (folder := Path(found).resolve()) in around), None)


def size(source: str) -> int:
    """Bytes of the local files of a source."""
    return sum(path.stat().st_size for name in names(source) if is_local(name)
               for path in local_files(name))


def fingerprint(source: str) -> str:
    """Changes when the source does: files by path, size and time; the standard library by version."""
    described = []
    for name in names(source):
        if name == "python_stdlib":
            described.append((name, sys.version))
        elif not is_local(name):
            described.append(name)
        else:
            stats = [(path.resolve(), path.stat()) for path in local_files(name)]
            described += [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return hashlib.sha256(repr(described).encode()).hexdigest()


# ---------------------------------------------------------------------- local files

def file_part(path: Path, source: str, passage: int) -> Part:
    """A local file; a text file is cut into passages of at most `passage` characters."""
    def read(rules: Rules):
        if kind(path) == ".parquet":
            return parquet_rows(path, rules)
        raw = open_binary(path)
        if kind(path) in JSON_SUFFIXES:
            items = json_lines(lines(path, raw), path, rules)
        elif source == "python_stdlib":
            items = iter([raw.read().decode(errors="replace")])
        else:
            items = passages(decoded(blocks(path, raw), path, rules.invalid_utf8), passage)
        length = max(path.stat().st_size, 1)
        return items, lambda: min(raw.tell() / length, 1.0)

    stat = path.stat()
    return Part(str(path), stat.st_size, read, (str(path.resolve()), stat.st_mtime_ns, passage))


def open_binary(path: Path):
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def unpacked(path: Path, raw) -> io.BufferedIOBase:
    """What is in a file that may be compressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(raw)
    if suffix == ".bz2":
        return bz2.open(raw)
    if suffix == ".zst":
        return io.BufferedReader(pyarrow(path).input_stream(raw, compression="zstd"))
    return raw


@contextlib.contextmanager
def named_if_damaged(path: Path):
    """What libraries raise at a damaged file, as a UserError that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno:  # the machine's trouble, not the file's
            raise UserError(f"{path}: {error.strerror}") from None
        raise UserError(f"{path}: damaged, or not what its name says ({reason(error).rstrip('.')}). Fetch it "
                        "again, or leave it out") from None


def blocks(path: Path, raw) -> Iterator[bytes]:
    with named_if_damaged(path):
        file = unpacked(path, raw)
        while block := file.read(BLOCK_BYTES):
            yield block


def lines(path: Path, raw) -> Iterator[bytes]:
    with named_if_damaged(path):
        yield from unpacked(path, raw)


def decoded(blocks: Iterator[bytes], path: Path, invalid_utf8: str) -> Iterator[str]:
    """UTF-8 → text, block by block; lines end with a newline, whichever line ends the file has.

    Raises UserError naming byte and line of what is not UTF-8.
    """
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    errors = "strict" if invalid_utf8 == "refuse" else "replace"
    offset, line, rest = 0, 1, b""
    for block in itertools.chain(blocks, [b""]):
        data = rest + block
        if offset == 0 and data.startswith(codecs.BOM_UTF8):
            data, offset = data[len(codecs.BOM_UTF8):], len(codecs.BOM_UTF8)
        try:
            text, used = codecs.utf_8_decode(data, errors, not block)
        except UnicodeDecodeError as error:
            line += data.count(b"\n", 0, error.start)
            raise not_utf8(path, offset + error.start, line) from None
        offset, line, rest = offset + used, line + data.count(b"\n", 0, used), data[used:]
        yield newlines.decode(text, final=not block)


def not_utf8(path: Path, byte: int, line: int) -> UserError:
    return UserError(f"{path}: not UTF-8 at byte {byte} (line {line}). Convert the file, or set "
                     "--config.data.invalid_utf8=replace")


def passages(pieces: Iterator[str], most: int) -> Iterator[str]:
    """Cuts a text, given in pieces, into documents of at most `most` characters, at blank lines where
    it can.

    A file that is one long book would otherwise be one document, wholly in the training or wholly
    in the validation split. The price is an end-of-text every 16 thousand characters (more often
    in a source of less than 1.6 MB, so that it has some hundred documents).
    """
    text = ""
    for piece in pieces:
        text, start = text + piece, 0
        while len(text) - start > most:
            half = start + most // 2
            cuts = (text.rfind(mark, half, start + most) + len(mark) for mark in ("\n\n", "\n", " "))
            end = next((cut for cut in cuts if cut > half), start + most)
            yield text[start:end]
            start = end
        text = text[start:]
    yield text


def json_lines(lines: Iterator[bytes], path: Path, rules: Rules) -> Iterator[Item]:
    """The text field of each line's object; blank lines are passed over."""
    offset = 0
    for number, line in enumerate(lines, start=1):
        start, offset = offset, offset + len(line)
        if line.strip():
            yield json_line(line, path, start, number, rules)


def json_line(line: bytes, path: Path, offset: int, number: int, rules: Rules) -> Item:
    where = f"{path}, line {number}"
    if offset == 0:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        decoded_line = line.decode(errors="replace" if rules.invalid_utf8 == "replace" else "strict")
    except UnicodeDecodeError as error:
        if rules.invalid_items == "skip":
            return Skipped("not UTF-8")
        raise not_utf8(path, offset + error.start, number) from None
    try:
        item = json.loads(decoded_line)
    except RecursionError:
        return rules.refuse(where, "not JSON: nested too deeply", "mend the line")
    except ValueError as error:  # also a number of thousands of digits
        return rules.refuse(where, f"not JSON: {getattr(error, 'msg', error)}", "mend the line")
    if not isinstance(item, dict):
        return rules.refuse(where, f"not a JSON object: a {type(item).__name__}", "mend the line")
    return text_of(item.get(rules.text_field), where, item, rules)


def text_of(text, where: str, fields, rules: Rules) -> Item:
    """The text that was found in an item, str or bytes, if it is one."""
    if isinstance(text, bytes):
        try:
            text = text.decode(errors="replace" if rules.invalid_utf8 == "replace" else "strict")
        except UnicodeDecodeError as error:
            return rules.refuse(where, f"not UTF-8: byte {error.start}",
                                "set --config.data.invalid_utf8=replace")
    if not isinstance(text, str):
        return rules.refuse(where, f"no text in the field {rules.text_field!r}: it has {', '.join(fields)}",
                            "set --config.data.text_field")
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, \ud800, which is no text
        if rules.invalid_utf8 == "replace":
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return rules.refuse(where, f"half a surrogate pair: character {error.start}",
                            "set --config.data.invalid_utf8=replace")


def parquet_rows(path: Path, rules: Rules) -> tuple[Iterator[Item], Callable[[], float]]:
    parquet, types = pyarrow(path, "parquet"), pyarrow(path, "types")
    with named_if_damaged(path):
        file = parquet.ParquetFile(path)
    rows = max(file.metadata.num_rows, 1)
    columns = file.schema_arrow.names
    if rules.text_field not in columns:
        raise UserError(f"{path}: no column {rules.text_field!r}, it has {', '.join(columns)}; set "
                        "--config.data.text_field")
    done = 0

    def items():
        nonlocal done
        with named_if_damaged(path):
            for batch in file.iter_batches(PARQUET_ROWS, columns=[rules.text_field]):
                column = batch.column(0)
                if types.is_string(column.type) or types.is_large_string(column.type):  # as it says
                    column = column.cast("binary" if types.is_string(column.type) else "large_binary")
                for number, text in enumerate(column.to_pylist(), done + 1):
                    yield text_of(text, f"{path}, row {number}", columns, rules)
                done += len(batch)

    return items(), lambda: done / rows


# ---------------------------------------------------------------------- libraries' datasets

def missing(what: str) -> UserError:
    return UserError(f"{what}: reading this needs more libraries: pip install -e '.[data]'")


def pyarrow(path: Path, module: str = ""):
    try:
        return importlib.import_module(f"pyarrow{module and '.'}{module}")
    except ImportError:
        raise missing(str(path)) from None


def hugging_face_parts(source: str) -> list[Part]:
    """The shards of the training split of `hf:NAME[:CONFIG]`, streamed."""
    try:
        import datasets
    except ImportError:
        raise missing(f"config.data.source={source!r}") from None
    name, *config = source.removeprefix("hf:").split(":", 1)

    @contextlib.contextmanager
    def told():
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of many kinds: of datasets, of the hub, of the network
            raise UserError(f"config.data.source={source!r}: {reason(error)}") from None

    with told():
        stream = datasets.load_dataset(name, *config, split="train", streaming=True)

    def read(shard: int, rules: Rules):
        def items():
            with told():
                for number, row in enumerate(stream.shard(num_shards=stream.num_shards, index=shard), 1):
                    yield text_of(row.get(rules.text_field), f"{source}, shard {shard}, row {number}", row,
                                  rules)
        return items(), lambda: 0.0

    return [Part(f"{source}, shard {shard}", 0, lambda rules, shard=shard: read(shard, rules))
            for shard in range(stream.num_shards)]


def tfds_parts(source: str) -> list[Part]:
    """The training split of `tfds:NAME`, read without TensorFlow: its shards in order if they are TFRecord files, all
    of it by index if its format allows that."""
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise missing(f"config.data.source={source!r}") from None
    name = source.removeprefix("tfds:")
    try:
        builder = tfds.builder(name)
        if builder.is_prepared() and builder.info.available_file_formats() == {tfds.core.FileFormat.TFRECORD}:
            split = builder.info.splits["train"]
            return list(map(tfrecord_part, split.filepaths, split.shard_lengths))
        return [indexed_part(source, tfds.data_source(name, split="train"))]
    except UserError:
        raise
    except Exception as error:  # of many kinds: TFDS runs the code of each dataset
        why = reason(error)
        mend = ("; write it as TFRecord or array_record files (tfds build --file_format=array_record), or its texts to "
                "Parquet files and name those" if "file format" in why.lower() else "")
        raise UserError(f"config.data.source={source!r}: {why.rstrip('.')}{mend}") from None


def tfrecord_part(path, count: int) -> Part:
    """A shard of a TensorFlow dataset: a TFRecord file of `count` tf.train.Example protos."""
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2

    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; fetch this shard of the dataset again") from None

    def read(rules: Rules):
        file = open_binary(path)

        def items():
            number = 0
            with named_if_damaged(path):
                for number, record in enumerate(tfrecord.records(file, stat.length), 1):
                    try:
                        fields = tf_example_pb2.Example.FromString(record).features.feature
                    except DecodeError:
                        raise ValueError(f"record {number} is no tf.train.Example") from None
                    texts = fields[rules.text_field].bytes_list.value if rules.text_field in fields else ()
                    yield text_of(texts[0] if len(texts) == 1 else None, f"{path}, record {number}", sorted(fields),
                                  rules)
            if number != count:
                raise UserError(f"{path}: has {number} records, dataset_info.json says {count}; fetch this shard of "
                                "the dataset again")
        return items(), lambda: file.tell() / max(stat.length, 1)

    return Part(str(path), stat.length, read, (stat.mtime,))


def indexed_part(source: str, rows) -> Part:
    """The items of a TensorFlow dataset that can be read at any place."""
    done = 0

    def read(rules: Rules):
        def items():
            nonlocal done
            for done in range(len(rows)):
                row = rows[done]
                yield text_of(row.get(rules.text_field), f"{source}, item {done}", row, rules)
        return items(), lambda: done / max(len(rows), 1)

    return Part(source, 0, read)
