"""Tests of logging with made-up metrics: files, full disks, closed outputs, divergence, the final
message.
"""

import json
import math
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

from smallgpt_jax.data.packing import Mixture
from smallgpt_jax.errors import DivergenceError, UserError
from smallgpt_jax.output import best_effort
from smallgpt_jax.run import clock as run_clock
from smallgpt_jax.run import metrics
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.logger import Logger, StepMetrics, Units
from smallgpt_jax.run.metrics import MetricsWriter, read_lines, read_lines_from, sample_lines
from smallgpt_jax.run.progress import RunProgress
from smallgpt_jax.storage import json_files
from smallgpt_jax.training import messages
from smallgpt_jax.training.nonfinite import NonFiniteGuard

LOSSES = [5 / step for step in range(1, 21)]


def log_run(workdir, log_every, clock, first_step=0, unlogged_losses=()) -> list[float] | None:
    """Logs 20 steps as the training loop does. A step takes 0.5 s; a save after step 15 takes 1,000
    s.

    Returns the losses that were not logged yet when step 15 was saved. Returns None if `first_step`
    is not 0.
    """
    timer = RunClock()
    clock.now += 7
    timer.start_training()
    logger = Logger(
        MetricsWriter(workdir, first_step),
        RunProgress(20),
        timer,
        Units(512, 1.0, None),
        log_every,
        unlogged_losses,
    )
    for step in range(first_step + 1, 21):
        values = {"loss": LOSSES[step - 1], "grad_norm": 1.0, "is_finite": True}
        if (previous := logger.exchange(step, values)) is not None:
            logger.log(previous)
        clock.now += 0.5
        if step in (15, 20):
            logger.log(logger.take())
        if step == 15:
            unlogged = list(logger.losses)
            with timer.during("save"):
                clock.now += 1000
    logger.log_evaluation(20, 2.0, 512)
    logger.close()
    return unlogged if first_step == 0 else None


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(run_clock, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def lines_of(workdir, split="train"):
    return {
        line["step"]: line
        for line in read_lines(workdir / "metrics.jsonl")
        if line["split"] == split
    }


def test_logged_lines(tmp_path, clock, capsys):
    """A logged line contains the loss, the mean loss since the previous line, the tokens so far,
    and the speed.

    The time that saves take does not lower the logged speed.
    """
    each, tenth = tmp_path / "each", tmp_path / "tenth"
    each.mkdir(), tenth.mkdir()
    log_run(each, 1, clock)
    unlogged = log_run(tenth, 10, clock)
    assert [line["loss"] for line in lines_of(each).values()] == LOSSES
    assert [line["loss_mean"] for line in lines_of(each).values()] == LOSSES
    lines = lines_of(tenth)
    assert {step: line["loss"] for step, line in lines.items()} == {10: LOSSES[9], 20: LOSSES[19]}
    assert {step: line["loss_mean"] for step, line in lines.items()} == {
        10: pytest.approx(np.mean(LOSSES[:10])),
        20: pytest.approx(np.mean(LOSSES[10:])),
    }
    assert {step: (line["tokens"], line["tokens_per_second"]) for step, line in lines.items()} == {
        10: (5120, 1024.0),
        20: (10240, 1024.0),
    }
    assert {
        step: {
            name: line[name]
            for name in line
            if name.endswith("wait_seconds") or name in ("save_seconds", "restart_seconds")
        }
        for step, line in lines.items()
    } == {
        10: {"data_wait_seconds": 0, "save_seconds": 0, "restart_seconds": 7},
        20: {"data_wait_seconds": 0, "save_seconds": 1000},
    }
    evaluation = lines_of(tenth, "eval")[20]
    assert (evaluation["loss"], evaluation["targets"], evaluation["tokens"]) == (2.0, 512, 10240)
    assert evaluation["bits_per_byte"] == pytest.approx(2.0 / math.log(2))
    assert lines[10]["time"] <= lines[20]["time"] <= evaluation["time"] <= time.time()
    assert list(tenth.glob("events.out.tfevents*"))
    assert "step 20/20   validation loss 2.0000, 2.8854 bits per byte\n" in capsys.readouterr().out

    # A run that resumes from the checkpoint of step 15 logs the same mean losses as an
    # uninterrupted run.
    assert unlogged == LOSSES[10:15]
    log_run(tenth, 10, clock, first_step=15, unlogged_losses=unlogged)
    assert {step: line["loss_mean"] for step, line in lines_of(tenth).items()} == {
        step: line["loss_mean"] for step, line in lines.items()
    }


def test_metrics_that_are_not_finite_are_null(tmp_path):
    """In lists of layers, too, and in numbers of a custom module; only the loss is read as NaN."""
    layers = {"trunk/blocks": np.float32([1.23456, np.inf]), "trunk/own": np.float32(np.nan)}
    arrays = {"loss": np.float32(np.nan), "gain": layers}
    values = StepMetrics(3, arrays, is_finite=False, loss=math.nan).read()
    assert math.isnan(values["loss"])
    writer = MetricsWriter(tmp_path, 0, log=print)
    writer.write(3, "train", values)
    writer.close()
    (line,) = read_lines(tmp_path / "metrics.jsonl")
    assert line["loss"] is None
    assert line["gain"] == {"trunk/blocks": [1.2346, None], "trunk/own": None}


def test_metrics_are_kept_until_the_disk_has_room(tmp_path):
    logged = []
    writer = MetricsWriter(tmp_path, 0, log=logged.append)
    writer.write(1, "train", {"loss": 1.0})
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, most))
    try:
        for step in (2, 3):
            writer.write(step, "train", {"loss": float(step)})
            assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.write(4, "train", {"loss": float("nan")})
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in lines] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, None),
    ]
    assert sum("metrics.jsonl: File too large. Training continues" in line for line in logged) == 1
    writer.close()


