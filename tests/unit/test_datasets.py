"""Tests of Hugging Face and TensorFlow datasets as text sources."""

import io
import json
import re
import struct
import sys
from pathlib import Path

import grain
import pytest
from data_helpers import RULES, parquet, prepare_store, read, write_jsonl, zstd
from tensorboardX.crc32c import crc32c
from tensorboardX.record_writer import masked_crc32c

from smallgpt_jax.data import parts, store
from smallgpt_jax.data.datasets import read_records
from smallgpt_jax.data.parts import Place, document_batches
from smallgpt_jax.data.source import Source
from smallgpt_jax.errors import UserError


@pytest.mark.slow
def test_hugging_face_dataset(tmp_path, monkeypatch):
    """The dataset is a local folder with three files, each of which is a shard."""
    monkeypatch.setenv("USE_TORCH", "0")  # so that the import of `datasets` is two seconds faster
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    for module in (
        datasets.config,
        constants,
    ):  # both read HF_HUB_OFFLINE from the environment only at import
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    datasets.utils.logging.set_verbosity_error()
    for shard in range(3):
        lines = [
            json.dumps({"text": f"text {i} of {shard}" if i % 9 else "", "id": i})
            for i in range(40)
        ]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))
    source = f"hf:{tmp_path}"
    texts = [f"text {i} of {shard}" for shard in range(3) for i in range(40) if i % 9]
    assert read(source) == texts
    parts = Source(source).parts
    assert len(parts) == 3
    rest = document_batches(parts, RULES, Place(1, 30))
    assert [text for batch in rest for text in batch.texts] == texts[texts.index("text 30 of 1") :]
    with pytest.raises(
        UserError,
        match=r"row 1: no string in the field 'body': the item's fields are named text, id",
    ):
        read(source, text_field="body")
    with pytest.raises(UserError, match=r"hf:nobody/nothing"):
        read("hf:nobody/nothing")


def write_tfds(folder, file_format: str, shards: list[list[dict]], monkeypatch) -> list[Path]:
    """Writes the TensorFlow dataset `words` to `folder` and returns its shard files.

    Also makes `folder` the data folder of tfds until the end of the test.
    """
    pytest.importorskip("tensorflow_datasets")
    from tensorflow_datasets.core import constants
    from tensorflow_datasets.proto import tf_example_pb2

    monkeypatch.setattr(constants, "DATA_DIR", str(folder))
    folder = folder / "words" / "1.0.0"
    folder.mkdir(parents=True)
    features = "tensorflow_datasets.core.features."
    (folder / "features.json").write_text(
        json.dumps(
            {
                "pythonClassName": features + "features_dict.FeaturesDict",
                "featuresDict": {
                    "features": {
                        name: {"pythonClassName": features + "text_feature.Text", "text": {}}
                        for name in shards[0][0]
                    }
                },
            }
        )
    )
    (folder / "dataset_info.json").write_text(
        json.dumps(
            {
                "name": "words",
                "version": "1.0.0",
                "fileFormat": file_format,
                "splits": [
                    {
                        "name": "train",
                        "shardLengths": [str(len(items)) for items in shards],
                        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                    }
                ],
            }
        )
    )
    files = []
    for number, items in enumerate(shards):
        files.append(folder / f"words-train.{file_format}-{number:05}-of-{len(shards):05}")
        records = []
        for item in items:
            example = tf_example_pb2.Example()
            for field, text in item.items():
                example.features.feature[field].bytes_list.value.append(text)
            records.append(example.SerializeToString())
        if file_format == "array_record":
            from array_record.python.array_record_module import ArrayRecordWriter

            writer = ArrayRecordWriter(str(files[-1]), "group_size:1")
            for record in records:
                writer.write(record)
            writer.close()
        else:
            files[-1].write_bytes(b"".join(map(tfrecord_bytes, records)))
    return files


