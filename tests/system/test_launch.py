"""Tests of the launch scripts: dry runs, and real runs with fakes of gcloud, srun, python and other programs.

A fake program records its arguments and then runs Python code that the test provides. The fake gcloud runs the commands
for a TPU worker in a local shell, in which HOME is another folder.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

LAUNCH = ROOT / "launch"
SCRIPTS = ("local_cluster.sh", "tpu_vm.sh", "slurm.sbatch")

FAKE = """#!{python} -SE
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path
folder, name, args = Path({folder!r}), Path(sys.argv[0]).name, sys.argv[1:]
env = {{key: os.environ[key] for key in os.environ if key.startswith(("JAX_", "XLA_"))}}
with open(folder / "calls", "a") as file:
    file.write(json.dumps(dict(name=name, args=args, env=env, cwd=os.getcwd(), pid=os.getpid())) + "\\n")
exec((folder / f"{{name}}.py").read_text())
"""

GCLOUD = """
worker = folder / "worker"
if "describe" in args:
    state, *later = (folder / "states").read_text().split()
    (folder / "states").write_text(" ".join(later or [state]))
    sys.exit("no answer") if state == "BROKEN" else print(state)
elif "scp" in args:
    shutil.copy(args[4], worker / args[5].removeprefix("gpt:"))
elif "ssh" in args:
    command = next(arg for arg in args if arg.startswith("--command=")).removeprefix("--command=")
    home = {**os.environ, "HOME": str(worker)}
    sys.exit(subprocess.run(["bash", "-c", command], cwd=worker, env=home).returncode)
"""

UV = """
if args[0] == "venv":
    Path(".venv/bin").mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "bin/python", ".venv/bin/python")
"""


class Machine:
    """Runs scripts with fake programs, whose folder comes first in PATH, and records the calls of these programs."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "calls").touch()

    def fake(self, name: str, program: str = "", folder: Path | None = None) -> None:
        path = (folder or self.folder / "bin") / name
        path.write_text(FAKE.format(python=sys.executable, folder=str(self.folder)))
        path.chmod(0o755)
        (self.folder / f"{name}.py").write_text(program)

    def environment(self, **more) -> dict:
        kept = {key: value for key, value in os.environ.items()
                if not key.startswith(("JAX_", "XLA_", "SLURM_", "PYTHON"))}
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "POLL_SECONDS": "0.01", **more}

    def start(self, script: Path, *args, cwd: Path = ROOT, **more) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", script, *args], cwd=cwd, env=self.environment(**more), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # If pytest runs in the background, pytest and its child processes ignore SIGINT. Bash cannot trap a signal
            # that was ignored when bash was started.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    def run(self, script: Path, *args, **more) -> subprocess.CompletedProcess:
        process = self.start(script, *args, **more)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self, name: str) -> list[dict]:
        calls = map(json.loads, (self.folder / "calls").read_text().splitlines())
        return [call for call in calls if call["name"] == name]

    def args(self, name: str) -> list[list[str]]:
        return [call["args"] for call in self.calls(name)]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def wait_until(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.02)


