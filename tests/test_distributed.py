"""Runs of several processes on this machine, started as a user starts them."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, XLA_FLAGS, run

from smallgpt_jax import sharding
from smallgpt_jax.metrics import read_lines

sys.path.insert(0, str(ROOT / "benchmarks"))
import chaos

CONFIG = ("--config=configs/gpt.py:tiny", "--config.train.steps=20")


UNREADABLE = """
import runpy, sys
sys.path.insert(0, "")  # as with python -m
from smallgpt_jax.checkpoint import Checkpoints
def read(self, *arguments, _read=Checkpoints._read):
    Checkpoints._read = _read
    _read(self, *arguments)  # orbax's processes read together
    raise ValueError("a bad sector")
Checkpoints._read = read
runpy.run_module("smallgpt_jax.main", run_name="__main__")
"""


def cluster(workdir, *arguments, processes: int, devices: int, **environment):
    return subprocess.run(
        ["bash", ROOT / "launch" / "local_cluster.sh", f"--processes={processes}", f"--devices={devices}",
         "--", *arguments, f"--workdir={workdir}"],
        env={**os.environ, "PYTHON": sys.executable, "XLA_FLAGS": "--xla_backend_optimization_level=0",
             **environment},
        capture_output=True, text=True, timeout=600)


def losses(workdir) -> np.ndarray:
    """Of the training steps, one after another."""
    lines = [line for line in read_lines(workdir / "metrics.jsonl") if line["split"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return np.array([line["loss"] for line in lines])


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text_file):
    """The same run in one process on one device."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    result = run("main", *CONFIG, f"--config.data.source={text_file}", "--config.train.log_every=1",
                 f"--workdir={workdir}")
    assert result.returncode == 0, result.stderr
    return workdir


