"""Tests of the exit status and the standard streams of commands, which run in the test process."""

import contextlib
import io
import logging
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, call, run

from smallgpt_jax import cli, errors
from smallgpt_jax.storage import object_storage


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the locale C
def test_prints_unencodable_characters_as_escapes(errors, monkeypatch):
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", stdout)
    cli.run_command(lambda: print("0.25 ± 0.01"))
    assert written.getvalue() == rb"0.25 \xb1 0.01" + b"\n"


def test_input_may_be_invalid_utf8(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), encoding="utf-8"))
    lines = []
    cli.run_command(lambda: lines.append(sys.stdin.readline()))
    assert lines == ["a\udcffb\n"]


def test_arguments_that_the_locale_cannot_read(monkeypatch):
    """Python has decoded the bytes of ü in UTF-8 one by one."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    cli.require_readable_arguments(["--workdir=runs/u"])
    with pytest.raises(errors.UserError, match=r"--workdir=runs/ü: cannot be read .* LC_ALL=C.UTF"):
        cli.require_readable_arguments(["--workdir=runs/\udcc3\udcbc"])


def test_few_open_files(monkeypatch, capsys):
    """The limit is raised where the process may; otherwise it ends before it writes anything."""
    limits, ran = [24, 1024], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(0, new[0]))
    cli.run_command(lambda: ran.append(limits[0]))
    assert ran == [cli.MIN_FILES]
    limits[:] = 24, 24
    with pytest.raises(SystemExit):
        cli.run_command(lambda: ran.append(limits[0]))
    assert ran == [cli.MIN_FILES]
    assert capsys.readouterr().err == (
        "error: ulimit -n: this process may open only 24 files; allow at least 64\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, advice",
    [("cuda", r", or, on a machine that has one, run pip install .*\[cuda\]'"), ("none", "")],
)
def test_devices_that_the_machine_does_not_have(kind, advice, tmp_path):
    result = run("main", "--config=gpt:tiny", f"--workdir={tmp_path}/run", JAX_PLATFORMS=kind)
    assert result.returncode == 1 and not any(tmp_path.iterdir())
    assert re.fullmatch(
        f"error: JAX_PLATFORMS={kind}: JAX finds no such device; unset the variable{advice}\n",
        result.stderr,
    )


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("is_buffered", [True, False])  # True: text is written only when flushed
@pytest.mark.parametrize(
    "output, status, message",
    [(closed_pipe, 141, ""), (full_disk, 1, "error: input or output: No space left on device\n")],
)
def test_unwritable_output(monkeypatch, capsys, is_buffered, output, status, message):
    """The exit status is 141 for a closed pipe and 1 for a full disk. Only the full disk causes a
    message.
    """
    raw = io.FileIO(output(), "wb")
    unwritable = io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else raw, write_through=not is_buffered
    )
    monkeypatch.setattr(sys, "stdout", unwritable)
    with pytest.raises(SystemExit) as end:
        cli.run_command(lambda: print("text"))
    assert (end.value.code, capsys.readouterr().err) == (status, message)
    sys.stdout.flush()  # as Python does at exit
    with contextlib.suppress(OSError):
        unwritable.close()


def test_broken_pipes_other_than_the_output_are_errors(capsys):
    def write_to_a_worker():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as end:
        cli.run_command(write_to_a_worker)
    assert (end.value.code, capsys.readouterr().err) == (1, "error: input or output: Broken pipe\n")


@pytest.mark.parametrize("error", [OSError("Forbidden"), ValueError("UNAVAILABLE: no network")])
def test_failed_requests_are_named_only_after_a_gs_path_was_used(monkeypatch, capsys, error):
    def fail():
        raise error

    monkeypatch.setattr(object_storage, "is_used", lambda: True)
    with pytest.raises(SystemExit):
        cli.run_command(fail)
    assert capsys.readouterr().err.startswith(
        f"error: object storage: request failed ({error}); check"
    )
    monkeypatch.setattr(object_storage, "is_used", lambda: False)
    with pytest.raises(SystemExit if isinstance(error, OSError) else ValueError):
        cli.run_command(fail)
    assert capsys.readouterr().err == (
        "error: input or output: Forbidden\n" if isinstance(error, OSError) else ""
    )


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "smallgpt_jax.prepare"],
        ["-c", "from smallgpt_jax.__main__ import prepare; prepare()"],
    ],
)
def test_ctrl_c_while_a_command_imports_its_libraries(command, tmp_path):
    """NumPy's place is taken by a module that sends Ctrl-C, and turns a KeyboardInterrupt into an
    ImportError.
    """
    (tmp_path / "numpy.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError('numpy')\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    # Shells ignore Ctrl-C in commands in the background, and their children inherit this.
    accepting = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    result = subprocess.run(
        [sys.executable, "-c", accepting, sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (result.returncode, result.stderr) == (130, "error: stopped\n")


def test_a_second_ctrl_c_ends_a_command_at_once():
    """`timeout -s INT` sends the signal twice, as an impatient user does."""
    program = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from smallgpt_jax import cli, errors
errors.exit_on_interrupt()

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        print("cleanup", flush=True)

cli.run(main, uses_jax=False)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_programs_that_import_the_package_keep_their_ctrl_c(tmp_path):
    """Python imports it for `python -m my_models.sweep`, as for `python -m smallgpt_jax.main`."""
    (tmp_path / "my_models").mkdir()
    (tmp_path / "my_models" / "__init__.py").write_text("import smallgpt_jax\n")
    program = "import signal; print(signal.getsignal(signal.SIGINT))"
    (tmp_path / "my_models" / "sweep.py").write_text(program)
    for option in (["-m", "my_models.sweep"], ["-mmy_models.sweep"]):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *option, "-x"]
        result = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        assert result.stdout and "_exit" not in result.stdout, result.stderr


def test_messages_of_the_hub_are_printed_once():
    """huggingface_hub prints them itself. absl prints again what reaches the root logger."""
    hub_logging = pytest.importorskip("huggingface_hub.utils.logging")
    reached, handler = [], logging.Handler()
    handler.handle = reached.append
    logging.getLogger().addHandler(handler)
    cli.run_command(
        lambda: hub_logging.get_logger("huggingface_hub.retries").warning("Retrying in 1s")
    )
    logging.getLogger().removeHandler(handler)
    assert not reached


def test_printed_commands_run_whether_the_environment_is_active_or_not(monkeypatch):
    """Without an active environment, `python` is another Python or missing."""
    monkeypatch.chdir(ROOT)
    for path in ("/usr/bin", str(Path(sys.executable).parent)):
        monkeypatch.setenv("PATH", path)
        command = errors.command_line("errors", "--workdir=my run")
        assert command.endswith(" -m smallgpt_jax.errors '--workdir=my run'")
        subprocess.run(["/bin/sh", "-c", command], check=True)
    assert shlex.split(command)[0] == "python"
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv/bin/python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert errors.command_line("main") == ".venv/bin/python -m smallgpt_jax.main"


def test_the_arguments_of_the_config_are_those_of_the_process(monkeypatch):
    given = ["--config", "gpt:tiny", "--config.data.source=a b", "--config.train.steps", "5"]
    monkeypatch.setattr(sys, "argv", ["main.py", *given, "--workdir=runs/x", "--process_id", "1"])
    assert errors.config_arguments() == given


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.lr=1e-3", "error: no config field 'lr'; configs/base.py documents the fields\n"),
        (
            "--config.steps=3",
            "error: no config field 'steps'; did you mean --config.train.steps?\n",
        ),
        (
            "--config.train.step=3",
            "error: no config field 'step'; did you mean --config.train.steps?\n",
        ),
        (
            "--config.train.foo=3",
            "error: no config field 'foo'; configs/base.py documents the fields\n",
        ),
    ],
)
def test_unknown_config_fields(flag, message):
    result = call("prepare", "--config=configs/gpt.py:tiny", flag)
    assert (result.returncode, result.stderr) == (2, message)