def test_logging_continues_without_the_event_file_on_a_full_disk(tmp_path):
    """If the disk is full, no more events are written, but metrics.jsonl still gets all lines.

    tensorboardX's own thread would hang after a failed write, so it does not write the events.
    """
    logged = []
    writer = MetricsWriter(tmp_path, 0, log=logged.append)
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, most))
    try:
        for step in range(1, 40):
            writer.write(step, "train", {"loss": 1.0, "learning_rate": 0.1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 40))
    assert sorted(line.split(":")[0].split("/")[-1] for line in logged) == [
        "TensorBoard event file",
        "metrics.jsonl",
    ]
    event_files = list(tmp_path.glob("events.out.tfevents.*"))
    assert [path.stat().st_size for path in event_files] == [1500]


@pytest.mark.parametrize(
    "line",
    [
        {"step": "3"},
        {"step": None},
        {"step": 2.5},
        {"step": -1},
        {"step": True},
        {"step": 10**30},
        {"split": "test"},
        {"split": []},
        {"loss": "low"},
        {"loss": [1]},
        {"split": "eval", "loss": {}},
        {"split": "eval", "targets": "8"},
        {"split": "eval", "bits_per_byte": "1"},
        {"tokens_per_second": 0},
        {"expert_load": {"router": "even"}},
    ],
)
def test_a_run_resumes_from_foreign_lines(tmp_path, line):
    """Lines that are not metrics of ours are skipped when the run resumes."""
    good = {"step": 1, "split": "train", "loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(entry) + "\n"
            for entry in (
                good,
                good | {"step": 3} | line,
                {"step": 2, "split": "eval"},
                good | {"step": 2},
            )
        )
    )
    writer = MetricsWriter(tmp_path, 5)
    writer.write(6, "train", {"loss": 0.5})
    writer.close()
    assert [entry["step"] for entry in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 6]


def test_a_run_starts_with_a_folder_in_place_of_its_metrics(tmp_path):
    (tmp_path / "metrics.jsonl" / "mine").mkdir(parents=True)
    logged = []
    writer = MetricsWriter(tmp_path, 0, log=logged.append)
    writer.write(1, "train", {"loss": 1.0})
    assert (
        tmp_path / "metrics.jsonl" / "mine"
    ).is_dir() and "metrics.jsonl: Is a directory" in logged[0]
    shutil.rmtree(tmp_path / "metrics.jsonl")
    writer.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1]


def write_long_run(path: Path, steps: int) -> list[dict]:
    """Writes a training line per step, and an evaluation every 100 steps. Returns the lines."""
    lines = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "split": "train", "loss": 1.5, "tokens_per_second": 100.0})
        if step % 100 == 0:
            evaluation = {"split": "eval", "loss": 2.5, "bits_per_byte": 1.0, "targets": 8}
            lines.append({"step": step, **evaluation})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


@pytest.mark.parametrize("first_step", [0, 50, 4_999, 5_000])
@pytest.mark.parametrize("ending", ["", '{"step": 5001, "spl', '{"step": 5002'])
def test_resumption_removes_the_lines_after_its_step(tmp_path, first_step, ending):
    path = tmp_path / "metrics.jsonl"
    lines = write_long_run(path, 5_000)
    with path.open("a") as file:
        file.write(ending)
    MetricsWriter(tmp_path, first_step).close()
    kept = [line for line in lines if line["step"] <= first_step]
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept


