"""gs:// paths, in an emulator of Google Cloud Storage: sources, token stores, locks, runs, and
commands that read runs.

The reference is the same command on local paths.
"""

import contextlib
import fcntl
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, call, load_config
from data_helpers import files_of, parquet
from storage_helpers import LEASE, faults, hold_lock, short_lease  # noqa: F401

from smallgpt_jax.data import prepare
from smallgpt_jax.data.corpus import open_existing, open_or_prepare
from smallgpt_jax.data.store import open_store
from smallgpt_jax.devices import compilation_cache
from smallgpt_jax.errors import LockHeldError, UserError
from smallgpt_jax.run import spool
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.checkpoint_folder import saved_steps
from smallgpt_jax.run.names import SESSIONS_FILE
from smallgpt_jax.run.sessions import append_session
from smallgpt_jax.run.state import TrainState
from smallgpt_jax.storage import object_lock, object_storage, temporary
from smallgpt_jax.storage.atomic import atomic_folder, write_atomically
from smallgpt_jax.storage.cache import local_copy
from smallgpt_jax.storage.locks import file_lock

TEXTS = [f"document {i} " + "of some words " * (i % 7) for i in range(300)]
SHARDS = {
    "a.jsonl.gz": gzip.compress(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:200]).encode()
    ),
    "b.parquet": parquet({"text": TEXTS[200:]}),
}


@pytest.fixture
def texts(bucket, tmp_path):
    """Writes SHARDS to the bucket and to the disk; returns both folders."""
    for folder in (bucket / "texts", tmp_path / "texts"):
        folder.mkdir(parents=True)
        for name, content in SHARDS.items():
            (folder / name).write_bytes(content)
    return bucket / "texts", tmp_path / "texts"


def data_fields(source, store) -> list[str]:
    return ["--config=gpt:tiny", f"--config.data.source={source}", f"--config.data.store={store}"]


def test_a_store_prepared_in_object_storage_has_the_same_bytes(texts, bucket, tmp_path):
    remote, local = texts
    first = call(
        "prepare", *data_fields(f"{remote}/*.jsonl.gz,{remote}/b.parquet", bucket / "store")
    )
    assert (first.returncode, first.stdout.splitlines()[-1]) == (
        0,
        f"new token store: {bucket}/store",
    ), first.stderr
    assert call("prepare", *data_fields(local, tmp_path / "store")).returncode == 0
    found, expected = (
        files_of(folder) for folder in (local_copy(bucket / "store"), tmp_path / "store")
    )
    metadata = [json.loads(files.pop("metadata.json")) for files in (found, expected)]
    assert found == expected and len(expected["train.bin"]) > 5000
    assert metadata[0].pop("made_from")["source"] == f"{remote}/*.jsonl.gz,{remote}/b.parquet"
    del metadata[1]["made_from"]
    assert metadata[0] == metadata[1]

    again = call(
        "prepare", *data_fields(f"{remote}/*.jsonl.gz,{remote}/b.parquet", bucket / "store")
    )
    assert again.stdout == f"existing token store: {bucket}/store\n"
    other = call("prepare", *data_fields(remote, bucket / "store"))
    assert other.returncode == 1 and "was made with source=" in other.stderr


def test_shards_in_object_storage(texts, bucket, tmp_path):
    remote, local = texts
    fields = data_fields(f"{remote}/*.jsonl.gz,{remote}/b.parquet", bucket / "store")
    for shard in ("2/2", "1/2"):
        made = call("prepare", *fields, f"--shard={shard}")
        assert made.stdout.splitlines()[-1].startswith(f"new: {bucket}/store.shards/"), made.stderr
    assert call("prepare", *fields).returncode == 0
    assert call("prepare", *data_fields(local, tmp_path / "store")).returncode == 0
    joined, expected = files_of(local_copy(bucket / "store")), files_of(tmp_path / "store")
    assert joined.pop("metadata.json") and expected.pop("metadata.json") and joined == expected