def commands(text: str) -> list[list[str]]:
    """Returns the arguments of each command in `text`, which has one command per line."""
    return [shlex.split(line, comments=True) for line in text.splitlines()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # empty for a zombie
    except OSError:
        return False


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed: pip install -e '.[test]'")
    result = subprocess.run([shellcheck, LAUNCH / script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script, args, message", [
    ("local_cluster.sh", [], "missing --"),
    ("local_cluster.sh", ["--config=configs/gpt.py"], "--config=configs/gpt.py: unknown flag"),
    ("local_cluster.sh", ["--processes=none", "--"], "--processes=none"),
    ("local_cluster.sh", ["--devices=0", "--"], "--devices=0"),
    ("tpu_vm.sh", [], "missing command"),
    ("tpu_vm.sh", ["restart"], "restart: unknown command"),
    ("tpu_vm.sh", ["status", "--zone=z"], "--name="),
    ("tpu_vm.sh", ["status", "--name=gpt"], "--zone="),
    ("tpu_vm.sh", ["status", "--name=gpt", "--zone=z", "--zones=z"], "--zones=z: unknown flag"),
    ("tpu_vm.sh", ["status", "--name=gpt", "--zone=z", "--", "x"], "unexpected arguments after --"),
    ("tpu_vm.sh", ["create", "--name=gpt", "--zone=z"], "--accelerator_type="),
    ("tpu_vm.sh", ["start", "--name=gpt", "--zone=z", "--"], "after --"),
    ("tpu_vm.sh", ["start", "--name=gpt", "--zone=z", "--config=c.py"], "follow --"),
    ("tpu_vm.sh", ["start", "--name=gpt", "--zone=z", "--", "--workdir=~/bucket/x"], "--bucket=NAME"),
    ("slurm.sbatch", ["--config=c.py"], "start it with sbatch"),
])
def test_wrong_usage_is_one_line(machine, script, args, message):
    result = machine.run(LAUNCH / script, *args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and message in result.stderr


@pytest.mark.parametrize("script", ["local_cluster.sh", "tpu_vm.sh"])
def test_help(machine, script):
    result = machine.run(LAUNCH / script, "--help")
    assert result.returncode == 0
    assert f"launch/{script}" in result.stdout


# local_cluster.sh

CLUSTER = LAUNCH / "local_cluster.sh"
MAIN = ["-m", "smallgpt_jax.main"]


def test_cluster_starts_every_process(machine):
    machine.fake("python", "print('of', args[4])")
    result = machine.run(
        CLUSTER, "--processes=3", "--devices=2", "--", "--workdir=runs/a b", "it's", cwd=machine.folder,
        XLA_FLAGS="--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2")
    assert (result.returncode, result.stdout, result.stderr) == (0, "of --process_id=0\n", "")
    calls = sorted(machine.calls("python"), key=lambda call: call["args"][4])
    assert len(calls) == 3
    port = re.fullmatch(r"--coordinator=127\.0\.0\.1:(\d+)", calls[0]["args"][2])[1]
    for i, call in enumerate(calls):
        assert call["args"] == [*MAIN, f"--coordinator=127.0.0.1:{port}", "--num_processes=3",
                                f"--process_id={i}", "--workdir=runs/a b", "it's"]
        assert call["cwd"] == str(ROOT)
        assert call["env"] == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2",
                               "XLA_FLAGS": "--xla_a=1  --xla_b=2"}


def test_cluster_dry_run(machine):
    machine.fake("python")
    result = machine.run(CLUSTER, "--dry-run", "--", "--workdir=runs/a b", XLA_FLAGS="--xla_a=1")
    coordinator = re.search(r"--coordinator=127\.0\.0\.1:\d+", result.stdout)[0]
    assert commands(result.stdout) == [
        ["env", "JAX_PLATFORMS=cpu", "JAX_NUM_CPU_DEVICES=1", "python", *MAIN, coordinator,
         "--num_processes=2", f"--process_id={i}", "--workdir=runs/a b"] for i in (0, 1)]
    assert machine.calls("python") == []


def test_cluster_uses_PYTHON(machine):
    machine.fake("mine", folder=machine.folder)
    assert machine.run(CLUSTER, "--", "--x", PYTHON=str(machine.folder / "mine")).returncode == 0
    assert len(machine.calls("mine")) == 2


def test_cluster_needs_a_python(machine):
    result = machine.run(CLUSTER, "--", "--x", PYTHON="/not/there")
    assert result.returncode == 1
    assert result.stderr == "error: /not/there: not found; activate the environment, or set PYTHON\n"


def test_cluster_stops_all_when_one_fails(machine):
    machine.fake("python", """
print("output of", args[4], flush=True)
if args[4] == "--process_id=1":
    while len((folder / "calls").read_text().splitlines()) < 4:
        time.sleep(0.02)
    print("it broke")
    sys.exit(3)
if args[4] == "--process_id=2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
""")
    result = machine.run(CLUSTER, "--processes=4", "--", "--x", GRACE_SECONDS="0")
    assert result.returncode == 3
    assert result.stdout == "output of --process_id=0\n"
    assert result.stderr.splitlines() == [
        "process 1: output of --process_id=1", "process 1: it broke", "process 1: exit status 3"]
    assert not any(is_running(call["pid"]) for call in machine.calls("python"))


def test_cluster_waits_before_stopping_the_others(machine):
    machine.fake("python", """
if args[4] == "--process_id=0":
    sys.exit(4)
time.sleep(0.5)
(folder / "saved").touch()
sys.exit(5)
""")
    result = machine.run(CLUSTER, "--", "--x", GRACE_SECONDS="10")
    assert result.returncode == 4
    assert (machine.folder / "saved").exists()
    assert result.stderr == "process 0: exit status 4\nprocess 1: exit status 5\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cluster_forwards_signals(machine, number):
    machine.fake("python", """
def end(number, _):
    (folder / f"received {args[4]}").write_text(str(number))
    sys.exit(6)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
(folder / f"ready {args[4]}").touch()
while True:
    time.sleep(0.05)  # short, since a signal that arrives just before the sleep is handled only after it
""")
    process = machine.start(CLUSTER, "--", "--x")
    wait_until(lambda: len(list(machine.folder.glob("ready *"))) == 2)
    process.send_signal(number)
    assert process.wait(10) == 6
    assert [path.read_text() for path in machine.folder.glob("received *")] == [str(int(number))] * 2


# tpu_vm.sh

SLICE = ["--name=gpt", "--zone=z"]
ACCELERATOR = ["--accelerator_type=v5litepod-16", "--runtime_version=v2-alpha-tpuv5-lite"]
RUN = ["--config=configs/gpt.py", "--workdir=~/bucket/runs/a b",
       "--note=it's \"so\": $HOME `id` \\ * ; =~/x", "--nothing="]

ZONE = ["--zone=z"]
RESOURCE = ["gcloud", "compute", "tpus", "queued-resources"]
CREATE = [*RESOURCE, "create", "gpt", "--node-id=gpt", *ZONE, "--accelerator-type=v5litepod-16",
          "--runtime-version=v2-alpha-tpuv5-lite"]
DESCRIBE = [*RESOURCE, "describe", "gpt", *ZONE, "--format=value(state.state)"]
DELETE = [*RESOURCE, "delete", "gpt", *ZONE, "--force", "--quiet"]
WORKER_SCRIPT = "bash smallgpt_jax/launch/tpu_vm.sh worker"


def ssh(command: str, worker: str = "all") -> list[str]:
    return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "gpt", *ZONE, f"--worker={worker}",
            f"--command={command}"]