def tfrecord_bytes(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return b"".join(
        [
            length,
            struct.pack("<I", masked_crc32c(length)),
            record,
            struct.pack("<I", masked_crc32c(record)),
        ]
    )


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
def test_tensorflow_dataset(file_format, tmp_path, monkeypatch):
    """A TensorFlow dataset gives the same token store as JSON lines of the same texts."""
    shards = [
        [{"text": f"text {i} ü of {shard}".encode(), "url": b"-"} for i in range(count)]
        for shard, count in enumerate((30, 0, 20))
    ]
    items = [item for shard in shards for item in shard]
    write_tfds(tmp_path, file_format, shards if file_format == "tfrecord" else [items], monkeypatch)
    texts = [item["text"].decode() for item in items]
    assert read("tfds:words") == texts
    assert_stores_equal("tfds:words", texts, tmp_path)
    with pytest.raises(
        UserError, match="no string in the field 'body': the item's fields are named text, url; set"
    ):
        read("tfds:words", text_field="body")
    with pytest.raises(UserError, match="'tfds:nothing': Dataset nothing not found"):
        read("tfds:nothing")


def assert_stores_equal(source: str, texts: list[str], folder: Path) -> None:
    for name, which in (("one", source), ("other", write_jsonl(folder / "texts.jsonl", texts))):
        prepare_store(folder / name, which)
    for split in store.SPLITS:
        for ending in (store.TOKENS, store.DOCUMENTS):
            one, other = (
                (folder / made / f"{split}{ending}").read_bytes() for made in ("one", "other")
            )
            assert one == other


def test_tfrecord_checksums_do_not_import_pytorch(tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorboardX", "torch"):
            monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torch.py").write_text("raise AssertionError('PyTorch is imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    records = tfrecord_bytes(b"one") + tfrecord_bytes(b"two")
    assert list(read_records(io.BytesIO(records), len(records))) == [b"one", b"two"]


def test_tfrecord_resumes_at_any_record(tmp_path, monkeypatch):
    shards = [[{"text": f"text {i} of {shard}".encode()} for i in range(40)] for shard in range(3)]
    write_tfds(tmp_path, "tfrecord", shards, monkeypatch)
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 100)
    rest = list(document_batches(Source("tfds:words").parts, RULES, Place(1, 30)))
    texts = [f"text {i} of {shard}" for shard in range(3) for i in range(40)]
    assert [text for batch in rest for text in batch.texts] == texts[70:]
    done = [batch.done for batch in rest]
    assert done == sorted(done) and done[-1] == 1 and done[0] == pytest.approx(78 / 120, abs=0.02)


def test_names_damaged_tfrecord_files(tmp_path, monkeypatch):
    assert crc32c(b"123456789") == 0xE3069283
    one, two = write_tfds(
        tmp_path, "tfrecord", [[{"text": b"a" * 40}] * 9, [{"text": b"b"}] * 2], monkeypatch
    )
    whole = one.read_bytes()
    record, flipped = len(whole) // 9, bytearray(whole)
    flipped[2 * record + 5] ^= 1
    for damaged, message in (
        (whole[:-3], f"the record at byte {8 * record} is truncated"),
        (whole[: 4 * record + 7], f"the record at byte {4 * record} is truncated"),
        (bytes(flipped), f"no record starts at byte {2 * record}"),
        (whole + tfrecord_bytes(b"text"), "record 10 is not a tf.train.Example"),
        (whole[: 8 * record], "has 8 records, but dataset_info.json lists 9; download this shard"),
    ):
        one.write_bytes(damaged)
        with pytest.raises(UserError, match=f"{re.escape(str(one))}: .*{message}"):
            read("tfds:words", invalid_items="skip")
    one.write_bytes(whole)
    two.unlink()
    with pytest.raises(
        UserError, match=f"{re.escape(str(two))}: No such file or directory; download this shard"
    ):
        Source("tfds:words").parts  # noqa: B018


def test_prepare_resumes_after_a_damaged_shard_is_replaced(tmp_path, monkeypatch):
    shards = [[{"text": f"text {i} of {shard}".encode()} for i in range(40)] for shard in range(3)]
    files = write_tfds(tmp_path, "tfrecord", shards, monkeypatch)
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 100)
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:-3])
    with pytest.raises(UserError, match="is truncated"):
        prepare_store(tmp_path / "one", "tfds:words")
    files[1].write_bytes(whole)
    logged = []
    prepare_store(tmp_path / "one", "tfds:words", log=logged.append)
    assert "61% done" in logged[0], (
        logged
    )  # resumed after the last complete batch of the second shard
    prepare_store(tmp_path / "other", "tfds:words")
    assert all(
        (tmp_path / "one" / f"{split}.bin").read_bytes()
        == (tmp_path / "other" / f"{split}.bin").read_bytes()
        for split in store.SPLITS
    )


def test_real_tfrecord_dataset(shared_data, tmp_path, monkeypatch):
    """A TensorFlow dataset of 1,000 C4 documents gives the same token store as JSON lines of the
    same texts.

    To write the JSON lines, the test reads the records with grain and decodes them with tfds.
    """
    tfds = pytest.importorskip("tensorflow_datasets")
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(shared_data / "tfds"))
    name = "c4_minimal/en:3.0.1"
    builder = tfds.builder(name)
    texts = [
        builder.info.features.deserialize_example_np(record)["text"].decode()
        for path in builder.info.splits["train"].filepaths
        for record in grain.experimental.TFRecordIterDataset(str(path))
    ]
    assert len(texts) == 1000
    assert_stores_equal(f"tfds:{name}", texts, tmp_path)


def test_names_missing_libraries(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(parquet({"text": ["a"]}))
    (tmp_path / "b.txt.zst").write_bytes(zstd(b"text"))
    for library in ("tensorflow_datasets", "datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, library, None)
    for source in ("tfds:words", "hf:some/corpus", tmp_path / "a.parquet", tmp_path / "b.txt.zst"):
        with pytest.raises(UserError, match=r"pip install -c constraints.txt -e '\.\[data\]'"):
            read(source)