def test_failed_reads_are_not_damage(texts, bucket, monkeypatch):
    """A file is called damaged if its content is invalid, but not if reading it fails."""
    config = load_config(
        "gpt", data__source=f"{texts[0]}/a.jsonl.gz", data__store=f"{bucket}/store"
    ).data
    (texts[0] / "a.jsonl.gz").write_bytes(b"not compressed")
    with pytest.raises(
        UserError, match=r"a\.jsonl\.gz: damaged, or of another type than its suffix"
    ):
        open_or_prepare(config, log=lambda _: None)

    class Unreachable(io.BytesIO):
        def read(self, size=-1):
            raise OSError("connection lost")

    for name in ("a.jsonl.gz", "b.parquet"):
        config.source = f"{texts[0]}/{name}"
        with monkeypatch.context() as patch:
            patch.setattr(
                object_storage.file_system(), "open", lambda *_, **__: Unreachable(bytes(1000))
            )
            with pytest.raises(
                UserError, match=rf"^{texts[0]}/{name}: request failed \(connection lost\); check"
            ):
                open_or_prepare(config, log=lambda _: None)


def test_a_folder_with_other_files_is_refused_before_tokenizing(texts, bucket, monkeypatch):
    config = load_config("gpt", data__source=str(texts[0]), data__store=f"{bucket}/store").data
    monkeypatch.setattr(prepare, "write_store", lambda *_, **__: pytest.fail("tokenized"))
    for other in (bucket / "store", bucket / "store" / "notes.txt"):
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("other")
        with pytest.raises(UserError, match="store': exists and is not a token store"):
            open_or_prepare(config, log=lambda _: None)
        other.unlink()


def test_an_interrupted_upload_is_no_store(texts, bucket, monkeypatch):
    def stop_before(remote_file):
        def put_file(source, target):
            if target.endswith(remote_file):
                raise OSError("connection lost")
            upload(source, target)

        return put_file

    config, storage = (
        load_config("gpt", data__source=str(texts[0]), data__store=f"{bucket}/store").data,
        (object_storage.file_system()),
    )
    upload = storage.put_file
    for name in ("validation.bin", "metadata.json"):
        monkeypatch.setattr(storage, "put_file", stop_before(name))
        with pytest.raises(OSError, match="connection lost"):
            open_or_prepare(config, log=lambda _: None)
        assert (bucket / "store" / "train.bin").exists() and open_existing(config) is None
        with pytest.raises(UserError, match=r"no token store \(no metadata\.json\); prepare it"):
            open_store(bucket / "store")
    monkeypatch.setattr(storage, "put_file", upload)
    open_or_prepare(config, log=lambda _: None)
    store = open_store(bucket / "store")
    assert open_existing(config).stores[0].train.tokens == len(store.train.stream) > 5000


def test_a_store_is_copied_once(texts, bucket, capsys, monkeypatch):
    assert call("prepare", *data_fields(texts[0], bucket / "store")).returncode == 0
    get_file = object_storage.file_system().get_file
    with monkeypatch.context() as patch:  # the first copy is interrupted
        patch.setattr(
            object_storage.file_system(),
            "get_file",
            lambda source, target: (
                get_file(source, target) if "train" in source else os.truncate(target, 0)
            ),
        )
        with pytest.raises(FileNotFoundError):
            open_store(bucket / "store")
    capsys.readouterr()
    first, second = open_store(bucket / "store"), open_store(bucket / "store")
    assert capsys.readouterr().err.count("copying") == 1 and isinstance(
        first.train.stream, np.memmap
    )
    assert first.train.folder == second.train.folder != first.folder == bucket / "store"
    # If the store changes, it is copied again.
    (bucket / "store" / "train.bin").write_bytes(b"\0" * 10)
    with pytest.raises(
        UserError, match=rf"{bucket}/store/train.bin: damaged, has 10 bytes, expected"
    ):
        open_store(bucket / "store")


