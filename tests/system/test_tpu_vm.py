"""Tests of tpu_vm.sh: dry runs, and real runs with fakes of gcloud, python and other programs.

The fake gcloud runs the commands for a TPU worker in a local shell, in which HOME is another
folder. For the commands of tpu_worker.sh that the file `unreachable` lists, it fails to connect,
once for each.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from launch_helpers import LAUNCH, MAIN, Machine, commands, is_running, wait_until

pytestmark = pytest.mark.slow

GCLOUD = """
def read(name):
    with open(f"{root}/{name}") as file:
        return file.read()

def write(name, text):
    with open(f"{root}/{name}", "w") as file:
        file.write(text)

worker = f"{root}/worker"
workers = [f"{root}/{name}" for name in sorted(os.listdir(root)) if name.startswith("worker")]
if "describe" in args:
    file = "states" if "queued-resources" in args else "node states"
    state, *later = read(file).split()
    write(file, " ".join(later or [state]))
    if state in ("SUSPENDED", "PREEMPTED") and os.path.exists(worker):
        if os.path.exists(f"{worker}/smallgpt_jax.pid"):
            os.killpg(int(read("worker/smallgpt_jax.pid")), 9)
        os.rename(worker, f"{root}/preempted {time.time_ns()}")
    if state == "BROKEN":
        sys.exit("no answer")
    if state == "NOT_FOUND":
        sys.exit("ERROR: (gcloud.x) NOT_FOUND: Resource 'gpt' was not found.")
    print(state)
elif "create" in args:
    if not os.path.exists(worker):
        from shutil import copytree
        copytree(f"{root}/new worker", worker)
elif "scp" in args:
    from shutil import copy
    for worker in workers:
        copy(args[4], f"{worker}/" + args[5].removeprefix("gpt:"))
elif "ssh" in args:
    from subprocess import run
    command = next(arg for arg in args if arg.startswith("--command=")).removeprefix("--command=")
    failures = read("unreachable").split() if os.path.exists(f"{root}/unreachable") else []
    if failures and f"tpu_worker.sh {failures[0]}" in command:
        write("unreachable", " ".join(failures[1:]))
        workers = []
    if not workers:
        print("cannot connect", file=sys.stderr)
        sys.exit(255)
    sys.exit(max(run(["bash", "-c", command], cwd=worker, env={**os.environ, "HOME": worker}).returncode
                 for worker in workers))
"""

UV = """
if args[0] == "venv":
    os.makedirs(".venv/bin", exist_ok=True)
    shutil.copy(f"{root}/bin/python", ".venv/bin/python")