def test_two_processes_train_as_one(tmp_path, text_file, alone):
    """Two processes of four devices each; fsdp lies across both. They go on, then one does alone."""
    data = f"--config.data.source={text_file}"
    mesh = ("--config.mesh.data=2", "--config.mesh.fsdp=4")
    for steps in (10, 20):
        result = cluster(tmp_path / "two", *CONFIG, data, "--config.train.log_every=1", *mesh,
                         f"--config.train.steps={steps}", processes=2, devices=4)
        assert result.returncode == 0, result.stderr
    assert "10 of them done" in result.stdout
    assert "on 8 cpu devices of 2 processes" in result.stdout
    assert result.stdout.count("step 20/20   validation loss") == 1  # only process 0 speaks
    assert not result.stderr, result.stderr
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(alone), rtol=1e-5)

    more = ("--config.train.steps=25", "--config.optimizer.decay_steps=40")
    result = run("main", *CONFIG, data, "--config.train.log_every=1", *more,
                 f"--workdir={tmp_path / 'two'}")
    assert result.returncode == 0, result.stderr
    assert "20 of them done" in result.stdout
    result = run("main", *CONFIG, data, "--config.train.log_every=1", *more, f"--workdir={alone}")
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(alone), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_of_which_one_is_stopped_then_killed(tmp_path, text_file):
    """Both end, at the same step or with a message; started again they end like two that were left alone."""
    flags = (*CONFIG, f"--config.data.source={text_file}", "--config.train.log_every=1",
             "--config.train.steps=120", "--config.train.checkpoint_every=20")
    result = cluster(tmp_path / "undisturbed", *flags, processes=2, devices=1)
    assert result.returncode == 0, result.stderr

    def disturb(number, words, which):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "smallgpt_jax.main", *flags, f"--workdir={tmp_path / 'run'}",
                   f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
        outputs = [tmp_path / str(i) for i in range(2)]
        running = [subprocess.Popen(
            [*command, f"--process_id={i}"], cwd=ROOT, stdout=output.open("w"), stderr=subprocess.STDOUT,
            env={**os.environ, "XLA_FLAGS": XLA_FLAGS.format(devices=1)}) for i, output in enumerate(outputs)]
        while words not in outputs[0].read_text() and running[0].poll() is None:
            time.sleep(0.02)
        running[which].send_signal(number)
        started = time.monotonic()
        statuses = [process.wait(90) for process in running]
        assert time.monotonic() - started < 60
        return statuses, [output.read_text() for output in outputs]

    statuses, said = disturb(signal.SIGTERM, "step  30/120", which=1)
    assert statuses == [143, 143]
    stops = [re.search(r"stopped after step (\d+), which is saved", text)[1] for text in said]
    assert stops[0] == stops[1] and 30 <= int(stops[0]) < 120
    statuses, said = disturb(signal.SIGKILL, "step  75/120", which=1)
    assert statuses == [1, -signal.SIGKILL], said[0][-3000:]
    assert "error: another process of this run has ended" in said[0] and "Traceback" not in said[0], said[0]
    # The newest checkpoint is good, but for process 1: all of them go back to the one before.
    (tmp_path / "shim.py").write_text(UNREADABLE)
    (tmp_path / "python").write_text(
        f'#!/bin/bash\nif [[ "$*" = *process_id=1* ]]; then shift 2; set -- {tmp_path}/shim.py "$@"; fi\n'
        f'exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    result = cluster(tmp_path / "run", *flags, processes=2, devices=1, PYTHON=str(tmp_path / "python"))
    assert result.returncode == 0, result.stderr
    assert "the checkpoint of step 60 is damaged (damaged for another process)" in result.stdout
    assert "40 of them done" in result.stdout
    runs = [chaos.Run(tmp_path / name, "gpt", 120) for name in ("undisturbed", "run")]
    assert chaos.differences(*runs) == []


def test_what_is_wrong_for_process_0_ends_all(tmp_path, text_file):
    """A workdir of another run, which only process 0 looks at: nobody is left waiting."""
    run_it = functools.partial(cluster, tmp_path / "run", *CONFIG, f"--config.data.source={text_file}",
                               processes=2, devices=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("")
    started = time.monotonic()
    result = run_it()
    assert result.returncode == 1 and time.monotonic() - started < 60
    assert "error: --workdir=" in result.stderr and "holds files, but no run" in result.stderr
    assert "process 1: error: process 0 has ended; its message says why" in result.stderr
    assert "Traceback" not in result.stderr, result.stderr


def test_processes_with_different_configs_do_not_train(tmp_path, text_file):
    """A stand-in python gives process 1 another seed."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nif [[ "$*" = *process_id=1* ]]; then seed=--config.train.seed=7; fi\n'
                      f'exec {sys.executable} "$@" $seed\n')
    python.chmod(0o755)
    result = cluster(tmp_path / "run", *CONFIG, f"--config.data.source={text_file}", processes=2, devices=1,
                     PYTHON=str(python))
    assert result.returncode == 1
    assert "error: process 1 has a config other than process 0's" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("flags, words", [
    (["--coordinator=127.0.0.1:9"], ["--num_processes", "--process_id", "must be given too"]),
    (["--num_processes=2", "--process_id=2", "--coordinator=127.0.0.1:9"], ["--process_id=2", "from 0 to 1"]),
    (["--num_processes=2", "--process_id=1", "--coordinator=here"], ["--coordinator=here", "HOST:PORT"]),
    (["--num_processes=2", "--process_id=1", "--coordinator=127.0.0.1:9"],
     ["127.0.0.1:9", "no answer within 2 seconds"]),
])
def test_processes_that_cannot_meet(tmp_path, flags, words):
    result = run("main", *CONFIG, f"--workdir={tmp_path / 'run'}", *flags, "--join_timeout=2")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lengths", [dict(data=8), dict(data=2, fsdp=2, tensor=2), dict(tensor=8)])
def test_a_batch_is_put_together_from_rows(lengths):
    mesh = sharding.make_mesh(**{"data": 1, "fsdp": 1, "tensor": 1, "path": 1, **lengths})
    batch = np.random.default_rng(0).integers(0, 100, (16, 5))
    rows = sharding.local_rows(mesh, 16)
    np.testing.assert_array_equal(rows, np.arange(16))
    array = sharding.global_batch(mesh, rows, 16, batch[rows])
    np.testing.assert_array_equal(array, batch)
    assert array.sharding.is_equivalent_to(sharding.batch_sharding(mesh), 2)


def test_rows_of_a_process_need_not_be_neighbours(monkeypatch):
    """A process whose devices are number 0, 3 and 6 of a mesh, as on a TPU slice."""
    mesh = sharding.make_mesh(data=4, fsdp=1, tensor=2, path=1)
    whole = sharding.batch_sharding(mesh).devices_indices_map((8,))
    mine = {device: index for device, index in whole.items() if device.id in (0, 3, 6)}

    class Sharding:
        def addressable_devices_indices_map(self, shape):
            return mine

    monkeypatch.setattr(sharding, "batch_sharding", lambda mesh: Sharding())
    np.testing.assert_array_equal(sharding.local_rows(mesh, 8), [0, 1, 2, 3, 6, 7])
