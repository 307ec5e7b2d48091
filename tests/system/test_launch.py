"""Tests of local_cluster.sh and slurm.sbatch, and of wrong usage of all launch scripts."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from launch_helpers import LAUNCH, MAIN, Machine, commands, is_running, wait_until

pytestmark = pytest.mark.slow

SCRIPTS = ("local_cluster.sh", "tpu_vm.sh", "tpu_watch.sh", "tpu_worker.sh", "slurm.sbatch")


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_nothing(script):
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside_python) if beside_python.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed: pip install -c constraints.txt -e '.[test]'")
    result = subprocess.run([shellcheck, "-x", LAUNCH / script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "script, args, message",
    [
        ("local_cluster.sh", [], "missing --"),
        ("local_cluster.sh", ["--config=configs/gpt.py"], "--config=configs/gpt.py: unknown flag"),
        ("local_cluster.sh", ["--processes=none", "--"], "--processes=none"),
        ("local_cluster.sh", ["--devices=0", "--"], "--devices=0"),
        ("tpu_vm.sh", [], "missing command"),
        ("tpu_vm.sh", ["restart"], "restart: unknown command"),
        ("tpu_vm.sh", ["status", "--zone=z"], "--name="),
        ("tpu_vm.sh", ["status", "--name=gpt"], "--zone="),
        ("tpu_vm.sh", ["status", "--name=gpt", "--zone=z", "--zones=z"], "--zones: unknown flag"),
        ("tpu_vm.sh", ["status", "--name=gpt", "--zone"], "--zone: missing value"),
        (
            "tpu_vm.sh",
            ["status", "--name=gpt", "--zone=z", "--", "x"],
            "unexpected arguments after --",
        ),
        ("tpu_vm.sh", ["create", "--name=gpt", "--zone=z"], "--accelerator_type="),
        ("tpu_vm.sh", ["start", "--name=gpt", "--zone=z", "--"], "after --"),
        ("tpu_vm.sh", ["start", "--name=gpt", "--zone=z", "--config=c.py"], "follow --"),
        (
            "tpu_vm.sh",
            ["start", "--name=gpt", "--zone=z", "--", "--workdir=~/bucket/x"],
            "--bucket=NAME",
        ),
        (
            "tpu_vm.sh",
            ["start", "--name=gpt", "--zone=z", "--stage=~/bucket/a:b", "--", "--x"],
            "--bucket=NAME",
        ),
        (
            "tpu_vm.sh",
            ["start", "--name=gpt", "--zone=z", "--stage=a", "--", "--x"],
            "--stage: expected FROM:TO",
        ),
        (
            "tpu_vm.sh",
            [
                "create",
                "--name=gpt",
                "--zone=z",
                "--accelerator_type=a",
                "--runtime_version=b",
                "--max_wait=1h",
            ],
            "--max_wait",
        ),
        ("slurm.sbatch", ["--config=c.py"], "start it with sbatch"),
    ],
)
def test_wrong_usage_is_one_line(machine, script, args, message):
    result = machine.run(LAUNCH / script, *args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert (
        result.stderr.startswith("error: ")
        and result.stderr.count("\n") == 1
        and message in result.stderr
    )


@pytest.mark.parametrize("script", ["local_cluster.sh", "tpu_vm.sh"])
def test_help(machine, script):
    result = machine.run(LAUNCH / script, "--help")
    assert result.returncode == 0
    assert f"launch/{script}" in result.stdout


# local_cluster.sh

CLUSTER = LAUNCH / "local_cluster.sh"


def test_cluster_starts_every_process(machine):
    machine.fake("python", "print('of', args[4])")
    result = machine.run(
        CLUSTER,
        "--processes=3",
        "--devices=2",
        "--",
        "--workdir=runs/a b",
        "it's",
        cwd=machine.folder,
        XLA_FLAGS="--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2",
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "of --process_id=0\n", "")
    calls = sorted(machine.calls("python"), key=lambda call: call["args"][4])
    assert len(calls) == 3
    port = re.fullmatch(r"--coordinator=127\.0\.0\.1:(\d+)", calls[0]["args"][2])[1]
    for i, call in enumerate(calls):
        assert call["args"] == [
            *MAIN,
            f"--coordinator=127.0.0.1:{port}",
            "--num_processes=3",
            f"--process_id={i}",
            "--workdir=runs/a b",
            "it's",
        ]
        assert call["cwd"] == str(ROOT)
        assert call["env"] == {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "2",
            "XLA_FLAGS": "--xla_a=1  --xla_b=2",
        }


def test_cluster_dry_run(machine):
    machine.fake("python")
    result = machine.run(CLUSTER, "--dry-run", "--", "--workdir=runs/a b", XLA_FLAGS="--xla_a=1")
    coordinator = re.search(r"--coordinator=127\.0\.0\.1:\d+", result.stdout)[0]
    assert commands(result.stdout) == [
        [
            "env",
            "JAX_PLATFORMS=cpu",
            "JAX_NUM_CPU_DEVICES=1",
            "python",
            *MAIN,
            coordinator,
            "--num_processes=2",
            f"--process_id={i}",
            "--workdir=runs/a b",
        ]
        for i in (0, 1)
    ]
    assert machine.calls("python") == []


def test_cluster_uses_PYTHON(machine):
    machine.fake("mine", folder=machine.folder)
    assert machine.run(CLUSTER, "--", "--x", PYTHON=str(machine.folder / "mine")).returncode == 0
    assert len(machine.calls("mine")) == 2


def test_cluster_needs_a_python(machine):
    result = machine.run(CLUSTER, "--", "--x", PYTHON="/not/there")
    assert result.returncode == 1
    assert (
        result.stderr == "error: /not/there: not found; activate the environment, or set PYTHON\n"
    )


def test_cluster_stops_all_when_one_fails(machine):
    machine.fake(
        "python",
        """
