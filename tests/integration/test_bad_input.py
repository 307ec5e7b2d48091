"""Error messages for unusable texts, stores and workdirs, and their table in docs/bad-input.md.

Each row of the table has an entry in CASES: the problem, a function that writes the files, the
config's settings, and the message. Training on these files with these settings fails with the
message. It leaves existing files unchanged and creates no workdir.
"""

import bz2
import gzip
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT, call, init, load_config, save_run
from data_helpers import parquet, prepare_store, zstd
from run_helpers import start_from

from smallgpt_jax import inference
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import texts
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.curves import save_curves
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.trainer import train_and_evaluate

LINES = b"".join(b'{"text": "words and words, number %d"}\n' % i for i in range(2000))
SKIP = "or skip such items with --config.data.invalid_items=skip"
NOT_UTF8 = (
    "convert the file, set --config.data.invalid_utf8=replace, or skip it with "
    "--config.data.invalid_items=skip"
)
DAMAGED = "damaged, or of another type than its suffix"
AGAIN = "download it again, or remove it"
RERUN = "remove the folder and rerun smallgpt_jax.prepare"
GOOD = dict(data__source="HERE/good.jsonl", data__store="HERE/store")


def good_store(folder: Path, name: str = "store", tokenizer: str = "bytes") -> Path:
    (folder / "good.jsonl").write_bytes(LINES)
    return prepare_store(
        folder / name, folder / "good.jsonl", tokenizer=tokenizer, validation_fraction=0.1
    ).folder


@pytest.fixture(scope="session")
def good_run(tmp_path_factory) -> Path:
    """Returns a folder with a text, its token store, and the workdir `run` of a finished run of two
    steps.

    The settings in GOOD point to the text and the store, and are those of the run.
    """
    folder = tmp_path_factory.mktemp("good")
    good_store(folder)
    config = Config.of(load_config("gpt", train__steps=2, **replace_here(folder, GOOD)))
    program = build_program(config, jax.devices())
    state = start_from(program, init(program.model))  # compiles nothing
    save_run(folder / "run", config, state.params, opt_state=state.opt_state)
    corpus = load_or_prepare(config.data)
    targets = num_validation_targets(corpus, config.data, config.model, config.train)
    rewrite(
        folder / "run" / "metrics.jsonl",
        lambda lines: lines.replace(b'"targets": 64', f'"targets": {targets}'.encode()),
    )
    save_curves(folder / "run")
    return folder


def replace_here(folder: Path, settings: dict) -> dict:
    """Returns the settings with the placeholder HERE replaced by `folder`."""
    return {
        field: value.replace("HERE", str(folder)) if isinstance(value, str) else value
        for field, value in settings.items()
    }


def copy_run(good_run: Path, folder: Path) -> None:
    """Copies the text, store and run of `good_run` into `folder`, and makes paths in the copied
    files point there.
    """
    for name in ("good.jsonl", "store", "run"):
        (shutil.copytree if (good_run / name).is_dir() else shutil.copy)(
            good_run / name, folder / name
        )
    for path in ("store/metadata.json", "run/config.json", "run/store.json"):
        rewrite(
            folder / path,
            lambda content: content.replace(str(good_run).encode(), str(folder).encode()),
        )


def files(**contents):
    """Returns a function that writes files into a folder: a__txt=b"..." writes a.txt."""

    def make(folder: Path) -> None:
        for name, content in contents.items():
            (folder / name.replace("__", ".")).write_bytes(content)

    return make


def damaged_store(damage):
    """Returns a function that prepares a token store in a folder and calls `damage` on the store's
    folder.
    """
    return lambda folder: damage(good_store(folder))


