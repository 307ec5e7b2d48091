"""Kills runs at random moments, resumes them, and compares their results with those of an undisturbed run.

    python benchmarks/chaos.py --kills=100

For each architecture, one run is trained without a kill. Other runs with the same config are killed with SIGKILL at
random moments, and restarted after each kill until they are complete. Their parameters, optimizer state and losses are
then compared with those of the undisturbed run, bit for bit. About half of the kills come before the first step. The
benchmark takes about 10 seconds per kill.

Prints the number of kills in each phase of a run. The last line is a JSON object. The exit status is 1 if anything
differs.
"""

import collections
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags, logging

from smallgpt_jax import cli, models
from smallgpt_jax.checkpoint import UNFINISHED_PATTERN
from smallgpt_jax.metrics import METRICS_FILE, read_lines
from smallgpt_jax.workdir import CHECKPOINT_FOLDER

ROOT = Path(__file__).parent.parent
EVERY = 10  # steps between two checkpoints and between two evaluations


class Run:
    """A workdir and the process that trains in it."""

    def __init__(self, workdir: Path, architecture: str, steps: int, overrides: tuple[str, ...] = ()):
        self.workdir, self.steps = workdir, steps
        self._output = workdir.with_suffix(".out")
        self._command = [
            sys.executable, "-m", "smallgpt_jax.main", f"--config=configs/{architecture}.py:tiny",
            f"--workdir={workdir}", f"--config.train.steps={steps}", "--config.train.log_every=1",
            f"--config.train.checkpoint_every={EVERY}", f"--config.train.eval_every={EVERY}",
            "--config.train.eval_steps=40", *overrides]  # makes evaluations so long that kills hit them

    def start(self) -> None:
        with self._output.open("w") as file:
            self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str) -> None:
        """Waits until the process has printed `text` or has ended."""
        while text not in self.output() and self.process.poll() is None:
            time.sleep(0.01)

    def finish(self) -> None:
        if self.process.wait():
            raise RuntimeError(f"{self.workdir}: the run failed:\n{self.output()[-2000:]}")

    def kill(self) -> str | None:
        """Kills the process. Returns the phase that the run was in, or None if the process had already ended."""
        self.process.kill()
        if self.process.wait() >= 0:
            self.finish()
            return None
        return self.phase()

    def phase(self) -> str:
        """Returns what the run was doing when it was killed, for example "compiling" or "saving".

        The phase is inferred from the output and the files of the run.
        """
        logged, checkpoints = self.output(), self.workdir / CHECKPOINT_FOLDER
        if list(checkpoints.glob(UNFINISHED_PATTERN)):
            return "saving"
        if "compiled and ready in" not in logged:
            return "compiling" if " parameters, on " in logged else "starting"
        lines = read_lines(self.workdir / METRICS_FILE)
        evaluated = max((line["step"] for line in lines if line["split"] == "eval"), default=0)
        trained = max((line["step"] for line in lines if line["split"] == "train"), default=0)
        if evaluated == self.steps:
            return "writing a text"
        return "evaluating" if trained > evaluated and trained % EVERY == 0 else "training"

    def outcome(self) -> tuple[dict[str, np.ndarray], dict]:
        """Returns all arrays of the last checkpoint and all logged losses."""
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # not the saved sharding
        arrays = {}
        for item in ("params", "opt_state"):
            folder = self.workdir / CHECKPOINT_FOLDER / str(self.steps) / item
            with ocp.StandardCheckpointer() as checkpointer:
                shapes = checkpointer.metadata(folder).item_metadata.tree
                restored = checkpointer.restore(folder, jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes))
            arrays |= {item + jax.tree_util.keystr(path): np.asarray(x)
                       for path, x in jax.tree_util.tree_leaves_with_path(restored)}
        lines = read_lines(self.workdir / METRICS_FILE)
        losses = {(line["split"], line["step"]): line["loss"] for line in lines}
        losses["lines"] = len(lines)
        return arrays, losses


