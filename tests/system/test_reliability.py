"""Processes that are stopped and killed."""

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
    """Stopped by SIGTERM and Ctrl-C while compiling, training and evaluating; killed while training.

    benchmarks/chaos.py kills runs at random moments.
    """
    overrides = (f"--config.data.source={text_file}", "--config.model.d_model=16", "--config.model.num_layers=1",
                 "--config.model.context_length=32", "--config.train.eval_steps=0",
                 "--config.train.checkpoint_every=1000", "--config.train.eval_every=100")
    undisturbed, asked = (chaos.Run(tmp_path / name, "gpt", 200, overrides) for name in ("one", "other"))
    undisturbed.start()
    undisturbed.finish()
    logged = undisturbed.output().splitlines()
    assert re.fullmatch(r"Step 200: validation loss \d\.\d{4}, \d\.\d{4} bits per byte\. To generate more:", logged[-2])
    assert not re.search("Error|Warning|Traceback", undisturbed.output())
    assert list(undisturbed.workdir.glob("events.out.tfevents*"))

    def ask(text, number):
        asked.start()
        asked.wait_for(text)
        asked.process.send_signal(number)
        started = time.monotonic()
        status = asked.process.wait(60)
        assert time.monotonic() - started < 15
        return status, asked.output().splitlines()[-1]

    status, last = ask(" parameters, on ", signal.SIGTERM)
    assert status == 143 and "stopped without saving; rerun the same command" in last
    status, last = ask("step  10/200", signal.SIGTERM)
    stopped = r"stopped after step (\d+) and saved; rerun the same command to resume"
    saved = re.fullmatch(stopped, last)
    assert status == 143 and 10 <= int(saved[1]) < 100
    asked.start()
    asked.wait_for("step  60/200")
    assert asked.kill() in ("training", "evaluating")  # inferred from the step, which may be a multiple of ten
    status, last = ask("step 100/200", signal.SIGINT)
    saved = re.fullmatch(stopped, last)
    assert status == 130 and int(saved[1]) == 100  # saved before the evaluation
    assert "step 100/200   validation loss" not in asked.output()
    asked.start()
    asked.finish()
    assert chaos.differences(undisturbed, asked) == []
    assert not (asked.workdir / ".lock").exists()