def rewrite(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


class Run:
    """A case that starts from a copy of `good_run`. The function `change` then changes the copy."""

    def __init__(self, change=lambda folder: None):
        self.change = change


CASES = {
    "Folder in S3": (
        files(),
        dict(data__source="s3://bucket/texts"),
        "config.data.source: 's3://bucket/texts' is a URL, and only gs:// URLs are supported; "
        "copy the files to such a URL or to a local path",
    ),
    "No such file": (
        files(),
        dict(data__source="HERE/none.txt"),
        "config.data.source='HERE/none.txt': no such file",
    ),
    "Folder without text files": (
        lambda folder: None,
        dict(data__source="HERE"),
        "config.data.source='HERE': folder contains no .txt, .jsonl, .ndjson, .json, .parquet file",
    ),
    "Folder of files with other suffixes": (
        files(notes__md=b"# notes", more__md=b"# more", photo__png=b"\x89PNG"),
        dict(data__source="HERE"),
        "config.data.source='HERE': folder contains no .txt, .jsonl, .ndjson, .json, .parquet "
        "file; to read its 2 .md files as text, set --config.data.text_endings=.txt,.md",
    ),
    "Store at a mount point": (
        files(good__jsonl=LINES),
        dict(data__source="HERE/good.jsonl", data__store="/proc"),
        "config.data.store='/proc': is a mount point, which a finished store cannot replace; "
        "choose a subfolder: --config.data.store=/proc/store",
    ),
    "Empty documents only": (
        files(a__jsonl=b'{"text": ""}\n' * 3),
        dict(data__source="HERE/a.jsonl"),
        "config.data.source='HERE/a.jsonl': contains no text (skipped: 3 empty)",
    ),
    "Image named .txt": (
        files(a__txt=b"\x89PNG\r\n\x1a\n"),
        dict(data__source="HERE/a.txt"),
        f"HERE/a.txt: not UTF-8 at byte 0 (line 1); {NOT_UTF8}",
    ),
    "Text in UTF-16": (
        files(a__txt="good\ntext".encode("utf-16-le")[1:] + b"\xff"),
        dict(data__source="HERE/a.txt"),
        f"HERE/a.txt: not UTF-8 at byte 17 (line 2); {NOT_UTF8}",
    ),
    "Truncated gzip file": (
        files(a__jsonl__gz=gzip.compress(LINES)[:-50]),
        dict(data__source="HERE/a.jsonl.gz"),
        f"HERE/a.jsonl.gz: {DAMAGED} (Compressed file ended before the "
        f"end-of-stream marker was reached); {AGAIN}",
    ),
    "Truncated bzip2 file": (
        files(a__txt__bz2=bz2.compress(LINES)[:-50]),
        dict(data__source="HERE/a.txt.bz2"),
        f"HERE/a.txt.bz2: {DAMAGED} (Compressed file ended before the "
        f"end-of-stream marker was reached); {AGAIN}",
    ),
    "Truncated Zstandard file": (
        files(a__jsonl__zst=zstd(LINES)[:-50]),
        dict(data__source="HERE/a.jsonl.zst"),
        f"HERE/a.jsonl.zst: {DAMAGED} (Truncated compressed stream); {AGAIN}",
    ),
    "Uncompressed file named .gz": (
        files(a__jsonl__gz=LINES),
        dict(data__source="HERE/a.jsonl.gz"),
        f"HERE/a.jsonl.gz: {DAMAGED} (Not a gzipped file (b'{{\"')); {AGAIN}",
    ),
    "Truncated Parquet file": (
        files(a__parquet=parquet({"text": ["words"]})[:-9]),
        dict(data__source="HERE/a.parquet"),
        f"HERE/a.parquet: {DAMAGED} (Parquet magic bytes not found in footer. Either "
        f"the file is corrupted or this is not a parquet file); {AGAIN}",
    ),
    "Archive": (
        files(a__zip=b"PK"),
        dict(data__source="HERE/a.zip"),
        "HERE/a.zip: .zip archives are not supported; unpack it, or compress single files as .gz, "
        ".bz2, .zst",
    ),
    "Compressed archive": (
        files(a__tar__gz=gzip.compress(b"words")),
        dict(data__source="HERE/a.tar.gz"),
        "HERE/a.tar.gz: .tar archives are not supported; unpack it, or compress single files as "
        ".gz, .bz2, .zst",
    ),
    "JSON without the text field": (
        files(a__jsonl=LINES + b'{"body": "words", "id": 7}\n'),
        dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 2001: no string in the field 'text': the item's fields are named "
        f"body, id; set --config.data.text_field, {SKIP}",
    ),
    "Parquet with two text columns": (
        files(a__parquet=parquet({"a": ["words"], "b": ["words"]}, ["text", "text"])),
        dict(data__source="HERE/a.parquet"),
        "HERE/a.parquet: several columns 'text'; rename the others",
    ),
    "Parquet without the text column": (
        files(a__parquet=parquet({"body": ["words"], "id": [1]})),
        dict(data__source="HERE/a.parquet"),
        "HERE/a.parquet: no column 'text', its columns are body, id; set --config.data.text_field",
    ),
    "Number instead of text": (
        files(a__jsonl=b'{"text": 7}\n'),
        dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 1: no string in the field 'text': the item's fields are named text; "
        f"set --config.data.text_field, {SKIP}",
    ),
    "Truncated line": (
        files(a__jsonl=LINES[:-5]),
        dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 2000: not JSON: Unterminated string starting at; fix the line, " + SKIP,
    ),
    "JSON list instead of JSON lines": (
        files(a__json=b'[{"text": "words"}]'),
        dict(data__source="HERE/a.json"),
        f"HERE/a.json, line 1: not a JSON object: a list; fix the line, {SKIP}",
    ),
    "Document that is too long": (
        files(a__jsonl=LINES),
        dict(data__source="HERE/a.jsonl", data__max_document_bytes=37),
        "HERE/a.jsonl, line 11: too long: more than 37 bytes; increase "
        "config.data.max_document_bytes, " + SKIP,
    ),
    "Half a surrogate pair": (
        files(a__jsonl=b'{"text": "ab\\ud83d"}'),
        dict(data__source="HERE/a.jsonl"),
        "HERE/a.jsonl, line 1: half a surrogate pair: character 2; set "
        f"--config.data.invalid_utf8=replace, {SKIP}",
    ),
    "Too little text for a validation split": (
        files(a__jsonl=b"\n".join(LINES.split(b"\n")[:4])),
        dict(data__source="HERE/a.jsonl"),
        "config.data.source='HERE/a.jsonl': none of its 4 documents is in the validation split "
        "(config.data.validation_fraction=0.1); use more text, or another fraction",
    ),
    "Too little text for one batch": (
        files(a__jsonl=LINES),
        dict(data__source="HERE/a.jsonl", train__batch_size=8000),
        "config.train.batch_size: one batch takes 8000 rows of 64 + 1 tokens, but the training "
        "split has 798 rows (NUMBER tokens); use more text, or a smaller config.train.batch_size "
        "or config.model.context_length",
    ),
    "Invalid tokenizer file": (
        files(a__jsonl=LINES, my__model=b"nonsense"),
        dict(data__source="HERE/a.jsonl", data__tokenizer="HERE/my.model"),
        "HERE/my.model: not a SentencePiece model",
    ),
    "Tokenizer too large for the model": (
        files(a__jsonl=LINES),
        dict(
            data__source="HERE/a.jsonl",
            data__tokenizer="sentencepiece:1000",
            model__vocab_size=512,
        ),
        "config.model.vocab_size=512: must be at least 1000, the vocabulary size of the tokenizer; "
        "set it to 1024, or choose another config.data.tokenizer",
    ),
    "Invalid tokenizer size": (
        files(a__jsonl=LINES),
        dict(data__source="HERE/a.jsonl", data__tokenizer="sentencepiece:10"),
        "config.data.tokenizer='sentencepiece:10': expected sentencepiece:SIZE, where SIZE is the "
        "number of pieces, at least 300 (256 of them are bytes)",
    ),
    "Store of another format": (
        damaged_store(
            lambda f: rewrite(
                f / "metadata.json", lambda b: b.replace(b'"format": 3', b'"format": 1')
            )
        ),
        GOOD,
        f"HERE/store: token store of format 1, expected format 3; {RERUN}",
    ),
    "Truncated store": (
        damaged_store(lambda f: rewrite(f / "train.bin", lambda b: b[:-1000])),
        GOOD,
        f"HERE/store/train.bin: damaged, has NUMBER bytes, expected NUMBER; {RERUN}",
    ),
    "Store with a missing file": (
        damaged_store(lambda f: (f / "validation.documents.bin").unlink()),
        GOOD,
        f"HERE/store/validation.documents.bin: file of the token store is missing; {RERUN}",
    ),
    "Store with damaged metadata": (
        damaged_store(lambda f: rewrite(f / "metadata.json", lambda b: b[:20])),
        GOOD,
        f"HERE/store/metadata.json: not JSON: Unterminated string starting at in line 3; {RERUN}",
    ),
    "Store with wrong metadata": (
        damaged_store(
            lambda f: rewrite(
                f / "metadata.json", lambda b: b.replace(b'"documents": ', b'"documents": -')
            )
        ),
        GOOD,
        "HERE/store/metadata.json: splits.train.documents: expected an integer of at least 1, "
        "found -1796; " + RERUN,
    ),
    "Store with ids of another tokenizer": (
        damaged_store(lambda f: rewrite(f / "train.bin", lambda b: b"\xff" * len(b))),
        GOOD,
        "HERE/store/train.bin: damaged, has the id 65535, but its vocabulary has only 257; "
        f"{RERUN}",
    ),
    "Store made with other settings": (
        damaged_store(lambda f: None),
        dict(GOOD, data__tokenizer="sentencepiece:300"),
        "config.data.store='HERE/store': was made with tokenizer='bytes', but this config has "
        "tokenizer='sentencepiece:300'; choose another folder, or use the same settings",
    ),
    "Store inside its source": (
        lambda folder: (
            (folder / "texts").mkdir(),
            (folder / "texts" / "a.jsonl").write_bytes(LINES),
        ),
        dict(data__source="HERE/texts", data__store="HERE/texts/store"),
        "config.data.store='HERE/texts/store': is inside HERE/texts, a folder of the source; "
        "choose a folder outside of it",
    ),
    "Other file at the path of a store": (
        files(good__jsonl=LINES, store=b"a thesis"),
        GOOD,
        "config.data.store='HERE/store': exists and is not a token store; choose another folder",
    ),
    "Mixture of different tokenizers": (
        lambda f: (good_store(f, "one"), good_store(f, "two", "sentencepiece:300")),
        dict(data__mixture="HERE/one=1,HERE/two=1"),
        "config.data.mixture='HERE/one=1,HERE/two=1': the stores 'HERE/one' and 'HERE/two' have "
        "different tokenizers; prepare both with the same one: "
        "--config.data.tokenizer=HERE/one/tokenizer",
    ),
    "Mixture that trains on validation documents": (
        lambda f: (
            good_store(f, "one"),
            prepare_store(f / "two", f / "good.jsonl", validation_fraction=0.5),
        ),
        dict(data__mixture="HERE/one=1,HERE/two=1"),
        "config.data.mixture='HERE/one=1,HERE/two=1': 769 of the NUMBER training documents of "
        "'HERE/one' are validation documents of 'HERE/two'; prepare all stores with the same "
        "config.data.validation_fraction",
    ),
    "Workdir with other files": (
        lambda f: (
            good_store(f),
            (f / "run").mkdir(),
            (f / "run" / "thesis.tex").write_text("mine"),
        ),
        GOOD,
        "--workdir=HERE/run: folder is not empty and not a run (no config.json); choose another",
    ),
    "Workdir of another config": (
        Run(),
        dict(GOOD, model__d_model=128, train__seed=7),
        "--workdir=HERE/run: existing run with another config: model.d_model was 64, now 128; "
        "train.seed was 1337, now 7.\nUse the same settings to resume it, or another --workdir",
    ),
    "Fewer steps than already trained": (
        Run(),
        dict(GOOD, train__steps=1),
        "--workdir=HERE/run: existing run of 2 steps, more than config.train.steps=1; increase "
        "the steps, or use another --workdir",
    ),
    "Text changed since the run started": (
        Run(lambda f: (shutil.rmtree(f / "store"), (f / "good.jsonl").write_bytes(LINES * 2))),
        GOOD,
        "--workdir=HERE/run: the training text has changed since the run started (documents for "
        "training: from NUMBER to NUMBER; bytes of text for training: from NUMBER to NUMBER; "
        "tokens for training: from NUMBER to NUMBER; and 3 more); restore the original text, or "
        "use another --workdir",
    ),
    "Damaged config.json": (
        Run(lambda f: rewrite(f / "run" / "config.json", lambda b: b[:40])),
        GOOD,
        "HERE/run/config.json: not JSON: Unterminated string starting at in line 4; restore the "
        "file, or use another run",
    ),
    "No undamaged checkpoint": (
        Run(lambda f: shutil.rmtree(f / "run" / "checkpoints" / "2" / "check")),
        dict(GOOD, train__steps=2),
        "HERE/run/checkpoints: all checkpoints are damaged (step 2: WHY).\nNothing was changed; "
        "use another --workdir to start from scratch",
    ),
}


def normalize(message: str, folder: Path) -> str:
    """Returns the message with placeholders for the folder, for large numbers and for the cause of
    damage.
    """
    message = message.replace(str(folder), "HERE")
    message = re.sub(r"\b\d{1,3}(,\d{3})+", "NUMBER", message)
    return re.sub(r"\(step 2: .*?\)\.\n", "(step 2: WHY).\n", message)


def contents(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if isinstance(make, Run) else [])
        for case, (make, _, _) in CASES.items()
    ],
)
def test_message_and_files(case, tmp_path, request):
    make, settings, message = CASES[case]
    if isinstance(make, Run):
        copy_run(request.getfixturevalue("good_run"), tmp_path)
        make.change(tmp_path)
    else:
        make(tmp_path)
    before = contents(tmp_path)
    config = load_config(
        "gpt", **{"data__store": f"{tmp_path}/store", **replace_here(tmp_path, settings)}
    )
    with pytest.raises(UserError) as error:
        train_and_evaluate(config, str(tmp_path / "run"))
    assert normalize(str(error.value), tmp_path) == message
    assert str(error.value).count("\n") <= 1
    after = {path: content for path, content in contents(tmp_path).items() if path.name != ".lock"}
    new = {str(path.relative_to(tmp_path)) for path in after.keys() - before.keys()}
    # The only new files are those of the store. It is partial if an invalid item stopped the
    # preparation, and complete if the error was found later.
    assert not [name for name in new if not name.startswith(("store/", "store.partial/"))], new
    assert "store/metadata.json" in new or not [name for name in new if name.startswith("store/")]
    if case == "Tokenizer too large for the model":  # refused before it is trained
        assert not new
    assert [path for path, content in before.items() if after.get(path) != content] == []


