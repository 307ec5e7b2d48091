"""The compare command: reports, resumption, refused input, and measurements of tiny models."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT, call, forward, init, load_config
from data_helpers import prepare_store

from smallgpt_jax import inference, models
from smallgpt_jax.comparison import inference_cost, measure, results
from smallgpt_jax.data.corpus import Corpus, load_or_prepare, open_existing
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import DivergenceError, UserError, WorkdirBusyError
from smallgpt_jax.formatting import millions
from smallgpt_jax.models.flops import train_flops_per_token
from smallgpt_jax.run.config_file import read_config, write_config
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.workdir import initialize_workdir
from smallgpt_jax.training import trainer
from smallgpt_jax.training.build import shared_program
from smallgpt_jax.training.validation import EvaluationSums

STEPS = (
    "--config.train.steps=8",
    "--config.train.eval_every=4",
    "--config.train.log_every=2",
    "--config.train.checkpoint_every=4",
    "--config.optimizer.decay_steps=8",
)
TINY = ("compare", "--config=configs/compare/paper.py:tiny", *STEPS)
TIME = 64


def fake_train(config, folder: str, corpus) -> None:
    """Writes the workdir files that comparisons read, with random metrics, instead of training."""
    rng, folder = np.random.default_rng(config.train.seed + config.model.num_layers), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    initialize_workdir(folder, config, load_or_prepare(config.data))
    append_session(
        folder,
        {
            "devices": 1,
            "device": "cpu",
            "argument_bytes": 10**6,
            "temp_bytes": 10**6,
            "padding": 0.0,
        },
    )
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(2, config.train.steps + 1, 2):
            file.write(
                json.dumps(
                    {
                        "step": step,
                        "split": "train",
                        "loss": 5.0,
                        "tokens_per_second": rng.uniform(1000, 2000),
                    }
                )
                + "\n"
            )
            if step % 4 == 0:
                file.write(
                    json.dumps(
                        {
                            "step": step,
                            "split": "eval",
                            "loss": rng.uniform(3, 4),
                            "bits_per_byte": rng.uniform(1, 2),
                            "targets": 8,
                        }
                    )
                    + "\n"
                )
    (folder / "checkpoints" / str(config.train.steps)).mkdir(parents=True)


@pytest.fixture(scope="module")
def compared(tmp_path_factory, text_file):
    """Returns the folder of a comparison of gpt and pgpt; `fake_train` made the runs. Tests must
    not change it.
    """
    output, decoded = tmp_path_factory.mktemp("compared") / "out", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train", fake_train)
        patch.setattr(inference_cost, "measure_inference", decoded.append)
        done = call(
            *TINY,
            f"--config.data.source={text_file}",
            f"--output={output}",
            "--config.compare.names=gpt,pgpt",
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert [folder.name for folder in decoded] == [
        "gpt-seed1337",
        "pgpt-seed1337",
        "gpt-seed1338",
        "pgpt-seed1338",
    ]
    return output


def untrained_run(folder, source, **fields):
    """Writes a workdir that has an evaluation at the last step, but no checkpoint. Returns
    `folder`.
    """
    config = load_config("gpt", data__source=str(source), **fields)
    folder.mkdir(parents=True, exist_ok=True)
    initialize_workdir(folder, config, load_or_prepare(config.data))
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(
            json.dumps(
                {
                    "step": config.train.steps,
                    "split": "eval",
                    "loss": 4.0,
                    "bits_per_byte": 2.0,
                    "targets": 8,
                }
            )
        )
    return folder


def numbers(first: int) -> str:
    return "\n\n".join(str(n) * 40 for n in range(first, first + 1000))


# ------------------------------------------------------------------ The report
@pytest.mark.slow
def test_every_number_of_the_report_follows_from_the_metrics(compared):
    markdown, page = (compared / "report.md").read_text(), (compared / "report.html").read_text()
    reported = json.loads((compared / "results.json").read_text())["runs"]
    assert len(reported) == 4
    for name in ("gpt", "pgpt"):
        losses, bits, speeds, ends = [], [], [], []
        for seed in (1337, 1338):
            folder = compared / "runs" / f"{name}-seed{seed}"
            lines = [
                json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
            ]
            evals = [line for line in lines if line["split"] == "eval"]
            assert [line["step"] for line in evals] == [4, 8]
            (ours,) = (run for run in reported if (run["name"], run["seed"]) == (name, seed))
            assert [point["loss"] for point in ours["curve"]] == [line["loss"] for line in evals]
            assert [point["tokens"] for point in ours["curve"]] == [4 * 8 * TIME, 8 * 8 * TIME]
            model = models.LanguageModel(read_config(folder).model)
            flops = train_flops_per_token(model)
            assert [point["flops"] for point in ours["curve"]] == [
                4 * 8 * TIME * flops,
                8 * 8 * TIME * flops,
            ]
            seconds = [
                2 * 8 * TIME / line["tokens_per_second"]
                for line in lines
                if line["split"] == "train"
            ]
            assert len(seconds) == 4
            np.testing.assert_allclose(
                [point["seconds"] for point in ours["curve"]],
                [sum(seconds[:2]), sum(seconds)],
                rtol=1e-12,
            )
            losses.append(evals[-1]["loss"])
            bits.append(evals[-1]["bits_per_byte"])
            speeds.append(8 * 8 * TIME / sum(seconds))
            ends.append(sum(seconds))
            assert f"| {name} | {seed} | 8 | {losses[-1]:.4f} |" in markdown
        cells = [
            f"{sum(bits) / 2:.4f}",
            "2",
            millions(models.num_parameters(model)),
            millions(round(flops)),
        ]
        cells += [f"{sum(values) / 2:,.0f}" for values in (speeds, ends)]
        assert f"| {name} | {sum(losses) / 2:.4f} ({min(losses):.4f} to {max(losses):.4f}) | " in (
            markdown.replace("**", "")
        )
        assert " | " + " | ".join(cells) + " |" in markdown.replace("**", "")
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert "Lowest validation loss: " in markdown
    # The report lists the config fields that have the same value in all runs.
    assert f"| model.context_length | {TIME} |" in markdown and "| train.steps | 8 |" in markdown
    assert (compared / "loss-tokens.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "http://" not in re.sub(r"base64,[^\"]*", "", page)
        and page.count("data:image/svg+xml") == 4
    )


@pytest.mark.slow
def test_results_json_gives_the_same_report(compared, tmp_path):
    done = call("compare", f"--results={compared / 'results.json'}", f"--output={tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")
    before, now = (
        (folder / "report.md").read_text().split("```")[0] for folder in (compared, tmp_path)
    )
    assert now == before
    before, now = (
        json.loads((folder / "results.json").read_text()) for folder in (compared, tmp_path)
    )
    assert {**now, "command": ""} == {**before, "command": ""}


def test_existing_runs_are_reported_finished_or_not(compared, tmp_path):
    partial, source = tmp_path / "partial", compared / "runs" / "gpt-seed1337"
    partial.mkdir()
    for name in ("config.json", "store.json", "tokenizer", "sessions.jsonl"):
        (partial / name).symlink_to(source / name)
    lines = (source / "metrics.jsonl").read_text().splitlines()
    (partial / "metrics.jsonl").write_text(
        "".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= 4)
    )
    output = tmp_path / "report"
    done = call("compare", f"--workdirs={partial},{compared}/runs/pgpt-*", f"--output={output}")
    assert done.returncode == 0, done.stderr
    markdown = (output / "report.md").read_text()
    assert "Unfinished: partial, seed 1337, at step 4 of 8." in markdown
    assert (
        "| partial (unfinished, step 4) | – | – | 1 |" in markdown
        and "Fewer than two runs are finished" in markdown
    )
    before, now = (
        [
            run
            for run in json.loads((folder / "results.json").read_text())["runs"]
            if run["name"] == "pgpt"
        ]
        for folder in (compared, output)
    )
    assert now == before and len(now) == 2
    # A report of other runs is not overwritten.
    before = (compared / "report.md").read_bytes()
    done = call("compare", f"--workdirs={partial}", f"--output={compared}")
    assert done.returncode == 1 and "contains the report of other runs" in done.stderr
    assert (compared / "report.md").read_bytes() == before


def test_refuses_to_continue_another_comparison(compared, tmp_path):
    """A comparison with other settings than the runs in its folder is refused before any run is
    trained.

    The test covers three differences: another model, another text, and fewer steps than in the
    existing runs.
    """
    source = read_config(compared / "runs" / "gpt-seed1337").data.source
    common = (
        *TINY,
        f"--config.data.source={source}",
        f"--output={compared}",
        "--config.compare.names=gpt",
    )
    for flags, message in (
        (["--config.train.steps=6"], "existing run of 8 steps, more than config.train.steps=6"),
        (
            ["--config.model.d_model=128"],
            "gpt-seed1337: existing run with another config: model.d_model was 64, now 128",
        ),
    ):
        done = call(*common, *flags)
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert "another --output" in done.stderr and "--workdir" not in done.stderr, done.stderr
    shutil.copytree(compared / "runs" / "gpt-seed1337", tmp_path / "runs" / "gpt-seed1337")
    store = tmp_path / "runs" / "gpt-seed1337" / "store.json"
    described = json.loads(store.read_text())
    described["splits"]["train"]["tokens"] += 1
    store.write_text(json.dumps(described))
    done = call(
        *TINY,
        f"--config.data.source={source}",
        f"--output={tmp_path}",
        "--config.compare.names=pgpt,gpt",
    )
    assert (
        done.returncode == 1
        and "text has changed" in done.stderr
        and "another --output" in done.stderr
    )
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gpt-seed1337"]


@pytest.mark.slow
def test_a_diverged_run_is_reported_and_not_trained_again(text_file, tmp_path):
    arguments = (
        *TINY,
        f"--config.data.source={text_file}",
        f"--output={tmp_path / 'out'}",
        "--config.compare.names=gpt",
        "--config.compare.seeds=1",
        "--config.model.num_layers=1",
        "--config.optimizer.learning_rate=1e30",
        "--config.optimizer.clip_norm=0.0",
    )
    for again in (False, True):
        done = call(*arguments)
        assert done.returncode == 0, done.stderr
        found = [
            message in done.stdout
            for message in ("diverged in an earlier session", "training has diverged")
        ]
        assert found == [again, not again], done.stdout
    assert "Diverged: gpt, seed 1337" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
def test_continues_after_a_run_that_cannot_be_trained(text_file, tmp_path, monkeypatch):
    """The first run of gpt diverges and the second is locked by another process; the runs of pgpt
    are still trained.
    """
    errors = {
        1337: DivergenceError("training has diverged"),
        1338: WorkdirBusyError("busy", by="process 1"),
    }

    def failing_train(config, folder: str, corpus) -> None:
        if config.train.seed in errors and config.model.architecture == "gpt":
            raise errors[config.train.seed]
        fake_train(config, folder, corpus)

    monkeypatch.setattr(trainer, "train", failing_train)
    done = call(
        *TINY,
        f"--config.data.source={text_file}",
        f"--output={tmp_path}",
        "--config.compare.names=gpt,pgpt",
        "--config.compare.decoding=false",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "training has diverged\nThe run is kept" in done.stdout
        and "process 1 is training it" in done.stdout
    )
    assert {run["name"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]} == {
        "pgpt"
    }


def test_names_runs_that_ignore_a_common_field(tmp_path):
    done = call(
        "compare",
        "--config=configs/compare/paper.py:quickstart",
        "--config.compare.names=gpt,lgpt",
        "--config.model.d_model=64",
        "--config.compare.texts=wrong",
        f"--output={tmp_path / 'out'}",
    )
    assert done.stdout == (
        "--config.model.d_model=64: does not apply to lgpt, which sets the field to 192; use "
        "--config.runs.lgpt.model.d_model\n"
    )
    assert (
        done.returncode == 1
        and "is not NAME=SOURCE" in done.stderr
        and not (tmp_path / "out").exists()
    )


def test_refuses_runs_of_different_texts(text_file, tmp_path):
    """Runs trained on different texts are refused; equal texts under different names are
    accepted.
    """
    for name, first in (("a", 1000), ("b", 1000), ("c", 2000)):
        (tmp_path / f"{name}.txt").write_text(numbers(first))
        untrained_run(tmp_path / name, tmp_path / f"{name}.txt")
    results.require_comparable([results.read_run(name, tmp_path / name) for name in "ab"])
    done = call(
        "compare",
        f"--workdirs={tmp_path / 'a'},{tmp_path / 'c'}",
        f"--output={tmp_path / 'report'}",
    )
    assert done.returncode == 1
    assert (
        "cannot be compared, since their texts differ" in done.stderr
        and done.stderr.count("\n") <= 2
    )
    assert not (tmp_path / "report").exists()


PAPER = "--config=configs/compare/paper.py:tiny"


@pytest.mark.parametrize(
    "arguments, message, status",
    [
        (["--workdirs="], "--workdirs: the list is empty", 1),
        (["--workdirs=HERE/x"], "no such folder; give the workdir of a run", 1),
        (["--workdirs=HERE"], "not a run, without config.json; give the workdir of a run", 1),
        ([], "give either --config", 2),
        (
            [PAPER, "--config.compare.names=gpt", "--config.compare.texts=x=/none.txt"],
            "/none.txt",
            1,
        ),
        (
            [PAPER, "--config.compare.names=gpt", "--config.compare.contexts=1,99999"],
            "config.compare.contexts=(1, 99999): the validation split of the text 'own' is "
            "shorter than",
            1,
        ),
        (["--config=configs/gpt.py:tiny"], "this is the recipe of one run, not a comparison", 1),
        (["--config=configs/compare/paper.py:huge"], "no size 'huge'", 2),
        (
            ["--workdirs=HERE", f"--logged={ROOT / 'README.md'}"],
            "not a CSV file with the columns model,step,val_loss",
            1,
        ),
    ],
)
def test_bad_flags(arguments, message, status, text_file, tmp_path):
    arguments = [argument.replace("HERE", str(tmp_path)) for argument in arguments]
    if PAPER in arguments:
        arguments.append(f"--config.data.source={text_file}")
    done = call("compare", *arguments, f"--output={tmp_path / 'out'}")
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    assert done.stderr.count("\n") <= 2
    assert not (tmp_path / "out").exists()


def test_a_pattern_that_ends_with_a_slash_matches_only_folders(tmp_path):
    (tmp_path / "a.txt").write_text("no run")
    (tmp_path / "b").mkdir()
    done = call("compare", f"--workdirs={tmp_path}/*/", f"--output={tmp_path / 'out'}")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {tmp_path}/b: not a run, "), (
        done.stderr
    )


# ------------------------------------------------------------------ Measurements
@pytest.mark.slow
def test_texts_in_longer_contexts(text_file, tmp_path, monkeypatch):
    """The measured losses at each context length match a float64 formula on the same tokens.

    A second call of `measure_texts` measures nothing, because the checkpoint is the same.
    """
    folder = untrained_run(
        tmp_path / "run",
        text_file,
        train__steps=2,
        train__eval_steps=2,
        model__position="rope",
        model__num_layers=1,
        model__d_model=16,
        data__packing="best_fit",
    )
    config, other = read_config(folder), tmp_path / "other.txt"
    other.write_text(
        "\n\n".join(" ".join(f"{n * n % 97}" for n in range(m, m + 60)) for m in range(900))
    )
    model = models.LanguageModel(config.model)
    trained = SimpleNamespace(model=model, params=init(model), model_state={})
    monkeypatch.setattr(inference, "load_trained", lambda folder: trained)
    monkeypatch.setattr(
        measure, "shared_program", lambda config: shared_program(config, jax.devices()[:1])
    )
    messages = []
    for _ in range(2):
        measure.measure_texts(folder, {"other": str(other)}, (1, 4), log=messages.append)
    assert len(messages) == 4 and f"other, context {4 * TIME}" in messages[3]
    rows = results.read_run("run", folder).texts
    assert [(row["text"], row["context_length"], row["step"]) for row in rows] == [
        (text, length, 2) for text in ("own", "other") for length in (TIME, 4 * TIME)
    ]

    corpus = measure.open_texts(config, {"other": str(other)})["other"]
    tokens = np.asarray(corpus.stores[0].validation.stream, np.int32)
    sample = measure.TextSample(corpus, config, (1, 4), "other")
    starts = sample._window_numbers * 4 * TIME
    assert (
        len(starts) == len(set(starts)) == 2 * 8 // 4
    )  # 2 evaluation steps of 8 rows, 4 rows per window
    for times, row in ((1, rows[2]), (4, rows[3])):
        windows = np.stack(
            [
                tokens[start : start + times * TIME + 1]
                for first in starts
                for start in range(first, first + 4 * TIME, times * TIME)
            ]
        )
        logits = np.asarray(forward(model, trained.params, windows[:, :-1]), np.float64)
        logits -= logits.max(axis=2, keepdims=True)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
        losses = -np.take_along_axis(log_probabilities, windows[:, 1:, None], axis=2)
        assert row["tokens"] == losses.size and abs(row["loss"] - losses.mean()) < 1e-5
        assert math.isclose(
            row["bits_per_byte"],
            row["loss"] / math.log(2) / corpus.stores[0].validation.bytes_per_token,
        )

    # The run's own text at its own context length is not measured, since training evaluates it.
    measure.measure_texts(folder, {}, (1,), log=messages.append)
    assert len(messages) == 4
    # Results of an earlier checkpoint are ignored.
    config = config.replace(train={"steps": 4})
    write_config(folder, config.to_dict())
    assert results.read_run("run", folder).texts == ()


@pytest.mark.parametrize("times", [1, 2])
def test_batches_are_no_larger_than_microbatches_of_training(
    times, text_file, tmp_path, monkeypatch
):
    """A batch of `measure_loss` has at most as many tokens as a training microbatch, so it fits
    into memory.
    """
    folder = untrained_run(
        tmp_path, text_file, train__batch_size=64, train__microbatches=4, train__eval_steps=2
    )
    config = read_config(folder)
    sample = measure.TextSample(open_existing(config.data), config, (1, 2), "own")
    shapes = []

    def eval_step(params, model_state, batch):
        shapes.append(batch.tokens_BxT1.shape)
        return EvaluationSums(np.float32(1), np.int32(1), np.int32(1), None)

    def program(config):
        mesh = sharding.make_mesh(config.mesh)
        return SimpleNamespace(
            mesh=mesh,
            shardings=SimpleNamespace(
                params=sharding.replicated(mesh), model_state=sharding.replicated(mesh)
            ),
            evaluate=eval_step if config.train.microbatches == 1 else None,
        )

    monkeypatch.setattr(measure, "shared_program", program)
    monkeypatch.setattr(
        inference, "load_trained", lambda folder: SimpleNamespace(params={}, model_state={})
    )
    measure.measure_loss(folder, sample, times)
    microbatch = 64 // 4 * TIME  # tokens
    assert shapes and {(rows * (length - 1), length) for rows, length in shapes} == {
        (microbatch, TIME * times + 1)
    }


def test_a_changed_text_is_measured_again_and_not_compared(text_file, tmp_path, monkeypatch):
    """A text is identified by its content, not by its name, size or modification time."""
    losses = iter(range(1, 9))
    monkeypatch.setattr(
        measure, "measure_loss", lambda *_: {"loss": 1.0, "bits_per_byte": next(losses)}
    )
    one, other = (untrained_run(tmp_path / name, text_file) for name in ("one", "other"))
    text = tmp_path / "text.txt"

    def measured(folder, source=text) -> int:
        measure.measure_texts(folder, {"text": str(source)}, (1,), log=lambda _: None)
        return next(
            row["bits_per_byte"]
            for row in results.read_run("run", folder).texts
            if row["text"] == "text"
        )

    def check() -> None:
        results.require_comparable(
            [results.read_run(folder.name, folder) for folder in (one, other)]
        )

    text.write_text(numbers(1000))
    # The fake `measure_loss` returns 1, 2, 3, …. The first call of `measured` measures the run's
    # own text (1), then the text named "text" (2). The second call measures nothing, so it also
    # returns 2.
    assert measured(one) == measured(one) == 2
    again = tmp_path / "again.txt"
    again.write_text(text.read_text())
    assert measured(one, again) == 2
    text.write_text(numbers(2000))
    assert measured(other) == 4
    with pytest.raises(
        UserError, match=r"the texts named 'text' differ \('.*/again.txt' and '.*/text.txt'\)"
    ):
        check()
    assert measured(one) == 5
    check()


def test_a_mixture_is_measured_on_the_same_tokens_at_each_context_length(token_store, tmp_path):
    (tmp_path / "numbers.txt").write_text("\n\n".join(str(n) * 40 for n in range(3000)))
    digits = prepare_store(tmp_path / "numbers", tmp_path / "numbers.txt")
    corpus = Corpus([token_store, digits], [0.25, 0.75])
    config = load_config("gpt", train__eval_steps=4)  # 32 rows of 64 tokens
    sample = measure.TextSample(corpus, config, (1, 2, 4), "own")
    of_one, of_four = (
        corpus.pack("validation", "concat", False, 64 * n).packings[0].num_rows for n in (1, 4)
    )
    # The first store has of_one rows of 64 tokens or of_four rows of 256 tokens. If of_one were 4 *
    # of_four, wrong code that multiplies all row indices by 4 would pass the test.
    assert of_one > 4 * of_four
    seen = [
        np.sort(
            np.concatenate(
                [
                    row[1:]
                    for batch in sample.batches(times, 5)
                    for row in batch.tokens_BxT1[batch.loss_mask_BxT.any(1)]
                ]
            )
        )
        for times in (1, 2, 4)
    ]
    assert len(seen[0]) == 8 * 256 and (seen[0] == seen[1]).all() and (seen[0] == seen[2]).all()
    # Two of the eight windows of 256 tokens are from the first store, and six are from the second.
    share = np.isin(seen[0], token_store.tokenizer.encode(["0123456789"])[0]).mean()
    assert (
        0.7 < share <= 0.75
    )  # below 0.75, because the second store contains line breaks besides digits
