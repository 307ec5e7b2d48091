"""A machine with fake programs, for tests of the launch scripts.

A fake program records its arguments and then runs Python code that the test provides.
"""

import ast
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import ROOT

LAUNCH = ROOT / "launch"
MAIN = ["-m", "smallgpt_jax.main"]

# Only what a program names is imported, because imports take most of the time of a fake.
FAKE = """#!{python} -SE
import os, sys, time
root, name, args = {folder!r}, os.path.basename(sys.argv[0]), sys.argv[1:]
env = {{key: os.environ[key] for key in os.environ if key.startswith(("JAX_", "XLA_"))}}
with open(f"{{root}}/calls", "a") as file:
    file.write(repr(dict(name=name, args=args, env=env, cwd=os.getcwd(), pid=os.getpid())) + "\\n")
with open(f"{{root}}/{{name}}.py") as file:
    program = file.read()
for module in ("json", "shutil", "signal"):
    if module + "." in program:
        globals()[module] = __import__(module)
if "folder" in program:
    from pathlib import Path
    folder = Path(root)
exec(program)
"""


class Machine:
    """Runs scripts with fake programs and records their calls. The folder of the fakes comes first
    in PATH.
    """

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
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("JAX_", "XLA_", "SLURM_", "PYTHON"))
        }
        return {
            **kept,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "POLL_SECONDS": "0.01",
            **more,
        }

    def start(self, script: Path, *args, cwd: Path = ROOT, **more) -> subprocess.Popen:
        # If pytest runs in the background, pytest and its child processes ignore SIGINT. Bash cannot
        # trap a signal that was ignored when bash was started. A handler is not inherited. (With a
        # preexec_fn, the start would copy the page tables of this process.)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                ["bash", script, *args],
                cwd=cwd,
                env=self.environment(**more),
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        finally:
            signal.signal(signal.SIGINT, before)

    def run(self, script: Path, *args, **more) -> subprocess.CompletedProcess:
        process = self.start(script, *args, **more)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self, name: str) -> list[dict]:
        calls = map(ast.literal_eval, (self.folder / "calls").read_text().splitlines())
        return [call for call in calls if call["name"] == name]

    def args(self, name: str) -> list[list[str]]:
        return [call["args"] for call in self.calls(name)]


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