"""

SLICE = ["--name=gpt", "--zone=z"]
ACCELERATOR = ["--accelerator_type=v5litepod-16", "--runtime_version=v2-alpha-tpuv5-lite"]
RUN = [
    "--config=configs/gpt.py",
    "--workdir=~/bucket/runs/a b",
    '--note=it\'s "so": $HOME `id` \\ * ; =~/x',
    "--nothing=",
]

ZONE = ["--zone=z"]
RESOURCE = ["gcloud", "compute", "tpus", "queued-resources"]
CREATE = [
    *RESOURCE,
    "create",
    "gpt",
    "--node-id=gpt",
    *ZONE,
    "--accelerator-type=v5litepod-16",
    "--runtime-version=v2-alpha-tpuv5-lite",
]
DESCRIBE = [*RESOURCE, "describe", "gpt", *ZONE, "--format=value(state.state)"]
NODE = ["gcloud", "compute", "tpus", "tpu-vm", "describe", "gpt", *ZONE, "--format=value(state)"]
DELETE = [*RESOURCE, "delete", "gpt", *ZONE, "--force", "--quiet"]
WORKER_SCRIPT = "bash smallgpt_jax/launch/tpu_worker.sh"


def ssh(command: str, worker: str = "all") -> list[str]:
    return [
        "gcloud",
        "compute",
        "tpus",
        "tpu-vm",
        "ssh",
        "gpt",
        *ZONE,
        f"--worker={worker}",
        f"--command={command}",
    ]


def install(get: str, bucket: str = "'' ''") -> list[str]:
    return ssh(
        f"set -e; if test -f smallgpt_jax/launch/tpu_worker.sh; then {WORKER_SCRIPT} idle; fi; "
        f"{get}; {WORKER_SCRIPT} install {bucket}"
    )


UNPACK = (
    "mkdir -p smallgpt_jax; rm -rf smallgpt_jax/smallgpt_jax; "
    "tar -xzf smallgpt_jax.tar.gz -C smallgpt_jax"
)
SCP = ["gcloud", "compute", "tpus", "tpu-vm", "scp"]
COPY = [
    ["mkdir", "-p", "build/gpt"],
    ["git", "archive", "--format=tar.gz", "--output=build/gpt/smallgpt_jax.tar.gz", "HEAD"],
    [*SCP, "build/gpt/smallgpt_jax.tar.gz", "gpt:", *ZONE, "--worker=all"],
]
CLONE = (
    "if test -d smallgpt_jax/.git; then git -C smallgpt_jax pull --quiet --ff-only; "
    "else test ! -e smallgpt_jax || mv smallgpt_jax smallgpt_jax-$(date +%s); "
    "git clone --quiet https://x.org/y smallgpt_jax; fi"
)
ARGS = ["--", "--config=c.py", "--workdir=~/bucket/x"]
READY = ssh(f"{WORKER_SCRIPT} ready mine ''")
START = ssh(f"{WORKER_SCRIPT} start '~/bucket/logs/gpt' --config=c.py '--workdir=~/bucket/x'")
WATCH = ssh(
    f"if test -f smallgpt_jax/launch/tpu_worker.sh; then {WORKER_SCRIPT} state; "
    'else echo "$(hostname): no run"; fi'
)
RESUME = [
    DESCRIBE,
    NODE,
    DELETE,
    CREATE,
    DESCRIBE,
    NODE,
    *COPY,
    install(UNPACK, "mine ''"),
    READY,
    START,
]


class Cloud(Machine):
    """A `Machine` with a fake gcloud, a repository with the launch scripts, and a folder for the
    TPU worker.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.repository, self.worker = folder / "repository", folder / "worker"
        shutil.copytree(LAUNCH, self.repository / "launch")
        git = ["git", "-C", self.repository, "-c", "user.name=x", "-c", "user.email=x"]
        for command in ("init", "add .", "commit --no-gpg-sign --message=x"):
            subprocess.run([*git, *command.split()], check=True, capture_output=True)
        (folder / "new worker/.local/bin").mkdir(parents=True)
        self.fake("gcloud", GCLOUD)
        self.fake("python", "time.sleep(60)")
        self.fake("uv", UV, folder=folder / "new worker/.local/bin")
        self.fake("gcsfuse", "open(f'{root}/mounted', 'w').close()")
        self.fake("mountpoint", "sys.exit(not os.path.exists(f'{root}/mounted'))")
        for name in ("curl", "sudo"):
            self.fake(name, "sys.exit('not in a test')")
        shutil.copytree(folder / "new worker", self.worker)
        (folder / "node states").write_text("READY")

    def states(self, *states: str) -> None:
        """Sets the states of the request that the fake gcloud reports, in order. The last state is
        repeated.
        """
        (self.folder / "states").write_text(" ".join(states))

    def verbs(self) -> list[str]:
        """Returns the calls of gcloud, such as create or "ssh start"; describe and "ssh state" are
        left out.
        """
        verbs = [
            args[3]
            if args[3] != "ssh"
            else "ssh " + re.findall(r"tpu_worker.sh (\w+)", " ".join(args))[-1]
            for args in self.args("gcloud")
        ]
        return [verb for verb in verbs if verb not in ("describe", "ssh state")]

    def tpu(self, command: str, *args, **more) -> subprocess.CompletedProcess:
        return self.run(self.repository / "launch/tpu_vm.sh", command, *SLICE, *args, **more)


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    for call in cloud.calls("python"):
        if is_running(call["pid"]):
            os.killpg(os.getpgid(call["pid"]), signal.SIGKILL)


