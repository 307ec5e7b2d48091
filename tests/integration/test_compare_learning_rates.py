"""Learning-rate grids in the compare command: which runs are trained, resumption, several
processes, the report.
"""

import concurrent.futures
import contextlib
import json
import math
import threading
from pathlib import Path

import pytest
from conftest import call, load_config

from smallgpt_jax.comparison import inference_cost, results, training
from smallgpt_jax.comparison.runs import Comparison
from smallgpt_jax.data.corpus import load_or_prepare
from smallgpt_jax.data.pipeline import num_validation_targets
from smallgpt_jax.errors import DivergenceError
from smallgpt_jax.run.completion import is_finished
from smallgpt_jax.run.config import Config
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import CONFIG_FILE
from smallgpt_jax.run.sessions import append_session, has_diverged
from smallgpt_jax.run.workdir import check_workdir, initialize_workdir, lock_workdir
from smallgpt_jax.training import trainer

STEPS = (
    "--config.train.steps=8",
    "--config.train.eval_every=4",
    "--config.train.log_every=2",
    "--config.train.checkpoint_every=4",
    "--config.optimizer.decay_steps=8",
)
TINY = ("compare", "--config=configs/compare/paper.py:tiny", *STEPS)
GRID = "--config.compare.learning_rates=0.5,1,2"
OWN_RATE = 3e-3  # the learning rate of the tiny recipes
BEST = {
    "gpt": 2 * OWN_RATE,
    "pgpt": OWN_RATE,
}  # the learning rates at which the made-up losses are lowest


