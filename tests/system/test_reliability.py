"""A test of a training run whose processes are stopped and killed."""

import re
import signal
import sys
import time

import pytest
from conftest import ROOT, XLA_FLAGS

sys.path.insert(0, str(ROOT / "benchmarks"))
import chaos

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_device_for_child_processes(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", XLA_FLAGS.format(devices=1))


def test_stops_and_kills_do_not_change_a_run(text_file, tmp_path):
    """A run that is stopped, killed and resumed ends with the same state and losses as an
    uninterrupted run.

    It is stopped by SIGTERM while compiling, by SIGTERM while training, and by Ctrl-C while
    evaluating. It is killed while training. (The command benchmarks/chaos.py kills runs at random
    moments.)
    """
    overrides = (
        f"--config.data.source={text_file}",
        "--config.model.d_model=16",
        "--config.model.num_layers=1",
        "--config.model.context_length=32",
        "--config.train.eval_steps=0",
        "--config.train.checkpoint_every=1000",
        "--config.train.eval_every=100",
    )
    undisturbed, interrupted = (
        chaos.Run(tmp_path / name, "gpt", 200, overrides) for name in ("one", "other")
    )
    undisturbed.start()
    undisturbed.finish()
    logged = undisturbed.output().splitlines()
    assert re.fullmatch(
        r"Step 200: validation loss \d\.\d{4}, \d\.\d{4} bits per byte\. To generate more:",
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
    status, last = interrupt("step  10/200", signal.SIGTERM)
    stopped = r"stopped after step (\d+) and saved; rerun the same command to resume"
    saved = re.fullmatch(stopped, last)
    assert status == 143 and 10 <= int(saved[1]) < 100
    interrupted.start()
    interrupted.wait_for("step  60/200")
    # The run is training, but `kill` returns "evaluating" if the last logged step is a multiple of
    # ten.
    assert interrupted.kill() in ("training", "evaluating")
    status, last = interrupt("step 100/200", signal.SIGINT)
    saved = re.fullmatch(stopped, last)
    assert (
        status == 130 and int(saved[1]) == 100
    )  # step 100 is saved, but its evaluation is not finished
    assert "step 100/200   validation loss" not in interrupted.output()
    interrupted.start()
    interrupted.finish()
    assert chaos.differences(undisturbed, interrupted) == []
    assert not (interrupted.workdir / ".lock").exists()
