"""Lists the commands of this project.

    python -m smallgpt_jax
"""

import ast
import sys
from pathlib import Path

COMMANDS = ("main", "prepare", "generate", "plan", "evaluate", "convert", "compare")


def main() -> None:
    if sys.argv[1:] and sys.argv[1] not in ("--help", "-h"):
        hint = f"python -m smallgpt_jax.{sys.argv[1]}" if sys.argv[1] in COMMANDS else "python -m smallgpt_jax.COMMAND"
        print(f"error: {sys.argv[1]!r}: unexpected argument; use {hint}", file=sys.stderr)
        sys.exit(2)
    for command in COMMANDS:
        print(f"python -m smallgpt_jax.{command:8}  {summary(command)}")
    print("\nEach command lists its flags with --help.")


def summary(command: str) -> str:
    """Returns the first line of a command's docstring. The command is not imported, because importing takes seconds."""
    source = Path(__file__).with_name(f"{command}.py").read_text()
    return ast.get_docstring(ast.parse(source)).splitlines()[0]


if __name__ == "__main__":
    main()