@pytest.mark.parametrize(
    "command, expected",
    [
        (["create", *ACCELERATOR], [CREATE, DESCRIBE, NODE]),
        (
            [
                "create",
                *ACCELERATOR,
                "--spot",
                "--no_wait",
                "--create_flag=--network=a b",
                "--create_flag",
                "--internal-ips",
            ],
            [[*CREATE, "--spot", "--network=a b", "--internal-ips"]],
        ),
        (["install"], [*COPY, install(UNPACK)]),
        (["install", "--bucket=gs://mine"], [*COPY, install(UNPACK, "mine ''")]),
        (["install", "--extras=wandb,gcs"], [*COPY, install(UNPACK, "'' wandb,gcs")]),
        (["install", "--repo=https://x.org/y"], [install(CLONE)]),
        (["start", "--bucket=mine", *ARGS], [READY, START]),
        (
            ["start", "--bucket=mine", "--stage=~/bucket/a:/dev/shm/a", *ARGS],
            [ssh(f"{WORKER_SCRIPT} ready mine '~/bucket/a:/dev/shm/a'"), START],
        ),
        (
            ["start", "--", "--x"],
            [ssh(f"{WORKER_SCRIPT} ready '' ''"), ssh(f"{WORKER_SCRIPT} start '' --x")],
        ),
        (["resume", *ACCELERATOR, "--bucket=mine", *ARGS], RESUME),
        (["watch", *ACCELERATOR, "--bucket=mine", *ARGS], [*RESUME, WATCH]),
        (["logs"], [ssh("tail -n 100 -F smallgpt_jax.log", "0")]),
        (["logs", "--worker=3"], [ssh("tail -n 100 -F smallgpt_jax.log", "3")]),
        (["status"], [DESCRIBE, NODE, ssh(f"{WORKER_SCRIPT} status")]),
        (["stop"], [ssh(f"{WORKER_SCRIPT} stop 30")]),
        (["delete"], [DELETE]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value[0], str) else "",
)
def test_tpu_dry_run(cloud, command, expected):
    result = cloud.tpu(command[0], "--dry-run", *command[1:])
    assert (result.returncode, result.stderr) == (0, "")
    assert commands(result.stdout) == expected
    with_project = cloud.tpu(command[0], "--dry-run", "--project=p", *command[1:])
    assert commands(with_project.stdout) == [
        [
            part
            for word in line
            for part in ([word, "--project=p"] if word == "--zone=z" else [word])
        ]
        for line in expected
    ]
    assert cloud.calls("gcloud") == []
    assert not (cloud.repository / "build").exists()


def test_tpu_create_waits_until_active(cloud):
    cloud.states(
        "ACCEPTED",
        "WAITING_FOR_RESOURCES",
        "WAITING_FOR_RESOURCES",
        "BROKEN",
        "PROVISIONING",
        "ACTIVE",
    )
    result = cloud.tpu("create", *ACCELERATOR)
    assert result.returncode == 0
    assert cloud.args("gcloud") == [CREATE[1:], *[DESCRIBE[1:]] * 6, NODE[1:]]
    assert [line.split(" is ")[1] for line in result.stdout.splitlines()] == [
        "ACCEPTED",
        "WAITING_FOR_RESOURCES",
        "UNKNOWN",
        "PROVISIONING",
        "ACTIVE",
    ]
    logged = [line for line in result.stderr.splitlines() if line.startswith("+ ")]
    assert commands("\n".join(line[2:] for line in logged)) == [CREATE]
    assert "no answer" in result.stderr


def test_tpu_create_reports_failure(cloud):
    cloud.states("ACCEPTED", "FAILED")
    result = cloud.tpu("create", *ACCELERATOR)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "error: gpt is FAILED; for the reason, run gcloud compute tpus queued-resources describe "
        "gpt --zone=z"
    )


