"""Tests of checkpoints (damage, failed writes, checksums) and of benchmarks/chaos.py, without
training.
"""

import collections
import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from conftest import ROOT
from process_helpers import run_processes  # noqa: F401

from smallgpt_jax.devices import agreement
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import find_errno, short_reason
from smallgpt_jax.run.checkpoint import Checkpoints, LoopMemory
from smallgpt_jax.run.checkpoint_folder import copy_checkpoint, remove_checkpoint, saved_steps
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.run.state import TrainState

sys.path.insert(0, str(ROOT / "benchmarks"))
import chaos


def state_of(step: int) -> TrainState:
    keys = jax.random.split(jax.random.key(step), 3)
    params = {
        "a": jax.random.normal(keys[0], (40, 30)),
        "b": {"c": jax.random.normal(keys[1], (7,))},
    }
    moments = (jax.tree.map(jnp.square, params), jnp.int32(step))
    return TrainState(jnp.int32(step), params, moments)


ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0)
)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert all(
        np.array_equal(a, b, equal_nan=True)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other))
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    for step in (5, 10, 20):
        checkpoints.save(step, state_of(step))
    checkpoints.close()
    assert sorted(os.listdir(folder)) == ["10", "20"]  # the newest two
    return folder


def test_kept_steps_are_not_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, kept_steps=(10,))
    for step in (5, 10, 20, 30):
        checkpoints.save(step, state_of(step))
    checkpoints.close()
    assert saved_steps(tmp_path) == [10, 30]


A, C = ABSTRACT.params["a"], ABSTRACT.params["b"]["c"]


@pytest.mark.parametrize(
    "params, difference",
    [
        (
            {"a": jax.ShapeDtypeStruct((40, 60), "float32"), "b": {"c": C}},
            "a is (40, 30), not (40, 60)",
        ),
        ({"a": A}, "b/c is (7,), not missing"),
        ({"a": A, "b": {"c": C, "d": C}}, "b/d is missing, not (7,)"),
    ],
    ids=["another shape", "fewer arrays", "more arrays"],
)
def test_an_edited_config_is_not_called_damage(saved, params, difference):
    """The arrays that a config describes are compared with those of the checkpoints, which stay."""
    checkpoints = Checkpoints(saved, keep=3)
    message = (
        f"{saved.parent}/config.json: does not describe the model in {saved}/20 ({difference}); "
        "restore the file as the run wrote it"
    )
    with pytest.raises(UserError) as of_training:
        checkpoints.restore_latest(ABSTRACT._replace(params=params, opt_state=None))
    with pytest.raises(UserError) as of_inference:
        checkpoints.restore_model(20, params, {})
    assert str(of_training.value) == str(of_inference.value) == message
    assert checkpoints.steps() == [10, 20] and os.listdir(saved.parent) == ["checkpoints"]
    checkpoints.close()


@pytest.mark.slow
def test_copies_between_disk_and_object_storage(saved, bucket, tmp_path):
    folders = [saved, bucket / "a", bucket / "b", tmp_path / "c"]
    for source, target in itertools.pairwise(folders):
        copy_checkpoint(source / "20", target / "20")
        assert saved_steps(target) == [20]
    for folder in folders[2:]:
        checkpoints = Checkpoints(folder, keep=1)
        assert_equal(checkpoints.restore_latest(ABSTRACT), state_of(20))
        checkpoints.close()