@pytest.mark.parametrize(
    "name", ["../../../outside", "a/../../../../outside", "..", "/etc/outside", "a//b", "./a"]
)
def test_object_names_do_not_lead_out_of_the_folder(emulated_storage, tmp_path, monkeypatch, name):
    """The emulator refuses such names, so the test replaces the requests."""

    def find(path, detail):
        return {
            f"{path.removeprefix('gs://')}/{each}": {"type": "file", "size": 7} for each in names
        }

    storage, names = object_storage.file_system(), ["config.json", "empty/", name]
    monkeypatch.setattr(storage, "find", find)
    monkeypatch.setattr(
        storage, "get_file", lambda source, target: Path(target).write_text("content")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        UserError, match=r"^gs://bucket/folder/.*: the name of this object is not a path; rename or"
    ):
        local_copy(emulated_storage / "folder")
    outside = {emulated_storage / "folder" / ".." / "b": object_storage.RemoteFile(7, "")}
    with pytest.raises(UserError, match=r"folder/../b: its copy would not be inside "):
        object_storage.download(emulated_storage / "folder", tmp_path / "target", outside)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    del names[2]
    assert [path.name for path in local_copy(emulated_storage / "folder").iterdir()] == [
        "config.json"
    ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--config.data.source=s3://b/texts"],
            "config.data.source: 's3://b/texts' is a URL, and only gs:// URLs",
        ),
        (
            ["--config.data.store=https://b/c"],
            "config.data.store: 'https://b/c' is a URL, and only gs:// URLs",
        ),
        (["--config.data.source=gs://"], "config.data.source: 'gs://' is not a path in a bucket"),
        (
            ["--config.data.store=gs://bucket"],
            "config.data.store: 'gs://bucket' is not a path in a bucket; expected gs://",
        ),
        (
            ["--config.data.store=gs://bucket/a/../b"],
            "config.data.store: 'gs://bucket/a/../b' is not a path in a bucket",
        ),
        (
            ["--config.data.source=gs://bucket/missing/*.txt"],
            "config.data.source='gs://bucket/missing/*.txt': no such",
        ),
        (
            ["--config.data.source=gs://nobucket/texts"],
            "config.data.source='gs://nobucket/texts': ",
        ),
        (
            ["--config.data.store=gs://nobucket/store"],
            "config.data.store=gs://nobucket/store: request failed",
        ),
        (
            ["--config.data.source={0}", "--config.data.store={0}/store"],
            "config.data.store='{0}/store': is inside {0}",
        ),
    ],
)
def test_wrong_paths(texts, arguments, message):
    found = call(
        "prepare", "--config=gpt:tiny", *(argument.format(texts[0]) for argument in arguments)
    )
    assert found.returncode == 1 and found.stderr.startswith(
        f"error: {message.format(texts[0])}"
    ), found.stderr
    assert len(found.stderr.splitlines()) <= 2


def test_failed_requests_are_not_missing_files(bucket, monkeypatch):
    async def fail(*_, **__):
        raise OSError("Forbidden")

    (bucket / "folder").mkdir(parents=True)
    monkeypatch.setattr(object_storage.file_system(), "_call", fail)
    for request in (
        bucket.exists,
        bucket.is_dir,
        bucket.is_file,
        lambda: list(bucket.iterdir()),
        bucket.read_text,
        lambda: object_storage.list_files(bucket),
        lambda: object_storage.match(bucket / "*"),
    ):
        with pytest.raises(OSError, match="Forbidden"):
            request()
    found = call("prepare", *data_fields("none.txt", bucket / "store"))
    assert (found.returncode, found.stderr) == (
        1,
        "error: object storage: request failed (Forbidden); check the name of the bucket, your "
        "permissions and your credentials (gcloud auth application-default login)\n",
    )


