"""Kills runs at random moments, resumes them, and compares their results with those of an
undisturbed run.

    python benchmarks/chaos.py --kills=100
    python benchmarks/chaos.py --kills=100 --suspensions=0.3 --storage=gs
    python benchmarks/chaos.py --kills=100 --suspensions=0.3
    python benchmarks/chaos.py --kills=100 --processes=2

For each architecture, one run is not disturbed. Others with the same config are killed with SIGKILL
at random moments, about half of them before the first step, and restarted until they are complete.
Parameters, optimizer state and losses are then compared bit for bit. The benchmark takes about 10
seconds per kill, and 20 with --storage=gs, where restarts wait for the lock of the killed run.

With --suspensions, a share of the kills are suspensions instead: the process is stopped with
SIGSTOP, the same command is started again, and some time later the first process continues
(SIGCONT). In object storage, the second process has then taken over the lock, and the first one has
to end without a trace. On a local disk, the second one is refused.

With --processes, each run has several processes, each of which holds and saves a part of the
weights (launch/local_cluster.sh). Half of the kills hit all of them, the others one; the rest then
has to end by itself within a minute.

--storage=gs puts the workdirs into an emulator of Google Cloud Storage, with short leases.

Prints the number of kills in each phase of a run. The exit status is 1 if anything differs.
"""

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags, logging
from measuring import table

from smallgpt_jax import cli, models
from smallgpt_jax.run.checkpoint_folder import UNFINISHED_PATTERN, saved_steps
from smallgpt_jax.run.metrics import read_lines
from smallgpt_jax.run.names import CHECKPOINT_FOLDER, METRICS_FILE
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import remove_folder
from smallgpt_jax.storage.object_storage import is_remote

ROOT = Path(__file__).parent.parent
SECONDS_TO_END = 60  # within which a run ends after one of its processes was killed
EVERY = 10  # steps between two checkpoints and between two evaluations
LEASE = {"LEASE_SECONDS": 8.0, "RENEWAL_SECONDS": 1.0, "POLL_SECONDS": 0.1}
# Runs the command `main` with short leases.
MAIN = f"""
import runpy
from smallgpt_jax.storage import object_lock
vars(object_lock).update({LEASE})
runpy.run_module("smallgpt_jax.main", run_name="__main__", alter_sys=True)
"""


def cluster(num_processes: int) -> list[str]:
    """Returns the begin of a command that trains with several processes."""
    return [
        "env",
        f"PYTHON={sys.executable}",
        f"GRACE_SECONDS={2 * SECONDS_TO_END}",
        "bash",
        str(ROOT / "launch" / "local_cluster.sh"),
        f"--processes={num_processes}",
        "--",
        f"--join_timeout={SECONDS_TO_END // 2}",  # one may be killed before the others join it
    ]


