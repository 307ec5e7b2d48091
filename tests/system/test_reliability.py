"""A test of a training run whose processes are stopped."""

import re
import signal
import sys
import time

import pytest
from conftest import ROOT, XLA_FLAGS
from run_helpers import SMALL, flags_of

sys.path.insert(0, str(ROOT / "benchmarks"))
import chaos

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_device_for_child_processes(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS.format(devices=1))


def test_stops_do_not_change_a_run(text_file, tmp_path):
    """A run that is stopped and resumed ends with the same state and losses as an uninterrupted
    run.

    It is stopped by SIGTERM while compiling, and by Ctrl-C while evaluating. (test_distributed.py
    has a run that is stopped while training, and killed; the command benchmarks/chaos.py kills runs
    at random moments.)
    """
    overrides = (
        *flags_of(SMALL),
        f"--config.data.source={text_file}",
        "--config.train.eval_steps=0",
        "--config.train.checkpoint_every=1000",
        "--config.train.eval_every=60",
    )
    undisturbed, interrupted = (
        chaos.Run(tmp_path / name, "gpt", 120, overrides) for name in ("one", "other")
    )
    undisturbed.start()
    undisturbed.finish()
    logged = undisturbed.output().splitlines()
    assert re.fullmatch(
        r"Step 120: validation loss \d\.\d{4}, \d\.\d{4} bits per byte\. To generate more:",
        logged[-2],
    )
    assert not re.search("Error|Warning|Traceback", undisturbed.output())
    assert list(undisturbed.workdir.glob("events.out.tfevents*"))

    def interrupt(text, number):
        interrupted.start()
        interrupted.wait_for(text)
        interrupted.process.send_signal(number)
        started = time.monotonic()
        status = interrupted.process.wait(60)
        assert time.monotonic() - started < 15
        return status, interrupted.output().splitlines()[-1]

    status, last = interrupt(" parameters, on ", signal.SIGTERM)
    assert status == 143 and "stopped without saving; rerun the same command" in last
    status, last = interrupt("step  60/120", signal.SIGINT)
    # Step 60 is saved, but its evaluation is not finished.
    assert (status, last) == (
        130,
        "stopped after step 60 and saved; rerun the same command to resume",
    )
    assert "step  60/120   validation loss" not in interrupted.output()
    interrupted.start()
    interrupted.finish()
    assert chaos.differences(undisturbed, interrupted) == []
    assert not (interrupted.workdir / ".lock").exists()