if args[4] == "--process_id=2":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("output of", args[4], flush=True)
(folder / f"ready {args[4]}").touch()
if args[4] == "--process_id=1":
    while len(list(folder.glob("ready *"))) < 4:
        time.sleep(0.02)
    print("it broke")
    sys.exit(3)
time.sleep(60)
""",
    )
    result = machine.run(CLUSTER, "--processes=4", "--", "--x", GRACE_SECONDS="0")
    assert result.returncode == 3
    assert result.stdout == "output of --process_id=0\n"
    assert result.stderr.splitlines() == [
        "process 1: output of --process_id=1",
        "process 1: it broke",
        "process 1: exit status 3",
    ]
    assert not any(is_running(call["pid"]) for call in machine.calls("python"))


def test_cluster_waits_before_stopping_the_others(machine):
    machine.fake(
        "python",
        """
if args[4] == "--process_id=0":
    sys.exit(4)
time.sleep(0.5)
(folder / "saved").touch()
sys.exit(5)
""",
    )
    result = machine.run(CLUSTER, "--", "--x", GRACE_SECONDS="10")
    assert result.returncode == 4
    assert (machine.folder / "saved").exists()
    assert result.stderr == "process 0: exit status 4\nprocess 1: exit status 5\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cluster_forwards_signals(machine, number):
    machine.fake(
        "python",
        """
def end(number, _):
    (folder / f"received {args[4]}").write_text(str(number))
    sys.exit(6)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
(folder / f"ready {args[4]}").touch()
while True:
    time.sleep(0.05)  # short, since a signal that arrives just before the sleep is handled only after it