def differences(one: Run, other: Run) -> list[str]:
    """Returns the names of the arrays and losses that are not bit-for-bit equal in the two runs."""
    found = []
    for a, b in zip(one.outcome(), other.outcome()):
        for name in sorted(a.keys() | b.keys(), key=str):
            x, y = (np.asarray(values.get(name, "missing")) for values in (a, b))
            if x.dtype != y.dtype or x.tobytes() != y.tobytes():
                found.append(str(name))
    return found


def kill_runs(architecture: str, folder: Path, kills: int, steps: int, rng: random.Random, log=print,
              overrides: tuple[str, ...] = ()) -> tuple[collections.Counter, list[str], int]:
    """Trains runs of an architecture and kills them `kills` times in total.

    Returns the number of kills in each phase, the differences from an undisturbed run, and the number of runs.
    """
    undisturbed = Run(folder / "undisturbed", architecture, steps, overrides)
    seconds = []
    for _ in range(2):  # the first run fills the compilation cache; only the second run is timed
        subprocess.run(["rm", "-rf", undisturbed.workdir], check=True)
        undisturbed.start()
        seconds = [time.monotonic()]
        undisturbed.wait_for("compiled and ready in")
        seconds.append(time.monotonic())
        undisturbed.finish()
        seconds.append(time.monotonic())
    to_first_step, after_first_step = np.diff(seconds)
    kills_by_phase, different, runs = collections.Counter(), [], 0
    while sum(kills_by_phase.values()) < kills:
        runs += 1
        victim = Run(folder / f"victim-{runs}", architecture, steps, overrides)
        while sum(kills_by_phase.values()) < kills:
            victim.start()
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, to_first_step))
            else:
                victim.wait_for("compiled and ready in")
                time.sleep(rng.uniform(0, after_first_step / 2))
            phase = victim.kill()
            if phase is None:
                break
            kills_by_phase[phase] += 1
        else:
            victim.start()
        victim.finish()
        different += [f"{victim.workdir}: {name}" for name in differences(undisturbed, victim)]
        log(f"{architecture}: {sum(kills_by_phase.values())} kills, {runs} completed runs, {len(different)} arrays or "
            "losses that differ")
    return kills_by_phase, different, runs


_KILLS = flags.DEFINE_integer("kills", 20, "Total number of kills, over all architectures.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps per run.", lower_bound=EVERY)
_ARCHITECTURES = flags.DEFINE_list("architectures", list(models.ARCHITECTURES), "Architectures to train.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed for the random moments of the kills.")


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.set_verbosity(logging.ERROR)  # hides orbax's warning that only some items of a checkpoint are read
    rng = random.Random(_SEED.value)
    results, names = {}, _ARCHITECTURES.value
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        for i, name in enumerate(names):
            kills = _KILLS.value * (i + 1) // len(names) - _KILLS.value * i // len(names)
            (Path(folder) / name).mkdir()
            results[name] = kill_runs(name, Path(folder) / name, kills, _STEPS.value, rng)
    phases = [phase for phase, _ in sum((kills_by_phase for kills_by_phase, _, _ in results.values()),
                                        collections.Counter()).most_common()]
    print("\n| model | " + " | ".join(phases) + " | all kills | completed runs | arrays and losses that differ |\n"
          + "|---" * (len(phases) + 4) + "|")
    for name, (kills_by_phase, different, runs) in results.items():
        print(f"| {name} | " + " | ".join(str(kills_by_phase[phase]) for phase in phases)
              + f" | {sum(kills_by_phase.values())} | {runs} | {len(different)} |")
    different = [line for _, lines, _ in results.values() for line in lines]
    print("\n".join(different))
    print(json.dumps({"kills": sum(sum(kills_by_phase.values()) for kills_by_phase, _, _ in results.values()),
                      "differences": len(different), "seed": _SEED.value,
                      "hits": {name: dict(kills_by_phase) for name, (kills_by_phase, _, _) in results.items()}}))
    if different:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)
