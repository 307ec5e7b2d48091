"""A test of a run that hangs, in its own process (test_watchdog.py has the phases of a run)."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, XLA_FLAGS
from run_helpers import SMALL, flags_of

from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.names import CHECKPOINT_FOLDER

pytestmark = pytest.mark.slow

# Trains with a data thread that hangs in its 20th batch.
PROGRAM = """
import runpy, sys, threading
from smallgpt_jax.data.packing import Mixture
read, batches = Mixture.read_rows, []
def freeze(self, numbers):
    batches.append(numbers)
    if len(batches) >= 20:
        threading.Event().wait()
    return read(self, numbers)
Mixture.read_rows = freeze
sys.argv[0] = "main"
runpy.run_module("smallgpt_jax.main", run_name="__main__", alter_sys=True)
"""


def test_a_stalled_run_ends(text_file, tmp_path):
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            "--config=configs/gpt.py:tiny",
            f"--workdir={tmp_path / 'run'}",
            f"--config.data.source={text_file}",
            *flags_of(SMALL),
            "--config.train.checkpoint_every=10",
            "--config.train.eval_every=40",
            "--config.train.stall_seconds=5",
        ],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": XLA_FLAGS.format(devices=1)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 124, result.stderr
    assert (
        "error: no training step has finished for 5 seconds (config.train.stall_seconds); "
        in result.stderr
    )
    assert "in freeze" in result.stderr
    assert Checkpoints(tmp_path / "run" / CHECKPOINT_FOLDER).steps()[-1] == 10