def install(get: str, bucket: str = "''") -> list[str]:
    return ssh(f"set -e; if test -f smallgpt_jax/launch/tpu_vm.sh; then {WORKER_SCRIPT} idle; fi; {get}; "
               f"{WORKER_SCRIPT} install {bucket}")


UNPACK = "mkdir -p smallgpt_jax; tar -xzf smallgpt_jax.tar.gz -C smallgpt_jax"
COPY = [["mkdir", "-p", "build"],
        ["git", "archive", "--format=tar.gz", "--output=build/smallgpt_jax.tar.gz", "HEAD"],
        ["gcloud", "compute", "tpus", "tpu-vm", "scp", "build/smallgpt_jax.tar.gz", "gpt:", *ZONE,
         "--worker=all"]]
CLONE = ("if test -d smallgpt_jax; then git -C smallgpt_jax pull --quiet --ff-only; "
         "else git clone --quiet https://x.org/y smallgpt_jax; fi")
START = [ssh(f"{WORKER_SCRIPT} ready mine"), ssh(f"{WORKER_SCRIPT} start --config=c.py '--workdir=~/bucket/x'")]


class Cloud(Machine):
    """A `Machine` with a fake gcloud, a repository with the launch scripts, and a folder for the only TPU worker."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.repository, self.worker = folder / "repository", folder / "worker"
        shutil.copytree(LAUNCH, self.repository / "launch")
        git = ["git", "-C", self.repository, "-c", "user.name=x", "-c", "user.email=x"]
        for command in ("init", "add .", "commit --no-gpg-sign --message=x"):
            subprocess.run([*git, *command.split()], check=True, capture_output=True)
        (self.worker / ".local/bin").mkdir(parents=True)
        self.fake("gcloud", GCLOUD)
        self.fake("python", "time.sleep(60)")
        self.fake("uv", UV, folder=self.worker / ".local/bin")
        self.fake("gcsfuse", "(folder / 'mounted').touch()")
        self.fake("mountpoint", "sys.exit(not (folder / 'mounted').exists())")
        for name in ("curl", "sudo"):
            self.fake(name, "sys.exit('not in a test')")

    def states(self, *states: str) -> None:
        """Sets the states that the fake gcloud reports, in order. The last state is repeated."""
        (self.folder / "states").write_text(" ".join(states))

    def tpu(self, command: str, *args, **more) -> subprocess.CompletedProcess:
        return self.run(self.repository / "launch/tpu_vm.sh", command, *SLICE, *args, **more)


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    for call in cloud.calls("python"):
        if is_running(call["pid"]):
            os.kill(call["pid"], signal.SIGKILL)


@pytest.mark.parametrize("command, expected", [
    (["create", *ACCELERATOR], [CREATE, DESCRIBE]),
    (["create", *ACCELERATOR, "--spot", "--no_wait"], [[*CREATE, "--spot"]]),
    (["install"], [*COPY, install(UNPACK)]),
    (["install", "--bucket=gs://mine"], [*COPY, install(UNPACK, "mine")]),
    (["install", "--repo=https://x.org/y"], [install(CLONE)]),
    (["start", "--bucket=mine", "--", "--config=c.py", "--workdir=~/bucket/x"], START),
    (["resume", *ACCELERATOR, "--bucket=mine", "--", "--config=c.py", "--workdir=~/bucket/x"],
     [DESCRIBE, DELETE, CREATE, DESCRIBE, *COPY, install(UNPACK, "mine"), *START]),
    (["logs"], [ssh("tail -n 100 -F smallgpt_jax.log", "0")]),
    (["logs", "--worker=3"], [ssh("tail -n 100 -F smallgpt_jax.log", "3")]),
    (["status"], [DESCRIBE, ssh(f"{WORKER_SCRIPT} status")]),
    (["stop"], [ssh(f"{WORKER_SCRIPT} stop 30")]),
    (["delete"], [DELETE]),
], ids=lambda value: " ".join(value[:2]) if isinstance(value[0], str) else "")
def test_tpu_dry_run(cloud, command, expected):
    result = cloud.tpu(command[0], "--dry-run", *command[1:])
    assert (result.returncode, result.stderr) == (0, "")
    assert commands(result.stdout) == expected
    with_project = cloud.tpu(command[0], "--dry-run", "--project=p", *command[1:])
    assert commands(with_project.stdout) == [
        [part for word in line for part in ([word, "--project=p"] if word == "--zone=z" else [word])]
        for line in expected]
    assert cloud.calls("gcloud") == []
    assert not (cloud.repository / "build").exists()


def test_tpu_create_waits_until_active(cloud):
    cloud.states("ACCEPTED", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "BROKEN", "PROVISIONING",
                 "ACTIVE")
    result = cloud.tpu("create", *ACCELERATOR)
    assert result.returncode == 0
    assert cloud.args("gcloud") == [CREATE[1:], *[DESCRIBE[1:]] * 6]
    assert [line.split(" is ")[1] for line in result.stdout.splitlines()] == [
        "ACCEPTED", "WAITING_FOR_RESOURCES", "unknown", "PROVISIONING", "ACTIVE"]
    logged = [line for line in result.stderr.splitlines() if line.startswith("+ ")]
    assert commands("\n".join(line[2:] for line in logged)) == [CREATE, DESCRIBE]


def test_tpu_create_reports_failure(cloud):
    cloud.states("ACCEPTED", "FAILED")
    result = cloud.tpu("create", *ACCELERATOR)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "error: gpt is FAILED; for the reason, run gcloud compute tpus queued-resources describe gpt --zone=z")


def test_tpu_run_from_install_to_stop(cloud):
    cloud.states("ACTIVE")
    too_early = cloud.tpu("start", "--bucket=mine", "--", *RUN)
    assert too_early.returncode != 0 and cloud.calls("python") == []

    result = cloud.tpu("install", "--bucket=mine")
    assert result.returncode == 0, result.stderr
    assert (cloud.worker / "smallgpt_jax/launch/tpu_vm.sh").read_text() == (LAUNCH / "tpu_vm.sh").read_text()
    assert cloud.args("uv")[1] == ["pip", "install", "--quiet", "--python=.venv/bin/python", "-c",
                                   "constraints.txt", "-e", ".[tpu]"]
    assert [args[-2:] for args in cloud.args("gcsfuse")] == [["mine", str(cloud.worker / "bucket")]]
    assert "no run; no log" in cloud.tpu("status").stdout

    result = cloud.tpu("start", "--bucket=mine", "--", *RUN)
    assert result.returncode == 0, result.stderr
    wait_until(lambda: cloud.calls("python"))
    call, = cloud.calls("python")
    assert call["args"] == [*MAIN, RUN[0], f"--workdir={cloud.worker}/bucket/runs/a b", *RUN[2:]]
    assert call["cwd"] == str(cloud.worker / "smallgpt_jax")
    assert os.getsid(call["pid"]) == call["pid"]  # a new session, so the process outlives the ssh session
    assert len(cloud.calls("gcsfuse")) == 1  # the bucket is mounted once

    (cloud.worker / "smallgpt_jax.log").write_text("step 1\nstep 2\n")
    assert "running; step 2" in cloud.tpu("status").stdout
    for command in (["start", "--", "--x"], ["install"]):
        refused = cloud.tpu(*command)
        assert refused.returncode == 1
        assert re.search("error: .*: a run is in progress; stop it first", refused.stderr)

    assert cloud.tpu("stop").returncode == 0
    assert not is_running(call["pid"])
    assert "no run" in cloud.tpu("status").stdout


def test_tpu_stop_kills_processes_that_ignore_sigterm(cloud):
    cloud.states("ACTIVE")
    cloud.fake("python", """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