""",
    )
    process = machine.start(CLUSTER, "--", "--x")
    wait_until(lambda: len(list(machine.folder.glob("ready *"))) == 2)
    process.send_signal(number)
    assert process.wait(10) == 6
    assert [path.read_text() for path in machine.folder.glob("received *")] == [
        str(int(number))
    ] * 2


# slurm.sbatch

SBATCH = LAUNCH / "slurm.sbatch"
SRUN = ["srun", "--kill-on-bad-exit=1"]


def test_slurm_settings_are_one_task_per_gpu():
    settings = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", SBATCH.read_text(), re.M))
    assert settings["ntasks-per-node"] == settings["gpus-per-node"]
    assert (
        "gpus-per-task" not in settings
        and "requeue" in settings
        and settings["open-mode"] == "append"
    )


def test_slurm_dry_run(machine):
    machine.fake("srun")
    result = machine.run(SBATCH, "--dry-run", "--workdir=/shared/a b")
    assert commands(result.stdout) == [[*SRUN, "python", *MAIN, "--workdir=/shared/a b"]]
    assert machine.calls("srun") == []


def test_slurm_runs_srun(machine):
    machine.fake("srun", "sys.exit(7)")
    result = machine.run(
        SBATCH, "--workdir=/shared/it's a", SLURM_JOB_ID="5", SLURM_CPUS_PER_TASK="8"
    )
    assert result.returncode == 7
    assert machine.args("srun") == [
        [*SRUN[1:], "--cpus-per-task=8", "python", *MAIN, "--workdir=/shared/it's a"]
    ]


def test_slurm_requires_the_repository_root(machine):
    result = machine.run(SBATCH, "--x", cwd=machine.folder, SLURM_JOB_ID="5")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "python, words",
    [
        (
            "apptainer exec --nv image.sif python",
            ["apptainer", "exec", "--nv", "image.sif", "python"],
        ),
        ("FOLDER/my env/python", ["FOLDER/my env/python"]),
    ],
)
def test_slurm_python_can_be_a_container_command(machine, python, words):
    (machine.folder / "my env").mkdir()
    machine.fake("python", folder=machine.folder / "my env")
    python, *words = (word.replace("FOLDER", str(machine.folder)) for word in (python, *words))
    result = machine.run(SBATCH, "--dry-run", "--x", PYTHON=python)
    assert commands(result.stdout) == [[*SRUN, *words, *MAIN, "--x"]]


# The fake srun is a run that takes one second to save when it gets SIGTERM. The fake scancel sends
# this signal. As in a real cluster, requeueing ends the run at once.
SAVING = """
def save(*_):
    time.sleep(1)
    (folder / "saved").touch()
    sys.exit(int((folder / "status").read_text()))
signal.signal(signal.SIGTERM, save)
(folder / "pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.02)
"""
SCANCEL = "os.kill(int((folder / 'pid').read_text()), signal.SIGTERM)"
SCONTROL = """
if not (folder / "saved").exists():
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
sys.exit((folder / "disabled").exists() and "Requested operation is presently disabled for job 5")
"""


@pytest.mark.parametrize(
    "status, requeueing, requeues", [(143, True, 1), (143, False, 5), (0, True, 0)]
)
def test_slurm_saves_and_requeues_before_the_time_limit(machine, status, requeueing, requeues):
    """The job is requeued after the run has saved. It is not requeued if the run has finished."""
    for name, program in dict(srun=SAVING, scancel=SCANCEL, scontrol=SCONTROL).items():
        machine.fake(name, program)
    (machine.folder / "status").write_text(str(status))
    if not requeueing:
        (machine.folder / "disabled").touch()
    process = machine.start(SBATCH, "--x", SLURM_JOB_ID="5")
    wait_until(lambda: (machine.folder / "pid").exists())
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: machine.calls("scancel"))
    process.send_signal(signal.SIGTERM)  # Slurm also signals the batch script
    _, err = process.communicate(timeout=10)
    assert process.returncode == status, err
    assert (machine.folder / "saved").exists()
    assert machine.args("scancel") == [["--signal=TERM", "5.0"]]
    assert machine.args("scontrol") == [["requeue", "5"]] * requeues
    assert (
        err == ""
        if requeueing
        else err.endswith(
            "error: the job could not be requeued; to resume the run, submit it again\n"
        )
    )


def test_slurm_repeats_requests_to_a_busy_controller(machine):
    busy = """
count = folder / f"{name}-count"
count.write_text(str(int(count.read_text()) + 1) if count.exists() else "1")
if count.read_text() != "3":
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller")
"""
    machine.fake("srun", SAVING)
    machine.fake("scancel", busy + SCANCEL)
    machine.fake("scontrol", busy + SCONTROL)
    (machine.folder / "status").write_text("143")
    process = machine.start(SBATCH, "--x", SLURM_JOB_ID="5")
    wait_until(lambda: (machine.folder / "pid").exists())
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143 and (machine.folder / "saved").exists()
    assert machine.args("scancel") == [["--signal=TERM", "5.0"]] * 3
    assert machine.args("scontrol") == [["requeue", "5"]] * 3
    assert "could not be requeued" not in err
