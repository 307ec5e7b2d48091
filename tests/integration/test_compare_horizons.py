"""Horizons in the compare command: which runs are trained, cost, resumption, several processes, the
report.
"""

import concurrent.futures
import contextlib
import json
import threading
from pathlib import Path

import pytest
from conftest import call, load_config

from smallgpt_jax.comparison import inference_cost, training
from smallgpt_jax.comparison.runs import Comparison
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.run.checkpoint import saved_steps
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.workdir import initialize_workdir, lock_workdir
from smallgpt_jax.training import trainer
from smallgpt_jax.training.branch import open_branch

HORIZONS = (0.25, 0.5, 0.75, 1.0)
COMPARE = (
    "compare",
    "--config=configs/compare/paper.py:tiny",
    "--config.train.steps=80",
    "--config.optimizer.schedule=wsd",
    "--config.compare.horizons=0.25,0.5,0.75,1",
    "--config.compare.seeds=2",
)
SHORTER = ["-x0.25", "-x0.5", "-x0.75"]


class FakeTrain:
    """Replaces `trainer.train`. Locks the workdir and starts from the trunk, but writes a loss of 3 +
    seed / steps.

    `trained` lists (folder, number of steps that were trained).
    """

    def __init__(self, before_end=lambda folder: None):
        self.trained, self.before_end = [], before_end

    def __call__(self, config: Config, folder: str, corpus) -> None:
        folder, steps = Path(folder), config.train.steps
        trunk = open_branch(folder, config)
        with lock_workdir(folder):
            if is_finished(folder, config, corpus):
                return
            initialize_workdir(folder, config, corpus)
            if trunk:
                trunk.copy_to(folder)
            first_step = max(saved_steps(folder / "checkpoints"), default=0)
            append_session(
                folder,
                {
                    "first_step": first_step,
                    "devices": 1,
                    "device": "cpu",
                    "argument_bytes": 10,
                    "temp_bytes": 10,
                    "padding": 0.0,
                },
            )
            self.before_end(folder.name)
            self.trained.append((folder.name, steps - first_step))
            targets = num_validation_targets(
                corpus,
                config.data,
                context_length=config.model.context_length,
                batch_size=config.train.batch_size,
                eval_steps=config.train.eval_steps,
            )
            loss = 3 + config.train.seed / steps
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
            for step in (*config.train.kept_steps, steps):
                (folder / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def fake_train(monkeypatch):
    """Returns a function that replaces `trainer.train` by a FakeTrain. Its arguments are those of
    FakeTrain.
    """

    def install(*arguments) -> FakeTrain:
        monkeypatch.setattr(trainer, "train", FakeTrain(*arguments))
        return trainer.train

    return install


@pytest.mark.slow
def test_trunk_then_shorter_runs_then_report(text_file, tmp_path, fake_train, monkeypatch):
    measured = []
    monkeypatch.setattr(
        inference_cost, "measure_inference", lambda folder: measured.append(folder.name)
    )
    fake, done = (
        fake_train(),
        call(
            *COMPARE,
            f"--config.data.source={text_file}",
            f"--output={tmp_path}",
            "--config.compare.names=gpt",
        ),
    )
    assert (done.returncode, done.stderr) == (0, "")
    full = ["gpt-seed1337", "gpt-seed1338"]
    # The decays take a tenth of 20, 40 and 60 steps.
    assert fake.trained == [
        (folder + suffix, steps)
        for folder in full
        for suffix, steps in (("", 80), ("-x0.25", 2), ("-x0.5", 4), ("-x0.75", 6))
    ]
    trained, alone = sum(steps for _, steps in fake.trained), 2 * (20 + 40 + 60 + 80)
    assert trained / alone <= 0.6
    assert measured == full  # shorter runs have the same speed
    assert "[2/8] gpt, seed 1337, horizon × 0.25\n" in done.stdout

    found, markdown = (
        json.loads((tmp_path / "results.json").read_text()),
        (tmp_path / "report.md").read_text(),
    )
    assert [(run["seed"], run["horizon"], Path(run["run"]).name) for run in found["runs"]] == [
        (int(folder[-4:]), horizon, folder) for folder in full for horizon in (1.0, 0.25, 0.5, 0.75)
    ]
    # The ranking is that of the longest runs; the table of horizons has all.
    assert found["ranking"]["means"]["gpt"] == pytest.approx(3 + 1337.5 / 80)
    cells = [
        f"{3 + 1337.5 / steps:.4f} ({3 + 1337 / steps:.4f} to {3 + 1338 / steps:.4f})"
        for steps in (20, 40, 60, 80)
    ]
    assert f"| gpt | {' | '.join(cells)} |" in markdown
    assert "| run | × 0.25 | × 0.5 | × 0.75 | × 1 |" in markdown
    assert f"of the {alone:,} steps of all runs, {trained:,} were trained" in markdown
    assert "| gpt × 0.25 | 1337 | 20 |" in markdown and "differ in tokens" not in markdown

    before = (tmp_path / "results.json").read_bytes()
    done = call(
        "compare", f"--results={tmp_path / 'results.json'}", f"--output={tmp_path / 'again'}"
    )
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    assert {**again, "command": ""} == {**json.loads(before), "command": ""}


def test_horizons_are_added_to_a_finished_comparison(text_file, tmp_path, fake_train):
    """The longest run has kept no checkpoint for a shorter one, so this one is trained from
    step 0.
    """
    arguments = (
        *COMPARE[:4],
        f"--config.data.source={text_file}",
        f"--output={tmp_path}",
        "--config.compare.names=gpt",
        "--config.compare.seeds=1",
        "--config.compare.decoding=false",
    )
    fake, done = fake_train(), call(*arguments)
    assert done.returncode == 0 and fake.trained == [("gpt-seed1337", 80)]
    fake, done = fake_train(), call(*arguments, "--config.compare.horizons=0.5,1")
    assert (done.returncode, done.stderr) == (0, "") and fake.trained == [("gpt-seed1337-x0.5", 40)]


@pytest.mark.slow
def test_grids_have_only_the_longest_horizon(text_file, tmp_path, fake_train):
    fake, done = (
        fake_train(),
        call(
            *COMPARE,
            f"--config.data.source={text_file}",
            f"--output={tmp_path}",
            "--config.compare.names=gpt",
            "--config.compare.decoding=false",
            "--config.compare.seeds=1",
            "--config.compare.learning_rates=0.5,1",
            "--config.compare.max_added_learning_rates=0",
        ),
    )
    assert (done.returncode, done.stderr) == (0, "")
    best = "gpt-seed1337-lr0.5x"  # all losses are equal
    assert [folder for folder, _ in fake.trained] == [
        "gpt-seed1336-lr0.5x",
        "gpt-seed1336",
        best,
        *(best + suffix for suffix in SHORTER),
    ]
    assert "[6/6] gpt, seed 1337, learning rate × 0.5, horizon × 0.75\n" in done.stdout


@pytest.mark.slow
def test_an_interrupted_comparison_resumes(text_file, tmp_path, fake_train):
    """It is interrupted in the trunk and in a shorter run. The results are those of one that is not
    interrupted.
    """

    def interrupt(folder: str) -> None:
        if folder == places[-1]:
            places.pop()
            raise KeyboardInterrupt

    arguments = (
        *COMPARE,
        f"--config.data.source={text_file}",
        "--config.compare.names=gpt",
        "--config.compare.seeds=1",
        "--config.compare.decoding=false",
    )
    fake_train()
    assert call(*arguments, f"--output={tmp_path / 'whole'}").returncode == 0
    places = ["", "gpt-seed1337-x0.5", "gpt-seed1337"]
    fake = fake_train(interrupt)
    done = [call(*arguments, f"--output={tmp_path / 'out'}") for _ in range(3)]
    assert [one.returncode for one in done] == [130, 130, 0] and done[-1].stderr == ""
    assert [folder for folder, _ in fake.trained] == [
        "gpt-seed1337" + suffix for suffix in ("", *SHORTER)
    ]
    before, now = (
        [
            (run["horizon"], run["curve"])
            for run in json.loads((tmp_path / name / "results.json").read_text())["runs"]
        ]
        for name in ("whole", "out")
    )
    assert now == before and len(now) == 4


@pytest.mark.slow
def test_two_processes_divide_the_shorter_runs(text_file, tmp_path, fake_train, monkeypatch):
    """The second process waits for the trunk that the first one is training; then both train
    shorter runs.

    In this test, threads replace the processes; file locks exclude threads, too.
    """
    started, waits, both = threading.Event(), threading.Event(), threading.Barrier(2, timeout=60)

    def before_end(folder: str) -> None:
        if folder == "gpt-seed1337":
            started.set()
            assert waits.wait(60)
        elif folder in ("gpt-seed1337-x0.25", "gpt-seed1337-x0.5"):
            both.wait()  # two threads train these runs at the same time

    @contextlib.contextmanager
    def waiting_lock(*arguments, **options):
        waits.set()
        with file_lock(*arguments, **options):
            yield

    file_lock, fake = training.file_lock, fake_train(before_end)
    monkeypatch.setattr(training, "file_lock", waiting_lock)
    config = Config.of(
        load_config("gpt", data__source=str(text_file), train__steps=80, optimizer__schedule="wsd")
    )
    comparison = Comparison(tmp_path, {"gpt": config}, range(1337, 1338), (), 4, horizons=HORIZONS)
    text, measured = load_or_prepare(config.data), []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(training.train_comparison, comparison, text, measured.append)
        assert started.wait(60)
        second = pool.submit(training.train_comparison, comparison, text, measured.append)
        found = [one.result(timeout=120) for one in (first, second)]
    assert sorted(fake.trained) == [
        ("gpt-seed1337", 80),
        ("gpt-seed1337-x0.25", 2),
        ("gpt-seed1337-x0.5", 4),
        ("gpt-seed1337-x0.75", 6),
    ]
    assert {folder.name for losses in found for folder in losses} == {
        folder for folder, _ in fake.trained
    }


@pytest.mark.slow
def test_a_real_comparison_equals_runs_trained_alone(text_file, tmp_path):
    """The shorter run has the losses of a comparison without horizons and with its number of
    steps.
    """
    fields = (
        "--config.compare.names=gpt",
        "--config.compare.seeds=1",
        "--config.compare.decoding=false",
        "--config.model.num_layers=1",
        "--config.optimizer.schedule=wsd",
        "--config.optimizer.warmup_steps=2",
        "--config.train.eval_every=4",
        "--config.optimizer.decay_fraction=0.25",
        f"--config.data.source={text_file}",
    )
    tiny = ("compare", "--config=configs/compare/paper.py:tiny", *fields)
    for name, arguments in (
        ("horizons", ("--config.train.steps=16", "--config.compare.horizons=0.5,1")),
        ("alone", ("--config.train.steps=8",)),
    ):
        done = call(*tiny, *arguments, f"--output={tmp_path / name}")
        assert (done.returncode, done.stderr) == (0, "")
    _, short = json.loads((tmp_path / "horizons" / "results.json").read_text())["runs"]
    (alone,) = json.loads((tmp_path / "alone" / "results.json").read_text())["runs"]
    losses, expected = (
        [(point["step"], point["loss"]) for point in run["curve"]] for run in (short, alone)
    )
    assert losses == expected and [step for step, _ in losses] == [4, 8]
    assert short["sessions"][0]["first_step"] == 6