def test_tpu_run_from_install_to_stop(cloud):
    cloud.states("ACTIVE")
    too_early = cloud.tpu("start", "--bucket=mine", "--", *RUN)
    assert too_early.returncode != 0 and cloud.calls("python") == []

    result = cloud.tpu("install", "--bucket=mine")
    assert result.returncode == 0, result.stderr
    assert (cloud.worker / "smallgpt_jax/launch/tpu_vm.sh").read_text() == (
        LAUNCH / "tpu_vm.sh"
    ).read_text()
    assert cloud.args("uv")[1] == [
        "pip",
        "install",
        "--quiet",
        "--python=.venv/bin/python",
        "-c",
        "constraints.txt",
        "-e",
        ".[tpu]",
    ]
    assert [args[-2:] for args in cloud.args("gcsfuse")] == [["mine", str(cloud.worker / "bucket")]]
    assert "no run; no log" in cloud.tpu("status").stdout

    result = cloud.tpu("start", "--bucket=mine", "--", *RUN)
    assert result.returncode == 0, result.stderr
    wait_until(lambda: cloud.calls("python"))
    (call,) = cloud.calls("python")
    assert call["args"] == [*MAIN, RUN[0], f"--workdir={cloud.worker}/bucket/runs/a b", *RUN[2:]]
    assert call["cwd"] == str(cloud.worker / "smallgpt_jax")
    assert os.getsid(call["pid"]) != os.getsid(
        0
    )  # a new session, so the process outlives the ssh session
    assert len(cloud.calls("gcsfuse")) == 1  # the bucket is mounted once

    (cloud.worker / "smallgpt_jax.log").write_text("step 1\nstep 2\n")
    assert ": running; step 2" in cloud.tpu("status").stdout
    for command in (["start", "--", "--x"], ["install"]):
        refused = cloud.tpu(*command)
        assert refused.returncode == 3
        assert re.search("error: .*: a run is in progress; stop it first", refused.stderr)

    assert cloud.tpu("stop").returncode == 0
    assert not is_running(call["pid"])
    assert ": stopped; step 2" in cloud.tpu("status").stdout


