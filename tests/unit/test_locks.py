"""Tests of locks on local files, of writes under them, and of what a power loss leaves."""

import json
import os
import re
import threading
from pathlib import Path

import pytest

from smallgpt_jax.errors import LockHeldError, LockLostError
from smallgpt_jax.run.metrics import MetricsWriter
from smallgpt_jax.run.sessions import append_session, read_sessions
from smallgpt_jax.storage import cache, locks, object_storage
from smallgpt_jax.storage.atomic import append_line, atomic_file, atomic_folder, write_atomically
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.locks import file_lock, require_locks


def test_a_waiting_process_takes_the_new_file_of_a_lock(tmp_path):
    """The holder removes the file on exit, and a third process creates a new one, before the
    waiting process gets its lock on the old file. It must then wait for the third.
    """
    path, events, is_waiting = tmp_path / "lock", [], threading.Event()

    def wait():
        is_waiting.set()
        with file_lock(path, wait=True):
            events.append("second")

    first = file_lock(path)
    first.__enter__()
    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait()
    thread.join(0.2)
    path.unlink()
    with file_lock(path):
        first.__exit__(None, None, None)
        thread.join(0.3)
        events.append("third")
    thread.join(20)
    assert events == ["third", "second"] and not path.exists()


def test_a_long_wait_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(locks, "QUIET_SECONDS", 0.05)

    def wait():
        with file_lock(tmp_path / "lock", wait=True):
            pass

    with file_lock(tmp_path / "lock"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.3)
    thread.join(20)
    assert re.fullmatch(
        rf"{tmp_path}/lock: locked by process {os.getpid()} on \S+; waiting until it releases the "
        "lock\n",
        capsys.readouterr().err,
    )


def write_metrics(folder):
    writer = MetricsWriter.__new__(MetricsWriter)
    vars(writer).update(_path=folder / "metrics.jsonl", _pending_lines="{}\n", _log=print)
    writer._append()


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_atomically(folder / "config.json", "{}"),
        lambda folder: append_line(folder / "sessions.jsonl", "{}"),
        lambda folder: require_locks(folder / "checkpoints"),
        write_metrics,
    ],
    ids=["write_atomically", "append_line", "checkpoints", "metrics"],
)
def test_a_process_whose_folder_was_moved_writes_nothing(tmp_path, write):
    """Another process has created a folder, and a lock, at the old place."""
    run, moved = tmp_path / "run", tmp_path / "run-old"
    run.mkdir()
    with file_lock(run / ".lock"):
        write(run)
        run.rename(moved)
        with pytest.raises(LockLostError, match=f"{run}: was moved, or its file .lock removed"):
            write(run)
        run.mkdir()
        (run / ".lock").write_text("process 1 on another machine\n")
        with pytest.raises(LockLostError):
            write(run)
        write(tmp_path)  # elsewhere, it may write
        assert os.listdir(run) == [".lock"]
    assert (run / ".lock").exists()  # the other process still holds it


def test_file_systems_that_change_the_numbers_of_files(tmp_path, monkeypatch):
    with file_lock(tmp_path / "lock"):
        monkeypatch.setattr(os.path, "samestat", lambda *_: False)
        require_locks(tmp_path / "file")
    assert not (tmp_path / "lock").exists()


def test_a_second_process_is_refused(tmp_path):
    with file_lock(tmp_path / "lock"):
        with (
            pytest.raises(LockHeldError, match=rf"process {os.getpid()} on"),
            file_lock(tmp_path / "lock"),
        ):
            pass
        assert (tmp_path / "lock").exists()
    with file_lock(tmp_path / "lock"):
        pass


def test_a_remote_file_is_copied_once(tmp_path, monkeypatch):
    """Two threads want a copy at the same time; the second one waits for the first."""
    copies, files = [], {Path("bucket/a"): object_storage.RemoteFile(3, "1")}

    def download(path, target, files):
        copies.append(target)
        target.write_text("par")
        has_begun.set()
        is_asked.wait(20)
        threading.Event().wait(0.2)
        target.write_text("part two")

    has_begun, is_asked = threading.Event(), threading.Event()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "is_remote", lambda path: True)
    monkeypatch.setattr(object_storage, "list_files", lambda path: files)
    monkeypatch.setattr(
        object_storage,
        "download",
        lambda path, target, files: (target.parent.mkdir(), download(path, target, files)),
    )
    found = []
    first = threading.Thread(target=lambda: found.append(local_copy(Path("bucket/a")).read_text()))
    first.start()
    has_begun.wait(20)
    is_asked.set()
    found.append(local_copy(Path("bucket/a")).read_text())
    first.join(20)
    assert found == ["part two"] * 2 and len(copies) == 1


class Disk:
    """Records which files and folders a power loss would leave as they are, and the renames."""

    def __init__(self, monkeypatch):
        self.synced, self.renamed = set(), []
        sync, replace = os.fsync, Path.replace

        def record_sync(descriptor):
            sync(descriptor)
            self.synced.add(os.fstat(descriptor).st_ino)

        def record_replace(path, target):
            is_durable = path.stat().st_ino in self.synced
            self.synced.discard(target.parent.stat().st_ino)  # its content changes now
            self.renamed.append((Path(target).name, is_durable))
            return replace(path, target)

        monkeypatch.setattr(os, "fsync", record_sync)
        monkeypatch.setattr(Path, "replace", record_replace)

    def has(self, path: Path) -> bool:
        return path.stat().st_ino in self.synced


def test_a_file_is_durable_before_it_replaces_another(tmp_path, monkeypatch):
    """The old content stays readable until then: the file is not written in place."""
    path, disk = tmp_path / "config.json", Disk(monkeypatch)
    path.write_text("old")
    with path.open() as old:
        write_atomically(path, "new")
        assert old.read() == "old"
    with path.open() as old, atomic_file(path) as partial:
        partial.write_text("newer")
        assert old.read() == "new"
    assert path.read_text() == "newer"
    assert disk.renamed == [("config.json", True)] * 2 and disk.has(tmp_path)


def test_a_renamed_folder_is_durable(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    with atomic_folder(tmp_path / "export") as folder:
        (folder / "config.json").write_text("{}")
    assert [name for name, _ in disk.renamed] == ["export"] and disk.has(tmp_path)


def test_lines_of_metrics_are_durable(tmp_path, monkeypatch):
    writer, disk = MetricsWriter(tmp_path, 0), Disk(monkeypatch)
    writer.write(1, "train", {"loss": 2.0})
    assert disk.has(tmp_path / "metrics.jsonl")
    writer.close()


def test_a_killed_process_leaves_a_part_of_a_line(tmp_path):
    """The next line is not appended to it."""
    facts = {
        "device": "cpu",
        "devices": 1,
        "argument_bytes": 1,
        "temp_bytes": 1,
        "padding": 0.0,
    }
    append_session(tmp_path, facts)
    path = tmp_path / "sessions.jsonl"
    path.write_text(path.read_text() + json.dumps(facts)[:20])
    append_session(tmp_path, facts | {"first_step": 7})
    assert [session.get("first_step") for session in read_sessions(tmp_path)] == [None, 7]
    assert path.read_text().count("\n") == 3