def flip_a_bit(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << len(content) % 8
    path.write_bytes(content)


def truncate(path, place):
    path.write_bytes(path.read_bytes()[: int(place * path.stat().st_size)])


@pytest.mark.slow
def test_damage_to_any_file_is_detected(saved, tmp_path):
    """Whichever file of the newest checkpoint is damaged, the restored state is intact.

    If the state itself is damaged, the older checkpoint is restored. Otherwise, the newest one is
    restored. The test damages one file at a time.
    """
    names = [
        path.relative_to(saved / "20")
        for path in (saved / "20").rglob("*")
        if path.is_file() and path.stat().st_size
    ]
    assert len(names) > 15
    outcomes = collections.Counter()
    for number, name in enumerate(names):
        for damage, place in (
            (flip_a_bit, (0.0, 0.37, 0.73)[number % 3]),
            (truncate, (0.0, 0.6)[number % 2]),
        ):
            folder, logged = tmp_path / f"{number}-{damage.__name__}" / "checkpoints", []
            shutil.copytree(saved, folder)
            damage(folder / "20" / name, place)
            checkpoints = Checkpoints(folder, keep=3, log=logged.append)
            state = checkpoints.restore_latest(ABSTRACT)
            step = int(state.step)
            assert_equal(state, state_of(step))
            outcomes[step] += 1
            is_quarantined = (folder.parent / "damaged_checkpoints" / "20").is_dir()
            assert is_quarantined == (step == 10) and len(logged) == (step == 10), name
            assert checkpoints.steps() == ([10] if is_quarantined else [10, 20])
            if is_quarantined:
                assert logged[0].startswith("damaged checkpoint of step 20 (")
            checkpoints.close()
            shutil.rmtree(folder.parent)
    assert outcomes[10] > len(names) / 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: [
            shutil.rmtree(path) if path.is_dir() else path.unlink() for path in folder.iterdir()
        ],
        lambda folder: shutil.rmtree(folder / "opt_state"),
        lambda folder: shutil.rmtree(folder / "check"),
        lambda folder: [
            flip_a_bit(path, 0.5) for path in (folder / "params").rglob("d/*")
        ],  # which are read varies
    ],
    ids=["empty", "no opt_state", "no check", "flipped bit"],
)
def test_a_damaged_checkpoint_is_quarantined(saved, tmp_path, damage):
    shutil.copytree(saved, tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "20")
    logged = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3, log=logged.append)
    assert_equal(checkpoints.restore_latest(ABSTRACT), state_of(10))
    assert len(logged) == 1 and str(tmp_path / "damaged_checkpoints" / "20") in logged[0]
    checkpoints.save(20, state_of(20))  # step 20 can be saved again
    checkpoints.close()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "20"]


@pytest.mark.parametrize(
    "check",
    [
        {},
        None,
        [],
        {"params": None, "opt_state": {}},
        {"params": {"['a']": "1"}, "opt_state": {}},
        {"unlogged_losses": 3},
        {"unlogged_losses": ["low"]},
        {"nonfinite": -1},
    ],
)
def test_checksums_of_another_shape_are_damage(saved, tmp_path, check):
    """JSON without the expected keys and types counts as damage to the checkpoint, in training and
    in inference.
    """
    shutil.copytree(saved, tmp_path / "checkpoints")
    (path,) = (tmp_path / "checkpoints" / "20" / "check").glob("metadata")
    if isinstance(check, dict) and check.keys() & {"unlogged_losses", "nonfinite"}:
        check = json.loads(path.read_text()) | check
    path.write_text(json.dumps(check))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    with pytest.raises(UserError, match=r"20: damaged checkpoint \(check"):
        checkpoints.restore_model(20, ABSTRACT.params, {})
    assert_equal(checkpoints.restore_latest(ABSTRACT), state_of(10))
    assert checkpoints.memory == LoopMemory([], 0)
    checkpoints.close()


