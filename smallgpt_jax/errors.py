"""Exceptions that commands print as a message, without a traceback; Ctrl-C during imports."""

import difflib
import importlib
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def command_line(module: str, *arguments: str) -> str:
    """Returns a command that also works while this environment is not active."""
    # "python" if it is this environment's, else the path of this environment's, as short as it can
    # be without leading out of the working directory
    python = "python"
    if os.path.dirname(shutil.which(python) or "") != os.path.dirname(sys.executable):
        python = os.path.relpath(sys.executable)
        python = sys.executable if python.startswith("..") else python
    return shlex.join([python, "-m", f"smallgpt_jax.{module}", *arguments])


def config_arguments() -> list[str]:
    """Returns the arguments of this process that belong to --config, overrides included."""
    arguments = []
    for previous, argument in zip(sys.argv, sys.argv[1:]):
        is_value = re.fullmatch(r"--?config(\.[^=]*)?", previous)
        if is_value or re.match(r"--?(no)?config\b", argument):
            arguments.append(argument)
    return arguments


def install_command(extra: str) -> str:
    is_clone = (Path(__file__).parents[1] / "setup.py").exists()
    if is_clone:
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install 'smallgpt_jax[{extra}]'"


def import_library(name: str, extra: str = "hf"):
    """Imports a library of the pip extra `extra`."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"{name.split('.')[0]} is not installed; run {install_command(extra)}"
        ) from None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" with the known name most like `name`, or ""."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_list(name: str, value: Any) -> None:
    """Raises UserError for a text in place of a list: each of its characters would be an item."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise UserError(f"{name}={value!r}: expected a list")


class UserError(Exception):
    """An error that a user can cause and fix: where, what is wrong, what to do."""

    def _render_traceback_(self) -> list[str]:  # which a notebook shows in place of a traceback
        return [f"error: {self}"]


class WorkdirBusyError(UserError):
    """Another process is training in the workdir. The attribute `by` describes that process."""

    def __init__(self, message: str, by: str):
        super().__init__(message)
        self.by = by


class LockHeldError(Exception):
    """Another process, named in the message, holds the lock."""


class LockLostError(UserError):
    """This process no longer holds the lock of a folder, and must not write there."""


class DivergenceError(UserError):
    """The loss, the gradient or a weight of a run is not finite."""


# As on any Ctrl-C, a loop over runs that handles Exception ends too.
class StoppedError(KeyboardInterrupt):
    """A stop request ended the run; `status` is the exit status of the command."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def exit_on_interrupt() -> None:
    """On Ctrl-C, prints a message and exits with status 130, as `cli` does later."""
    # imports take seconds; not if the caller ignores Ctrl-C
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Ends `exit_on_interrupt`: from now on, the first Ctrl-C raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, _raise_once)


def ends_on_interrupt() -> bool:
    """Whether Ctrl-C ends this process. In a notebook or a user's script, it raises
    KeyboardInterrupt.
    """
    return signal.getsignal(signal.SIGINT) is _raise_once


def _raise_once(*_) -> None:
    # A second KeyboardInterrupt would end what the first one started, such as JAX's cleanup at exit,
    # in a traceback or a crash. `timeout -s INT` sends the signal twice.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    raise KeyboardInterrupt


def _exit(*_) -> None:
    # does not raise: libraries turn a KeyboardInterrupt in their imports into other errors
    os.write(2, b"error: stopped\n")
    os._exit(130)
