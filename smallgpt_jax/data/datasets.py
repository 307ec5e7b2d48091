"""Reads Hugging Face and TensorFlow datasets as lists of `Part`s. Requires the optional
dependencies `[data]`.
"""

import contextlib
import dataclasses
import functools
import struct
from collections.abc import Iterator
from typing import BinaryIO

from smallgpt_jax.data.parts import Member, Part, Rules, extract_text
from smallgpt_jax.data.prompts import extract_document
from smallgpt_jax.data.text_files import name_file_in_errors, open_binary
from smallgpt_jax.errors import UserError, import_library
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.storage.tensorboardx import without_torch

_HEADER = struct.Struct("<QI")  # of a TFRecord
_CHECKSUM_BYTES = 4


@contextlib.contextmanager
def _name_source_in_errors(source: str) -> Iterator[None]:
    """Raises a UserError with the dataset's name if reading fails in the `with` block."""
    try:
        yield
    except UserError:
        raise
    # The libraries, the network and a dataset's own code raise errors of many types.
    except Exception as error:
        message = short_reason(error).rstrip(".")
        if source.startswith("tfds:") and "file format" in message.lower():
            message += (
                "; convert the dataset to TFRecord or array_record files (tfds build "
                "--file_format=array_record), or its text to Parquet files"
            )
        raise UserError(f"config.data.source={source!r}: {message}") from None


def _hugging_face_parts(source: str) -> list[Part]:
    """Returns one streamed `Part` per shard of the training split of `hf:NAME[:CONFIG]`."""
    datasets = import_library("datasets", "data")
    name, *config = source.removeprefix("hf:").split(":", 1)
    with _name_source_in_errors(source):
        stream = datasets.load_dataset(name, *config, split="train", streaming=True)
    split = (stream.info.splits or {}).get("train")
    num_rows = getattr(split, "num_examples", 0) or 0  # as the dataset's card says, if it does
    rows_per_shard = num_rows / stream.num_shards

    def read(shard: int, rules: Rules):
        with _name_source_in_errors(source):
            rows = stream.shard(num_shards=stream.num_shards, index=shard)
            for number, row in enumerate(rows, 1):
                # Shards differ in their rows, and a card may be out of date.
                fraction = min(number / rows_per_shard, 1.0) if rows_per_shard else None
                item = extract_document(row, f"{source}, shard {shard}, row {number}", rules)
                yield item, fraction

    return [
        Part(f"{source}, shard {shard}", 0, functools.partial(read, shard), has_fields=True)
        for shard in range(stream.num_shards)
    ]


def _tfds_parts(source: str) -> list[Part]:
    """Returns one `Part` per TFRecord shard of `tfds:NAME`; of other formats, a single one."""
    tfds = import_library("tensorflow_datasets", "data")
    name = source.removeprefix("tfds:")
    with _name_source_in_errors(source):
        builder = tfds.builder(name)
        # These are read without TensorFlow, which the library needs for them.
        only_tfrecord = {tfds.core.FileFormat.TFRECORD}
        if builder.is_prepared() and builder.info.available_file_formats() == only_tfrecord:
            split = builder.info.splits["train"]
            return list(map(_tfrecord_part, split.filepaths, split.shard_lengths))
        return [_indexed_part(source, tfds.data_source(name, split="train"))]


def _tfrecord_part(path, count: int) -> Part:
    """Returns a `Part` that reads a TFRecord file of `count` tf.train.Example protos."""
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2

    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; download this shard again") from None

    def read(rules: Rules):
        number, name = 0, rules.text_field
        with name_file_in_errors(path):
            for number, record in enumerate(read_records(open_binary(path), stat.length), 1):
                try:
                    fields = tf_example_pb2.Example.FromString(record).features.feature
                except DecodeError:
                    raise ValueError(f"record {number} is not a tf.train.Example") from None
                # A protobuf map makes the fields that it is asked for.
                values = fields[name].bytes_list.value if name in fields else ()
                text = values[0] if len(values) == 1 else None
                item = extract_text(text, f"{path}, record {number}", sorted(fields), rules)
                yield item, min(number / max(count, 1), 1.0)
        if number != count:
            raise UserError(
                f"{path}: has {number} records, but dataset_info.json lists {count}; download "
                "this shard again"
            )

    return Part(str(path), stat.length, read, (stat.mtime,))


def read_records(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the records of a TFRecord file. Reading does not need TensorFlow.

    A record consists of the length of its data in bytes (uint64), a checksum of the length
    (uint32), the data, and a checksum of the data (uint32), all little-endian. Raises ValueError if
    a record is truncated or its length does not match the checksum. The checksum of the data is not
    verified, because that takes longer in Python than tokenizing.
    """
    with without_torch():
        from tensorboardX.record_writer import masked_crc32c

    end = 0
    while end < size:
        start, header = end, file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ValueError(f"the record at byte {start} is truncated")
        length, checksum = _HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            raise ValueError(f"no record starts at byte {start}")
        end = start + _HEADER.size + length + _CHECKSUM_BYTES
        if end > size:
            raise ValueError(f"the record at byte {start} is truncated")
        yield file.read(length + _CHECKSUM_BYTES)[:length]


def _indexed_part(source: str, rows) -> Part:
    def read(rules: Rules):
        for number in range(len(rows)):
            row, where = rows[number], f"{source}, item {number}"
            item = extract_text(row.get(rules.text_field), where, row, rules)
            yield item, number / len(rows)

    return Part(source, size=0, read=read)


# Prefix of a dataset's name in `config.data.source` → function that returns its `Part`s. A new kind
# is a line here.
DATASETS = {"hf:": _hugging_face_parts, "tfds:": _tfds_parts}


@dataclasses.dataclass(frozen=True)
class Dataset(Member):
    is_local = False

    name: str  # with the prefix

    @property
    def identity(self) -> list[str]:
        return [self.name]

    def parts(self, max_passage: int) -> list[Part]:
        prefix = f"{self.name.partition(':')[0]}:"
        return DATASETS[prefix](self.name)