class FakeTrain:
    """Replaces `trainer.train`. Locks the workdir, but writes made-up losses instead of training.

    The loss is |log2(learning rate / best learning rate)| + seed / 1e5. Runs diverge above three
    times the recipe's learning rate. `trained` lists the folders of the runs in the order in which
    they start.
    """

    def __init__(self, before_end=lambda folder: None):
        self.trained, self.before_end = [], before_end

    def __call__(self, config, folder: str, corpus) -> None:
        folder, rate, steps = Path(folder), config.optimizer.learning_rate, config.train.steps
        with lock_workdir(folder):
            if is_finished(folder, config, corpus):
                return
            if has_diverged(
                folder
            ):  # another process trained the run just now; a resumed run diverges again
                raise DivergenceError("training has diverged")
            self.trained.append(folder.name)
            initialize_workdir(folder, config, corpus)
            self.before_end(folder.name)
            if rate > 3 * OWN_RATE:
                append_session(folder, {"diverged": "loss"})
                raise DivergenceError("training has diverged")
            loss = abs(math.log2(rate / BEST[config.model.architecture])) + config.train.seed / 1e5
            targets = num_validation_targets(
                corpus,
                config.data,
                context_length=config.model.context_length,
                batch_size=config.train.batch_size,
                eval_steps=config.train.eval_steps,
            )
            (folder / "metrics.jsonl").write_text(
                "".join(
                    json.dumps(
                        {
                            "step": step,
                            "split": "eval",
                            "loss": value,
                            "bits_per_byte": value,
                            "targets": targets,
                        }
                    )
                    + "\n"
                    for step, value in ((steps // 2, 9.0), (steps, loss))
                )
            )
            (folder / "checkpoints" / str(steps)).mkdir(parents=True)


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
def test_grid_then_seeds_then_report(text_file, tmp_path, fake_train, monkeypatch):
    """The best learning rate of gpt is × 2, the edge of the grid. So × 4 is tried, too; it
    diverges.
    """
    output, measured = tmp_path / "out", []
    monkeypatch.setattr(
        inference_cost, "measure_inference", lambda folder: measured.append(folder.name)
    )
    arguments = (
        *TINY,
        GRID,
        f"--config.data.source={text_file}",
        f"--output={output}",
        "--config.compare.names=gpt,pgpt",
    )
    fake, done = fake_train(), call(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    grids = [
        "gpt-seed1336-lr0.5x",
        "gpt-seed1336",
        "gpt-seed1336-lr2x",
        "gpt-seed1336-lr4x",
        "pgpt-seed1336-lr0.5x",
        "pgpt-seed1336",
        "pgpt-seed1336-lr2x",
    ]
    seeds = ["gpt-seed1337-lr2x", "pgpt-seed1337", "gpt-seed1338-lr2x", "pgpt-seed1338"]
    assert fake.trained == [*grids, *seeds] and measured == seeds
    assert "[1/10] gpt, seed 1336, learning rate × 0.5\n" in done.stdout
    assert (
        "[4/11] gpt, seed 1336, learning rate × 4\n" in done.stdout
        and "[11/11] pgpt, seed 1338\n" in done.stdout
    )

    found, markdown = (
        json.loads((output / "results.json").read_text()),
        (output / "report.md").read_text(),
    )
    assert [Path(run["workdir"]).name for run in found["runs"]] == seeds
    assert {
        name: (grid["seed"], grid["best"], grid["edge"])
        for name, grid in found["learning_rates"].items()
    } == {"gpt": (1336, 2.0, ""), "pgpt": (1336, 1.0, "")}
    assert found["learning_rates"]["gpt"]["rates"] == [
        {
            "multiple": multiple,
            "learning_rate": multiple * OWN_RATE,
            "diverged": multiple == 4.0,
            "loss": {0.5: 2 + 0.01336, 1.0: 1 + 0.01336, 2.0: 0.01336, 4.0: None}[multiple],
        }
        for multiple in (0.5, 1.0, 2.0, 4.0)
    ]
    assert "| gpt | 0.003 | 2.0134 | 1.0134 | 0.0134 | diverged | 0.006 (× 2) | – | – |" in markdown
    assert (
        "| pgpt | 0.003 | 1.0134 | 0.0134 | 1.0134 | – | 0.003 (× 1) | 0.003 | +1.0000 |"
        in markdown
    )
    table = markdown.partition("## Which model?")[0]
    assert table.count("0.0134 (0.0134 to 0.0134)") == 2  # loss of both models, over the two seeds
    assert (output / "loss-learning-rate.png").exists() and "of its grid" not in markdown

    before = (output / "results.json").read_bytes()
    again, done = fake_train(), call(*arguments)
    assert (done.returncode, again.trained) == (0, []) and (
        output / "results.json"
    ).read_bytes() == before
    named = results.name_workdirs(
        [output / "runs" / f"gpt-seed{seed}-lr2x" for seed in (1337, 1338)]
    )
    assert [name for name, _ in named] == ["gpt-lr2x"] * 2


def test_every_learning_rate_diverges(text_file, tmp_path, monkeypatch):
    """The comparison then has no runs; the report says why."""
    monkeypatch.setattr(trainer, "train", FakeTrain())
    monkeypatch.setitem(BEST, "gpt", math.inf)
    done = call(
        *TINY,
        "--config.compare.learning_rates=4,8",
        f"--config.data.source={text_file}",
        f"--output={tmp_path}",
        "--config.compare.names=gpt",
        "--config.compare.max_added_learning_rates=0",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "gpt has diverged at every learning rate of its grid."
        in (tmp_path / "report.md").read_text()
    )
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == []


@pytest.mark.slow
def test_a_grid_is_added_to_an_existing_comparison(text_file, tmp_path, fake_train):
    """Existing runs are not trained again. The report says that the best rate is the highest of the
    grid.
    """
    arguments = (
        *TINY,
        f"--config.data.source={text_file}",
        f"--output={tmp_path}",
        "--config.compare.names=gpt",
        "--config.compare.decoding=false",
    )
    fake, done = fake_train(), call(*arguments)
    assert done.returncode == 0 and fake.trained == ["gpt-seed1337", "gpt-seed1338"]
    before = json.loads((tmp_path / "results.json").read_text())
    assert "learning_rates" not in before and not (tmp_path / "loss-learning-rate.png").exists()
    fake, done = fake_train(), call(*arguments, GRID, "--config.compare.max_added_learning_rates=0")
    assert done.returncode == 0 and fake.trained == [
        "gpt-seed1336-lr0.5x",
        "gpt-seed1336",
        "gpt-seed1336-lr2x",
        "gpt-seed1337-lr2x",
        "gpt-seed1338-lr2x",
    ]
    assert (
        "gpt: the best learning rate is the highest of its grid"
        in (tmp_path / "report.md").read_text()
    )
    fake, done = (
        fake_train(),
        call(*arguments),
    )  # without the grid, the report has the same runs as before
    assert (
        fake.trained == []
        and json.loads((tmp_path / "results.json").read_text())["runs"] == before["runs"]
    )


@pytest.mark.slow
def test_an_interrupted_grid_resumes(text_file, tmp_path, fake_train):
    def interrupt(folder: str) -> None:
        if folder == "gpt-seed1336-lr2x":
            raise KeyboardInterrupt

    arguments = (
        *TINY,
        GRID,
        f"--config.data.source={text_file}",
        f"--output={tmp_path}",
        "--config.compare.names=gpt",
        "--config.compare.decoding=false",
    )
    fake, done = fake_train(interrupt), call(*arguments)
    assert done.returncode == 130 and fake.trained == [
        "gpt-seed1336-lr0.5x",
        "gpt-seed1336",
        "gpt-seed1336-lr2x",
    ]
    fake, done = fake_train(), call(*arguments)
    assert done.returncode == 0
    assert fake.trained == [
        "gpt-seed1336-lr2x",
        "gpt-seed1336-lr4x",
        "gpt-seed1337-lr2x",
        "gpt-seed1338-lr2x",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True])
def test_two_processes_divide_the_runs(is_killed, text_file, tmp_path, fake_train, monkeypatch):
    """The second process waits for a run of the grid that the first one is training.

    The loss of this run is needed to choose the learning rate for the other seeds. If the first
    process is killed, the second one resumes the run. In this test, threads replace the processes;
    file locks exclude threads, too.
    """
    started, waits = threading.Event(), threading.Event()

    def before_end(folder: str) -> None:
        if folder == "gpt-seed0-lr0.5x" and not started.is_set():
            started.set()
            assert waits.wait(60)
            if is_killed:
                raise KeyboardInterrupt

    @contextlib.contextmanager
    def waiting_lock(*arguments, **options):
        waits.set()
        with file_lock(*arguments, **options):
            yield

    file_lock, fake = training.file_lock, fake_train(before_end)
    monkeypatch.setattr(training, "file_lock", waiting_lock)
    config = load_config("gpt", data__source=str(text_file), train__steps=8)
    comparison = Comparison(tmp_path, {"gpt": Config.of(config)}, range(1, 4), (0.5, 1, 2), 4)
    text, measured = load_or_prepare(config.data), []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(training.train_comparison, comparison, text, measured.append)
        assert started.wait(60)
        second = pool.submit(training.train_comparison, comparison, text, measured.append)
        losses = second.result(timeout=120)
        assert isinstance(
            first.exception(timeout=120), KeyboardInterrupt if is_killed else type(None)
        )
    grid = ["gpt-seed0-lr0.5x", "gpt-seed0", "gpt-seed0-lr2x", "gpt-seed0-lr4x"]
    seeds = ["gpt-seed1-lr2x", "gpt-seed2-lr2x", "gpt-seed3-lr2x"]
    assert sorted(fake.trained) == sorted([*grid, *seeds, *["gpt-seed0-lr0.5x"] * is_killed])
    assert comparison.grids(losses)["gpt"].best == 2.0
    if not is_killed:
        assert comparison.grids(first.result()) == comparison.grids(losses)
    assert {run.folder.name for run in measured} == set(seeds)


def test_another_process_starts_a_run_during_the_check(tmp_path, monkeypatch):
    """The other process writes the config just after this process has found none."""
    exists = Path.exists

    def exists_before_the_start(path: Path) -> bool:
        found = exists(path)
        if path.name == CONFIG_FILE:
            path.write_text("{}")
        return found

    monkeypatch.setattr(Path, "exists", exists_before_the_start)
    check_workdir(tmp_path, load_config("gpt"))


def test_refuses_a_grid_for_existing_runs(tmp_path):
    done = call("compare", "--workdirs=a,b", GRID, f"--output={tmp_path / 'out'}")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --config.compare.learning_rates: cannot override a field without --config; "
        "add --config=RECIPE or remove this flag\n",
    )


@pytest.mark.slow
def test_real_runs_at_several_learning_rates(text_file, tmp_path):
    """The highest rate diverges. At every step, the logged rate of the run at × 0.5 is half that of
    the recipe.
    """
    done = call(
        *TINY,
        "--config.compare.learning_rates=0.5,1e33",
        f"--config.data.source={text_file}",
        f"--output={tmp_path}",
        "--config.compare.names=gpt",
        "--config.compare.seeds=1",
        "--config.compare.max_added_learning_rates=0",
        "--config.compare.decoding=false",
        "--config.model.num_layers=1",
        "--config.optimizer.clip_norm=0.0",
    )
    assert done.returncode == 0, done.stderr
    grid = json.loads((tmp_path / "results.json").read_text())["learning_rates"]["gpt"]
    assert [rate["diverged"] for rate in grid["rates"]] == [False, True] and grid["best"] == 0.5
    lines = read_lines(tmp_path / "runs" / "gpt-seed1336-lr0.5x" / "metrics.jsonl")
    assert [line["loss"] for line in lines if line["split"] == "eval"][-1] == grid["rates"][0][
        "loss"
    ]
    rates = {line["step"]: line["learning_rate"] for line in lines if line["split"] == "train"}
    # Step n is update n − 1: after one update of warmup, half a cosine down to a tenth.
    assert rates == pytest.approx(
        {
            step: OWN_RATE / 2 * (0.55 + 0.45 * math.cos(math.pi * (step - 2) / 7))
            for step in (2, 4, 6, 8)
        },
        rel=1e-5,
    )