URL = "s3://bucket/run"
REFUSED_URL = (
    f"{URL!r} is a URL, and only gs:// URLs are supported; copy the files to such a URL or to a "
    "local path"
)


@pytest.mark.parametrize(
    "field, function",
    [
        ("--workdir", lambda: train_and_evaluate(load_config("gpt"), URL)),
        ("--workdir", lambda: inference.load(URL)),
        ("--config=configs/run.py", lambda: load_config("run", URL)),
        *(
            (
                f"config.data.{field}",
                lambda settings={f"data__{field}": value}: train_and_evaluate(
                    load_config("gpt", **settings), "run"
                ),
            )
            for field, value in {
                "store": URL,
                "source": f"a.txt,{URL}",
                "mixture": f"{URL}=1",
                "tokenizer": URL,
            }.items()
        ),
    ],
)
def test_refuses_urls(field, function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("words\n" * 1000)
    with pytest.raises(UserError) as error:
        function()
    assert str(error.value) == f"{field}: {REFUSED_URL}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("url", [URL, "gs://bucket/a.txt"])
def test_refuses_urls_in_compare_texts(url):
    with pytest.raises(UserError) as error:
        texts.parse_texts(f"here=a.txt,there={url}")
    assert str(error.value) == (
        f"config.compare.texts: {url!r} is a URL, which is not supported here; use a local path"
    )


@pytest.mark.parametrize(
    "field, command",
    [
        ("--output", ("convert", "--to=hf", "--workdir=run", f"--output={URL}")),
        ("--input", ("convert", "--from=hf", f"--input={URL}", "--workdir=run")),
        ("--input", ("convert", "--from=run", f"--input={URL}", "--workdir=run")),
        ("--workdirs", ("compare", f"--workdirs=run,{URL}", "--output=report")),
        ("--output", ("compare", f"--config={ROOT}/configs/compare/paper.py", f"--output={URL}")),
        ("--data_dir", ("evaluate", "--workdir=run", "--tasks=paper", f"--data_dir={URL}")),
    ],
)
def test_commands_refuse_urls(field, command, tmp_path):
    result = call(*command, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, f"error: {field}: {REFUSED_URL}\n")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_refuses_two_runs_in_one_workdir(good_run, tmp_path):
    copy_run(good_run, tmp_path)
    config = load_config("gpt", train__steps=2, **replace_here(tmp_path, GOOD))
    with file_lock(tmp_path / "run" / LOCK_FILE), pytest.raises(UserError) as error:
        train_and_evaluate(config, str(tmp_path / "run"))
    assert re.fullmatch(
        rf"--workdir={tmp_path}/run: in use by process \d+ on \S+; wait for it, or use another "
        "--workdir",
        str(error.value),
    )
    train_and_evaluate(config, str(tmp_path / "run"))
    assert not (tmp_path / "run" / LOCK_FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, character", [(50_000_000, "word "), (3_000_000, "x"), (4_000_000, "漢")]
)
def test_very_large_document(tmp_path, size, character):
    """A document of 3 to 50 MB on one line, among short ones, is stored unchanged."""
    large = character * (size // len(character.encode()))
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"text": text}, ensure_ascii=False) + "\n"
            for text in (large, *(f"small {i}" for i in range(50)))
        )
    made = prepare_store(tmp_path / "store", tmp_path / "a.jsonl", validation_fraction=0.3)
    split = max(made.train, made.validation, key=lambda split: split.tokens)
    start = int(split.starts[0])
    assert split.text_bytes > size - 10
    np.testing.assert_array_equal(
        split.stream[start + 1 : start + 1 + len(large.encode())],
        np.frombuffer(large.encode(), np.uint8),
    )


def test_documented_messages():
    text = (ROOT / "docs" / "bad-input.md").read_text()
    for case, (_, _, message) in CASES.items():
        assert f"| {case} | {table_cell(message)} |" in text, case


def table_cell(message: str) -> str:
    """Returns a message as a table cell of docs/bad-input.md."""
    message = (
        message.replace("HERE", "DIR")
        .replace("NUMBER", "…")
        .replace("WHY", "…")
        .replace("|", "\\|")
    )
    return "<br>".join(f"`{line}`" for line in message.splitlines())
