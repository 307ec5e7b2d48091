"""What a user sees of texts, stores and workdirs that cannot be used: docs/bad-input.md, row by row.

Each case is a table's row: what is wrong, the files, the settings, and the message, in full. Nothing is
lost or left half-written: files stay as they were, and neither a store nor a workdir appears.
"""

import bz2
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, load_config, run
from test_data import parquet, zstd

from smallgpt_jax import inference
from smallgpt_jax import workdir as run_folder
from smallgpt_jax.comparison import measure
from smallgpt_jax.data import prepare
from smallgpt_jax.errors import UserError
from smallgpt_jax.files import locked
from smallgpt_jax.train import train

LINES = b"".join(b'{"text": "words and words, number %d"}\n' % i for i in range(2000))
SKIP = "or leave such items out: --config.data.invalid_items=skip"
FETCH = "Fetch it again, or leave it out"
AGAIN = "Remove the folder and make the store again with smallgpt_jax.prepare"


def good_store(folder: Path, name: str = "store", tokenizer: str = "bytes") -> Path:
    (folder / "good.jsonl").write_bytes(LINES)
    return prepare.prepare_store(
        folder / name, source=str(folder / "good.jsonl"), tokenizer=tokenizer, validation_fraction=0.1,
        text_field="text", invalid_utf8="refuse", invalid_items="refuse", say=lambda _: None).folder


def files(**contents):
    """Makes these files; their names have __ for the dot."""
    def make(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name.replace("__", ".")).write_bytes(content)
    return make


def damaged_store(damage):
    """Makes a store and damages it."""
    return lambda folder: damage(good_store(folder))


