"""Fuzz tests: every reader of a file of a run or a token store is given 200 damaged copies of the
file.

A reader may use what is left, skip damaged lines, or raise a UserError of one line that names the
file.
"""

import json
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, init, load_config, save_run
from data_helpers import prepare_store

from smallgpt_jax import models
from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.comparison import budget, run_reader
from smallgpt_jax.conversion import model_card
from smallgpt_jax.data import store, tokenizers, unfinished_store
from smallgpt_jax.data.corpus import Corpus, same_text
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.report import page
from smallgpt_jax.run import trackers, workdir
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training import messages

DAMAGED_COPIES = 200
JUNK = [
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    -0.0,
    2**31,
    2**53 + 1,
    10**30,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1",
    "../x",
    "a.b",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": 0},
    {"a.b": 1},
    ["x"] * 3,
    {"step": "x"},
]
SOURCES = {
    "metrics.jsonl": [
        {
            "step": 2,
            "split": "train",
            "loss": 5.0,
            "loss_mean": 5.5,
            "tokens_per_second": 99.0,
            "learning_rate": 1e-3,
            "expert_load": {"router": [[0.5, 0.5], [0.25, None]]},
        },
        {"step": 3, "split": "train", "loss": None, "tokens_per_second": 98.5},
        {"step": 4, "split": "eval", "loss": 4.0, "bits_per_byte": 5.77, "targets": 64},
    ],
    "sessions.jsonl": [
        {
            "time": "2026-11-20T10:00:00+00:00",
            "device": "cpu",
            "devices": 1,
            "argument_bytes": 10,
            "temp_bytes": 5,
            "padding": 0.25,
            "versions": {"python": "3.11", "jax": "0.6"},
            "first_step": 0,
        },
        {"time": "2026-11-21T10:00:00+00:00", "diverged": "step 5: loss nan"},
    ],
    "evaluations/texts.json": [
        {
            "step": 40,
            "text": "own",
            "source": "a.txt",
            "context_length": 64,
            "loss": 4.0,
            "bits_per_byte": 5.5,
            "fingerprint": "ab",
        }
    ],
    "evaluations/decoding.json": {"tokens_per_second": 99.5, "batch": 1, "new_tokens": 16},
    "evaluations/step40-copa.json": {
        "results": {"copa": {"acc,none": 0.5, "acc_norm,none": 0.25, "sample_len": 100}},
        "n-shot": {"copa": 0},
        "n-samples": {"copa": {"original": 100, "effective": 100}},
        "config": {"limit": None},
    },
    "speeds.json": {"0123": 1.5},
    "tracker.json": {"id": "0123abcd"},
}


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Returns `content` with a few bytes changed, or, if it is JSON or JSON lines, with a value
    changed or removed.
    """
    if rng.random() < 0.35:
        return damage_bytes(content, rng)
    if content.count(b"\n") > 1 and not content.startswith((b"{\n", b"[\n")):
        lines = content.splitlines(keepends=True)
        number = rng.randrange(len(lines))
        lines[number] = damaged(lines[number].rstrip(), rng) + b"\n"
        return b"".join(lines)
    try:
        value = json.loads(content)
    except ValueError:
        return damage_bytes(content, rng)
    places = [(None, None), *containers(value)]
    container, key = rng.choice(places)
    if container is None:
        value = rng.choice(JUNK)
    elif rng.random() < 0.3:
        del container[key]
    else:
        container[key] = rng.choice(JUNK)
    text = json.dumps(value)
    if rng.random() < 0.1:  # nested deeply, or with an integer of thousands of digits
        text = text.replace("null", rng.choice(["[" * 3000 + "]" * 3000, "9" * 5000]))
    return text.encode(errors="surrogatepass")


def containers(value):
    """Yields (container, key) of every value inside `value`."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(part, dict | list):
            yield from containers(part)


def damage_bytes(content: bytes, rng: random.Random) -> bytes:
    place, length = rng.randrange(len(content) + 1), rng.randrange(1, 9)
    return rng.choice(
        [
            content[:place],
            content[place:],
            content[:place] + rng.randbytes(length) + content[place + length :],
            content[:place] + content[place + length :],
            content[:place] + content[max(0, place - length) :],
            b"",
            content[:place] + b"\xff\x00" + content[place:],
        ]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a token store in `store` and the workdir of a run in `run`."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("".join(f"line {i * i}\n" for i in range(5000)))
    made = prepare_store(folder / "store", folder / "a.txt", validation_fraction=0.1)
    config = load_config(
        "gpt", data__source=str(folder / "a.txt"), data__store=str(made.folder), model__num_layers=1
    )
    save_run(folder / "run", config, init(build("gpt", num_layers=1)))
    shutil.rmtree(folder / "run" / "checkpoints")
    (folder / "expected").mkdir()
    shutil.copy(folder / "run" / "config.json", folder / "expected" / "config.json")
    (folder / "run" / "origin.json").write_text(json.dumps({"model": "gpt2", "from": "here"}))
    for name, content in SOURCES.items():
        (folder / "run" / name).parent.mkdir(exist_ok=True)
        lines = content if name.endswith("jsonl") else [content]
        (folder / "run" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    checkpoints.save(
        7, TrainState(jnp.int32(7), {"a": jnp.ones(2)}, {"count": jnp.int32(7)}), [1.0, 2.0]
    )
    checkpoints.close()
    write_tokenizers(folder)
    identity = {"format": 3, "made_from": {"source": "a"}, "texts": "0", "tokenizer": "1"}
    counts = {"train": {"tokens": 7, "documents": 2, "text_bytes": 5}}
    entry = unfinished_store.Entry(
        unfinished_store.Place(1, 2), "digest", 0.5, {"empty": 1}, counts, {}
    )
    unfinished_store.Journal(identity, None, entry, entry).write(folder)
    return folder


def write_tokenizers(folder):
    """Writes a SentencePiece model, a vocabulary in GPT-2's format and a tokenizer.json, each into
    its own folder.
    """
    tokenizers.save(
        TokenizerSource("sentencepiece:400").make(["some words to learn from " * 9]),
        folder / "pieces",
    )
    for name in ("gpt2", "hf"):
        (folder / name).mkdir()
    letters = sorted(tokenizers.gpt2_bytes(), key=tokenizers.gpt2_bytes().get)
    vocabulary = [*letters, "th", "the", "<|endoftext|>"]
    (folder / "gpt2" / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(vocabulary)})
    )
    (folder / "gpt2" / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (folder / "gpt2" / "tokenizer_kind.json").write_text('{"kind": "gpt2"}')
    (folder / "hf" / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [
                    {
                        "id": 258,
                        "content": "<|endoftext|>",
                        "special": True,
                        "normalized": False,
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                    }
                ],
                "normalizer": None,
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "post_processor": None,
                "decoder": {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "model": {
                    "type": "BPE",
                    "unk_token": None,
                    "merges": [["t", "h"], ["th", "e"]],
                    "vocab": {token: i for i, token in enumerate(vocabulary[:-1])},
                },
            }
        )
    )
    (folder / "hf" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|endoftext|>"}})
    )