""")
    assert cloud.tpu("install").returncode == 0
    assert cloud.tpu("start", "--", "--x").returncode == 0
    wait_until(lambda: (cloud.worker / "smallgpt_jax.log").read_text() == "deaf\n")
    assert cloud.tpu("stop", GRACE_SECONDS="1").returncode == 0
    wait_until(lambda: not is_running(cloud.calls("python")[0]["pid"]), 2)


def test_tpu_resume_recreates_the_slice(cloud):
    cloud.states("SUSPENDING", "SUSPENDING", "SUSPENDED", "WAITING_FOR_RESOURCES", "ACTIVE")
    result = cloud.tpu("resume", *ACCELERATOR, "--spot", "--bucket=mine", "--", *RUN)
    assert result.returncode == 0, result.stderr
    assert [args[3] for args in cloud.args("gcloud")] == [
        "describe", "describe", "describe", "delete", "create", "describe", "describe", "scp", "ssh", "ssh",
        "ssh"]
    assert cloud.args("gcloud")[3:5] == [DELETE[1:], [*CREATE[1:], "--spot"]]
    wait_until(lambda: cloud.calls("python"))
    assert cloud.args("python")[0][3] == f"--workdir={cloud.worker}/bucket/runs/a b"


def test_tpu_resume_creates_a_missing_slice(cloud):
    """The slice is missing, for example, if an earlier `resume` was interrupted after it had deleted the slice."""
    cloud.states("BROKEN", "ACTIVE")
    assert cloud.tpu("resume", *ACCELERATOR, "--", "--x").returncode == 0
    assert [args[3] for args in cloud.args("gcloud")][:3] == ["describe", "create", "describe"]
    wait_until(lambda: cloud.calls("python"))


def test_tpu_resume_keeps_an_existing_slice(cloud):
    cloud.states("WAITING_FOR_RESOURCES", "ACTIVE")
    assert cloud.tpu("resume", *ACCELERATOR, "--", "--x").returncode == 0
    assert not any("delete" in args or "create" in args for args in cloud.args("gcloud"))
    wait_until(lambda: cloud.calls("python"))


def test_tpu_delete_asks_for_confirmation(cloud):
    result = cloud.tpu("delete")  # standard input is empty, so there is no confirmation
    assert (result.returncode, result.stderr) == (1, "error: nothing was deleted\n")
    assert cloud.calls("gcloud") == []
    assert cloud.tpu("delete", "--yes").returncode == 0
    assert cloud.args("gcloud") == [DELETE[1:]]


# slurm.sbatch

SBATCH = LAUNCH / "slurm.sbatch"
SRUN = ["srun", "--kill-on-bad-exit=1"]


def test_slurm_settings_are_one_task_per_gpu():
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SBATCH.read_text(), re.M))
    assert settings["ntasks-per-node"] == settings["gpus-per-node"]
    assert "gpus-per-task" not in settings and "requeue" in settings and settings["open-mode"] == "append"


def test_slurm_dry_run(machine):
    machine.fake("srun")
    result = machine.run(SBATCH, "--dry-run", "--workdir=/shared/a b")
    assert commands(result.stdout) == [[*SRUN, "python", *MAIN, "--workdir=/shared/a b"]]
    assert machine.calls("srun") == []


def test_slurm_runs_srun(machine):
    machine.fake("srun", "sys.exit(7)")
    result = machine.run(SBATCH, "--workdir=/shared/it's a", SLURM_JOB_ID="5", SLURM_CPUS_PER_TASK="8")
    assert result.returncode == 7
    assert machine.args("srun") == [
        [*SRUN[1:], "--cpus-per-task=8", "python", *MAIN, "--workdir=/shared/it's a"]]


def test_slurm_requires_the_repository_root(machine):
    result = machine.run(SBATCH, "--x", cwd=machine.folder, SLURM_JOB_ID="5")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


def test_slurm_requeues_before_the_time_limit(machine):
    machine.fake("srun", """
while not (folder / "requeued").exists():
    time.sleep(0.02)
""")
    machine.fake("scontrol", "(folder / 'requeued').touch()")
    process = machine.start(SBATCH, "--x", SLURM_JOB_ID="5")
    wait_until(lambda: machine.calls("srun"))
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=10)
    assert machine.args("scontrol") == [["requeue", "5"]]