def rewritten(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def another_run(change):
    """Makes the workdir of a run on a good text and changes something in it."""
    def make(folder: Path) -> None:
        good_store(folder)
        train(on_good_text(folder, train__steps=2), str(folder / "run"))
        change(folder)
    return make


def on_good_text(folder: Path, **fields):
    return load_config("gpt", data__source=f"{folder}/good.jsonl", data__store=f"{folder}/store", **fields)


GOOD = dict(data__source="HERE/good.jsonl", data__store="HERE/store")

CASES = {
    "A folder in a bucket": (
        files(), dict(data__source="gs://bucket/texts"),
        "config.data.source: 'gs://bucket/texts' is a URL, and object storage is not supported yet; mount the bucket "
        "or copy the files, and give a local path"),
    "No such file": (
        files(), dict(data__source="HERE/none.txt"),
        "config.data.source='HERE/none.txt': no such file"),
    "A folder without text": (
        lambda folder: None, dict(data__source="HERE"),
        "config.data.source='HERE': no .txt, .jsonl, .ndjson, .json, .parquet file in this folder"),
    "A folder of other files": (
        files(notes__md=b"# notes", more__md=b"# more", photo__png=b"\x89PNG"), dict(data__source="HERE"),
        "config.data.source='HERE': no .txt, .jsonl, .ndjson, .json, .parquet file in this folder; to read its 2 .md "
        "files as text, set --config.data.source='HERE/**/*.md'"),
    "A mount point for a store": (
        files(good__jsonl=LINES), dict(data__source="HERE/good.jsonl", data__store="/proc"),
        "config.data.store='/proc': is a mount point, which a finished store cannot replace; name a folder in it: "
        "--config.data.store=/proc/store"),
    "Empty documents only": (
        files(a__jsonl=b'{"text": ""}\n' * 3), dict(data__source="HERE/a.jsonl"),
        "config.data.source='HERE/a.jsonl': there is no text in it; left out: 3 empty"),
    "A picture by the name of a text": (
        files(a__txt=b"\x89PNG\r\n\x1a\n"), dict(data__source="HERE/a.txt"),
        "HERE/a.txt: not UTF-8 at byte 0 (line 1). Convert the file, or set "
        "--config.data.invalid_utf8=replace"),
    "Text in UTF-16": (
        files(a__txt="good\ntext".encode("utf-16-le")[1:] + b"\xff"), dict(data__source="HERE/a.txt"),
        "HERE/a.txt: not UTF-8 at byte 17 (line 2). Convert the file, or set "
        "--config.data.invalid_utf8=replace"),
    "A damaged gzip file": (
        files(a__jsonl__gz=gzip.compress(LINES)[:-50]), dict(data__source="HERE/a.jsonl.gz"),
        "HERE/a.jsonl.gz: damaged, or not what its name says (Compressed file ended before the "
        f"end-of-stream marker was reached). {FETCH}"),
    "A damaged bzip2 file": (
        files(a__txt__bz2=bz2.compress(LINES)[:-50]), dict(data__source="HERE/a.txt.bz2"),
        "HERE/a.txt.bz2: damaged, or not what its name says (Compressed file ended before the "
        f"end-of-stream marker was reached). {FETCH}"),
    "A damaged Zstandard file": (
        files(a__jsonl__zst=zstd(LINES)[:-50]), dict(data__source="HERE/a.jsonl.zst"),
        f"HERE/a.jsonl.zst: damaged, or not what its name says (Truncated compressed stream). {FETCH}"),
    "A file that is not what its name says": (
        files(a__jsonl__gz=LINES), dict(data__source="HERE/a.jsonl.gz"),
        "HERE/a.jsonl.gz: damaged, or not what its name says (Not a gzipped file (b'{\"')). " + FETCH),
    "A damaged Parquet file": (
        files(a__parquet=parquet({"text": ["words"]})[:-9]), dict(data__source="HERE/a.parquet"),
        "HERE/a.parquet: damaged, or not what its name says (Parquet magic bytes not found in footer. Either "
        f"the file is corrupted or this is not a parquet file). {FETCH}"),
    "An archive": (
        files(a__zip=b"PK"), dict(data__source="HERE/a.zip"),
        "HERE/a.zip: archives of the kind .zip cannot be read; unpack it, or compress single files as .gz, "
        ".bz2, .zst"),
    "Another field in JSON": (
        files(a__jsonl=LINES + b'{"body": "words", "id": 7}\n'), dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 2001: no text in the field 'text': it has body, id; set "
        f"--config.data.text_field, {SKIP}"),
    "Another column in Parquet": (
        files(a__parquet=parquet({"body": ["words"], "id": [1]})), dict(data__source="HERE/a.parquet"),
        "HERE/a.parquet: no column 'text', it has body, id; set --config.data.text_field"),
    "Numbers where text should be": (
        files(a__jsonl=b'{"text": 7}\n'), dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 1: no text in the field 'text': it has text; set --config.data.text_field, "
        f"{SKIP}"),
    "A line that was cut off": (
        files(a__jsonl=LINES[:-5]), dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 2000: not JSON: Unterminated string starting at; mend the line, " + SKIP),
    "One JSON list instead of lines": (
        files(a__json=b'[{"text": "words"}]'), dict(data__source="HERE/a.json"),
        f"HERE/a.json, line 1: not a JSON object: a list; mend the line, {SKIP}"),
    "Half a surrogate pair": (
        files(a__jsonl=b'{"text": "ab\\ud83d"}'), dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 1: half a surrogate pair: character 2; set --config.data.invalid_utf8=replace, "
        f"{SKIP}"),
    "Too little text to validate on": (
        files(a__jsonl=b"\n".join(LINES.split(b"\n")[:4])), dict(data__source="HERE/a.jsonl"),
        "config.data.source='HERE/a.jsonl': of its 4 documents none fell into the validation split "
        "(config.data.validation_fraction=0.1); use more text or another fraction"),
    "Too little text for one batch": (
        files(a__jsonl=LINES), dict(data__source="HERE/a.jsonl", train__batch_size=8000),
        "the training text has NUMBER tokens, 798 rows of 64 + 1; one batch takes 8000 rows: use more "
        "text, or a smaller config.train.batch_size or config.model.context_length"),
    "A tokenizer that is no tokenizer": (
        files(a__jsonl=LINES, my__model=b"nonsense"),
        dict(data__source="HERE/a.jsonl", data__tokenizer="HERE/my.model"),
        "HERE/my.model: not a SentencePiece model"),
    "A tokenizer too large for the model": (
        files(a__jsonl=LINES), dict(data__source="HERE/a.jsonl", model__vocab_size=200),
        "config.model.vocab_size=200: the tokenizer of the text has 257 entries"),
    "A tokenizer of an impossible size": (
        files(a__jsonl=LINES), dict(data__source="HERE/a.jsonl", data__tokenizer="sentencepiece:10"),
        "config.data.tokenizer='sentencepiece:10': after sentencepiece: comes the number of pieces, at least "
        "300 (256 of them are bytes)"),
    "A store of another version": (
        damaged_store(lambda f: rewritten(f / "metadata.json",
                                          lambda b: b.replace(b'"format": 2', b'"format": 1'))), GOOD,
        f"HERE/store: a token store of format 1, this version reads format 2. {AGAIN}"),
    "A store that was cut off": (
        damaged_store(lambda f: rewritten(f / "train.bin", lambda b: b[:-1000])), GOOD,
        f"HERE/store/train.bin: NUMBER bytes long, it was made with NUMBER: damaged. {AGAIN}"),
    "A store with a file missing": (
        damaged_store(lambda f: (f / "validation.documents.bin").unlink()), GOOD,
        f"HERE/store/validation.documents.bin: this part of the token store is missing. {AGAIN}"),
    "A store with a damaged description": (
        damaged_store(lambda f: rewritten(f / "metadata.json", lambda b: b[:20])), GOOD,
        "HERE/store/metadata.json: not the description of a token store (Unterminated string starting at: "
        "line 3 column 3 (char 19))"),
    "A store made from something else": (
        damaged_store(lambda f: None), dict(GOOD, data__tokenizer="sentencepiece:300"),
        "config.data.store='HERE/store' was made with tokenizer='bytes'; this config has "
        "tokenizer='sentencepiece:300'. Name another folder, or use the same settings"),
    "A store inside of its source": (
        lambda folder: ((folder / "texts").mkdir(), (folder / "texts" / "a.jsonl").write_bytes(LINES)),
        dict(data__source="HERE/texts", data__store="HERE/texts/store"),
        "config.data.store='HERE/texts/store': lies inside of HERE/texts, whose files are the source; name a "
        "folder elsewhere"),
    "A store's place that is taken": (
        files(good__jsonl=LINES, store=b"a thesis"), GOOD,
        "config.data.store='HERE/store': there is something else there already; name a new folder"),
    "A mixture of different tokenizers": (
        lambda f: (good_store(f, "one"), good_store(f, "two", "sentencepiece:300")),
        dict(data__mixture="HERE/one=1,HERE/two=1"),
        "config.data.mixture='HERE/one=1,HERE/two=1': the stores 'HERE/one' and 'HERE/two' have different "
        "tokenizers. Prepare both with the same one: --config.data.tokenizer=HERE/one/tokenizer"),
    "A workdir with something else in it": (
        lambda f: (good_store(f), (f / "run").mkdir(), (f / "run" / "thesis.tex").write_text("mine")), GOOD,
        "--workdir=HERE/run: holds files, but no run (no config.json); choose an empty or a new folder"),
    "Another model in the same workdir": (
        another_run(lambda f: None), dict(GOOD, model__d_model=128, train__seed=7),
        "--workdir=HERE/run: belongs to a run with another config: model.d_model was 64, now 128; train.seed "
        "was 1337, now 7.\nUse the same settings to continue it, or another --workdir"),
    "Fewer steps than the run has had": (
        another_run(lambda f: None), dict(GOOD, train__steps=1),
        "--workdir=HERE/run: has been trained for 2 steps, more than config.train.steps=1; ask for as many, or "
        "use another --workdir"),
    "Text that has changed since the run began": (
        another_run(lambda f: (shutil.rmtree(f / "store"), (f / "good.jsonl").write_bytes(LINES * 2))), GOOD,
        "--workdir=HERE/run: its text has changed since the run began (documents for training: from NUMBER to "
        "NUMBER; bytes of text for training: from NUMBER to NUMBER; tokens for training: from NUMBER to NUMBER; "
        "and 3 more); use another --workdir, or the text of then"),
    "A damaged config.json": (
        another_run(lambda f: rewritten(f / "run" / "config.json", lambda b: b[:40])), GOOD,
        "HERE/run/config.json: not the config of a run (Unterminated string starting at: line 3 column 22 "
        "(char 35))"),
    "No checkpoint left that can be read": (
        another_run(lambda f: shutil.rmtree(f / "run" / "checkpoints" / "2" / "check")),
        dict(GOOD, train__steps=2),
        "HERE/run/checkpoints: no checkpoint in it can be read (2: WHY).\nThey are left as they are; to "
        "begin anew, use another --workdir"),
}


def shown(message: str, folder: Path) -> str:
    """A message without what differs from machine to machine."""
    message = message.replace(str(folder), "HERE")
    message = re.sub(r"\b\d{1,3}(,\d{3})+", "NUMBER", message)
    return re.sub(r"\(2: .*?\)\.\n", "(2: WHY).\n", message)


def contents(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_a_user_sees_what_is_wrong(case, tmp_path):
    make, settings, message = CASES[case]
    make(tmp_path)
    before = contents(tmp_path)
    config = load_config("gpt", **{"data__store": f"{tmp_path}/store", **{
        field: value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
        for field, value in settings.items()}})
    with pytest.raises(UserError) as error:
        train(config, str(tmp_path / "run"))
    assert shown(str(error.value), tmp_path) == message
    assert str(error.value).count("\n") <= 1
    after = {path: content for path, content in contents(tmp_path).items() if path.name != ".lock"}
    new = {str(path.relative_to(tmp_path)) for path in after.keys() - before.keys()}
    # What is done of a text that turned out to be bad is kept for going on, under another name; a good
    # store may have been made before something else was found.
    assert not [name for name in new if not name.startswith(("store/", "store.partial/"))], new
    assert "store/metadata.json" in new or not [name for name in new if name.startswith("store/")]
    assert [path for path, content in before.items() if after.get(path) != content] == []


URL = "gs://bucket/run"
REFUSED_URL = (f"{URL!r} is a URL, and object storage is not supported yet; mount the bucket or copy the files, and "
               "give a local path")


@pytest.mark.parametrize("field, use", [
    ("--workdir", lambda: train(load_config("gpt"), URL)),
    ("--workdir", lambda: inference.load(URL)),
    ("--config=configs/run.py", lambda: load_config("run", URL)),
    ("config.compare.texts", lambda: measure.named_sources(f"here=a.txt,there={URL}")),
    *((f"config.data.{field}", lambda settings={f"data__{field}": value}: train(load_config("gpt", **settings), "run"))
      for field, value in {"store": URL, "source": f"a.txt,{URL}", "mixture": f"{URL}=1", "tokenizer": URL}.items()),
])
def test_a_url_is_refused_and_nothing_is_made(field, use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words\n" * 1000)
    with pytest.raises(UserError) as error:
        use()
    assert str(error.value) == f"{field}: {REFUSED_URL}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("field, command", [
    ("--output", ("convert", "--to=hf", "--workdir=run", f"--output={URL}")),
    ("--workdirs", ("compare", f"--workdirs=run,{URL}", "--output=report")),
    ("--data_dir", ("evaluate", "--workdir=run", "--tasks=paper", f"--data_dir={URL}")),
])
def test_commands_refuse_a_url_and_make_nothing(field, command, tmp_path):
    result = run(*command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (result.returncode, result.stderr) == (1, f"error: {field}: {REFUSED_URL}\n")
    assert not any(tmp_path.iterdir())


def test_two_runs_in_one_workdir(tmp_path):
    good_store(tmp_path)
    (tmp_path / "run").mkdir()
    config = on_good_text(tmp_path, train__steps=2)
    with locked(tmp_path / "run" / run_folder.LOCK_FILE), pytest.raises(UserError) as error:
        train(config, str(tmp_path / "run"))
    assert re.fullmatch(rf"--workdir={tmp_path}/run: process \d+ on \S+ is training in it; wait for it, or "
                        "use another --workdir", str(error.value))
    train(config, str(tmp_path / "run"))
    assert not (tmp_path / "run" / run_folder.LOCK_FILE).exists()


@pytest.mark.parametrize("character", ["x", "word ", "漢"])
def test_one_very_large_document_is_a_document(tmp_path, character):
    """Fifty megabytes in one line, and a few small ones."""
    large = character * (50_000_000 // len(character.encode()))
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n"
                        for text in (large, *("small %d" % i for i in range(50))))  # noqa: UP031
    made = prepare.prepare_store(
        tmp_path / "store", source=str(tmp_path / "a.jsonl"), tokenizer="bytes", validation_fraction=0.3,
        text_field="text", invalid_utf8="refuse", invalid_items="refuse", say=lambda _: None)
    split = max(made.train, made.validation, key=lambda split: split.tokens)
    start = int(split.starts[0])
    assert split.text_bytes > 49_999_990
    np.testing.assert_array_equal(
        split.stream[start + 1:start + 1 + len(large.encode())], np.frombuffer(large.encode(), np.uint8))


def test_the_documents_table_is_what_is_tested():
    text = (ROOT / "docs" / "bad-input.md").read_text()
    for case, (_, _, message) in CASES.items():
        assert f"| {case} | {in_table(message)} |" in text, case


def in_table(message: str) -> str:
    """A message as it stands in the table."""
    message = message.replace("HERE", "DIR").replace("NUMBER", "…").replace("WHY", "…").replace("|", "\\|")
    return "<br>".join(f"`{line}`" for line in message.splitlines())
