"""Every reader of bytes that somebody else may have written gets 200 mutations of a valid file, 80
if the file is one of a checkpoint.

It returns a valid value or raises UserError, whose message is one or two lines, at once and in
little memory. No other exception is allowed, not even a BaseException, as Rust's panics are.
"""

import contextlib
import gzip
import json
import random
import shutil
import sys
from pathlib import Path

import foreign_helpers
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, build, init, load_config, save_run, spaced_tokenizer
from conversion_helpers import GPT2, export, write_released
from data_helpers import parquet, prepare_store, zstd
from foreign_helpers import COMPRESSIONS, bounded, mutate

from smallgpt_jax import models
from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.comparison import budget, held_out, merging, run_reader
from smallgpt_jax.comparison.counts import Counts
from smallgpt_jax.conversion import gpt_variations, hugging_face, model_card
from smallgpt_jax.data import shards, store, tokenizer_folder, tokenizers, unfinished_store
from smallgpt_jax.data.chat_template import ChatTemplate, find_template
from smallgpt_jax.data.config import DataConfig
from smallgpt_jax.data.corpus import Corpus, same_text
from smallgpt_jax.data.parts import Rules, Shard
from smallgpt_jax.data.source import Source
from smallgpt_jax.data.store_spec import StoreSpec
from smallgpt_jax.data.tokenizer_source import TokenizerSource
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import local_data
from smallgpt_jax.evaluation.score_cache import ScoreCache
from smallgpt_jax.planning import compilation
from smallgpt_jax.report import choosing, figures, page
from smallgpt_jax.run import trackers, workdir
from smallgpt_jax.run.checkpoint import Checkpoints, LoopMemory
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.training import messages
from smallgpt_jax.verification.bundle import open_bundle, write_bundle
from smallgpt_jax.verification.record_checks import check_record

safetensors = pytest.importorskip("safetensors.numpy")
torch = pytest.importorskip("torch")

MUTATIONS = 200
CHECKPOINT_MUTATIONS = 80  # of each of the files of a checkpoint, which are read together
TEXT = "the cat sat ü\n"
MESSAGES = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# ---------------------------------------------------------------------- valid files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Returns a folder with a folder of valid files per kind of reader."""
    folder = tmp_path_factory.mktemp("files")
    write_run(folder)
    write_tokenizers(folder)
    write_models(folder)
    write_sources(folder / "sources")
    write_others(folder)
    return folder


RUN_FILES = {
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
    "evaluations/inference.json": {
        "device": "cpu",
        "dtype": "float32",
        "context_length": 64,
        "cache_bytes": 6400,
        "cache_bytes_per_token": 100,
        "prefill_ms": {"median": 2.0, "low": 1.9, "high": 2.2, "count": 24},
        "decoding": [
            {
                "batch": 1,
                "cache": "full",
                "step_ms": {"median": 2.0, "low": 1.9, "high": 2.2, "count": 24},
            }
        ],
    },
    "evaluations/step40-copa.json": {
        "results": {"copa": {"acc,none": 0.5, "acc_norm,none": 0.25, "sample_len": 100}},
        "n-shot": {"copa": 0},
        "n-samples": {"copa": {"original": 100, "effective": 100}},
        "config": {"limit": None},
    },
    "evaluations/examples-step40-test.json": {
        "step": 40,
        "examples": "test.jsonl",
        "count": 100,
        "results": {"exact_match": {"mean": 0.5, "standard_error": 0.1}},
        "is_whole": True,
    },
    "diagnosis/diagnose.json": {
        "format": 1,
        "split": "validation",
        "step": 40,
        "paths": 1,
        "trained": {
            "blocks": [
                {
                    "output": {
                        "token_similarity": 0.5,
                        "neighbour_similarity": 0.6,
                        "effective_rank": 9.0,
                    },
                    "attention": {"entropy": [1.0, None], "first_weight": [0.5, 0.25]},
                }
            ],
            "losses": {
                "loss": 2.5,
                "in_context_score": -0.1,
                "without_block": [{"difference": 0.1}],
                "repeats": {"loss": 2.0, "others": 3.0},
            },
        },
    },
    "origin.json": {"model": "gpt2", "from": "here"},
    "speeds.json": {"0123": 1.5},
    "tracker.json": {"id": "0123abcd"},
}


