"""Text files as `Part`s: plain text, JSON lines and Parquet, optionally compressed; local or in
object storage.
"""

import bz2
import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.data.parts import Item, Part, Passage, Rules, Skipped, extract_text
from smallgpt_jax.data.prompts import extract_document
from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.formatting import list_names, short_reason
from smallgpt_jax.storage.json_files import require_few_values
from smallgpt_jax.storage.object_storage import Reader, is_remote

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
ROW_SUFFIXES = (*_JSON_SUFFIXES, ".parquet")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".zst")
ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".xz")
_READ_BYTES = 1_000_000  # per read of a text file
# A read takes at most as many rows of a Parquet file as fit into PARQUET_BYTES if each is as long as
# a whole column: a few bytes can mean the same long text in all rows.
_PARQUET_ROWS, PARQUET_BYTES = 64, 2**29


def content_suffix(path: Path) -> str:
    """Ignores a compression suffix: 'a.jsonl.gz' → '.jsonl'."""
    for suffix in map(str.lower, reversed(path.suffixes)):
        if suffix not in COMPRESSED_SUFFIXES:
            return suffix
    return ""


class TextFile(NamedTuple):
    path: Path
    location: str  # the path without symbolic links
    size: int  # bytes
    version: int | str  # modification time in ns; in object storage, the generation of the object


def file_part(file: TextFile, max_passage: int, is_code: bool = False) -> Part:
    """Returns a file as a part. `max_passage`: the most characters per passage. With `is_code`, the
    file is one document.
    """
    path, suffix = file.path, content_suffix(file.path)

    def read(rules: Rules):
        with name_file_in_errors(path):
            if not file.size and path.suffix.lower() in COMPRESSED_SUFFIXES:
                raise EOFError("the file is empty")
            if suffix == ".parquet":
                yield from _read_parquet(path, rules)
                return
            raw = open_binary(path)
            content = _decompress(path, raw)
            if suffix in _JSON_SUFFIXES:
                items = _parse_json_lines(content, path, rules)
            elif is_code:
                items = [content.read().decode(errors="replace")]
            elif rules.skips_invalid_utf8 and not _is_utf8(path):
                items = [Skipped("not UTF-8 (whole file)")]
            else:
                pieces = _decode_utf8(_read_pieces(content), path, rules.decoding_errors)
                items = _read_passages(pieces, str(path), max_passage, rules.split_by_file)
            for item in items:
                # Of a compressed file, the position in what is stored. The file may be growing.
                yield item, min(raw.tell() / max(file.size, 1), 1.0)

    version = (file.location, file.version, max_passage)
    return Part(str(path), file.size, read, version, has_fields=suffix in _JSON_SUFFIXES)


def open_binary(path: Path):
    return Reader(path) if is_remote(path) else path.open("rb")


def _decompress(path: Path, raw) -> io.BufferedIOBase:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(raw)
    if suffix == ".bz2":
        return bz2.open(raw)
    if suffix == ".zst":
        pyarrow = import_library("pyarrow", "data")
        return io.BufferedReader(pyarrow.input_stream(raw, compression="zstd"))
    # The readline of a raw file reads single bytes.
    return io.BufferedReader(raw) if isinstance(raw, io.RawIOBase) else raw


