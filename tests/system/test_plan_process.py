"""Tests of the command `plan`, started as users start it, with the CPU compiler and the TPU compiler."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys

import jax
import pytest
from conftest import ROOT, load_config, run

from smallgpt_jax.training.program import build_program

pytestmark = pytest.mark.slow
FIELDS = {"model__num_layers": 2, "model__d_model": 16}


def test_memory_matches_the_compiled_steps():
    result = run("plan", "--config=configs/gpt.py:tiny", "--topology=cpu:8", "--json",
                 *(f"--config.{name.replace('__', '.')}={value}" for name, value in FIELDS.items()))
    assert result.returncode == 0, result.stderr
    planned = json.loads(result.stdout)
    program = build_program(load_config("gpt", **FIELDS), jax.devices()[:8])
    memory_stats = program.compile_train_step().memory_analysis()
    eval_needs = program.compile_eval_step().memory_analysis()
    assert planned["temp_bytes"] == pytest.approx(memory_stats.temp_size_in_bytes, rel=0.1)
    assert planned["argument_bytes"] == memory_stats.argument_size_in_bytes
    assert planned["eval_temp_bytes"] == pytest.approx(eval_needs.temp_size_in_bytes, rel=0.1)
    # An evaluation step reads only the weights, but the optimizer's moments stay in memory. They are twice as large as
    # the weights.
    moments = 2 * 4 * planned["parameters"]
    assert planned["eval_needed_bytes"] - planned["eval_temp_bytes"] == pytest.approx(
        eval_needs.argument_size_in_bytes + moments, rel=0.01)
    assert planned["fits"] and planned["devices"] == 8 and planned["estimated_cycles"] is None
    assert planned["flops_per_step"] == planned["flops_per_token"] * 8 * 64
    assert set(planned["collectives"]) == {"all-reduce"}


needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler: pip install -c constraints.txt -e '.[plan]'")


@needs_tpu_compiler
def test_a_stopped_compilation():
    """On SIGTERM, `plan` ends at once, without the stack that the TPU compiler's own handler prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "smallgpt_jax.plan", "--config=configs/gpt.py", "--topology=v5e:2x2"],
        cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""}, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stderr.readline(), process.stderr.readline()]
        assert lines[1] == "compiling the training step\n", lines
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[1] == "stopped\n"
        assert process.returncode == 143
    finally:
        process.kill()


@needs_tpu_compiler
def test_the_topology_determines_the_dtype():
    result = run("plan", "--config=configs/gpt.py:tiny", "--config.model.dtype=auto", "--topology=v5e:2x2",
                 "--inference", "--json", XLA_FLAGS="")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["dtype"] == "bfloat16"


@needs_tpu_compiler
def test_a_tpu_program():
    result = run("plan", "--config=configs/lgpt.py:tiny", "--topology=v5e:2x2", "--config.model.context_length=128",
                 "--config.model.num_layers=2", "--json", XLA_FLAGS="")  # libtpu rejects flags of the CPU compiler
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if not re.search(r": (\d+m )?\d+s$", line)]
    assert lines == ["compiling for v5e:2x2; large models take minutes", "compiling the training step",
                     "compiling the evaluation step"]
    planned = json.loads(result.stdout)
    assert planned["fits"] and planned["hbm_bytes"] == 16 * 2**30 and planned["devices"] == 4
    assert planned["estimated_cycles"] > 0 and planned["kernel_cycles"] > 0
    seconds = (planned["estimated_cycles"] + planned["kernel_cycles"]) / 1.5e9
    assert planned["estimated_step_seconds"] == pytest.approx(seconds)
    assert planned["estimated_mfu"] == pytest.approx(
        planned["flops_per_step"] / 4 / (seconds * 197e12))
    assert set(planned["collectives"]) == {"all-reduce"}