def test_nothing_is_moved_if_all_checkpoints_are_damaged(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    for step in ("10", "20"):
        shutil.rmtree(tmp_path / "checkpoints" / step / "check")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    with pytest.raises(UserError, match="all checkpoints are damaged"):
        checkpoints.restore_latest(ABSTRACT)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["10", "20"]
    assert os.listdir(tmp_path) == ["checkpoints"]
    checkpoints.close()


def error_of_tensorstore(number: int) -> ValueError:
    return ValueError(f"UNAVAILABLE: reading the file [os_error_code='{number}']")


@pytest.mark.parametrize(
    "error",
    [
        *(
            OSError(number, os.strerror(number))
            for number in (
                errno.EACCES,
                errno.EPERM,
                errno.EIO,
                errno.EMFILE,
                errno.ENFILE,
                errno.ENOMEM,
                errno.ESTALE,
                errno.ETIMEDOUT,
                errno.ENOTCONN,
                errno.ESHUTDOWN,
                errno.EREMOTEIO,
                errno.EBUSY,
                errno.EAGAIN,
                errno.EHOSTDOWN,
            )
        ),
        error_of_tensorstore(errno.EIO),
        error_of_tensorstore(errno.ENOTCONN),
        MemoryError("cannot allocate"),
        TimeoutError("timed out"),
        RuntimeError("can't start new thread"),
    ],
    ids=lambda error: f"{type(error).__name__}-{find_errno(error)}",
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_errors_of_the_machine_are_not_damage(saved, monkeypatch, error, is_wrapped):
    """Sound checkpoints stay where they are. orbax wraps errors of a read in an Exception."""

    def restore(*_, **__):
        if is_wrapped:
            raise Exception("encountered error while reading") from error
        raise error

    monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, "restore", restore)
    checkpoints = Checkpoints(saved, keep=3)
    reason = re.escape(short_reason(error))
    with pytest.raises(UserError, match=rf"checkpoints/20: cannot be read \({reason}\); nothing"):
        checkpoints.restore_latest(ABSTRACT)
    with pytest.raises(UserError, match=rf"checkpoints/20: cannot be read \({reason}\)$"):
        checkpoints.restore_model(20, ABSTRACT.params, {})
    assert checkpoints.steps() == [10, 20] and os.listdir(saved.parent) == ["checkpoints"]
    checkpoints.close()


@pytest.mark.parametrize(
    "error, is_damage",
    [
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), True),
        (ValueError("OUT_OF_RANGE: not valid for value of size 0"), True),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), False),
    ],
    ids=["missing", "empty", "EIO", "EACCES"],
)
@pytest.mark.parametrize("process", [0, 1])
def test_one_process_cannot_read(
    saved,
    tmp_path,
    monkeypatch,
    run_processes,  # noqa: F811
    error,
    is_damage,
    process,
):
    """All processes do the same, and none waits for another."""
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    restore = orbax.checkpoint.AsyncCheckpointer.restore
    index, one_at_a_time = agreement.process_index, threading.Lock()

    def restore_or_fail(self, path, *arguments, **options):
        if index() == process and path.name == "20":
            raise error
        with one_at_a_time:
            return restore(self, path, *arguments, **options)

    monkeypatch.setattr(orbax.checkpoint.AsyncCheckpointer, "restore", restore_or_fail)

    def resume(_):
        checkpoints = Checkpoints(folder, keep=3)
        return int(checkpoints.restore_latest(ABSTRACT).step), checkpoints.steps()

    found = run_processes(resume)
    if is_damage:
        assert found == [(10, [10])] * 3
        assert os.listdir(tmp_path / "damaged_checkpoints") == ["20"]
    else:
        reason = f"checkpoints/20: cannot be read ({os.strerror(error.errno)})"
        assert all(isinstance(each, UserError) and reason in str(each) for each in found)
        assert os.listdir(tmp_path) == ["checkpoints"] and saved_steps(folder) == [10, 20]


def test_inference_refuses_a_checkpoint_with_other_bits(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "20" / "check" / "metadata"
    check = json.loads(path.read_text())
    check["params"]["['b']['c']"] ^= 1
    path.write_text(json.dumps(check))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(
        UserError, match=r"20: damaged checkpoint \(checksum of params\['b'\]\['c'\] differs\)"
    ):
        checkpoints.restore_model(20, ABSTRACT.params, {})


def test_a_checkpoint_that_a_run_removes_is_not_damaged(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    checkpoints = Checkpoints(folder)
    remove_checkpoint(folder / "10")
    with pytest.raises(
        UserError,
        match=r"checkpoints/10: removed while it was read, because the run keeps only its",
    ):
        checkpoints.restore_model(10, ABSTRACT.params, {})
    shutil.rmtree(folder / "20" / "params")
    with pytest.raises(UserError, match="checkpoints/20: damaged checkpoint"):
        checkpoints.restore_model(20, ABSTRACT.params, {})


def test_a_removal_that_is_interrupted_leaves_no_checkpoint(saved, tmp_path, monkeypatch):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        remove_checkpoint(folder / "10")
    monkeypatch.undo()
    assert saved_steps(folder) == [20] and len(os.listdir(folder)) == 2
    Checkpoints(folder, keep=2).close()
    assert os.listdir(folder) == ["20"]


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch):
    """It is reported once. The newer ones are saved, and those after it removed."""
    logged, rmtree = [], shutil.rmtree

    def remove(path, *arguments, **options):
        if "/10" in str(path):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        rmtree(path, *arguments, **options)

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, log=logged.append)
    monkeypatch.setattr(shutil, "rmtree", remove)
    for step in (10, 20, 30, 40):
        checkpoints.save(step, state_of(step))
    checkpoints.wait_until_finished()
    path = tmp_path / "checkpoints" / "10"
    assert logged == [f"{path}: could not be removed: Device or resource busy"]
    assert checkpoints.steps() == saved_steps(tmp_path / "checkpoints") == [40]
    monkeypatch.undo()
    checkpoints.save(50, state_of(50))
    checkpoints.close()
    assert os.listdir(tmp_path / "checkpoints") == ["50"]