@pytest.mark.slow
def test_a_folder_is_uploaded_with_the_file_that_completes_it(bucket):
    """That of an adapter is not config.json."""
    with atomic_folder(bucket / "adapter", last="adapter_config.json") as folder:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text("{}")
    assert sorted(path.name for path in (bucket / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_missing_bucket_is_named(emulated_storage):
    found = call("generate", "--workdir=gs://nobucket/run")
    assert found.returncode == 1 and found.stderr.startswith(
        "error: --workdir=gs://nobucket/run: request failed (404 "
    )


@pytest.mark.slow
def test_a_lock_is_refused_until_it_is_released(bucket, short_lease):  # noqa: F811
    lock = bucket / "lock"
    with contextlib.ExitStack() as second:
        with file_lock(lock):
            with (
                pytest.raises(LockHeldError, match=rf"^process {os.getpid()} on \S+$"),
                file_lock(lock),
            ):
                pass
            waiter = threading.Thread(
                target=lambda: second.enter_context(file_lock(lock, wait=True))
            )
            waiter.start()
            waiter.join(2 * LEASE["LEASE_SECONDS"])
            assert waiter.is_alive()
        waiter.join(5)
        assert not waiter.is_alive() and lock.exists()
    assert not lock.exists()


@pytest.mark.slow
def test_an_expired_lock_is_taken_over(bucket, short_lease):  # noqa: F811
    with hold_lock(bucket / "lock") as holder:
        with (
            pytest.raises(LockHeldError, match=f"process {holder.pid} on"),
            file_lock(bucket / "lock"),
        ):
            pass
        holder.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with file_lock(bucket / "lock"):
            assert time.monotonic() - began > LEASE["LEASE_SECONDS"]
            holder.send_signal(signal.SIGCONT)
            _, error = holder.communicate(timeout=10)
            assert holder.returncode == 1 and "another process has taken over the lock" in error
            assert (bucket / "lock").read_text().startswith(f"process {os.getpid()} on")


@pytest.mark.slow
def test_a_suspended_holder_does_not_overwrite_its_successor(bucket, short_lease):  # noqa: F811
    file = bucket / "file"
    with hold_lock(bucket / "lock", "writes") as holder:
        while not file.exists():
            time.sleep(0.01)
        holder.send_signal(signal.SIGSTOP)
        with file_lock(bucket / "lock"):
            write_atomically(file, "written by the successor")
            holder.send_signal(signal.SIGCONT)
            _, error = holder.communicate(timeout=20)
            assert holder.returncode == 1 and "another process has taken over the lock" in error
            assert file.read_text() == "written by the successor"


def test_a_write_whose_answer_is_lost_is_repeated(bucket, faults):  # noqa: F811
    (bucket / "file").write_text("old")
    with file_lock(bucket / "lock"):
        sent = faults({"match": "POST .*/file$", "status": 503, "lost": True, "times": 1})
        for text in ("new", "newer"):
            write_atomically(bucket / "file", text)
            assert (bucket / "file").read_text() == text
        assert sent() == [1]


@pytest.mark.parametrize("place", ["bucket", "tmp_path"])
def test_a_torn_line_does_not_swallow_the_next_session(place, request):
    folder = request.getfixturevalue(place) / "run"
    folder.mkdir()
    append_session(folder, {"step": 1})
    path = folder / SESSIONS_FILE
    path.write_text(path.read_text() + '{"step": 2, "proc')
    for step in (3, 4):
        append_session(folder, {"step": step})
    first, torn, *others = path.read_text().splitlines()
    assert torn == '{"step": 2, "proc' and [
        json.loads(line)["step"] for line in (first, *others)
    ] == [1, 3, 4]


KILLED_WITH_SPOOL = """
import os, sys
from smallgpt_jax.run import spool
from smallgpt_jax.storage.paths import as_path
with spool.open_spool(as_path("--workdir", sys.argv[1]), []) as opened:
    (opened.folder / "file").write_text("text")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_the_spools_of_killed_runs_are_removed(bucket, tmp_path, monkeypatch):
    """Not those of other runs, and not those that could not be uploaded."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(spool, "CLOSING_PAUSES", ())
    subprocess.run([sys.executable, "-c", KILLED_WITH_SPOOL, bucket / "killed"], cwd=ROOT)
    assert len(list(tmp_path.iterdir())) == 1
    with spool.open_spool(bucket / "first", []) as first:
        with spool.open_spool(bucket / "second", []) as second:
            assert len(list(tmp_path.iterdir())) == 2 and first.folder.exists()
            monkeypatch.setattr(second, "upload", lambda: False)
        assert second.folder.exists()
    with spool.open_spool(bucket / "third", []) as third:
        assert second.folder.exists() and not first.folder.exists()
    assert not third.folder.exists()


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """Returns an empty folder, which is that of temporary files during the test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_folders_of_other_users_are_left_alone(bucket, tmp_path, temporary_folder, monkeypatch):
    """Neither a lock nor a folder that is a symbolic link is followed."""
    text = tmp_path / "thesis.txt"
    text.write_text("ten years")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".lock").touch()
    linked_lock, linked_folder, foreign, abandoned = (
        temporary_folder / f"{spool.SPOOL_PREFIX}{name}" for name in "abcd"
    )
    for folder in (linked_lock, foreign, abandoned):
        folder.mkdir()
    (linked_lock / ".lock").symlink_to(text)
    linked_folder.symlink_to(tmp_path / "home")
    (foreign / ".lock").touch()
    (abandoned / ".lock").touch()
    lstat = Path.lstat

    def lstat_of_two_users(path):
        status = lstat(path)
        owner = status.st_uid + (path == foreign)
        return os.stat_result((*status[:4], owner, *status[5:]))

    monkeypatch.setattr(Path, "lstat", lstat_of_two_users)
    with spool.open_spool(bucket / "run", []):
        assert text.read_text() == "ten years" and (tmp_path / "home" / ".lock").exists()
        assert (foreign / ".lock").exists() and linked_lock.exists() and not abandoned.exists()


@pytest.mark.parametrize("moment", ["before the lock", "while it removes"])
def test_runs_that_start_at_once_do_not_meet(moment, bucket, temporary_folder, monkeypatch):
    """Another run finds the lock file of this one before this one holds its lock."""
    lock, removed = fcntl.flock, []

    def other_run():
        monkeypatch.setattr(fcntl, "flock", lock)
        (folder,) = temporary_folder.iterdir()
        removed.append(folder)
        if moment == "before the lock":
            temporary.remove_abandoned(temporary_folder, spool.SPOOL_PREFIX)
            assert not folder.exists()
        else:
            other = (folder / ".lock").open()
            lock(other, fcntl.LOCK_EX)
            others.enter_context(other)

    def flock_after_the_other(*arguments):
        other_run()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock_after_the_other)
    with contextlib.ExitStack() as others, spool.open_spool(bucket / "run", []) as opened:
        assert removed and opened.folder.parent not in removed
        (opened.folder / "file").write_text("text")
        assert opened.upload() and (bucket / "run" / "file").read_text() == "text"


@pytest.mark.slow
def test_the_lease_does_not_end_while_requests_hang(bucket, short_lease, monkeypatch):  # noqa: F811
    read, delays = object_lock.Lease._read, [2 * LEASE["RENEWAL_SECONDS"]] * 4

    def slow_read(lease, **_):
        time.sleep(delays.pop() if delays else 0)
        return read(lease)

    monkeypatch.setattr(object_lock.Lease, "_read", slow_read)
    (bucket / "lock").write_text("process 1 on elsewhere\n0\n")
    began = time.monotonic()
    with file_lock(bucket / "lock"):
        assert time.monotonic() - began > 8 * LEASE["RENEWAL_SECONDS"] + LEASE["LEASE_SECONDS"]


def test_a_holder_that_cannot_renew_ends_before_its_lease(bucket, short_lease):  # noqa: F811
    with hold_lock(bucket / "lock", "unreachable") as holder:
        began = time.monotonic()
        _, error = holder.communicate(timeout=20)
        assert time.monotonic() - began < LEASE["LEASE_SECONDS"] and holder.returncode == 1
    first, last = error.splitlines()
    assert (
        first
        == f"{bucket}/lock: the lock could not be renewed (no network); trying again every 0.5 s"
    )
    assert (
        last
        == f"error: {bucket}/lock: the lock could not be renewed (no network); this process ends without saving"
    )
    assert (bucket / "lock").read_text().startswith(f"process {holder.pid} on")


def small_state(step: int) -> TrainState:
    return TrainState(
        jnp.int32(step), {"weight": jnp.full(8, step, jnp.float32)}, {"count": jnp.int32(step)}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "match, status",
    [
        ("/checkpoints", 403),
        ("GET .*/o\\?", 403),
        ("POST .*/checkpoints/20/", 403),
        ("commit_success", 403),
    ],
)
def test_saving_fails_while_requests_are_refused(bucket, faults, match, status):  # noqa: F811
    """The run goes on, the step is not taken for saved, and the next save succeeds."""
    messages = []
    checkpoints = Checkpoints(bucket / "checkpoints", keep=2, log=messages.append)
    checkpoints.save(10, small_state(10))
    checkpoints.wait_until_finished()
    refused = faults({"match": match, "status": status})
    checkpoints.save(20, small_state(20))
    checkpoints.wait_until_finished()
    assert refused()[0] > 0 and len(messages) == 1 and checkpoints.steps() == [10], messages
    assert messages[0].startswith("could not write a checkpoint: Forbidden")
    checkpoints.save(20, small_state(20))
    checkpoints.wait_until_finished()
    assert len(messages) == 1 and checkpoints.steps() == [10]
    faults()
    for step in (20, 30):
        checkpoints.save(step, small_state(step))
    checkpoints.close()
    assert messages[1:] == ["checkpoints can be written again; newest checkpoint: step 20"]
    assert saved_steps(bucket / "checkpoints") == [20, 30]


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503])
def test_a_save_repeats_requests(bucket, faults, status):  # noqa: F811
    messages = []
    checkpoints = Checkpoints(bucket / "checkpoints", keep=2, log=messages.append)
    hits = faults(
        *(
            {"match": match, "status": status, "times": 1}
            for match in (
                "POST .*checkpoints/10/.*manifest",
                "POST .*commit_success",
                "GET .*/o\\?",
            )
        )
    )
    checkpoints.save(10, small_state(10))
    checkpoints.close()
    assert hits() == [1, 1, 1] and not messages and saved_steps(bucket / "checkpoints") == [10]


COMPILE = """
import jax
from smallgpt_jax.devices import compilation_cache
compilation_cache.configure()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
print(jax.jit(lambda x: x @ x + 3)(jax.numpy.ones((4, 4)))[0, 0], sum(hits))
"""


@pytest.mark.slow
def test_processes_share_a_compilation_cache(bucket):
    """An incomplete entry is ignored. A process leaves one if it is killed while it writes."""
    folder = bucket / "compiled"
    environment = {
        **os.environ,
        compilation_cache.VARIABLE: str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def compile_in_process() -> tuple[str, int]:
        done = subprocess.run(
            [sys.executable, "-W", "default", "-c", COMPILE],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0 and "persistent" not in done.stderr, done.stderr
        value, hits = done.stdout.split()
        return value, int(hits)

    assert compile_in_process() == ("7.0", 0)
    entries = list((folder / compilation_cache.processor_kind()).glob("*-cache"))
    assert compile_in_process() == ("7.0", len(entries)) and entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:-20])
    assert compile_in_process() == ("7.0", 0)
