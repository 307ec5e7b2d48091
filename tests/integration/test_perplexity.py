"""Loss, perplexity and bits per byte of texts: `evaluate --text`."""

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import call, init, load_config, save_run, spaced_tokenizer
from run_helpers import SMALL, losses_in, start_from

from smallgpt_jax import UserError, models
from smallgpt_jax.comparison import run_reader
from smallgpt_jax.data.encoding import is_validation
from smallgpt_jax.evaluation.evaluation import evaluate
from smallgpt_jax.evaluation.example_file import ExampleFile
from smallgpt_jax.evaluation.perplexity import TextFiles, encode_text, measures
from smallgpt_jax.evaluation.report import texts_table
from smallgpt_jax.evaluation.scoring import split_with_stride
from smallgpt_jax.run.config import Config
from smallgpt_jax.training import trainer
from smallgpt_jax.training.build import build_program

TIME = SMALL["model__context_length"]


def save_random_run(folder, text_file, architecture="gpt"):
    """Returns the workdir of an untrained model, whose predictions are far from uniform."""
    config = load_config(
        architecture,
        **SMALL,
        data__source=str(text_file),
        data__tokenizer="sentencepiece:300",
        model__dtype="float32",
    )
    return save_run(folder, config, init(models.build(**config.model)))


@pytest.fixture(scope="module")
def workdir(text_file, tmp_path_factory):
    return save_random_run(tmp_path_factory.mktemp("runs") / "gpt", text_file)


@pytest.mark.parametrize("length", [2, 8, 9, 10, 12, 13, 50])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_score_each_token_once(length, stride):
    windows = list(split_with_stride(range(length), 8, stride))
    scored = [token for window in windows for token in window.tokens[-window.scored :]]
    assert scored == list(range(1, length))
    assert all(len(window.tokens) <= 9 for window in windows)
    for window in windows[1:]:
        assert len(window.tokens) - window.scored >= 8 - stride + 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture, stride", [("gpt", None), ("llama", 5)])