def test_resumption_reads_only_the_end_of_a_long_run(tmp_path, monkeypatch):
    """A million lines would take half a minute, and gigabytes."""
    path, parsed, parse = tmp_path / "metrics.jsonl", [], json_files.parse_json
    lines = write_long_run(path, 5_000)
    monkeypatch.setattr(
        json_files, "parse_json", lambda *arguments: parsed.append(1) or parse(*arguments)
    )
    MetricsWriter(tmp_path, 4_990).close()
    position, newest = read_lines_from(path, 4_900)
    assert newest == [line for line in lines if 4_900 <= line["step"] <= 4_990]
    assert path.read_bytes()[position:].splitlines()[0] == json.dumps(newest[0]).encode()
    assert len(parsed) < 300


def test_the_last_line_has_no_end(tmp_path):
    """Somebody has edited the file."""
    path, line = tmp_path / "metrics.jsonl", {"step": 1, "split": "train", "loss": 1.0}
    path.write_text(json.dumps(line))
    writer = MetricsWriter(tmp_path, 1)
    writer.write(2, "train", {"loss": 2.0})
    writer.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2]


def test_a_plot_reads_a_sample_of_a_long_run(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_POINTS", 50)
    lines = write_long_run(tmp_path / "metrics.jsonl", 1000)
    sample = sample_lines(tmp_path / "metrics.jsonl")
    assert [line for line in sample if line["split"] == "eval"] == [
        line for line in lines if line["split"] == "eval"
    ]
    assert 45 <= sum(line["split"] == "train" for line in sample) <= 55
    assert sample[0]["step"] == 1 and sample_lines(tmp_path / "none") == []


def test_damaged_lines_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "split": "train", "loss": 1.0}) for step in range(5)]
    path.write_bytes(
        "\n".join([*lines[:2], '{"step": 2, "spl']).encode()
        + b"\n\xff\xfe\n[1]\n"
        + "\n".join(lines[3:]).encode()
    )
    assert [line["step"] for line in read_lines(path)] == [0, 1, 3, 4]


@pytest.mark.parametrize("failure", ["file removed", "replaced by a folder", "folder removed"])
def test_removed_metrics_do_not_end_a_run(tmp_path, failure):
    folder, logged = tmp_path / "run", []
    folder.mkdir()
    writer = MetricsWriter(folder, 0, log=logged.append)
    path = folder / "metrics.jsonl"
    writer.write(1, "train", {"loss": 1.0})
    if failure == "folder removed":
        shutil.rmtree(folder)
    else:
        path.unlink()
    if failure == "replaced by a folder":
        path.mkdir()
    writer.write(2, "train", {"loss": 2.0})
    writer.write(3, "eval", {"loss": 3.0, "bits_per_byte": 2.0, "targets": 8})
    assert len(logged) == (failure != "file removed")
    if failure == "replaced by a folder":
        path.rmdir()
    writer.close()
    assert [line["step"] for line in read_lines(path)] == (
        [] if failure == "folder removed" else [2, 3]
    )
    if failure == "folder removed":
        assert "No such file or directory. The last 2 lines are lost" in logged[-1]


class ClosedStream:
    """A stream whose `write` and `flush` raise `error`."""

    def __init__(self, error):
        self.error = error

    def isatty(self):
        return False

    def write(self, text=""):
        raise self.error

    flush = write


@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left")]
)
def test_best_effort_ignores_write_errors(monkeypatch, error):
    monkeypatch.setattr(sys, "stdout", ClosedStream(error))
    with best_effort("stdout"):
        print("text", flush=True)
    sys.stdout.flush()


@pytest.mark.parametrize("stream, status", [("stdout", 0), ("stderr", 143)])
def test_the_exit_status_does_not_depend_on_a_full_disk(stream, status):
    """A command keeps its exit status if its output cannot be written.

    Without `best_effort`, the flush at exit would fail, and Python would replace the status by 120.
    """
    program = (
        f"import sys; from smallgpt_jax.output import best_effort\n"
        f"with best_effort({stream!r}):\n    print('x' * 10_000, file=sys.{stream}); "
        f"sys.exit({status})"
    )
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, **{stream: full})
    assert result.returncode == status


PRINT_MUCH = """
import sys
from smallgpt_jax import output
from smallgpt_jax.training import watchdog
from smallgpt_jax.run.clock import RunClock
output.PATIENCE_SECONDS = 0.2
with output.best_effort("stdout"), output.best_effort("stderr"):
    for i in range(30_000):
        print(f"line {i:>20}", flush=True)
    if sys.argv[1:]:
        print("x" * 100_000, file=sys.stderr)
        watchdog.Watchdog(RunClock(), 1.0)._end("it hangs")
"""


