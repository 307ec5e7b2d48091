"""Lists the commands of this project.

    python -m smallgpt_jax

Also defines the scripts that pip installs. `smallgpt-train` runs `python -m smallgpt_jax.main`. For
every other command NAME, `smallgpt-NAME` runs `python -m smallgpt_jax.NAME`.
"""

import ast
import functools
import os
import runpy
import sys
from pathlib import Path

from smallgpt_jax.errors import exit_on_interrupt
from smallgpt_jax.output import best_effort

COMMANDS = (
    *("main", "prepare", "generate", "plan", "evaluate", "convert"),
    *("compare", "choose", "diagnose"),
)


def _run_script(command: str) -> None:
    exit_on_interrupt()
    # like `python -m`, makes modules in the working directory importable
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    runpy.run_module(f"smallgpt_jax.{command}", run_name="__main__", alter_sys=True)


# The functions that setup.py names in console_scripts.
train, prepare, generate, plan, evaluate, convert, compare, choose, diagnose = (
    functools.partial(_run_script, command) for command in COMMANDS
)


def main() -> None:
    argument = sys.argv[1] if sys.argv[1:] else "--help"
    if argument not in ("--help", "-h"):
        command = argument if argument in COMMANDS else "COMMAND"
        hint = f"python -m smallgpt_jax.{command}"
        print(f"error: {argument!r}: unexpected argument; use {hint}", file=sys.stderr)
        sys.exit(2)
    for command in COMMANDS:
        print(f"python -m smallgpt_jax.{command:8}  {_first_line(command)}")
    print(
        "\nEach command lists its flags with --help. pip also installs the commands as "
        "smallgpt-train (main), smallgpt-prepare, ..."
    )


def _first_line(command: str) -> str:
    # Without importing the command, because imports take seconds.
    source = Path(__file__).with_name(f"{command}.py").read_text("utf-8")
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


if __name__ == "__main__":
    with best_effort("stdout"):  # such as `| head`
        main()