class Run:
    def __init__(
        self,
        workdir: Path,
        architecture: str,
        steps: int,
        overrides: Sequence[str] = (),
        num_processes: int = 1,
    ):
        self.workdir, self.steps, self._num_processes = workdir, steps, num_processes
        self._outputs, self._starts = Path(tempfile.mkdtemp()), 0
        self._command = [
            *([sys.executable, "-c", MAIN] if num_processes == 1 else cluster(num_processes)),
            f"--config=configs/{architecture}.py:tiny",
            f"--workdir={workdir}",
            f"--config.train.steps={steps}",
            "--config.train.log_every=1",
            f"--config.train.checkpoint_every={EVERY}",
            f"--config.train.eval_every={EVERY}",
            "--config.train.eval_steps=40",  # makes evaluations so long that kills hit them
            "--config.mesh.data=1",
            f"--config.mesh.fsdp={num_processes}",  # each process saves a part of the weights
            *overrides,
        ]

    def start(self) -> None:
        self._starts += 1
        self._output = self._outputs / f"{self._starts}.txt"
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Waits until the process has printed `text` or has ended."""
        while text not in self.output() and self.process.poll() is None:
            time.sleep(0.01)

    def finish(self) -> None:
        if self.process.wait():
            raise RuntimeError(f"{self.workdir}: the run failed:\n{self.output()[-8000:]}")

    def kill(self) -> str | None:
        """Kills the process, or some of several. Returns the phase that the run was in, or None if
        the process had already ended.
        """
        victims = [self.process.pid]
        if self._num_processes > 1:
            victims = self._wait_for_processes()
        if len(victims) > 1 and random.random() < 0.5:
            victims = [random.choice(victims)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            status = self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{self.workdir}: still running {SECONDS_TO_END} s after {len(victims)} of "
                f"{self._num_processes} processes were killed:\n{self.output()[-8000:]}"
            ) from None
        if status == 0 or not victims:
            self.finish()
            return None
        return self.phase()

    def _wait_for_processes(self) -> list[int]:
        """Returns the processes that local_cluster.sh has started; [] if they have ended."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while self.process.poll() is None:
            with contextlib.suppress(OSError):  # some have just ended
                processes = [
                    int(pid)
                    for pid in children.read_text("utf-8").split()
                    if b"--process_id" in Path(f"/proc/{pid}/cmdline").read_bytes()
                ]
                if len(processes) == self._num_processes:
                    return processes
            time.sleep(0.01)
        return []

    def suspend(self, seconds: float) -> str | None:
        """Suspends the process and starts a second one. `seconds` after the second one has begun,
        continues the first.

        One of them ends; the other one is `process` from then on. Returns "suspended", or None if
        the process had already ended.
        """
        first, first_output = self.process, self._output
        first.send_signal(signal.SIGSTOP)
        if first.poll() is not None:
            self.finish()
            return None
        self.start()
        second = self.process
        self.wait_for(" parameters, on ")  # printed after the lock is acquired
        time.sleep(seconds)
        first.send_signal(signal.SIGCONT)
        while first.poll() is None and second.poll() is None:
            time.sleep(0.01)
        if (
            second.poll() == 0
        ):  # complete, and the first process has lost its lock or finds nothing to do
            first.wait()
        ended = second if first.poll() is None else first
        if ended is second:
            self.process, self._output = first, first_output
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"{self.workdir}: a process ended with status {ended.returncode}")
        return "suspended"

    def is_saving(self) -> bool:
        folder = self.workdir / CHECKPOINT_FOLDER
        if not is_remote(folder):
            return bool(list(folder.glob(UNFINISHED_PATTERN)))
        return folder.exists() and {path.name for path in folder.iterdir()} > set(
            map(str, saved_steps(folder))
        )

    def phase(self) -> str:
        """Returns what the run was doing when it was killed, inferred from its output and files."""
        logged = self.output()
        if self.is_saving():
            return "saving"
        if "compiled and ready in" not in logged:
            return "compiling" if " parameters, on " in logged else "starting"
        lines = read_lines(self.workdir / METRICS_FILE)
        trained, evaluated = (
            max((line["step"] for line in lines if line["split"] == split), default=0)
            for split in ("train", "eval")
        )
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
                restored = checkpointer.restore(
                    folder,
                    jax.tree.map(
                        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
                    ),
                )
            arrays |= {
                item + jax.tree_util.keystr(path): np.asarray(x)
                for path, x in jax.tree_util.tree_leaves_with_path(restored)
            }
        lines = read_lines(self.workdir / METRICS_FILE)
        return arrays, {
            "lines": len(lines),
            **{(line["split"], line["step"]): line["loss"] for line in lines},
        }


def differences(one: Run, other: Run) -> list[str]:
    """Returns the names of the arrays and losses that are not bit-for-bit equal in the two runs."""
    found = []
    for a, b in zip(one.outcome(), other.outcome()):
        for name in sorted(a.keys() | b.keys(), key=str):
            x, y = (np.asarray(values.get(name, "missing")) for values in (a, b))
            if x.dtype != y.dtype or x.tobytes() != y.tobytes():
                found.append(str(name))
    return found


class Kills(NamedTuple):
    by_phase: collections.Counter  # numbers of kills and suspensions
    different: list[str]  # arrays and losses that differ from those of an undisturbed run
    runs: int


