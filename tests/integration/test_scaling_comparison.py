"""Comparisons of several sizes, whose losses follow known laws instead of training: the order of
events, the report.
"""

import gc
import hashlib
import json
import math
import shutil
from pathlib import Path

import jax
import pytest
from conftest import call

from smallgpt_jax import models
from smallgpt_jax.comparison.power_law import Law
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.workdir import initialize_workdir, lock_workdir
from smallgpt_jax.training import trainer

LAW, BEST_RATE = Law(1.5, 60.0, 60.0, 0.34, 0.28), 0.5  # as a multiple of the models' own rates
HELD_OUT = "0.2M"
NAMES = f"gpt@20k,gpt@45k,gpt@77k,gpt@{HELD_OUT}"


class FakeTrain:
    """Replaces `trainer.train`. `events` lists the runs, and whether predictions.json existed when
    they started.
    """

    def __init__(self, output: Path, before_end=lambda folder: None):
        self.output, self.before_end, self.events = output, before_end, []

    def __call__(self, config, folder: str, corpus) -> None:
        folder, steps = Path(folder), config.train.steps
        with lock_workdir(folder):
            if is_finished(folder, config, corpus):
                return
            self.events.append((folder.name, (self.output / "predictions.json").exists()))
            initialize_workdir(folder, config, corpus)
            self.before_end(folder.name)
            tokens = steps * config.train.batch_size * config.model.context_length
            loss = float(
                LAW.loss(models.num_parameters(models.LanguageModel(config.model)), tokens)
            )
            loss += 1e-3 * (config.train.seed % 2) + self.excess(folder.name)
            targets = num_validation_targets(
                corpus,
                config.data,
                context_length=config.model.context_length,
                batch_size=config.train.batch_size,
                eval_steps=config.train.eval_steps,
            )
            (folder / "metrics.jsonl").write_text(
                json.dumps(
                    {
                        "step": steps,
                        "split": "eval",
                        "loss": loss,
                        "bits_per_byte": loss,
                        "targets": targets,
                    }
                )
                + "\n"
            )
            (folder / "checkpoints" / str(steps)).mkdir(parents=True)

    @staticmethod
    def excess(name: str) -> float:
        """Returns how much higher the loss is than at the best learning rate. Grids have the seed
        1336.
        """
        multiple = float(name.partition("-lr")[2].partition("x")[0] or 1)
        return 0.1 * abs(math.log2(multiple / BEST_RATE)) * ("-seed1336" in name)


@pytest.fixture
def compare(text_file, tmp_path, monkeypatch):
    """Returns a function that runs a tiny scaling comparison of gpt in tmp_path / "out"."""

    def start(
        *arguments: str,
        before_end=lambda folder: None,
        expected: int = 0,
        rates: str = "()",
        horizons: str = "0.25,0.5,1",
    ):
        fake = FakeTrain(tmp_path / "out", before_end)
        for owner, name in (
            (gc, "collect"),
            (jax, "clear_caches"),
        ):  # after each run; nothing is trained here
            monkeypatch.setattr(owner, name, lambda: None)
        monkeypatch.setattr(trainer, "train", fake)
        done = call(
            "compare",
            "--config=configs/compare/scaling.py:tiny",
            f"--config.compare.names={NAMES}",
            f"--config.compare.learning_rates={rates}",
            f"--config.compare.horizons={horizons}",
            "--config.model.num_layers=2",
            f"--config.data.source={text_file}",
            "--config.data.tokenizer=bytes",
            f"--output={tmp_path / 'out'}",
            *arguments,
        )
        assert done.returncode == expected, done.stderr
        return fake.events, done

    return start


def is_held_out(folder: str) -> bool:
    return f"_{HELD_OUT}-" in folder


@pytest.mark.slow
def test_held_out_runs_start_after_their_prediction(compare, tmp_path):
    """The report has the errors of the stored predictions, which a second start does not change."""
    output = tmp_path / "out"
    events, done = compare("--config.compare.train_held_out=false")
    assert len(events) == 3 * 2 * 3 and not any(
        is_held_out(name) or existed for name, existed in events
    )
    assert "predictions of 6 held-out runs" in done.stdout
    before = (output / "predictions.json").read_bytes()
    content = json.loads(before)
    assert content["held_out"] == HELD_OUT and content["command"].startswith(
        "python -m smallgpt_jax.compare "
    )
    rows = json.dumps(content["records"], sort_keys=True).encode()
    assert (
        content["records_sha256"] == hashlib.sha256(rows).hexdigest()
        and len(content["records"]) == 18
    )
    assert "No predicted run is finished yet." in (output / "report.md").read_text()

    events, _ = compare()
    assert len(events) == 6 and all(is_held_out(name) and existed for name, existed in events)
    assert (output / "predictions.json").read_bytes() == before
    found = json.loads((output / "results.json").read_text())
    assert (
        found["predictions"] == content
        and found["held_out"] == HELD_OUT
        and len(found["runs"]) == 24
    )
    markdown = (output / "report.md").read_text()
    for row in content["predictions"]["parameters"]:
        mean = LAW.loss(row["size"], row["tokens"]) + 5e-4  # over both seeds
        assert row["loss"] == pytest.approx(mean, abs=2e-3)
        assert (
            f"| {row['loss']:.4f} | {row['low']:.4f} to {row['high']:.4f} | {mean:.4f} | "
            f"{mean - row['loss']:+.4f} |"
        ) in markdown
    assert found["ranking"]["means"].keys() == {f"gpt@{HELD_OUT}"}
    events, _ = compare()
    assert events == [] and (output / "report.md").read_text() == markdown

    (output / "results.json").rename(tmp_path / "record.json")
    shutil.rmtree(output)
    events, _ = compare(f"--results={tmp_path / 'record.json'}")
    assert events == [] and (output / "predictions.json").read_bytes() == before