def test_perplexity_is_that_of_transformers(architecture, stride, text_file, tmp_path):
    """The oracle is the loop of transformers' guide to perplexity, on the exported model: of each
    window, the tokens that the window before has are not scored.
    """
    from conversion_helpers import export, load_in_torch, torch

    from smallgpt_jax import inference

    workdir = save_random_run(tmp_path / "run", text_file, architecture)
    trained = inference.load_trained(workdir)
    theirs = load_in_torch(export(tmp_path / "export", trained.model, trained.params))
    path = tmp_path / "text.txt"
    path.write_text(text_file.read_text()[:1500])
    (ids,) = trained.tokenizer.encode([path.read_text()])
    mark = trained.tokenizer.end_of_text
    tokens = torch.tensor([[mark, *ids.tolist(), mark]])
    assert tokens.shape[1] > 4 * TIME
    step, nats, previous_end = stride or TIME // 2, 0.0, 1
    for begin in range(0, tokens.shape[1], step):
        end = min(begin + TIME + 1, tokens.shape[1])
        with torch.no_grad():
            logits = theirs(tokens[:, begin : end - 1]).logits.double()
        losses = torch.nn.functional.cross_entropy(
            logits[0], tokens[0, begin + 1 : end], reduction="none"
        )
        nats += float(losses[-(end - previous_end) :].sum())
        previous_end = end
        if end == tokens.shape[1]:
            break
    results, _, _ = evaluate(workdir, TextFiles(path, stride=stride))
    count = tokens.shape[1] - 1
    assert results["total"]["tokens"] == count
    assert results["total"]["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)


@pytest.mark.slow
def test_measures_in_training_are_those_of_evaluate(tmp_path):
    """The bits per byte of texts, and all measures of multiple-choice examples, which the run
    computes at its end, on eight devices in two microbatches. Each document fills a row, with its mark, so that
    both score the same tokens in the same rows.
    """
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcd "), TIME - 1)) for _ in range(200)]
    source, held_out = tmp_path / "all.jsonl", tmp_path / "held_out.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = load_config(
        "gpt",
        **SMALL,
        data__source=str(source),
        data__tokenizer="bytes",
        data__validation_fraction=0.3,
        data__packing="concat",
        model__dtype="float32",
        mesh__data=2,
        mesh__fsdp=2,
        mesh__tensor=2,
        train__microbatches=2,
        train__steps=1,
        train__eval_steps=0,
        train__eval_examples=str(tmp_path / "examples.jsonl"),
    )
    with pytest.raises(UserError, match=r"config\.train\.eval_examples='.*': no such file"):
        trainer.train_and_evaluate(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    answers = itertools.islice(itertools.cycle([" a", " bb", " c d"]), 11)
    rows = [{"prompt": text[:9], "completion": label} for text, label in zip(texts, answers)]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    program = build_program(config)
    state = start_from(program, init(program.model))
    save_run(tmp_path / "run", Config.of(config), state.params, opt_state=state.opt_state)
    trainer.train_and_evaluate(config, str(tmp_path / "run"))  # only evaluates
    validation = [text for text in texts if is_validation(text, 0.3)]
    # The last row of validation lacks its last target.
    lines = [json.dumps({"text": text}) + "\n" for text in validation[:-1]]
    held_out.write_text("".join(lines))
    results, _, _ = evaluate(tmp_path / "run", TextFiles(held_out, stride=TIME))
    logged = losses_in(tmp_path / "run", "eval", "bits_per_byte")[1]
    assert results["total"]["documents"] == len(validation) - 1 > 40
    assert results["total"]["bits_per_byte"] == pytest.approx(logged, rel=1e-5)
    file = ExampleFile(tmp_path / "examples.jsonl", metrics=["accuracy"])
    results, _, _ = evaluate(tmp_path / "run", file)
    assert list(results["results"]) == ["accuracy", "answer_bits_per_byte", "answer_margin"]
    (last,) = run_reader.read_run("run", tmp_path / "run").curve
    assert last.answers == pytest.approx(
        {name: values["mean"] for name, values in results["results"].items()}, rel=1e-4
    )


@pytest.mark.slow
def test_files_and_total(workdir, text_file, tmp_path):
    """The total is that of all tokens, and of all bytes."""
    text = text_file.read_text()
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(text[:700])
    (folder / "b.jsonl").write_text(json.dumps({"text": text[700:900]}) + "\n")
    (folder / "c.txt").write_text("")
    result = call("evaluate", f"--workdir={workdir}", f"--text={folder}", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"{folder}/c.txt: is empty; left out\n"
    results = json.loads(result.stdout)
    a, b = results["files"]
    total = results["total"]
    assert [a["text_bytes"], b["text_bytes"]] == [len(text[:700]), len(text[700:900])]
    assert a["tokens"] + b["tokens"] == total["tokens"]
    nats = a["loss"] * a["tokens"] + b["loss"] * b["tokens"]
    assert total["loss"] * total["tokens"] == pytest.approx(nats)
    assert total["bits_per_byte"] == pytest.approx(nats / math.log(2) / 900)


def test_no_bits_per_byte_without_tokens_for_all_characters():
    tokenizer = spaced_tokenizer(remove_extra_whitespaces=True)
    texts = [
        encode_text("a.txt", ["a cat sat"], tokenizer),
        encode_text("b.txt", ["the cat, 漢"], tokenizer),
    ]
    rows = [{"file": text.file, **measures([text], 10.0)} for text in texts]
    total = measures(texts, 20.0)
    assert rows[0]["bits_per_byte"] == pytest.approx(10 / math.log(2) / 9)
    assert rows[1]["bits_per_byte"] is None and total["bits_per_byte"] is None
    assert rows[1]["unencoded"] == total["unencoded"] == 2
    table = texts_table(rows, total)
    assert "cannot encode some characters (2 unknown)" in table
    a_row, b_row, total_row = table.splitlines()[2:5]
    assert a_row.endswith("| 1.6030 |") and b_row.endswith("|  |") and total_row.endswith("|  |")


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"caf\xe9.txt", ("漢" * 78).encode() + b".txt"])
def test_results_of_texts_with_any_name(workdir, tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    path.write_text("some words")
    done = call("evaluate", f"--workdir={workdir}", f"--text={path}")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[-1]).is_file()


@pytest.mark.slow
def test_errors(workdir, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\xff")
    (tmp_path / "rows.jsonl").write_text('{"content": "a"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.md").write_text("a")
    advice = "; give UTF-8 text, or JSON lines with the text in the field 'text'"
    problems = {
        "missing.txt": f"--text='missing.txt': no such file{advice}",
        "empty.txt": "--text=empty.txt: contains no text; give another file",
        "image.png": f"image.png: not UTF-8 at byte 0 (line 1){advice}",
        "rows.jsonl": "rows.jsonl, line 1: no string in the field 'text': the item's fields are "
        f"named content{advice}",
    }
    for name, message in problems.items():
        result = call("evaluate", f"--workdir={workdir}", f"--text={name}", cwd=tmp_path)
        assert (result.returncode, result.stderr.splitlines()[-1]) == (1, f"error: {message}")
    result = call("evaluate", f"--workdir={workdir}", "--text=folder", cwd=tmp_path)
    assert result.stderr.startswith("error: --text='folder': folder contains no .txt")
    assert result.stderr.endswith("its 1 .md files as text, give --text='folder/**/*.md'\n")
    for stride in (0, TIME + 1):
        with pytest.raises(UserError, match=f"--stride={stride}: must be from 1 to {TIME}, "):
            evaluate(workdir, TextFiles(tmp_path / "image.png", stride=stride))
    with pytest.raises(UserError, match="--limit: cannot be combined with --text"):
        evaluate(workdir, TextFiles(tmp_path / "image.png"), limit=3)
    result = call("evaluate", f"--workdir={workdir}", "--tasks=copa", "--stride=3")
    assert result.stderr == "error: --stride: cannot be combined with --tasks\n"