def use_config(folder):
    config = workdir.read_config(folder / "run")
    models.LanguageModel(config.model)
    config.flat()
    workdir.check_workdir(folder / "run", workdir.read_config(folder / "expected"))
    model_card.training_facts(folder / "run", 40)


def use_store(folder):
    opened = store.open_store(folder / "store")
    corpus = Corpus((opened,), (1.0,))
    assert corpus.tokenizer.vocab_size == 257
    same_text(corpus.description, store.open_store(folder / "store").metadata)
    for split in store.SPLITS:
        assert corpus.bytes_per_token(split) > 0 and len(corpus.fingerprint(split)) >= 0
        for packing in ("concat", "best_fit"):
            rows = corpus.pack(split, packing, True, 64)
            rows.read_rows(np.arange(rows.num_rows))


def use_description(folder):
    corpus = Corpus((store.open_store(folder / "store"),), (1.0,))
    workdir.check_same_text(folder / "run", corpus)


def use_run(folder):
    run = run_reader.read_run("run", folder / "run")
    content = records.Record("t", "b", "c", "run", (run,))
    page.markdown(content, analyse(content))


def use_metrics(folder):
    use_run(folder)
    messages.loss_message(folder / "run")
    messages.last_evaluation_message(folder / "run")
    model_card.training_facts(folder / "run", 4)


def use_journal(folder):
    found = unfinished_store.read_journal(folder)
    assert found is None or (found.latest.place, found.latest.digest) == ((1, 2), "digest")


def use_checkpoint(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    params, _, _ = checkpoints.restore_model(7, {"a": jnp.zeros(2)}, {})
    losses = checkpoints.unlogged_losses
    checkpoints.close()
    assert params["a"].tolist() == [1, 1] and all(isinstance(loss, int | float) for loss in losses)


def tokenizer_reader(name):
    def use(folder):
        tokenizer = tokenizers.load(folder / name)
        for ids in (
            *tokenizer.encode(["the text", "ü"]),
            tokenizer.encode_continuation("the text"),
        ):
            assert isinstance(tokenizer.decode(ids), str)
        assert 0 <= tokenizer.end_of_text < tokenizer.vocab_size

    return use


READERS = {
    "run/config.json": use_config,
    "run/store.json": use_description,
    "run/metrics.jsonl": use_metrics,
    "run/sessions.jsonl": use_run,
    "run/evaluations/texts.json": use_run,
    "run/evaluations/decoding.json": use_run,
    "run/evaluations/step40-copa.json": use_run,
    "run/origin.json": lambda folder: model_card.training_facts(folder / "run", 40),
    "run/tracker.json": lambda folder: trackers.run_id(folder / "run"),
    "run/speeds.json": lambda folder: budget.known_speeds({}, folder / "run"),
    "run/tokenizer/tokenizer_kind.json": lambda folder: tokenizers.load(
        folder / "run" / "tokenizer"
    ),
    "store/metadata.json": use_store,
    "store/train.bin": use_store,
    "store/train.documents.bin": use_store,
    **{
        f"{name}/{file}": tokenizer_reader(name)
        for name, file in (
            ("pieces", "tokenizer.model"),
            ("gpt2", "vocab.json"),
            ("gpt2", "merges.txt"),
            ("hf", "tokenizer.json"),
            ("hf", "tokenizer_config.json"),
        )
    },
    "journal.json": use_journal,
    "checkpoints/7/check/metadata": use_checkpoint,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_give_one_line(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path / "files")
    path, rng = tmp_path / "files" / name, random.Random(name)
    before, refused = path.read_bytes(), 0
    READERS[name](tmp_path / "files")
    for number in range(DAMAGED_COPIES):
        content = damaged(before, rng)
        path.write_bytes(content)
        try:
            READERS[name](tmp_path / "files")
        except UserError as error:
            refused += 1
            assert str(error).count("\n") <= 1 and len(str(error)) < 2000, (number, error)
        except Exception as error:
            raise AssertionError(f"{name}, copy {number}: {content[:3000]!r}") from error
    print(f"{name}: {refused} of {DAMAGED_COPIES} refused")