def test_tpu_stop_kills_processes_that_ignore_sigterm(cloud):
    cloud.states("ACTIVE")
    cloud.fake(
        "python",
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
""",
    )
    assert cloud.tpu("install").returncode == 0
    assert cloud.tpu("start", "--", "--x").returncode == 0
    wait_until(lambda: (cloud.worker / "smallgpt_jax.log").read_text() == "deaf\n")
    assert cloud.tpu("stop", GRACE_SECONDS="1").returncode == 0
    wait_until(lambda: not is_running(cloud.calls("python")[0]["pid"]), 2)


def test_tpu_resume_recreates_the_slice(cloud):
    cloud.states("SUSPENDING", "SUSPENDING", "SUSPENDED", "WAITING_FOR_RESOURCES", "ACTIVE")
    result = cloud.tpu("resume", *ACCELERATOR, "--spot", "--bucket=mine", "--", *RUN)
    assert result.returncode == 0, result.stderr
    assert cloud.verbs() == ["delete", "create", "scp", "ssh install", "ssh ready", "ssh start"]
    assert cloud.args("gcloud")[3:5] == [DELETE[1:], [*CREATE[1:], "--spot"]]
    wait_until(lambda: cloud.calls("python"))
    assert cloud.args("python")[0][3] == f"--workdir={cloud.worker}/bucket/runs/a b"


def test_tpu_resume_creates_a_missing_slice(cloud):
    """The slice is missing, for example, if an earlier `resume` was interrupted after it had
    deleted the slice.
    """
    cloud.states("NOT_FOUND", "ACTIVE")
    assert cloud.tpu("resume", *ACCELERATOR, "--", "--x").returncode == 0
    assert cloud.verbs() == ["create", "scp", "ssh install", "ssh ready", "ssh start"]
    wait_until(lambda: cloud.calls("python"))


def test_tpu_resume_changes_nothing_without_an_answer(cloud):
    """An error of gcloud, such as an expired login, does not mean that the slice is missing."""
    cloud.states("BROKEN")
    result = cloud.tpu("resume", *ACCELERATOR, "--", "--x")
    assert (result.returncode, cloud.verbs()) == (1, []) and "no answer" in result.stderr


def test_tpu_resume_recreates_a_slice_whose_node_was_preempted(cloud):
    """The state of the request can stay ACTIVE after its node is gone."""
    cloud.states("ACTIVE")
    (cloud.folder / "node states").write_text("PREEMPTED PREEMPTED READY")
    result = cloud.tpu("resume", *ACCELERATOR, "--", "--x")
    assert result.returncode == 0, result.stderr
    assert "gpt is NODE_PREEMPTED" in result.stdout
    assert cloud.verbs() == ["delete", "create", "scp", "ssh install", "ssh ready", "ssh start"]
    wait_until(lambda: cloud.calls("python"))


def test_tpu_waiting_has_a_limit(cloud):
    cloud.states("WAITING_FOR_RESOURCES")
    for command in (["create"], ["watch", "--", "--x"]):
        result = cloud.tpu(command[0], *ACCELERATOR, "--max_wait=0", *command[1:])
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith(
            "error: gpt is still WAITING_FOR_RESOURCES after 0 minutes (--max_wait); "
        )


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


# tpu_vm.sh watch

WATCHED = [*ACCELERATOR, "--spot", "--bucket=mine", *ARGS]
STARTED = ["scp", "ssh install", "ssh ready", "ssh start"]


def test_tpu_watch_continues_a_run_after_a_preemption(cloud):
    """After the preemption, the slice is deleted and created once, and the run is installed and
    started once.
    """
    cloud.states("ACTIVE")
    assert cloud.tpu("install").returncode == cloud.tpu("start", "--", "--x").returncode == 0
    wait_until(lambda: cloud.calls("python"))
    cloud.fake("python", "time.sleep(0.3)")
    (cloud.folder / "calls").write_text("")
    cloud.states(
        "ACTIVE",
        "SUSPENDING",
        "BROKEN",
        "SUSPENDED",
        "SUSPENDED",
        "NOT_FOUND",
        "ACCEPTED",
        "ACTIVE",
    )
    result = cloud.tpu("watch", *WATCHED)
    assert result.returncode == 0, result.stderr
    assert cloud.verbs() == ["delete", "create", *STARTED]
    assert [*CREATE[1:], "--spot"] in cloud.args("gcloud")
    assert len(cloud.calls("python")) == 1
    assert (
        "the run has finished; to stop the charges, run launch/tpu_vm.sh delete --name=gpt --zone=z"
        in result.stdout
    )


def test_tpu_watch_creates_a_missing_slice(cloud):
    cloud.states("NOT_FOUND", "ACTIVE")
    cloud.fake("python", "")
    assert cloud.tpu("watch", *WATCHED).returncode == 0
    assert cloud.verbs() == ["create", *STARTED]


@pytest.mark.parametrize("first", ["ACTIVE", "WAITING_FOR_RESOURCES", "SUSPENDING"])
def test_tpu_watch_ends_when_the_request_is_deleted_elsewhere(cloud, first):
    cloud.states(first, "NOT_FOUND")
    result = cloud.tpu("watch", *WATCHED)
    assert result.returncode == 1
    assert (
        result.stderr.splitlines()[-1]
        == "error: gpt was deleted by another command; rerun watch to create it again"
    )
    assert cloud.verbs() == (STARTED if first == "ACTIVE" else [])


CALLS = "calls = (folder / 'calls').read_text().count('smallgpt_jax.main')"


@pytest.mark.parametrize(
    "program, status, runs, message",
    [
        (
            "sys.exit(3)",
            1,
            1,
            r"error: the run has failed: \S+: exit status 3; see the log. The slice still exists",
        ),
        # A run that has stalled (124) or was ended by SIGTERM (143), as before a restart of its VM,
        # is started again.
        (f"{CALLS}; sys.exit(124 * (calls == 1))", 0, 2, ""),
        (f"{CALLS}; sys.exit(143 * (calls == 1))", 0, 2, ""),
        (
            "print('step 50/100   loss 1'); sys.exit(143)",
            1,
            7,
            r"error: the run has ended 6 times without a new step: \S+: exit status 143 after step 50; see the log",
        ),
        (f"{CALLS}; print('step', f'{{calls}}/100'); sys.exit(124 * (calls < 7))", 0, 7, ""),
        # A connection that fails is not a failure of the run, or of its start.
        (
            f"{CALLS}; (folder / 'unreachable').write_text('ready start ' * 3); sys.exit(124 * "
            "(calls == 1))",
            0,
            2,
            "",
        ),
    ],
)
def test_tpu_watch_when_the_run_fails(cloud, program, status, runs, message):
    cloud.states("ACTIVE")
    cloud.fake("python", program)
    result = cloud.tpu("watch", *WATCHED)
    assert result.returncode == status, result.stderr
    assert len(cloud.calls("python")) == runs
    assert not message or re.search(message, result.stderr.splitlines()[-1])


def test_tpu_watch_gives_up_when_the_run_cannot_be_started(cloud):
    cloud.states("ACTIVE")
    cloud.fake("mountpoint", "sys.exit(1)")
    cloud.fake("gcsfuse", "sys.exit('no permission')")
    result = cloud.tpu("watch", *WATCHED)
    assert result.returncode == 1 and cloud.calls("python") == []
    assert (
        result.stderr.splitlines()[-1] == "error: the run could not be started, five times in a row"
    )


def test_tpu_watch_survives_failing_connections(cloud):
    cloud.states("NOT_FOUND", "ACTIVE")
    cloud.fake("python", "")
    (cloud.folder / "unreachable").write_text("idle ready " * 3)
    result = cloud.tpu("watch", *WATCHED)
    assert result.returncode == 0, result.stderr
    assert "the workers cannot be reached" in result.stderr


@pytest.mark.parametrize(
    "end, status, runs, message",
    [
        (
            "sys.exit(3)",
            1,
            2,
            r"error: the run has failed: \S+: exit status 3; see the log. The slice still exists",
        ),
        # The fake ends without an exit status, like a process on a VM that was reset.
        ("os.killpg(os.getpgid(0), signal.SIGKILL)", 0, 4, ""),
        ("sys.exit(0)", 0, 4, ""),
    ],
)
def test_tpu_watch_when_one_worker_ends_and_the_others_hang(cloud, end, status, runs, message):
    """The other workers are stopped. The run is started again, unless the worker has failed."""
    cloud.states("ACTIVE")
    shutil.copytree(cloud.folder / "new worker", cloud.folder / "worker2")
    cloud.fake(
        "python",
        f"""
def calls():
    return [call["cwd"] for call in map(eval, (folder / "calls").read_text().splitlines())
            if call["name"] == "python"]

if calls().count(os.getcwd()) == 1:
    while len(calls()) < 2:
        time.sleep(0.02)
    if "/worker2/" in os.getcwd():
        {end}
    time.sleep(60)
""",
    )
    result = cloud.tpu("watch", *WATCHED)
    assert result.returncode == status, result.stderr
    assert len(cloud.calls("python")) == runs and not any(
        is_running(call["pid"]) for call in cloud.calls("python")
    )
    assert not message or re.search(message, result.stderr.splitlines()[-1])


def test_tpu_watch_ends_when_the_run_is_stopped(cloud):
    cloud.states("ACTIVE")
    watch = cloud.start(cloud.repository / "launch/tpu_vm.sh", "watch", *SLICE, *WATCHED)
    wait_until(lambda: cloud.calls("python"))
    assert ": stopped" in cloud.tpu("stop").stdout
    _, errors = watch.communicate(timeout=30)
    assert (
        errors.splitlines()[-1]
        == "error: the run was stopped by tpu_vm.sh stop; rerun watch to continue it"
    )
    assert watch.returncode == 1 and len(cloud.calls("python")) == 1


def test_tpu_env_is_secret(cloud):
    """The values of --env reach the run and appear nowhere else."""
    secret = "it's $a \\secret"
    cloud.states("ACTIVE")
    cloud.fake(
        "python",
        "(folder / 'received').write_text(json.dumps([os.environ['KEY'], os.environ['HERE']]))",
    )
    flags = ["--env=KEY=" + secret, "--env", "HERE"]
    outputs = [
        cloud.tpu("watch", *ACCELERATOR, *flags, "--", "--x", HERE="also " + secret),
        cloud.tpu("start", *flags, "--", "--x", HERE="also " + secret),
    ]
    assert [result.returncode for result in outputs] == [0, 0], outputs
    assert json.loads((cloud.folder / "received").read_text()) == [secret, "also " + secret]
    outputs += [
        cloud.tpu(command, "--dry-run", *ACCELERATOR, *flags, "--", "--x", HERE="also " + secret)
        for command in ("start", "resume", "watch")
    ]
    outputs += [
        cloud.tpu("start", *wrong, "--", "--x")
        for wrong in (
            ["--evn=KEY=" + secret],
            ["--env=K-Y=" + secret],
            ["--env", "KEY=" + secret, "--env=HERE"],
        )
    ]
    assert [result.returncode for result in outputs] == [0] * 5 + [2] * 3
    assert not any("secret" in result.stdout + result.stderr for result in outputs)
    assert "secret" not in str(cloud.args("gcloud"))
    assert [*SCP, "build/gpt/smallgpt_jax.env", "gpt:", *ZONE, "--worker=all"] in commands(
        outputs[2].stdout
    )
    assert not list(cloud.folder.rglob("smallgpt_jax.env"))


def test_tpu_log_is_copied_to_the_bucket(cloud):
    cloud.states("ACTIVE")
    cloud.fake(
        "python",
        """
print("step 1", flush=True)
while not (folder / "go").exists():
    time.sleep(0.02)
print("step 2")
sys.exit(143)
""",
    )
    assert cloud.tpu("install", "--bucket=mine").returncode == 0
    (cloud.worker / "smallgpt_jax.log").write_text("of an earlier run\n")
    assert cloud.tpu("start", "--bucket=mine", "--", "--x", LOG_SECONDS="0.02").returncode == 0
    logs = cloud.worker / "bucket/logs/gpt"
    wait_until(lambda: [path.read_text() for path in logs.glob("*.log")] == ["step 1\n"])
    (cloud.folder / "go").touch()
    wait_until(lambda: "exit status 143" in cloud.tpu("status").stdout)
    assert [path.read_text() for path in logs.glob("*.log")] == ["step 1\nstep 2\n"]


def test_tpu_stage_copies_the_store_to_the_worker(cloud):
    cloud.states("ACTIVE")
    cloud.fake("python", "")
    store, copy = cloud.worker / "bucket/store", cloud.folder / "memory/store"
    (store / "train").mkdir(parents=True)
    (store / "train/0.bin").write_bytes(bytes(1000))
    assert cloud.tpu("install").returncode == 0
    start = [
        "start",
        "--bucket=mine",
        f"--stage=~/bucket/store:{copy}",
        "--",
        f"--config.data.store={copy}",
    ]
    (copy.parent / "store.partial/of").mkdir(parents=True)  # of an interrupted copy
    assert "staged" in cloud.tpu(*start).stdout
    assert [path.name for path in copy.parent.iterdir()] == ["store"]
    assert (copy / "train/0.bin").read_bytes() == bytes(1000)
    wait_until(lambda: "exit status" in cloud.tpu("status").stdout)
    again = cloud.tpu(*start)
    assert again.returncode == 0 and "staged" not in again.stdout
    wait_until(lambda: "exit status" in cloud.tpu("status").stdout)
    (copy / "train/0.bin").write_bytes(bytes(999))
    refused = cloud.tpu(*start)
    assert refused.returncode == 3 and re.search(
        f"error: .*: --stage: {copy} exists and is not a copy of {store}; remove it", refused.stderr
    )