@pytest.mark.slow
def test_runs_without_a_prediction_stay_without(compare, tmp_path):
    """A held-out run that was trained in another way forbids a later prediction."""
    compare(
        f"--config.compare.names=gpt@{HELD_OUT}",
        "--config.compare.held_out=",
        "--config.compare.seeds=1",
        horizons="1",
    )
    _, done = compare("--config.compare.train_held_out=false")
    assert "has started without predictions.json; no predictions are made" in done.stdout
    assert not (tmp_path / "out" / "predictions.json").exists()


@pytest.mark.slow
def test_a_killed_comparison_ends_with_the_same_report(compare, tmp_path):
    """It is killed in the grid, in a fitted run and in a held-out run. The smallest size has the
    only grid.
    """
    output, killed = tmp_path / "out", []

    def kill(folder: str) -> None:
        at = (
            "gpt_20k-seed1336-lr2x",
            "gpt_45k-seed1338-lr0.5x-x0.5",
            f"gpt_{HELD_OUT}-seed1337-lr0.5x",
        )
        if folder in at and folder not in killed:
            killed.append(folder)
            raise KeyboardInterrupt

    for number in range(3):
        compare(before_end=kill, expected=130, rates="0.5,1,2")
        started, _ = compare(
            "--config.compare.train=false", rates="0.5,1,2"
        )  # reports on the runs so far
        found = json.loads((output / "results.json").read_text())
        finished = [run for run in found["runs"] if run["is_finished"]]
        losses = [rate["loss"] for rate in found["learning_rates"]["gpt@20k"]["rates"]]
        assert "compare.train=" not in found["command"]
        assert (
            not started
            and len(finished) == (0, 14, 18)[number]
            and (None in losses) == (number == 0)
        )
    events, _ = compare(before_end=kill, rates="0.5,1,2")
    assert len(killed) == 3 and events[0][0] == killed[-1] and len(events) == 6
    found = json.loads((output / "results.json").read_text())
    assert (
        found["learning_rates"].keys() == {"gpt@20k"}
        and found["learning_rates"]["gpt@20k"]["best"] == 0.5
    )
    names = [folder.name for folder in (output / "runs").iterdir()]
    assert sorted(name for name in names if "-seed1336" in name) == [
        f"gpt_20k-seed1336{suffix}" for suffix in ("", "-lr0.25x", "-lr0.5x", "-lr2x")
    ]
    assert all("-lr0.5x" in name for name in names if "-seed1336" not in name)
    output.rename(tmp_path / "resumed")
    compare(before_end=kill, rates="0.5,1,2")
    texts = [
        (folder / "report.md").read_text().splitlines() for folder in (output, tmp_path / "resumed")
    ]
    first, second = (
        [line for line in text if not line.startswith("On ")] for text in texts
    )  # the time differs
    assert first == second and len(first) > 50


@pytest.mark.parametrize(
    "argument, horizons, message",
    [
        (
            "--config.compare.held_out=9M",
            "0.25,0.5,1",
            "must be the SIZE of runs named MODEL@SIZE; choose from ",
        ),
        (
            "--config.compare.names=gpt@20k,gpt@45k,gpt@0.2M",
            "0.25,0.5,1",
            "gpt has too few other runs for a scaling law; add 2 more runs, 1 more size, or set "
            "the field to ''",
        ),
        (
            "--config.compare.seeds=2",
            "1",
            "few other runs for a scaling law; add runs whose tokens per parameter differ",
        ),
    ],
)
def test_refuses_what_cannot_be_predicted(argument, horizons, message, compare, tmp_path):
    events, done = compare(argument, horizons=horizons, expected=1)
    assert events == [] and "config.compare.held_out=" in done.stderr and message in done.stderr
    assert not (tmp_path / "out").exists()
