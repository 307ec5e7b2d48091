"""Tests of runs that hang, each in its own process."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, XLA_FLAGS

from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.names import CHECKPOINT_FOLDER

pytestmark = pytest.mark.slow

# Trains with a data thread that hangs in its 20th batch, or with slow checkpoints.
PROGRAM = """
import runpy, sys, threading, time
from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.data.packing import Mixture
fault, read, save, batches = sys.argv.pop(1), Mixture.read_rows, Checkpoints.save, []
def freeze(self, numbers):
    batches.append(numbers)
    if len(batches) >= 20:
        threading.Event().wait()
    return read(self, numbers)
def save_slowly(self, *arguments):
    time.sleep(5)
    save(self, *arguments)
if fault == "frozen data":
    Mixture.read_rows = freeze
else:
    Checkpoints.save = save_slowly
sys.argv[0] = "main"
runpy.run_module("smallgpt_jax.main", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("fault, status", [("frozen data", 124), ("slow checkpoint", 0)])
def test_a_stalled_run_ends(text_file, tmp_path, fault, status):
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            fault,
            "--config=configs/gpt.py:tiny",
            f"--workdir={tmp_path / 'run'}",
            f"--config.data.source={text_file}",
            "--config.model.num_layers=1",
            "--config.train.checkpoint_every=10",
            "--config.train.eval_every=40",
            "--config.train.stall_seconds=3",
        ],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": XLA_FLAGS.format(devices=1)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == status, result.stderr
    stalled = (
        "error: no training step has finished for 3 seconds (config.train.stall_seconds); "
        in result.stderr
    )
    assert stalled == ("in freeze" in result.stderr) == (fault == "frozen data")
    assert Checkpoints(tmp_path / "run" / CHECKPOINT_FOLDER).steps()[-1] == (10 if stalled else 40)