def test_a_clock_that_jumps_does_not_end_a_save(tmp_path, monkeypatch):
    logged, days = [], itertools.count()
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, log=logged.append)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86_400 * next(days))
    checkpoints.save(10, state_of(10))
    checkpoints.close()
    assert next(days) > 10 and not logged and checkpoints.steps() == [10]


def test_a_folder_that_cannot_be_created_does_not_keep_others_waiting(tmp_path, monkeypatch):
    """Orbax's threads would wait for the folder for five minutes, also when the process exits."""
    logged, mkdir = [], os.mkdir

    def make(path, *arguments, **options):
        if "opt_state" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *arguments, **options)

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, log=logged.append)
    monkeypatch.setattr(os, "mkdir", make)
    checkpoints.save(10, state_of(10))
    checkpoints.wait_until_finished()
    end = time.monotonic() + 20
    while any(thread.name == "write_metadata_after_commits" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert logged == [
        "could not write a checkpoint: No space left on device. Training continues; newest "
        "checkpoint: none"
    ]
    assert os.listdir(tmp_path / "checkpoints") == []
    monkeypatch.undo()
    checkpoints.save(20, state_of(20))
    checkpoints.close()
    assert saved_steps(tmp_path / "checkpoints") == [20]


def test_a_checkpoint_is_durable_before_older_ones_are_removed(tmp_path, monkeypatch):
    """When the older one is renamed to be removed, the disk has every file and folder of the newer
    one.
    """
    synced, missing, sync, replace = set(), [], os.fsync, Path.replace

    def record(descriptor):
        sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def check(path, target):
        if path.name == "10":
            newer = tmp_path / "20"
            content = [newer, tmp_path, *newer.rglob("*")]
            missing.extend(path for path in content if path.stat().st_ino not in synced)
            missing.append("checked")
        return replace(path, target)

    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(10, state_of(10))
    checkpoints.wait_until_finished()
    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "replace", check)
    checkpoints.save(20, state_of(20))
    checkpoints.close()
    assert missing == ["checked"]


def test_a_failed_save_is_logged_and_the_next_one_tried(tmp_path):
    """A temporary limit of 200 bytes per file simulates a full disk."""
    logged = []
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3, log=logged.append)
    checkpoints.save(1, state_of(1))
    checkpoints.wait_until_finished()
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (2, 3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, most))
        try:
            checkpoints.save(step, state_of(step))
            checkpoints.wait_until_finished()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.steps() == [1]
        assert os.listdir(tmp_path / "checkpoints") == ["1"]
    assert logged == [
        "could not write a checkpoint: File too large. Training continues; newest checkpoint: "
        "step 1"
    ]
    checkpoints.save(4, state_of(4))
    checkpoints.wait_until_finished()
    assert logged[1:] == ["checkpoints can be written again; newest checkpoint: step 4"]
    assert checkpoints.steps() == [1, 4]
    assert_equal(checkpoints.restore_latest(ABSTRACT), state_of(4))
    checkpoints.close()


