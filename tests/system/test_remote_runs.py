"""Runs whose workdir is in object storage, in an emulator of Google Cloud Storage.

The reference is the same run, or the same command, in a local workdir.
"""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from conftest import ROOT, call, load_config
from run_helpers import SMALL, assert_equal, flags_of, read_untimed_metrics, state_of
from storage_helpers import hold_lock, name_of, short_lease  # noqa: F401

from smallgpt_jax.run import spool
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.names import LOCK_FILE
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.training import trainer

pytestmark = pytest.mark.slow
FIELDS = dict(SMALL, train__checkpoint_every=10, train__log_every=5)
# Runs the command `main`. Kills it after it has written the arrays of step 20, before it commits
# this checkpoint.
KILLED_IN_SAVE = """
import os, runpy, signal, sys
from smallgpt_jax.storage import object_storage

storage = object_storage.file_system()
open_file = storage.open

def open_or_die(path, mode="rb", **options):
    if path.endswith("checkpoints/20/commit_success.txt") and "w" in mode:
        os.kill(os.getpid(), signal.SIGKILL)
    return open_file(path, mode, **options)

storage.open = open_or_die
runpy.run_module("smallgpt_jax.main", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def local_run(trained_run):
    return trained_run(**FIELDS)


@pytest.fixture(scope="module")
def remote_run(emulated_storage, text_file, short_lease):  # noqa: F811
    """Returns the workdir of a run that was killed while it saved step 20, and then resumed."""
    folder = emulated_storage / "runs" / "tiny"
    fields = {"data__source": text_file, "data__store": emulated_storage / "store", **FIELDS}
    flags = [
        "--config=gpt:tiny",
        f"--workdir={folder}",
        *flags_of(fields),
    ]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_SAVE, *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (
        folder / "checkpoints" / "20" / "params" / "manifest.ocdbt"
    ).exists()  # step 20 is not committed
    assert (
        saved_steps(folder / "checkpoints") == Checkpoints(folder / "checkpoints").steps() == [10]
    )
    assert {line["step"] for line in read_untimed_metrics(folder)} == {5, 10, 15, 20}
    assert (folder / LOCK_FILE).exists()
    before = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])

    resumed = call("main", *flags)
    assert resumed.returncode == 0 and "10 done" in resumed.stdout, resumed.stderr
    assert "waiting until it renews or loses the lock" in resumed.stderr
    assert (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]) == before
    )  # of the killed session
    assert not (folder / LOCK_FILE).exists()
    return folder


def test_a_killed_run_ends_like_a_local_run(remote_run, local_run):
    assert (
        saved_steps(remote_run / "checkpoints")
        == saved_steps(local_run / "checkpoints")
        == [20, 30, 40]
    )
    assert_equal(state_of(remote_run, 40), state_of(local_run, 40))
    assert read_untimed_metrics(remote_run) == read_untimed_metrics(local_run)
    ours, local = (
        {path.name.split(".out.")[0] for path in folder.iterdir()}
        for folder in (remote_run, local_run)
    )
    assert ours == local
    sessions = [
        json.loads(line) for line in (remote_run / "sessions.jsonl").read_text().splitlines()
    ]
    assert len(sessions) == 2


def test_a_second_process_is_refused(remote_run, text_file):
    with hold_lock(remote_run / LOCK_FILE) as holder:
        second = call(
            "main",
            f"--config=run:{remote_run}",
            f"--workdir={remote_run}",
            "--config.train.steps=50",
        )
    assert second.returncode == 1 and second.stderr.splitlines()[-1] == (
        f"error: --workdir={remote_run}: in use by {name_of(holder)}; wait for it, or use another "
        "--workdir"
    )
    assert 50 not in saved_steps(remote_run / "checkpoints")
    other = call(
        "main",
        f"--config=run:{remote_run}",
        f"--workdir={remote_run}",
        "--config.model.num_heads=4",
    )
    assert (
        other.returncode == 1
        and "existing run with another config: model.num_heads was 2, now 4" in other.stderr
    )


def test_generate_reads_a_remote_run(remote_run, local_run):
    texts = [
        call(
            "generate",
            f"--workdir={folder}",
            "--prompt=the cat",
            "--step=30",
            "--max_new_tokens=20",
        )
        for folder in (remote_run, local_run)
    ]
    assert texts[0].stdout == texts[1].stdout and texts[0].stdout.startswith("the cat"), texts[
        0
    ].stderr


def test_convert_reads_and_writes_remote_folders(remote_run, local_run, bucket, tmp_path):
    exports = bucket / "export", tmp_path / "export"
    for source, target in zip((remote_run, local_run), exports):
        exported = call("convert", "--to=hf", f"--workdir={source}", f"--output={target}")
        assert exported.returncode == 0, exported.stderr
    names = {path.name for path in exports[1].iterdir()}
    assert (
        {path.name for path in exports[0].iterdir()}
        == names
        >= {"config.json", "model.safetensors"}
    )
    for name in names - {"README.md"}:
        assert (exports[0] / name).read_bytes() == (exports[1] / name).read_bytes(), name
    for form, source in (("hf", exports[0]), ("run", remote_run)):
        imported = call(
            "convert", f"--from={form}", f"--input={source}", f"--workdir={bucket / form}"
        )
        assert imported.returncode == 0, imported.stderr
        params = Checkpoints(bucket / form / "checkpoints")
        assert params.steps() == [0]
    again = call("convert", "--to=hf", f"--workdir={remote_run}", f"--output={exports[0]}")
    assert (again.returncode, again.stderr) == (
        1,
        f"error: --output={exports[0]}: folder is not empty; choose another\n",
    )
    text = [
        call("generate", f"--workdir={folder}", "--max_new_tokens=20").stdout
        for folder in (bucket / "hf", bucket / "run", local_run)
    ]
    assert text[0] == text[1] == text[2] != ""


def test_compare_reads_and_writes_remote_folders(remote_run, local_run, bucket, tmp_path):
    outputs = bucket / "report", tmp_path / "report"
    (remote_run.parent / "t_y").write_text("a file, which matches the pattern, but is no workdir")
    for pattern, output in ((remote_run.parent / "t*y", outputs[0]), (local_run, outputs[1])):
        compared = call("compare", f"--workdirs={pattern}", f"--output={output}")
        assert compared.returncode == 0, compared.stderr
    found = [json.loads((output / "results.json").read_text())["runs"][0] for output in outputs]
    assert found[0]["workdir"] == str(remote_run) and found[0]["name"] == "tiny"
    assert [point["loss"] for point in found[0]["curve"]] == [
        point["loss"] for point in found[1]["curve"]
    ]
    assert {path.name for path in outputs[0].iterdir()} == {
        path.name for path in outputs[1].iterdir() if not path.name.startswith(".")
    }


def test_evaluate_reads_a_remote_run(remote_run, local_run, tmp_path):
    copied = shutil.copytree(local_run, tmp_path / "run")
    copa = {"choice1": "It broke.", "choice2": "It flew away.", "question": "effect"}
    (tmp_path / "copa_val.jsonl").write_text(
        "".join(
            json.dumps(copa | {"premise": f"Cup {i} fell.", "label": i % 2, "idx": i}) + "\n"
            for i in range(4)
        )
    )
    scores = []
    for folder in (remote_run, copied):
        evaluated = call(
            "evaluate",
            f"--workdir={folder}",
            "--tasks=copa",
            f"--data_dir={tmp_path}",
            "--log_samples",
        )
        assert evaluated.returncode == 0, evaluated.stderr
        (path,) = (folder / "evaluations").glob("step40-copa-*.json")
        samples = json.loads(path.read_text())["samples"]
        scores.append([sample["resps"] for sample in samples["copa"]])
    assert scores[0] == scores[1] and len(scores[0]) == 4


def test_folders_of_the_user_survive_a_failed_save(remote_run, bucket, monkeypatch):
    folder, messages = bucket / "run" / "checkpoints", []
    object_storage.file_system().copy(str(remote_run / "checkpoints"), str(folder), recursive=True)
    for name in ("best", "backup_5000", "50"):  # the save of step 50 was interrupted
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    kept = {"20", "30", "40", "best", "backup_5000"}
    checkpoints = Checkpoints(folder, keep=3, log=messages.append)
    assert {path.name for path in folder.iterdir()} == kept

    def fail(_, path, **__):
        (folder / "50" / "file").write_text(str(path))
        raise OSError("no network")

    monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, "save", fail)
    checkpoints.save(50, TrainState(jnp.int32(50), {"a": jnp.ones(2)}, {"count": jnp.int32(50)}))
    assert len(messages) == 1 and "newest checkpoint: step 40" in messages[0]
    assert {path.name for path in folder.iterdir()} == kept
    assert saved_steps(folder) == [20, 30, 40]


def test_a_damaged_checkpoint_is_moved_away(remote_run, bucket):
    """The test changes the saved checksums, so tensorstore can read the arrays, but they count as
    damaged.
    """
    copy = bucket / "run"
    storage = object_storage.file_system()
    storage.copy(str(remote_run), str(copy), recursive=True)
    check = copy / "checkpoints" / "40" / "check" / "metadata"
    sums = json.loads(check.read_text())
    sums["params"] = {name: value ^ 1 for name, value in sums["params"].items()}
    write_atomically(check, json.dumps(sums))
    found = call("main", f"--config=run:{copy}", f"--workdir={copy}")
    assert found.returncode == 0, found.stderr
    assert "damaged checkpoint of step 40 (checksum of params['" in found.stdout
    assert (copy / "damaged_checkpoints" / "40" / "check" / "metadata").read_text() == json.dumps(
        sums
    )
    assert_equal(state_of(copy, 40), state_of(remote_run, 40))  # trained again, from step 30


def test_metrics_are_uploaded_while_a_run_trains(bucket, monkeypatch):
    monkeypatch.setattr(spool, "UPLOAD_SECONDS", 0.1)
    uploaded = threading.Event()
    messages = []
    write = write_atomically

    def flaky_write(path, content):
        if not uploaded.is_set():
            uploaded.set()
            raise OSError("connection lost")
        write(path, content)

    monkeypatch.setattr(spool, "write_atomically", flaky_write)
    (bucket / "run").mkdir(parents=True)
    (bucket / "run" / "metrics.jsonl").write_text("old\n")
    with spool.open_spool(
        bucket / "run", ["metrics.jsonl", "tracker.json"], messages.append
    ) as opened:
        assert opened.folder.name == "run" and [path.name for path in opened.folder.iterdir()] == [
            "metrics.jsonl"
        ]
        with (opened.folder / "metrics.jsonl").open("a") as file:
            file.write("new\n")
        assert uploaded.wait(5)
        deadline = time.monotonic() + 20
        while (
            bucket / "run" / "metrics.jsonl"
        ).read_text() != "old\nnew\n" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (bucket / "run" / "metrics.jsonl").read_text() == "old\nnew\n"
        (opened.folder / "profile").mkdir()
        (opened.folder / "profile" / "trace").write_text("last")
    assert (
        bucket / "run" / "profile" / "trace"
    ).read_text() == "last" and not opened.folder.exists()
    assert len(messages) == 1
    assert messages[0].startswith(f"{bucket}/run: metrics could not be uploaded (connection lost)")


def test_files_that_cannot_be_uploaded_are_kept(bucket, monkeypatch):
    def refuse_trace(path, content):
        uploaded.append(path.name)
        if path.name == "trace":
            raise OSError("quota exceeded")

    uploaded, messages = [], []
    monkeypatch.setattr(spool, "CLOSING_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(spool, "write_atomically", refuse_trace)
    with spool.open_spool(bucket / "run", [], messages.append) as opened:
        for name in ("trace", "metrics.jsonl", ".tracker.json.partial", "z.txt"):
            (opened.folder / name).write_text(name)
    assert uploaded == ["metrics.jsonl", "trace", "z.txt", "trace", "trace"]
    assert (opened.folder / "trace").read_text() == "trace"
    assert (
        messages[-1] == f"{opened.folder}: not uploaded (quota exceeded); copy it to {bucket}/run"
    )
    assert len(messages) == 2
    shutil.rmtree(opened.folder.parent)


def test_failed_requests_are_not_damage(remote_run, monkeypatch):
    """If the service fails, no checkpoint is moved, and the message has one line."""

    def fail(*_, **__):
        raise ValueError("UNAVAILABLE: Failed to connect")

    monkeypatch.setattr(Checkpoints, "_read", fail)
    before = sorted(object_storage.list_files(remote_run / "checkpoints"))
    with pytest.raises(
        Exception,
        match=r"checkpoints/40: cannot be read \(UNAVAILABLE: Failed to connect\); nothing",
    ):
        trainer.train_and_evaluate(
            load_config("run", str(remote_run), train__steps=60), str(remote_run)
        )
    assert (
        sorted(object_storage.list_files(remote_run / "checkpoints")) == before
        and np.size(before) > 10
    )