@contextlib.contextmanager
def name_file_in_errors(path: Path):
    """Raises a UserError that begins with `path` if reading fails in the `with` block."""
    try:
        yield
    # gzip raises OSError, EOFError and zlib.error; pyarrow ValueError and NotImplementedError.
    except (OSError, EOFError, zlib.error, ValueError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno:  # such as no permission: it is not damaged
            raise UserError(f"{path}: {error.strerror}") from None
        raise UserError(
            f"{path}: damaged, or of another type than its suffix "
            f"({short_reason(error).rstrip('.')}); download it again, or remove it"
        ) from None


def _read_pieces(file) -> Iterator[bytes]:
    return iter(lambda: file.read(_READ_BYTES), b"")


def _read_lines(file, max_bytes: int) -> Iterator[bytes]:
    """Yields the lines. Of a line of more than `max_bytes` bytes and its end, only the first
    max_bytes + 3.
    """
    while line := file.readline(max_bytes + 3):
        if len(line) > max_bytes + 2:  # the rest of the line is read, but not kept
            piece = line
            while piece and not piece.endswith(b"\n"):
                piece = file.readline(_READ_BYTES)
        yield line


def _is_utf8(path: Path) -> bool:
    pieces = _read_pieces(_decompress(path, open_binary(path)))
    try:
        for _ in _decode_utf8(pieces, path, "strict"):
            pass
    except UserError:
        return False
    return True


def _decode_utf8(pieces: Iterator[bytes], path: Path, errors: str) -> Iterator[str]:
    """Decodes UTF-8 piece by piece. All line endings become newlines.

    If `errors` is "strict", raises UserError with the position of the first invalid byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
    offset, line = 0, 1  # of `piece` in the file
    for piece in itertools.chain(pieces, [b""]):
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            # `error.object` is the piece after the beginning of a character at the end of the piece
            # before it, or without a byte order mark.
            byte = offset + len(piece) - len(error.object) + error.start
            raise _not_utf8(path, byte, line + error.object.count(b"\n", 0, error.start)) from None
        yield text
        offset += len(piece)
        line += piece.count(b"\n")


def _not_utf8(path: Path, byte: int, line: int, can_skip: bool = True) -> UserError:
    advice = "convert the file"
    if can_skip:
        advice += (
            ", set --config.data.invalid_utf8=replace, or skip it with "
            "--config.data.invalid_items=skip"
        )
    return UserError(f"{path}: not UTF-8 at byte {byte} (line {line}); {advice}")


def _read_passages(
    pieces: Iterator[str], file: str, max_characters: int, split_by_file: bool
) -> Iterator[Passage]:
    """Yields the passages of a file. With `split_by_file`, the split of all passages depends on the
    first of `pieces`, up to a megabyte: equal files share a split, whatever their names are.
    """
    beginning = next(pieces, "")
    key_of_file = hashlib.blake2b(beginning.encode(), digest_size=16).hexdigest()
    is_first = True
    for text in _split_passages(itertools.chain([beginning], pieces), max_characters):
        key = key_of_file if split_by_file else text
        yield Passage.of(text, file, is_first, key)
        is_first = False


def _split_passages(pieces: Iterator[str], max_characters: int) -> Iterator[str]:
    """Splits a text into documents of at most `max_characters` characters, preferably at blank
    lines.

    Otherwise a long book would be one document, entirely in one split. Costs one more end-of-text
    token per document.
    """
    kept, length = [], 0  # pieces without what was yielded
    for piece in pieces:
        kept.append(piece)
        length += len(piece)
        if length <= max_characters:
            continue
        text, start = "".join(kept), 0
        while len(text) - start > max_characters:
            half, end = start + max_characters // 2, start + max_characters
            for separator in ("\n\n", "\n", " "):  # the last one in the passage's second half
                position = text.rfind(separator, half, end)
                if position >= 0:
                    end = position + len(separator)
                    break
            yield text[start:end]
            start = end
        kept = [text[start:]]
        length = len(kept[0])
    yield "".join(kept)


def _parse_json_lines(file, path: Path, rules: Rules) -> Iterator[Item]:
    offset = 0  # of the line in the file, for messages
    for number, line in enumerate(_read_lines(file, rules.max_document_bytes), start=1):
        if line.strip():
            yield _parse_json_line(line, path, offset, number, rules)
        offset += len(line)


def _parse_json_line(line: bytes, path: Path, offset: int, number: int, rules: Rules) -> Item:
    where = f"{path}, line {number}"
    if len(line.rstrip(b"\r\n")) > rules.max_document_bytes:
        return rules.refuse_or_skip_long(where)
    if offset == 0:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        decoded_line = line.decode(errors=rules.decoding_errors)
    except UnicodeDecodeError as error:
        if rules.invalid_items == "skip":
            return Skipped("not UTF-8")
        raise _not_utf8(path, offset + error.start, number, rules.can_skip) from None
    try:
        require_few_values(line)
    except ValueError as error:
        return rules.refuse_or_skip(where, f"too large: {error}", "shorten the line")
    try:
        item = json.loads(decoded_line)
    except RecursionError:
        return rules.refuse_or_skip(where, "not JSON: nested too deeply", "fix the line")
    except ValueError as error:  # json.loads also raises it for integers with thousands of digits
        why = f"not JSON: {getattr(error, 'msg', error)}"
        return rules.refuse_or_skip(where, why, "fix the line")
    if not isinstance(item, dict):
        why = f"not a JSON object: a {type(item).__name__}"
        return rules.refuse_or_skip(where, why, "fix the line")
    return extract_document(item, where, rules)


def _read_parquet(path: Path, rules: Rules) -> Iterator[tuple[Item, float]]:
    parquet = import_library("pyarrow.parquet", "data")
    types = import_library("pyarrow.types", "data")
    file = parquet.ParquetFile(open_binary(path) if is_remote(path) else path)
    columns = file.schema_arrow.names
    if columns.count(rules.text_field) > 1:
        raise UserError(f"{path}: several columns {rules.text_field!r}; rename the others")
    if rules.text_field not in columns:
        raise UserError(
            f"{path}: no column {rules.text_field!r}, its columns are {list_names(columns)}; set "
            "--config.data.text_field"
        )
    longest_text = max(_largest_chunk(file, rules.text_field), 1)
    rows_per_read = min(max(PARQUET_BYTES // longest_text, 1), _PARQUET_ROWS)
    batches = file.iter_batches(rows_per_read, columns=[rules.text_field])
    if types.is_dictionary(file.schema_arrow.field(rules.text_field).type):
        batches = _name_invalid_dictionary(batches, path, rules.text_field)
    rows, number = max(file.metadata.num_rows, 1), 0
    for batch in batches:
        column = batch.column(0)
        # pyarrow does not check that strings are valid UTF-8. `extract_text` checks this if it
        # receives bytes.
        if types.is_string(column.type):
            column = column.cast("binary")
        elif types.is_large_string(column.type):
            column = column.cast("large_binary")
        for value in column:  # one at a time becomes an object of Python
            number += 1
            where = f"{path}, row {number}"
            # Before it becomes a string: the size of its bytes, if it has any.
            buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
            if buffer is not None and buffer.size > rules.max_document_bytes:
                yield rules.refuse_or_skip_long(where), number / rows
            else:
                yield extract_text(value.as_py(), where, columns, rules), number / rows


def _name_invalid_dictionary(batches: Iterator, path: Path, column: str) -> Iterator:
    """Raises UserError for invalid UTF-8 in a dictionary, which pyarrow checks when it reads it."""
    try:
        yield from batches
    except ValueError as error:
        if "UTF8" not in str(error):
            raise
        raise UserError(
            f"{path}: not UTF-8 in the column {column!r}, whose texts are in a dictionary, so that "
            "neither bytes nor rows can be left out; write it as a column of strings"
        ) from None


def _largest_chunk(file, column: str) -> int:
    """Returns the largest size of a column in a row group, in bytes as they are encoded."""
    leaves = [file.schema.column(i).path for i in range(len(file.schema.names))]
    if column not in leaves:  # it is nested, which `extract_text` refuses
        return 0
    number, groups = leaves.index(column), range(file.metadata.num_row_groups)
    chunks = [file.metadata.row_group(group).column(number) for group in groups]
    return max((chunk.total_uncompressed_size for chunk in chunks), default=0)