def write_run(folder: Path) -> None:
    """Writes a run, its token store, another config, a checkpoint and a journal."""
    source, run = folder / "a.txt", folder / "run"
    source.write_text("".join(f"line {i * i}\n" for i in range(5000)))
    made = prepare_store(folder / "store", source, validation_fraction=0.1)
    examples = [{"prompt": f"question {i}", "completion": "answer"} for i in range(50)]
    (folder / "a.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    prepare_store(folder / "examples", folder / "a.jsonl", format="completion")
    write_shard(folder / "shard", source)
    config = load_config(
        "gpt", data__source=str(source), data__store=str(made.folder), model__num_layers=1
    )
    save_run(run, config, init(build("gpt", num_layers=1)))
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(made.folder, run / "store")
    (run / "expected").mkdir()
    shutil.copy(run / "config.json", run / "expected" / "config.json")
    for name, content in RUN_FILES.items():
        (run / name).parent.mkdir(exist_ok=True)
        lines = content if name.endswith("jsonl") else [content]
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoints = Checkpoints(folder / "checkpoint" / "checkpoints", keep=1)
    state = TrainState(jnp.int32(7), {"a": jnp.ones(2)}, {"count": jnp.int32(7)})
    checkpoints.save(7, state, LoopMemory([1.0, 2.0], 1))
    checkpoints.close()
    counts = {"train": {"tokens": 7, "documents": 2, "text_bytes": 5}}
    identity = {"format": 3, "made_from": {"source": "a"}, "texts": "0", "tokenizer": "1"}
    place = unfinished_store.Place(1, 2)
    files = {"files": 2, "passages": 9, "validation_files": ["b.txt"]}
    entry = unfinished_store.Entry(place, "digest", 0.5, {"empty": 1}, counts, files)
    (folder / "journal").mkdir()
    unfinished_store.Journal(identity, None, entry, entry).write(folder / "journal")


def write_shard(folder: Path, source: Path) -> None:
    data = DataConfig(
        store=str(folder / "store"), source=str(source), tokenizer="bytes", validation_fraction=0.1
    )
    made, _ = shards.write_shard(StoreSpec.of(data), Shard(), log=lambda _: None)
    record = made / "shard.json"
    record.write_text(record.read_text().replace(str(source), "a.txt"))


def write_tokenizers(folder: Path) -> None:
    trained = TokenizerSource("sentencepiece:400").make(["some words to learn from " * 9])
    tokenizer_folder.save(trained, folder / "pieces")
    tokenizer_folder.save(spaced_tokenizer(False), folder / "spaced_pieces")
    tokenizer_folder.save(tokenizers.Bytes(), folder / "bytes")
    tokenizer_folder.save(tokenizers.Symbols(["a", "b"]), folder / "symbols")
    letters = sorted(tokenizers.gpt2_bytes(), key=tokenizers.gpt2_bytes().get)
    vocabulary = {token: i for i, token in enumerate([*letters, "th", "the", "<|endoftext|>"])}
    for name in ("gpt2_tokenizer", "hugging_face"):
        (folder / name).mkdir()
    (folder / "gpt2_tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "gpt2_tokenizer" / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (folder / "gpt2_tokenizer" / "tokenizer_kind.json").write_text('{"kind": "gpt2"}')
    added = dict(id=258, content=vocabulary.popitem()[0], special=True, single_word=False)
    level = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)
    described = {
        "version": "1.0",
        "added_tokens": [{**added, "lstrip": False, "rstrip": False, "normalized": False}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "merges": [["t", "h"], ["th", "e"]],
            "vocab": vocabulary,
        },
    }
    settings = {
        "eos_token": {"content": "<|endoftext|>"},
        "bos_token": None,
        "add_bos_token": False,
    }
    folder = folder / "hugging_face"
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "added_tokens.json").write_text('{"<|endoftext|>": 258}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


SMALL = dict(num_layers=1, d_model=16, context_length=8, vocab_size=300)
LLAMA = dict(position="rope", norm="rms", mlp="gated", activation="silu")
MODELS = {
    "gpt2": dict(GPT2),
    "llama": dict(LLAMA, num_heads=2, num_kv_heads=1),
    "smallgpt": dict(LLAMA, mlp="moe", num_experts=2, experts_per_token=2, attention_windows=(4,)),
}


def write_models(folder: Path) -> None:
    for name, fields in MODELS.items():
        model = build("gpt", **SMALL | fields)
        blocks = {"mlp": {"router": {name: np.zeros((1, 2), np.float32) for name in ROUTER}}}
        export(folder / name, model, init(model), tokenizers.Bytes(), {"trunk": {"blocks": blocks}})
    shutil.copytree(folder / "llama", folder / "index")
    (folder / "index" / "model.safetensors").rename(folder / "index" / "one.safetensors")
    names = safetensors.load_file(folder / "index" / "one.safetensors")
    weight_map = dict.fromkeys(names, "one.safetensors")
    (folder / "index" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    shutil.copytree(folder / "llama", folder / "pickled")
    weights = safetensors.load_file(folder / "pickled" / "model.safetensors")
    (folder / "pickled" / "model.safetensors").unlink()
    tensors = {name: torch.from_numpy(x) for name, x in weights.items()}
    torch.save(tensors, folder / "pickled" / "pytorch_model.bin")
    (folder / "released").mkdir()
    write_released(folder / "released" / "a.pt")


ROUTER = ("bias", "load")


def write_sources(folder: Path) -> None:
    folder.mkdir()
    texts = [f"{TEXT}{i}" for i in range(20)]
    lines = "".join(json.dumps({"text": text, "n": None}) + "\n" for text in texts).encode()
    (folder / "a.txt").write_text("".join(texts))
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.bz2").write_bytes(COMPRESSIONS[".bz2"][1](lines))
    (folder / "a.jsonl.zst").write_bytes(zstd(lines))
    (folder / "a.parquet").write_bytes(parquet({"text": texts, "n": list(range(20))}))
    chats = [{"messages": MESSAGES, "n": None}] * 3
    (folder / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


PREDICTIONS = {
    "time": "2026-11-20T10:00:00+00:00",
    "command": "compare",
    "held_out": "1M",
    "interval": 0.8,
    "records_sha256": "0" * 64,
    "predictions": {
        "parameters": [
            {"name": "gpt", "size": 1e6, "tokens": 1e7, "loss": 3.0, "low": 2.9, "high": 3.1}
        ]
    },
    "not_predicted": {"pgpt": "a size"},
}


def write_others(folder: Path) -> None:
    for name in ("record", "scores", "compiled", "logged", "benchmark"):
        (folder / name).mkdir()
    shutil.copy(ROOT / "docs/results/example.json", folder / "record" / "results.json")
    (folder / "record" / "predictions.json").write_text(json.dumps(PREDICTIONS))
    write_bundle(folder / "record" / "results.json", folder / "bundle")
    cache = ScoreCache(folder / "scores" / "scores.jsonl")
    cache.add_partial("loglikelihood", ("a", "b"), (-2.5, True))
    cache.add_partial("generate_until", ("a", {}), "b")
    program = compilation.CompiledProgram(10, 5, 2, 1, "HloModule a")
    compilation.store(folder / "compiled" / "a.json.gz", program)
    (folder / "logged" / "a.csv").write_text("model,step,val_loss\ngpt,1,5.5\ngpt,2,5.0\n")
    question = {"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 0}
    (folder / "benchmark" / "copa_val.jsonl").write_text(json.dumps(question) + "\n")


# ---------------------------------------------------------------------- readers


def read_config(folder):
    config = workdir.read_config(folder)
    models.LanguageModel(config.model)
    assert config.flat()
    workdir.check_workdir(folder, workdir.read_config(folder / "expected"))


def read_run(folder):
    run = run_reader.read_run("run", folder)
    content = records.Record("title", "budget", "command", "run", (run,))
    assert page.markdown(content, analyse(content))
    assert run.steps_done >= 0 and all(point.step >= 0 for point in run.curve)


def read_metrics(folder):
    read_run(folder)
    messages.loss_message(folder)
    messages.last_evaluation_message(folder)
    model_card.training_facts(folder, 4)


def read_store(folder):
    opened = store.open_store(folder)
    corpus = Corpus((opened,), (1.0,))
    assert corpus.tokenizer.vocab_size == 257
    same_text(corpus.description, store.open_store(folder).metadata)
    for split in store.SPLITS:
        assert corpus.bytes_per_token(split) > 0 and len(corpus.fingerprint(split)) >= 0
        for packing in ("concat", "best_fit"):
            rows = corpus.pack(split, packing, True, 64)
            rows.read_rows(np.arange(min(rows.num_rows, 100)))


def read_shard(folder):
    """A shard of which the store consists, because of which the join reads no text."""
    shutil.rmtree(folder / "store", ignore_errors=True)
    prepare_store(folder / "store", "a.txt", validation_fraction=0.1)


def read_examples(folder):
    corpus = Corpus((store.open_store(folder),), (1.0,))
    for split in store.SPLITS:
        rows = corpus.pack(split, "best_fit", True, 64)
        rows.read_rows(np.arange(min(rows.num_rows, 100)))


def read_description(folder):
    workdir.check_same_text(folder, Corpus((store.open_store(folder / "store"),), (1.0,)))


def read_journal(folder):
    journal = unfinished_store.read_journal(folder)
    assert journal is None or (journal.latest.place, journal.latest.digest) == ((1, 2), "digest")


def read_checkpoint(folder):
    checkpoints = Checkpoints(folder / "checkpoints")
    try:
        params, _, _ = checkpoints.restore_model(7, {"a": jnp.zeros(2)}, {})
    finally:
        checkpoints.close()
    assert params["a"].tolist() == [1, 1]


def read_tokenizer(folder):
    tokenizer = tokenizer_folder.load(folder)
    ids = [*tokenizer.encode(["a b" if tokenizer.kind == "symbols" else TEXT])[0].tolist()]
    if tokenizer.kind != "symbols":
        ids += tokenizer.encode_continuation("the text").tolist()
    assert isinstance(tokenizer.decode(ids), str)
    assert all(0 <= i < tokenizer.vocab_size for i in [*ids, tokenizer.end_of_text])


def read_template(folder):
    template = ChatTemplate(find_template("", folder))
    with contextlib.suppress(ValueError):  # `prepare` names the line, and `generate` the message
        pieces = template.pieces(MESSAGES)
        assert pieces and isinstance(template.render(MESSAGES, True), str)


def read_model(folder):
    imported = hugging_face.read_folder(str(folder))
    assert imported.model.config.num_layers >= 1 and imported.params


def read_released(folder):
    model, params, _ = gpt_variations.read_checkpoint(folder / "a.pt")
    assert model.config.num_layers == 1 and params


def source_reader(name, form="text"):
    def read(folder):
        template = ChatTemplate(TEMPLATE) if form == "messages" else None
        for invalid_utf8, invalid_items in (("refuse", "refuse"), ("replace", "skip")):
            rules = Rules("text", invalid_utf8, invalid_items, 100_000, form, template)
            for text in Source(str(folder / name), ".txt").documents(rules):
                assert len(text.encode()) <= 100_000

    return read


def read_record(folder):
    path = folder / "results.json"
    record = merging.merge([(path, records.read(path))], "command")
    assert page.markdown(record, analyse(record))
    assert str(choosing.choose(path, "flops", 1e15))
    checked = check_record(records.read(path), lambda config: Counts({}, 1, 1.0, 0, 0.0, "", 0))
    assert all(map(str, checked))


def read_bundle(folder):
    assert open_bundle(folder, False).name == "results.json"


def read_scores(folder):
    result = ScoreCache(folder / "scores.jsonl").find("loglikelihood", ("a", "b"))
    if result is not None:
        assert isinstance(result[0], int | float) and isinstance(result[1], bool)


def read_program(folder):
    program = compilation.load(folder / "a.json.gz")
    assert program is None or isinstance(program, compilation.CompiledProgram)


def read_logged(folder):
    assert all(figures.read_logged(folder / "a.csv").values())


def read_benchmark(folder):
    local_data.task_config("copa", {}, folder)


READERS = {
    "run/config.json": read_config,
    "run/store.json": read_description,
    "run/metrics.jsonl": read_metrics,
    "run/sessions.jsonl": read_run,
    "run/evaluations/texts.json": read_run,
    "run/evaluations/inference.json": read_run,
    "run/evaluations/step40-copa.json": read_run,
    "run/evaluations/examples-step40-test.json": read_run,
    "run/diagnosis/diagnose.json": read_run,
    "run/origin.json": lambda folder: model_card.training_facts(folder, 40),
    "run/tracker.json": trackers.run_id,
    "run/speeds.json": lambda folder: budget.measured_speeds({}, folder),
    "store/metadata.json": read_store,
    "store/train.bin": read_store,
    "store/train.documents.bin": read_store,
    "examples/train.counted.bin": read_examples,
    "journal/journal.json": read_journal,
    "shard/store.shards/1-of-1/shard.json": read_shard,
    "checkpoint/checkpoints/7/check/metadata": read_checkpoint,
    "checkpoint/checkpoints/7/_CHECKPOINT_METADATA": read_checkpoint,
    "checkpoint/checkpoints/7/params/_METADATA": read_checkpoint,
    "checkpoint/checkpoints/7/params/array_metadatas/process_0": read_checkpoint,
    "checkpoint/checkpoints/7/params/manifest.ocdbt": read_checkpoint,
    "checkpoint/checkpoints/7/params/d/*": read_checkpoint,
    "pieces/tokenizer.model": read_tokenizer,
    "spaced_pieces/tokenizer.model": read_tokenizer,
    "bytes/tokenizer_kind.json": read_tokenizer,
    "symbols/symbols.json": read_tokenizer,
    "gpt2_tokenizer/vocab.json": read_tokenizer,
    "gpt2_tokenizer/merges.txt": read_tokenizer,
    "hugging_face/tokenizer.json": read_tokenizer,
    "hugging_face/tokenizer_config.json": read_tokenizer,
    "hugging_face/special_tokens_map.json": read_tokenizer,
    "hugging_face/added_tokens.json": read_tokenizer,
    "hugging_face/chat_template.jinja": read_template,
    "gpt2/config.json": read_model,
    "llama/config.json": read_model,
    "llama/model.safetensors": read_model,
    "smallgpt/config.json": read_model,
    "index/model.safetensors.index.json": read_model,
    "released/a.pt": read_released,
    "pickled/pytorch_model.bin": read_model,
    "sources/a.txt": source_reader("a.txt"),
    "sources/a.jsonl": source_reader("a.jsonl"),
    "sources/a.jsonl.gz": source_reader("a.jsonl.gz"),
    "sources/a.jsonl.bz2": source_reader("a.jsonl.bz2"),
    "sources/a.jsonl.zst": source_reader("a.jsonl.zst"),
    "sources/a.parquet": source_reader("a.parquet"),
    "sources/chat.jsonl": source_reader("chat.jsonl", "messages"),
    "record/results.json": read_record,
    "bundle/manifest.json": read_bundle,
    "record/predictions.json": held_out.read_predictions,
    "scores/scores.jsonl": read_scores,
    "compiled/a.json.gz": read_program,
    "logged/a.csv": read_logged,
    "benchmark/copa_val.jsonl": read_benchmark,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_mutated_files(name, files, tmp_path):
    top, _, rest = name.partition("/")
    folder = shutil.copytree(files / top, tmp_path / top)
    (path,) = folder.glob(rest)
    rng = random.Random(name)
    valid, refused = path.read_bytes(), 0
    READERS[name](folder)
    mutations = CHECKPOINT_MUTATIONS if READERS[name] is read_checkpoint else MUTATIONS
    for number in range(mutations):
        content = mutate(valid, name, rng)
        path.write_bytes(content)
        try:
            with bounded():
                READERS[name](folder)
        except UserError as error:
            refused += 1
            message = str(error)
            assert message.count("\n") <= 1 and len(message) < 2000, (number, message)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise AssertionError(f"{name}, mutation {number}: {content[:3000]!r}") from error
    print(f"{name}: {refused} of {mutations} refused", file=sys.stderr)


def test_the_bounds_hold(monkeypatch):
    monkeypatch.setattr(foreign_helpers, "SECONDS", 0.05)
    with pytest.raises(foreign_helpers.Expired), bounded():
        while True:
            pass
    monkeypatch.setattr(foreign_helpers, "MEGABYTES", 20)
    with pytest.raises(AssertionError, match=r"\d+ MB"), bounded():
        assert len(b"x" * 2**25) == 2**25
