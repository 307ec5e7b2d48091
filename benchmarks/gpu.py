"""Runs all GPU measurements of this project in one call and writes their results to one JSON file.

    pip install -c constraints.txt -e '.[bench,cuda]'
    python benchmarks/gpu.py --output=gpu.json
    python benchmarks/gpu.py --rehearsal --output=rehearsal.json   # tiny models, on any machine

The measurements run one after the other, each in its own process:

- attention: relative errors of the outputs and gradients of cuDNN's attention, for causal masks,
  windows and grouped queries. The reference is computed in float32.
- losses: 50 training steps of gpt, size quickstart, in float32. They run on the CPU with the
  highest precision of matrix products, and on the GPU with the highest and with the default
  precision. The losses are compared.
- training: speed of all architectures at size paper in bfloat16, beside the roofline of the
  compiled program, and of PyTorch with torch.compile (train_step.py)
- decoding: speed of decoding at 124M parameters, also of transformers (inference.py)
- flags: training speed of gpt with several groups of XLA flags, measured in turn (train_step.py)

A measurement that fails or exceeds its time limit is reported as an error, and the others still
run. The whole call takes at most --minutes; measurements that would begin in the last minute are
skipped. The file is rewritten after each measurement.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from absl import app, flags

from smallgpt_jax.storage.atomic import write_atomically

ROOT = Path(__file__).parents[1]
FLAG_GROUPS = {
    "default": "",
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
    "no autotuning": "--xla_gpu_autotune_level=0",
    "no Triton": "--xla_gpu_enable_triton_gemm=false",
}
LOSS_STEPS = 50

_OUTPUT = flags.DEFINE_string("output", "gpu.json", "JSON file to write.")
_MINUTES = flags.DEFINE_float(
    "minutes", 9.5, "Time limit of the whole call, in minutes.", lower_bound=0
)
_ONLY = flags.DEFINE_list("only", None, "Measurements to run. Default: all.")
_REHEARSAL = flags.DEFINE_bool(
    "rehearsal", False, "Run every measurement with tiny models, also without a GPU."
)
_HERE = flags.DEFINE_enum(
    "here", None, ["attention", "losses"], "Run this measurement in this process and print it."
)


def commands() -> dict[str, tuple[list[str], float]]:
    """Returns the command of each measurement and its time limit in seconds."""
    here = [__file__, *["--rehearsal"] * _REHEARSAL.value]
    train_step = ["benchmarks/train_step.py"]
    training = [*train_step, "--architectures=gpt,pgpt,lgpt,cgpt", "--rounds=5"]
    flag_run = [*train_step, "--architectures=gpt", "--peer=none", "--rounds=3"]
    decoding = ["--size=124M", "--batches=1,8", "--contexts=1024"]
    if _REHEARSAL.value:
        training = flag_run = [
            *train_step,
            "--config=configs/gpt.py:tiny",
            "--sizes=recipe",
            "--steps=2",
            "--rounds=1",
            "--peer=none",
        ]
        decoding = [
            "--size=10M",
            "--batches=1",
            "--contexts=64",
            "--new_tokens=4",
            "--repeats=1",
            "--only=gpt",
        ]
    return {
        "attention": ([*here, "--here=attention"], 90),
        "losses": ([*here, "--here=losses"], 120),
        "training": (training, 270),
        "decoding": (["benchmarks/inference.py", *decoding], 180),
        **{
            f"flags, {name}, round {round_}": (flag_run, 90)
            for round_ in (1, 2)
            for name in FLAG_GROUPS
        },
    }


def attention_errors() -> dict:
    """Returns ‖a − b‖ / ‖b‖ of this machine's attention backend in bfloat16 (a) and the reference
    in float32 on the CPU (b): {mask: {"output", "dq", "dk", "dv"}}.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from smallgpt_jax.ops.attention import attention
    from smallgpt_jax.ops.attention_mask import AttentionMask

    backend = "cudnn" if jax.default_backend() == "gpu" else "xla"
    heads, time, width = (4, 64, 16) if _REHEARSAL.value else (12, 1024, 64)
    rng = np.random.default_rng(0)

    def outputs_and_gradients(arrays, dtype: str, mask, backend: str) -> list[np.ndarray]:
        *qkv, weights = (jnp.asarray(x, dtype) for x in arrays)
        y, gradients = jax.vjp(
            jax.jit(lambda q, k, v: attention(q, k, v, mask, backend=backend)), *qkv
        )
        return [np.float64(x) for x in (y, *gradients(weights))]

    errors = {}
    for groups in (heads, heads // 4):
        for window in (0, time // 4 + 1):
            arrays = [
                np.asarray(
                    jnp.asarray(rng.standard_normal((2, n, time, width)), "bfloat16"), np.float32
                )
                for n in (heads, groups, groups, heads)
            ]
            found = outputs_and_gradients(arrays, "bfloat16", AttentionMask(window), backend)
            with jax.default_device(jax.devices("cpu")[0]):
                expected = outputs_and_gradients(
                    arrays, "float32", AttentionMask(window), "reference"
                )
            errors[f"{heads} heads, {groups} key-value heads, window {window or 'none'}"] = {
                name: float(np.linalg.norm(a - b) / np.linalg.norm(b))
                for name, a, b in zip(("output", "dq", "dk", "dv"), found, expected)
            }
    return {"backend": backend, "errors": errors}


def training_losses() -> dict:
    """Returns the losses of LOSS_STEPS training steps on the CPU and on the first device, and their
    differences.
    """
    import jax
    import numpy as np
    from measuring import Training

    from configs import gpt
    from smallgpt_jax.data.packing import Batch
    from smallgpt_jax.devices import sharding

    config = gpt.get_config("tiny" if _REHEARSAL.value else "quickstart")
    config.train.steps = LOSS_STEPS
    config.mesh.data = 1
    tokens_N = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8).astype(
        np.int32
    )  # Python code as bytes
    rows, length = config.train.batch_size, config.model.context_length + 1

    def losses(device, precision: str) -> list[float]:
        with jax.default_device(device), jax.default_matmul_precision(precision):
            training, starts, values = Training(config, [device]), np.random.default_rng(0), []
            sharded = sharding.batch_sharding(training.program.mesh)
            for _ in range(LOSS_STEPS):
                rows_Bx1 = starts.integers(0, len(tokens_N) - length, (rows, 1))
                training.batch = Batch(
                    jax.device_put(tokens_N[rows_Bx1 + np.arange(length)], sharded)
                )
                values.append(float(training.run()["loss"]))
        return values

    on_cpu = losses(jax.devices("cpu")[0], "highest")
    found = {precision: losses(jax.devices()[0], precision) for precision in ("highest", "default")}
    return {
        "cpu": on_cpu,
        **found,
        "largest_relative_difference": {
            precision: float(np.max(np.abs(np.divide(values, on_cpu) - 1)))
            for precision, values in found.items()
        },
    }


def run(command: list[str], seconds: float, xla_flags: str) -> dict:
    """Runs a Python command. Returns the JSON of its last line of output, or {"error": …} with its
    last lines.
    """
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip(),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    if "JAX_PLATFORMS" not in environment and not _REHEARSAL.value:
        environment["JAX_PLATFORMS"] = "cuda,cpu"  # without a GPU, every measurement fails
    try:
        result = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {seconds:.0f} seconds"}
    try:
        return json.loads(result.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"error": f"status {result.returncode}: {result.stderr[-2000:]}"}


def main(_) -> None:
    if _HERE.value:
        print(json.dumps({"attention": attention_errors, "losses": training_losses}[_HERE.value]()))
        return
    started, results = time.monotonic(), {"rehearsal": _REHEARSAL.value}
    for name, (command, limit) in commands().items():
        measurement, *variant = name.split(", ")
        if _ONLY.value is not None and measurement not in _ONLY.value:
            continue
        left = 60 * _MINUTES.value - (time.monotonic() - started)
        print(f"{name} …", file=sys.stderr, flush=True)
        results[name] = (
            run(command, min(limit, left), FLAG_GROUPS[variant[0]] if variant else "")
            if left > 60
            else {"error": "skipped: no time left; raise --minutes or use --only"}
        )
        if "error" in results[name]:
            print(results[name]["error"], file=sys.stderr, flush=True)
        write_atomically(Path(_OUTPUT.value), json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    app.run(main)
