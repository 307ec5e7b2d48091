"""Tests of multi-process runs on one machine, started as users start them."""

import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, XLA_FLAGS, load_config, run
from process_helpers import run_processes  # noqa: F401
from run_helpers import SMALL, flags_of

from smallgpt_jax.devices import agreement
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.training import checks
from smallgpt_jax.training.trainer import train_and_evaluate

pytestmark = pytest.mark.slow

STEPS = 20
FIELDS = dict(
    SMALL,
    optimizer__decay_steps=40,
    train__steps=STEPS,
    train__log_every=1,
    train__checkpoint_every=4,
    train__eval_every=10,
    train__eval_steps=2,
    train__microbatches=0,  # as of sized recipes; process 0 tells the memory of a device
)
CONFIG = (
    "--config=configs/gpt.py:tiny",
    *flags_of(FIELDS),
)

# With faults, the processes run this program: smallgpt_jax.main with the faults that the environment
# variable FAULTS lists. Each fault is "PROCESS ACT STEP"; PROCESS then fails to do ACT, or sends
# itself the signal ACT, at STEP. SIGKILL waits until the checkpoint of step 12 is complete.
FAULTY = """
import errno, os, pathlib, resource, runpy, signal, sys, time
sys.path.insert(0, "")  # as with python -m
import orbax.checkpoint as ocp
from smallgpt_jax.run.logger import Logger

(process,) = (arg[-1] for arg in sys.argv if "process_id=" in arg)
(workdir,) = (arg.partition("=")[2] for arg in sys.argv if arg.startswith("--workdir="))
saved = pathlib.Path(workdir, "checkpoints", "12")
faults = [fault.split(" ")[1:] for fault in os.environ["FAULTS"].split(",") if fault[0] == process]

def is_due(act, path):
    # "12" and "12.orbax-checkpoint-tmp/params.orbax-checkpoint-tmp" belong to step 12
    return any([act, name.split(".")[0]] in faults for name in path.parts)

def failing(cls, method, act, number):
    original = getattr(cls, method)
    def fail(self, path, *arguments, **options):
        if is_due(act, path):
            raise OSError(number, os.strerror(number), str(path))
        return original(self, path, *arguments, **options)
    setattr(cls, method, fail)

def write(self, path, *arguments, _write=ocp.StandardCheckpointHandler.async_save, **options):
    most = 200 if is_due("write", path) else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    return _write(self, path, *arguments, **options)

def log(self, metrics, _log=Logger.log):
    _log(self, metrics)
    for act, step in faults:
        if act.startswith("SIG") and metrics.step == int(step):
            while act == "SIGKILL" and not saved.exists():
                time.sleep(0.05)
            os.kill(os.getpid(), getattr(signal, act))
        if act == "log" and metrics.step == int(step):
            raise OSError(errno.EIO, os.strerror(errno.EIO), "a file")

failing(ocp.AsyncCheckpointer, "save", "start", errno.EACCES)
failing(ocp.CompositeCheckpointHandler, "finalize", "commit", errno.ENOSPC)
ocp.StandardCheckpointHandler.async_save = write
Logger.log = log
sys.argv = sys.argv[2:]
runpy.run_module("smallgpt_jax.main", run_name="__main__")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, text_file):
    """Returns a function (workdir, faults) that trains a run in `workdir` with local_cluster.sh.

    The run has two processes, each of which holds half of the weights. See FAULTY for the faults.
    """
    folder = tmp_path_factory.mktemp("bin")
    (folder / "faulty.py").write_text(FAULTY)
    python = folder / "python"
    python.write_text(
        f'#!/bin/bash\n[[ $FAULTS ]] && set -- {folder}/faulty.py "$@"\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)

    def start(workdir, faults=""):
        return subprocess.run(
            [
                "bash",
                ROOT / "launch" / "local_cluster.sh",
                "--",
                *CONFIG,
                f"--config.data.source={text_file}",
                "--config.mesh.data=1",
                "--config.mesh.fsdp=2",
                f"--workdir={workdir}",
            ],
            env={
                **os.environ,
                "PYTHON": str(python),
                "XLA_FLAGS": XLA_FLAGS.format(devices=1),
                "FAULTS": faults,
                "GRACE_SECONDS": "60",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )

    return start


def losses(workdir) -> np.ndarray:
    """Returns the losses of the training steps, after checking that each step is logged once."""
    lines = [line for line in read_lines(workdir / "metrics.jsonl") if line["split"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return np.array([line["loss"] for line in lines])


def saved_steps(workdir) -> list[int]:
    return sorted(
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal()
    )


def test_two_processes_train_as_one(tmp_path, text_file, cluster):
    """A run trained by two processes has the same losses as a run trained by one process.

    The losses are also the same if process 1 is killed, if a checkpoint is damaged or cannot be
    written by one of them, if process 1 receives SIGTERM or fails, and if the run is resumed by a
    single process.
    """
    undisturbed, run, alone = (tmp_path / name for name in ("undisturbed", "run", "alone"))
    result = cluster(undisturbed)
    assert (result.returncode, result.stderr) == (0, "")
    assert "on 2 cpu devices of 2 processes" in result.stdout
    assert result.stdout.count("step 20/20   validation loss") == 1  # only process 0 prints

    # The second checkpoint does not fit on the disk of process 1, which is killed later.
    result = cluster(run, "1 write 8,1 SIGKILL 15")
    assert result.returncode in (1, 137)
    failed = "could not write a checkpoint: process 1: File too large. Training continues; newest "
    assert f"{failed}checkpoint: step 4" in result.stdout
    assert "error: another process of this run has exited or is unreachable" in result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    assert (
        "process 0: exit status 1" in result.stderr
        and "process 1: exit status 137" in result.stderr
    )

    assert saved_steps(run) == [4, 12]
    for path in (run / "checkpoints/12/params/ocdbt.process_1/d").iterdir():
        path.write_bytes(b"")  # only process 1 reads these files
    result = cluster(run, "1 start 8,0 commit 12,1 SIGTERM 16")
    assert result.returncode == 143, result.stderr
    assert "damaged checkpoint of step 12 (OUT_OF_RANGE: " in result.stdout
    assert "20 steps of 8 × 32 tokens, 4 done" in result.stdout
    failed = "could not write a checkpoint: process 1: Permission denied. Training continues; "
    assert result.stdout.count(failed) == result.stdout.count("could not write") == 1
    assert "checkpoints can be written again; newest checkpoint: step 16" in result.stdout
    stopped = saved_steps(run)[-1]
    assert 16 <= stopped < STEPS
    assert result.stderr.count(f"stopped after step {stopped} and saved") == 2
    assert losses(run).tolist() == losses(undisturbed)[:stopped].tolist()

    # An error of one process ends all. JAX would wait for 30 seconds, and then abort both.
    started = time.monotonic()
    result = cluster(run, f"1 log {stopped + 1}")
    assert time.monotonic() - started < 60 and result.returncode == 1
    assert "process 1: error: a file: Input/output error\nprocess 1: exit status 1" in result.stderr
    assert "error: another process of this run has exited or is unreachable" in result.stderr
    assert "process 0: exit status 1" in result.stderr
    assert "Check failure stack trace" not in result.stderr

    for workdir in (alone, run):
        train_and_evaluate(
            load_config(
                "gpt", **{**FIELDS, "data__source": str(text_file), "train__steps": STEPS + 5}
            ),
            str(workdir),
        )
    np.testing.assert_allclose(losses(undisturbed), losses(alone)[:STEPS], rtol=1e-5)
    np.testing.assert_allclose(losses(run), losses(alone), rtol=1e-5)
    assert len((run / "sessions.jsonl").read_text().splitlines()) == 4


def test_all_processes_exit_if_the_primary_one_fails(tmp_path, cluster):
    """Only process 0 checks the workdir. If it refuses the workdir, the other processes exit,
    too.
    """
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("")
    started = time.monotonic()
    result = cluster(tmp_path / "run")
    assert result.returncode == 1 and time.monotonic() - started < 60
    assert (
        "error: --workdir=" in result.stderr
        and "folder is not empty and not a run" in result.stderr
    )
    assert "process 1: error: process 0 has failed; see its message" in result.stderr
    assert "Traceback" not in result.stderr, result.stderr


def test_processes_with_different_devices_are_refused(run_processes, monkeypatch, tmp_path):  # noqa: F811
    """Their collectives would fail. Here, the processes are threads."""

    def local_device_count() -> int:
        return 2 if agreement.distributed.global_state.process_id == 1 else 1

    monkeypatch.setattr(jax, "local_device_count", local_device_count)
    for error in run_processes(lambda number: checks.check_processes(tmp_path)):
        assert isinstance(error, UserError)
        assert str(error) == (
            "process 1: the number of its devices differs from process 0's (2; there 1); use the "
            "same in all processes"
        )


def test_join_timeout(tmp_path):
    result = run(
        "main",
        *CONFIG,
        f"--workdir={tmp_path / 'run'}",
        "--num_processes=2",
        "--process_id=1",
        "--coordinator=127.0.0.1:9",
        "--join_timeout=2",
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert "127.0.0.1:9" in result.stderr and "no answer within 2 seconds" in result.stderr
    assert not (tmp_path / "run").exists()
