"""Tests of the command `plan`, started as users start it, with the CPU compiler and the TPU
compiler.
"""

import contextlib
import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys

import jax
import pytest
from conftest import OWN_FLAGS, ROOT, call, load_config
from run_helpers import flags_of

from smallgpt_jax.training.build import build_program

pytestmark = pytest.mark.slow
FIELDS = {"model__num_layers": 1, "model__d_model": 16}


def test_memory_matches_the_compiled_steps():
    result = call(
        "plan",
        "--config=configs/gpt.py:tiny",
        "--topology=cpu:8",
        "--json",
        *flags_of(FIELDS),
    )
    assert result.returncode == 0, result.stderr
    planned = json.loads(result.stdout)
    program = build_program(load_config("gpt", **FIELDS), jax.devices()[:8])
    memory_stats = program.compiled_train_step.memory_analysis()
    eval_needs = program.compiled_eval_step.memory_analysis()
    assert planned["temp_bytes"] == pytest.approx(memory_stats.temp_size_in_bytes, rel=0.1)
    assert planned["argument_bytes"] == memory_stats.argument_size_in_bytes
    assert planned["eval_temp_bytes"] == pytest.approx(eval_needs.temp_size_in_bytes, rel=0.1)
    # An evaluation step reads only the weights, but the optimizer's moments stay in memory. They
    # are twice as large as the weights, and divided among the devices, except for those of the three
    # scales of width 16.
    scales = 3 * 16
    moments = 2 * 4 * ((planned["parameters"] - scales) / 8 + scales)
    assert planned["eval_needed_bytes"] - planned["eval_temp_bytes"] == pytest.approx(
        eval_needs.argument_size_in_bytes + moments, rel=0.01
    )
    assert planned["fits"] and planned["devices"] == 8 and planned["estimated_cycles"] is None
    assert planned["flops_per_step"] == planned["flops_per_token"] * 8 * 64
    assert set(planned["collectives"]) == {"all-gather", "all-reduce"}


def test_a_notebook_plans_before_it_trains():
    """Afterwards, JAX has this machine's devices, and its settings and variables are as before."""
    code = """if True:
        import os, jax, smallgpt_jax
        before = dict(os.environ), jax.config.jax_platforms, jax.config.jax_enable_compilation_cache
        fields = {"model.num_layers": 1, "model.d_model": 16}
        estimate = smallgpt_jax.plan_inference("gpt:tiny", "cpu:3", fields, batch=2)
        after = dict(os.environ), jax.config.jax_platforms, jax.config.jax_enable_compilation_cache
        print(estimate.batch, after == before, len(jax.devices()))
        try:
            smallgpt_jax.plan_inference("gpt:tiny", "cpu:3", fields)
        except smallgpt_jax.UserError as error:
            print(error)
    """
    fast = [flag for flag in OWN_FLAGS if "{devices}" not in flag]
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": " ".join(fast)},
        capture_output=True,
        text=True,
    )
    first, refusal = result.stdout.splitlines()
    assert first == "2 True 1"
    assert refusal.startswith("--topology=cpu:3: JAX already runs in this process, with fewer CPU")


needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler: pip install -c constraints.txt -e '.[plan]'",
)


@needs_tpu_compiler
def test_a_stopped_compilation():
    """On a terminal, `plan` shows the time. On SIGTERM it ends at once, without the TPU compiler's
    stack trace.
    """
    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "smallgpt_jax.plan",
            "--config=configs/gpt.py",
            "--topology=v5e:2x2",
        ],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=terminal,
    )
    os.close(terminal)
    try:
        shown = ""
        while not re.search(r"compiling the training step for v5e:2x2 … \d+s", shown):
            shown += os.read(reader, 1000).decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143 and process.stdout.read() == b""
        with contextlib.suppress(OSError):  # the end
            while more := os.read(reader, 1000).decode():
                shown += more
        assert shown.endswith("stopped\r\n") and "***" not in shown, shown
    finally:
        process.kill()
        os.close(reader)


@needs_tpu_compiler
def test_tpu_programs():
    """The topology also determines the dtype of decoding."""
    code = """if True:
        import dataclasses, json, smallgpt_jax
        fields = {"model.context_length": 128, "model.num_layers": 1}
        planned = smallgpt_jax.plan("gpt:tiny", "v5e:2x2", fields)
        print(json.dumps(dataclasses.asdict(planned.estimate)))
        fields["model.dtype"] = "auto"
        print(smallgpt_jax.plan_inference("gpt:tiny", "v5e:2x2", fields).dtype)
    """
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": ""},  # libtpu rejects flags of the CPU compiler
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    first, dtype = result.stdout.splitlines()
    assert dtype == "bfloat16"
    planned = json.loads(first)
    assert planned["fits"] and planned["hbm_bytes"] == 16 * 2**30 and planned["devices"] == 4
    assert planned["estimated_cycles"] > 0 and planned["kernel_cycles"] > 0
    seconds = (planned["estimated_cycles"] + planned["kernel_cycles"]) / 1.5e9
    assert planned["estimated_step_seconds"] == pytest.approx(seconds)
    assert planned["estimated_mfu"] == pytest.approx(
        planned["flops_per_step"] / 4 / (seconds * 197e12)
    )
    assert set(planned["collectives"]) == {"all-gather", "reduce-scatter", "all-reduce"}
