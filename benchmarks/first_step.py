"""Measures how long a training run takes to start, with an empty and with a filled compilation
cache.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --config=configs/pgpt.py:quickstart --rounds=3
    python benchmarks/first_step.py --parts   # where the time of a cold start goes

The benchmark has its own cache folder, in which the token store is already prepared. Each round
runs three processes: one that only imports `smallgpt_jax.main`; a cold one, which trains for one
step with an empty compilation cache; and a warm one, with the programs that the cold one compiled.
The table has the seconds since the start of the process, their median over rounds and their range,
of these events:

- started: the first line of the run is printed, after the initialization of the model
- compiled: the training step and the evaluation step are compiled
- first step: the loss of the first step is printed
- evaluated: the checkpoint is saved, and the validation loss is printed
- ended: the run has printed a sample of the model's text, and the process has ended

--parts measures the parts of a cold start one after the other. A training run computes the last
three at the same time.
"""

import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

ROOT = Path(__file__).parents[1]
# Event → pattern of the line that the run prints at this event.
EVENTS = {
    "started": r".* parameters, on ",
    "compiled": "compiled and ready",
    "first step": r"step 1/1   loss",
    "evaluated": r"step 1/1   validation loss",
}

_CONFIG = flags.DEFINE_string("config", "configs/gpt.py:quickstart", "The recipe to train.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Number of rounds.", lower_bound=1)
_PARTS = flags.DEFINE_bool("parts", False, "Measure the parts of a cold start instead.")


def python(arguments: list[str], cache: Path) -> tuple[float, list[tuple[float, str]]]:
    """Runs Python with a cache folder. Returns its seconds, and [(seconds since the start, line of
    output)].
    """
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would replace the folder in `cache`
    started, lines = time.perf_counter(), []
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        lines.append((time.perf_counter() - started, line))
    if process.wait():
        sys.exit(f"python {' '.join(arguments)}: failed with status {process.returncode}")
    return time.perf_counter() - started, lines


def run_once(cache: Path) -> dict[str, float]:
    """Trains one step in a new workdir. Returns the seconds until each event."""
    with tempfile.TemporaryDirectory() as workdir:
        seconds, lines = python(
            [
                "-m",
                "smallgpt_jax.main",
                f"--config={_CONFIG.value}",
                f"--workdir={workdir}",
                "--config.train.steps=1",
            ],
            cache,
        )
    times = {
        event: next(at for at, line in lines if re.match(pattern, line))
        for event, pattern in EVENTS.items()
    }
    return {**times, "ended": seconds}


def measure_parts() -> dict[str, float]:
    """Returns the seconds of each part of a cold start. Nothing of this project is imported
    before.
    """
    started, seconds = time.perf_counter(), {}

    def end(part: str) -> None:
        nonlocal started
        seconds[part], started = time.perf_counter() - started, time.perf_counter()

    sys.path.insert(0, str(ROOT))
    from smallgpt_jax import cli  # noqa: F401
    from smallgpt_jax.training import trainer  # noqa: F401
    from smallgpt_jax.training.build import build_program

    end("imports")
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    path, _, size = _CONFIG.value.partition(":")
    recipe = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    program = build_program(recipe.get_config(size or "paper"))
    end("config, mesh and shapes of the model")
    program.compiled_train_step  # noqa: B018
    end("tracing and compilation of the training step")
    jax.block_until_ready(program.initial_state(0))
    end("initialization, with compilation")
    program.compiled_eval_step  # noqa: B018
    end("tracing and compilation of the evaluation step")
    return seconds


def main(argv) -> None:
    if _PARTS.value:
        seconds = measure_parts()
        print(
            "| part | seconds |\n|---|---|\n"
            + "\n".join(f"| {part} | {s:.1f} |" for part, s in seconds.items())
        )
        print(json.dumps({"config": _CONFIG.value, "parts": seconds}))
        return
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        run_once(cache)  # prepares the token store
        for _ in range(_ROUNDS.value):
            imports, _ = python(["-c", "import smallgpt_jax.main"], cache)
            shutil.rmtree(cache / "smallgpt_jax" / "compiled")
            rounds.append({"imports": imports, "cold": run_once(cache), "warm": run_once(cache)})
    events = [*EVENTS, "ended"]
    print("| | imports | " + " | ".join(events) + " |\n" + "|---" * (len(events) + 2) + "|")
    for kind in ("cold", "warm"):
        columns = [
            [r["imports"] for r in rounds],
            *([r[kind][event] for r in rounds] for event in events),
        ]
        print(
            f"| {kind} | "
            + " | ".join(
                f"{statistics.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
                for column in columns
            )
            + " |"
        )
    print(json.dumps({"config": _CONFIG.value, "rounds": rounds}))


if __name__ == "__main__":
    app.run(main)
