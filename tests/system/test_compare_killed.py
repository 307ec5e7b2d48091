"""A test of `compare`: a comparison is killed, and then resumed by two processes at the same
time, one of them with eight devices.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, XLA_FLAGS, call
from run_helpers import SMALL, flags_of

from smallgpt_jax.data.corpus import open_existing
from smallgpt_jax.run.config_file import read_config
from smallgpt_jax.run.metrics import read_lines

pytestmark = pytest.mark.slow


def test_a_killed_comparison_resumes_and_repeats_nothing(text_file, tmp_path):
    """Two processes finish a comparison that was killed while it trained the second of its three
    runs.

    The first run is not trained again, and the second run resumes from its checkpoint of step 4.
    """
    output = tmp_path / "out"
    arguments = (
        "compare",
        "--config=configs/compare/paper.py:tiny",
        "--config.compare.names=gpt",
        "--config.compare.seeds=3",
        "--config.compare.decoding=false",
        "--config.train.steps=8",
        "--config.train.eval_every=4",
        "--config.train.checkpoint_every=4",
        "--config.optimizer.decay_steps=8",
        *flags_of(SMALL),
        "--config.data.packing=best_fit",
        f"--config.data.source={text_file}",
        f"--output={output}",
    )

    def started(name: str) -> subprocess.Popen:
        with (tmp_path / name).open("w") as out:
            return subprocess.Popen(
                [sys.executable, "-m", f"smallgpt_jax.{arguments[0]}", *arguments[1:]],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "XLA_FLAGS": XLA_FLAGS.format(devices=1)},
            )

    killed = started("killed.txt")
    checkpoint = output / "runs" / "gpt-seed1338" / "checkpoints" / "4"
    while not checkpoint.is_dir() and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    _, errors = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, errors

    def files() -> dict:
        return {
            path: path.stat().st_mtime_ns
            for path in (output / "runs" / "gpt-seed1337").rglob("*")
            if path.is_file()
        }

    before = files()
    process = started("first.txt")
    while "[2/3]" not in (tmp_path / "first.txt").read_text() and process.poll() is None:
        time.sleep(0.01)
    other = call(*arguments)
    _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors, other.returncode, other.stderr) == (0, "", 0, "")
    assert files() == before
    first, second = (tmp_path / "first.txt").read_text(), other.stdout
    assert "[1/3]" not in first + second and "[2/3] gpt, seed 1338" in first
    sessions = re.findall(r"steps of 8 × 32 tokens(.*)", first + second)
    # The startup line of run 2 ends in ", 4 done", because run 2 resumes at step 4. Run 3 starts
    # from scratch.
    assert sorted(sessions) == ["", ", 4 done"]
    assert "is training it" in first + second
    assert [path.name for path in sorted((output / "runs").iterdir())] == [
        "gpt-seed1337",
        "gpt-seed1338",
        "gpt-seed1339",
    ]
    # The final report contains all seeds, with the memory, speed and FLOPs that the runs recorded.
    runs = json.loads((output / "results.json").read_text())["runs"]
    assert [run["seed"] for run in runs] == [1337, 1338, 1339] and all(
        run["is_finished"] for run in runs
    )
    for run_ in runs:
        folder = output / "runs" / f"gpt-seed{run_['seed']}"
        config = read_config(folder)
        padding = open_existing(config.data).pack("train", "best_fit", False, 32).padding
        assert padding > 0 and run_["memory_bytes"] > 0 and run_["tokens_per_second"] > 0
        evals = [line for line in read_lines(folder / "metrics.jsonl") if line["split"] == "eval"]
        assert [
            (point["step"], point["loss"], point["tokens"], point["flops"])
            for point in run_["curve"]
        ] == [
            (
                line["step"],
                line["loss"],
                round(line["step"] * 8 * 32 * (1 - padding)),  # tokens exclude padding
                line["step"] * 8 * 32 * run_["flops_per_token"],
            )
            for line in evals
        ]