def test_checksums_do_not_depend_on_the_mesh():
    state, sharded = state_of(3), {}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    for spec in (("x", "y"), (None, "y"), ("y", None)):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        sharded[spec] = bit_checksums({"a": jax.device_put(state.params["a"], sharding)})
    expected = int(
        (
            np.asarray(state.params["a"]).reshape(-1).view(np.uint32).astype(object)
            * (2 * np.arange(1200, dtype=object) + 1)
        ).sum()
        % 2**32
    )
    assert all(sums == {"['a']": expected} for sums in sharded.values())


@pytest.mark.parametrize(
    "dtype, view", [("bfloat16", "uint16"), ("int8", "uint8"), ("bool", "uint8")]
)
def test_checksums_of_narrow_dtypes(dtype, view):
    x = jnp.asarray([[0, 1, 1], [1, 0, 1]], dtype)
    bits = np.asarray(x).reshape(-1).view(view).astype(object)
    assert bit_checksums({"a": x}) == {
        "['a']": (bits * np.array([1, 3, 5, 7, 9, 11], object)).sum() % 2**32
    }


def test_chaos_finds_every_difference(tmp_path):
    """`chaos.differences` finds a changed weight, a changed loss and a duplicate line of
    metrics.jsonl.

    It finds no difference between a run and an unchanged copy of it.
    """
    runs = {
        name: chaos.Run(tmp_path / name, "gpt", 10)
        for name in ("one", "copy", "weights", "loss", "line")
    }
    for name, run in runs.items():
        checkpoints = Checkpoints(run.workdir / "checkpoints", keep=1)
        state = state_of(10)
        if name == "weights":
            state.params["b"]["c"] = jnp.nextafter(state.params["b"]["c"], jnp.inf)
        checkpoints.save(10, state)
        checkpoints.close()
        losses = [1.0, 2.5 if name == "loss" else 2.0] + [2.0] * (name == "line")
        (run.workdir / "metrics.jsonl").write_text(
            "".join(
                json.dumps({"step": min(step, 2), "split": "train", "loss": loss}) + "\n"
                for step, loss in enumerate(losses, start=1)
            )
        )
    assert {name: chaos.differences(runs["one"], run) for name, run in runs.items()} == {
        "one": [],
        "copy": [],
        "weights": ["params['b']['c']"],
        "loss": ["('train', 2)"],
        "line": ["lines"],
    }


def test_chaos_restarts_killed_runs(tmp_path, monkeypatch):
    """`chaos.kill_runs` restarts each killed run until the run finishes.

    The training processes are fakes. They finish after the third start, so each run is killed at
    most twice.
    """
    events = []

    class Run:
        def __init__(self, workdir, architecture, steps, overrides, num_processes):
            self.workdir, self.starts = workdir, 0

        def start(self):
            self.starts += 1

        def wait_for(self, text):
            assert text == "compiled and ready in"

        def kill(self):
            return None if self.starts == 3 else "training"

        def finish(self):
            events.append(f"{self.workdir.name} ends after {self.starts} starts")

    monkeypatch.setattr(chaos, "Run", Run)
    monkeypatch.setattr(
        chaos, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    )
    monkeypatch.setattr(
        chaos, "differences", lambda one, other: [f"{one.workdir.name} {other.workdir.name}"]
    )
    kills_by_phase, different, runs = chaos.kill_runs(
        "gpt", tmp_path, kills=5, steps=10, rng=random.Random(0), log=lambda line: None
    )
    assert (kills_by_phase, runs) == ({"training": 5}, 3)
    assert events == [
        "undisturbed ends after 1 starts",
        "undisturbed ends after 2 starts",
        *(f"victim-{i} ends after {starts} starts" for i, starts in ((1, 3), (2, 3), (3, 2))),
    ]
    assert len(different) == 3 and different[0].endswith("victim-1: undisturbed victim-1")


def test_a_copy_of_a_checkpoint_is_no_checkpoint(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "checkpoints")
    shutil.copytree(folder / "20", folder / "backup_5000")
    assert saved_steps(folder) == [10, 20] and saved_steps(tmp_path / "none") == []
