"""Tests of token stores that several machines prepare in shards."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from conftest import call
from data_helpers import RULES, files_of, prepare_store, write_jsonl

from smallgpt_jax.data import encoding, parts, shards
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.parts import Part, Shard, document_batches, find_start
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.errors import UserError

COUNT = 3


def write_shard(
    store: Path, source, number: int, count: int = COUNT, log=lambda _: None, **changes
):
    fields = {"tokenizer": "bytes", "validation_fraction": 0.2, **changes}
    spec = StoreSpec.of(DataConfig(store=str(store), source=str(source), **fields))
    return shards.write_shard(spec, Shard(number, count), workers=1, log=log)[0]


def write_sources(folder: Path) -> dict[str, str]:
    """Returns a file, a folder of uneven files, and books of which whole ones are held out."""
    texts = [f"document {i} " + "text " * (i * 37 % 90) for i in range(200)]
    write_jsonl(folder / "one.jsonl", texts)
    for name, content in (("a", texts[:120]), ("b", []), ("c", texts[120:])):
        (folder / "files").mkdir(exist_ok=True)
        path = write_jsonl(folder / "files" / f"{name}.jsonl", [*content, ""])
        (path.with_suffix(".jsonl.gz")).write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    (folder / "books").mkdir()
    for i in range(60):
        paragraphs = [f"book{i} {'word ' * 40}{j}" for j in range(5 + i % 7)]
        (folder / "books" / f"{i}.txt").write_text("\n\n".join(paragraphs))
    return {name: str(folder / name) for name in ("one.jsonl", "files", "books")}


@pytest.mark.parametrize(("name", "count"), [("one.jsonl", 5), ("files", 2), ("books", 3)])
def test_joined_shards_equal_one_preparation(name, count, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 3000)
    source = write_sources(tmp_path)[name]
    whole = prepare_store(tmp_path / "whole", source)
    for number in range(count, 0, -1):
        write_shard(tmp_path / "store", source, number, count)
    joined = prepare_store(tmp_path / "store", source)
    assert files_of(joined.folder) == files_of(whole.folder)
    held = [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "store"))]
    assert sorted(held) == ["store", "store.shards"]


def test_a_shard_resumes_and_trains_the_tokenizer_on_the_whole_text(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BATCH_CHARACTERS", 1000)
    source, tokenizer = write_sources(tmp_path)["one.jsonl"], "sentencepiece:300"
    whole = prepare_store(tmp_path / "whole", source, tokenizer=tokenizer)
    encode, calls, logged = encoding.encode, [], []

    def encode_some(texts, tokenizer):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(texts, tokenizer)

    monkeypatch.setattr(encoding, "encode", encode_some)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "store", source, 2, tokenizer=tokenizer)
    for number in (2, 1, 3):
        write_shard(tmp_path / "store", source, number, log=logged.append, tokenizer=tokenizer)
    assert sum(line.startswith("resuming ") for line in logged) == 1
    joined = prepare_store(tmp_path / "store", source, tokenizer=tokenizer)
    assert files_of(joined.folder) == files_of(whole.folder)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def edit(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGES = {
    "missing": (shutil.rmtree, r"store\.shards: missing or unfinished: 2/3; prepare each with"),
    "unfinished": (lambda shard: shard.rename(f"{shard}.partial"), "unfinished: 2/3"),
    "flipped": (
        lambda shard: flip(shard / "train.bin"),
        r"2-of-3: damaged, the files of the train split have changed; remove \S+2-of-3 and rerun",
    ),
    "cut": (lambda shard: cut(shard / "train.documents.bin"), r"documents\.bin: damaged, has"),
    "record": (lambda shard: cut(shard / "shard.json"), r"shard\.json: not JSON"),
    "version": (
        lambda shard: edit(shard / "shard.json", version="0.0.1"),
        "2-of-3: was made by another version of smallgpt_jax than 1-of-3",
    ),
    "border": (
        lambda shard: edit(shard / "shard.json", start={"parts": 0, "items": 1, "digest": ""}),
        "2-of-3: does not begin where 1-of-3 ends",
    ),
    "counts": (
        lambda shard: shutil.copytree(shard, shard.with_name("1-of-4")),
        "contains shards of 3 and of 4",
    ),
}


@pytest.fixture(scope="module")
def finished_shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    source = write_sources(folder)["one.jsonl"]
    for number in (1, 2, 3):
        write_shard(folder / "store", source, number)
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_names_the_shard_that_does_not_fit(name, finished_shards, tmp_path):
    shutil.copytree(finished_shards / "store.shards", tmp_path / "store.shards")
    damage, message = DAMAGES[name]
    damage(tmp_path / "store.shards" / "2-of-3")
    with pytest.raises(UserError, match=message) as caught:
        prepare_store(tmp_path / "store", finished_shards / "one.jsonl")
    assert "\n" not in str(caught.value) and not (tmp_path / "store").exists()


def test_refuses_shards_of_other_text_or_settings(tmp_path):
    source = write_sources(tmp_path)["one.jsonl"]
    for number in (1, 2):
        write_shard(tmp_path / "store", source, number)
    with Path(source).open("a") as file:
        file.write('{"text": "one more"}\n')
    write_shard(tmp_path / "store", source, 3)
    with pytest.raises(UserError, match="3-of-3: was made from other text"):
        prepare_store(tmp_path / "store", source)
    with pytest.raises(UserError, match=r"with validation_fraction=0\.2, but this config"):
        write_shard(tmp_path / "store", source, 3, validation_fraction=0.1)


def test_the_command(tmp_path):
    """The joining machine does not need the text."""
    source = write_sources(tmp_path)["one.jsonl"]
    fields = ["--config=gpt:tiny", f"--config.data.source={source}"]
    store = f"--config.data.store={tmp_path / 'store'}"
    for number in ("1", "1", "2"):
        made = call("prepare", *fields, store, f"--shard={number}/2")
        assert made.returncode == 0, made.stderr
    assert f"new: {tmp_path}/store.shards/2-of-2" in made.stdout
    assert call("prepare", *fields, f"--config.data.store={tmp_path / 'whole'}").returncode == 0
    Path(source).unlink()
    joined = call("prepare", *fields, store)
    assert joined.returncode == 0 and "joining the 2 shards" in joined.stdout, joined.stderr
    assert files_of(tmp_path / "store") == files_of(tmp_path / "whole")
    again = call("prepare", *fields, store, "--shard=2/2")
    assert again.stdout == f"existing: {tmp_path / 'store'}\n"
    for value, message in (("3/2", "expected NUMBER/COUNT"), ("x", "expected NUMBER/COUNT")):
        refused = call("prepare", *fields, store, f"--shard={value}")
        assert refused.returncode == 1 and message in refused.stderr
    cached = call("prepare", *fields, "--config.data.store=", "--shard=1/2")
    assert "--shard needs a folder that all machines reach" in cached.stderr


@pytest.mark.parametrize("fraction", [None, 0.5])
@pytest.mark.parametrize("count", [1, 3, 4, 25, 30])
def test_each_item_is_in_one_shard(fraction, count):
    """Parts whose sizes, and possibly progress, are unknown; there are fewer parts than shards."""

    def read(rules):
        for item in "abc":
            yield item, fraction

    source = [Part(str(number), 0, read) for number in range(25)]
    texts, starts = [], []
    for number in range(1, count + 1):
        shard = Shard(number, count)
        start, _ = find_start(source, RULES, shard)
        batches = list(document_batches(source, RULES, start, shard))
        starts += [start, batches[-1].place]
        texts.append("".join(text for batch in batches for text in batch.texts))
    assert "".join(texts) == "abc" * 25
    assert starts[1:-1:2] == starts[2::2]
    if count == 25:
        assert texts == ["abc"] * 25