def kill_runs(
    architecture: str,
    folder: Path,
    kills: int,
    steps: int,
    rng: random.Random,
    log=print,
    overrides: Sequence[str] = (),
    suspensions: float = 0.0,
    num_processes: int = 1,
) -> Kills:
    def start_run(name: str) -> Run:
        return Run(folder / name, architecture, steps, overrides, num_processes)

    undisturbed = start_run("undisturbed")
    for _ in range(2):  # the first run fills the compilation cache; only the second run is timed
        remove_folder(undisturbed.workdir)
        undisturbed.start()
        seconds = [time.monotonic()]
        undisturbed.wait_for("compiled and ready in")
        seconds.append(time.monotonic())
        undisturbed.finish()
        seconds.append(time.monotonic())
    to_first_step, after_first_step = np.diff(seconds)
    by_phase, different, runs = collections.Counter(), [], 0
    while by_phase.total() < kills:
        runs += 1
        victim, is_running = start_run(f"victim-{runs}"), False
        while by_phase.total() < kills:
            if not is_running:
                victim.start()
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, to_first_step))
            else:
                victim.wait_for("compiled and ready in")
                time.sleep(rng.uniform(0, after_first_step / 2))
            is_running = rng.random() < suspensions
            phase = (
                victim.suspend(rng.uniform(0, to_first_step + after_first_step))
                if is_running
                else victim.kill()
            )
            if phase is None:
                break
            by_phase[phase] += 1
        else:
            if not is_running:
                victim.start()
        victim.finish()
        different += [f"{victim.workdir}: {name}" for name in differences(undisturbed, victim)]
        log(
            f"{architecture}: {by_phase.total()} kills, {runs} completed runs, {len(different)} "
            "arrays or losses that differ"
        )
    return Kills(by_phase, different, runs)


_KILLS = flags.DEFINE_integer(
    "kills", 20, "Total number of kills, over all architectures.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps per run.", lower_bound=EVERY)
_ARCHITECTURES = flags.DEFINE_list(
    "architectures", list(models.ARCHITECTURES), "Architectures to train."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed for the random moments of the kills.")
_SUSPENSIONS = flags.DEFINE_float(
    "suspensions", 0.0, "Share of the kills that are suspensions instead.", 0.0, 1.0
)
_STORAGE = flags.DEFINE_enum(
    "storage",
    "local",
    ["local", "gs"],
    "Where the workdirs are: on the local disk, or in an emulator of Google Cloud Storage.",
)
_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes of each run.", lower_bound=1)
_OVERRIDES = flags.DEFINE_multi_string(
    "override", [], "Flag of the runs, such as --override=--config.model.num_layers=1."
)


@contextlib.contextmanager
def emulated_bucket() -> Iterator[Path]:
    """Starts the emulator of the tests. Yields the path of its bucket."""
    emulator = subprocess.Popen(
        [sys.executable, ROOT / "tests" / "gcs_emulator.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    url = f"http://localhost:{int(emulator.stdout.readline())}"
    os.environ.update(
        STORAGE_EMULATOR_HOST=url,
        TENSORSTORE_GCS_HTTP_URL=url,
        GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false",
    )  # needs requests that the emulator does not support
    object_storage.file_system()  # configures gcsfs
    try:
        yield object_storage.to_epath("bucket")
    finally:
        emulator.communicate()


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.set_verbosity(
        logging.ERROR
    )  # hides orbax's warning that only some items of a checkpoint are read
    rng = random.Random(_SEED.value)
    random.seed(_SEED.value)
    results, names = {}, _ARCHITECTURES.value
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.environ["XDG_CACHE_HOME"], os.environ["TMPDIR"], tempfile.tempdir = (
            f"{folder}/cache",
            folder,
            None,
        )
        root = stack.enter_context(emulated_bucket()) if _STORAGE.value == "gs" else Path(folder)
        for i, name in enumerate(names):
            kills = _KILLS.value * (i + 1) // len(names) - _KILLS.value * i // len(names)
            (root / name).mkdir(exist_ok=True)
            results[name] = kill_runs(
                name,
                root / name,
                kills,
                _STEPS.value,
                rng,
                overrides=_OVERRIDES.value,
                suspensions=_SUSPENSIONS.value,
                num_processes=_PROCESSES.value,
            )
    total = sum((found.by_phase for found in results.values()), collections.Counter())
    phases = [phase for phase, _ in total.most_common()]
    print(
        "\n"
        + table(
            ["model", *phases, "all kills", "completed runs", "arrays and losses that differ"],
            (
                [
                    name,
                    *(found.by_phase[phase] for phase in phases),
                    found.by_phase.total(),
                    found.runs,
                    len(found.different),
                ]
                for name, found in results.items()
            ),
        )
    )
    different = [line for found in results.values() for line in found.different]
    print("\n".join(different))
    print(
        json.dumps(
            {
                "kills": total.total(),
                "storage": _STORAGE.value,
                "suspensions": total["suspended"],
                "processes": _PROCESSES.value,
                "differences": len(different),
                "seed": _SEED.value,
                "hits": {name: dict(found.by_phase) for name, found in results.items()},
            }
        )
    )
    if different:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)