@pytest.mark.parametrize("arguments, status", [([], 0), (["stall"], 124)])
def test_a_reader_that_does_not_read_does_not_block_a_run(arguments, status):
    """The output is ten times as large as the buffer of a pipe. The watchdog can still end a run
    that hangs.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_MUCH, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            assert process.wait(30) == status
        finally:
            process.kill()


@pytest.mark.slow
def test_a_slow_reader_gets_everything():
    with subprocess.Popen(
        [sys.executable, "-c", PRINT_MUCH], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        time.sleep(0.1)
        lines = [line.split()[1] for line in process.stdout]
    assert list(map(int, lines)) == list(range(30_000)) and process.returncode == 0


@pytest.mark.parametrize(
    "on_nonfinite, values, message",
    [
        (
            "stop",
            (math.nan, math.nan),
            "training has diverged: step 3: loss nan, gradient norm nan; its batch: rows 7, 3 of "
            "the training text.\n"
            "The newest checkpoint, of step 2, is not affected. Try a lower "
            "config.optimizer.learning_rate, or "
            "--config.train.on_nonfinite=skip",
        ),
        # Loss and gradient are finite, but the update made the weights non-finite.
        (
            "skip",
            (2.5, 1.0),
            "training has diverged: step 3: loss 2.5, gradient norm 1, the updated weights are "
            "not finite; its batch: rows 7, 3 of the training text.\nThe newest checkpoint, of "
            "step 2, is not affected. Try a lower config.optimizer.learning_rate",
        ),
    ],
)
def test_divergence_message(on_nonfinite, values, message):
    guard = NonFiniteGuard(on_nonfinite, 3, lambda step: [7, step], lambda: 2)
    with pytest.raises(DivergenceError) as error:
        guard.check(StepMetrics(3, {"loss": values[0], "grad_norm": values[1]}, False, values[0]))
    assert str(error.value) == message


def test_final_message(tmp_path, monkeypatch, capsys):
    """Covers a run with an evaluation, and a run that has no metrics.jsonl and whose model cannot
    generate text.
    """
    workdir = tmp_path / "my run"
    workdir.mkdir()
    monkeypatch.setattr(
        messages.inference,
        "load",
        lambda folder: SimpleNamespace(stream=lambda **settings: iter(["a ", "text"])),
    )
    (workdir / "metrics.jsonl").write_text(
        json.dumps(
            {"step": 10, "split": "eval", "loss": 1.23456, "bits_per_byte": None, "targets": 8}
        )
        + "\n"
    )
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # the environment is active
    messages.print_final_message(str(workdir))
    command = f"To generate more:\n  python -m smallgpt_jax.generate '--workdir={workdir}' --prompt=\"...\"\n"
    assert capsys.readouterr().out == (
        f"\nSample:\n\na text\n\n\nStep 10: validation loss 1.2346. {command}"
    )

    def refuse(folder):
        raise UserError("it cannot be decoded")

    (workdir / "metrics.jsonl").unlink()
    monkeypatch.setattr(messages.inference, "load", refuse)
    messages.print_final_message(str(workdir))
    assert capsys.readouterr().out == f"\nSample:\n\n(none: it cannot be decoded)\n\n\n\n{command}"


@pytest.mark.parametrize(
    "steps, format, message",
    [
        (9, "text", "9 steps read 18% of the training text"),
        (200, "text", "200 steps read the text 4.0 times"),
        (210, "text", "warning: 210 steps read the text 4.2 times; beyond 4 times, repeated text"),
        (210, "completion", "210 steps read the text 4.2 times"),
    ],
)
def test_how_often_a_run_reads_its_text(steps, format, message):
    """Two stores of 600 and 40 rows, of which the smaller one is read more often."""
    packings = [SimpleNamespace(num_rows=rows) for rows in (600, 40)]
    pipeline = SimpleNamespace(train=Mixture(packings, [0.9, 0.1]))
    config = SimpleNamespace(
        data=SimpleNamespace(source="my_texts/", mixture="", format=format),
        train=SimpleNamespace(steps=steps, batch_size=8),
    )
    assert messages.epochs(config, pipeline, steps) == pytest.approx(steps * 0.8 / 40)
    (line,) = messages.epochs_messages(config, pipeline)
    assert line.startswith(message)
    config.data.source = "synthetic:recall"
    assert messages.epochs_messages(config, pipeline) == []
