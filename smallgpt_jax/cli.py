"""How every command starts and ends: flags in, one call, words and an exit status out.

Exit status: 0 done, 1 it could not be done (one or two lines say why), 2 wrong usage, 130 stopped
from the keyboard, 141 nobody reads its output any more, 143 stopped by SIGTERM.
"""

import ast
import difflib
import io
import keyword
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from smallgpt_jax import distributed
from smallgpt_jax.data import cache_folder
from smallgpt_jax.errors import Stopped, UserError
from smallgpt_jax.files import local_path
from smallgpt_jax.output import best_effort, drop_unwritable, is_output_closed

WANTED = {"int()": "a whole number", "to float": "a number", "boolean": "true or false"}  # by what Python says

flags.disclaim_key_flags()  # --config belongs, in --help, to the command that asks for it


def define_config():
    """The --config flag; its value is a ConfigDict with the --config.group.field overrides in it."""
    return config_flags.DEFINE_config_file(
        "config", None, "A recipe, configs/NAME.py or configs/NAME.py:SIZE. Any field of it can be "
        "set with --config.group.field=value; configs/base.py explains them all. "
        "configs/run.py:WORKDIR is the recipe of a run that is there.")


def run(main: Callable[[], None]) -> None:
    """Parses the flags, calls `main` and leaves the process with the command's exit status."""

    def main_without_traceback(argv):
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        if len(argv) > 1:
            fail(f"unexpected argument {argv[1]!r}: flags start with --", status=2)
        if jax.config.jax_compilation_cache_dir is None:
            jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
            # Where it cannot be written, programs are compiled again the next time.
            warnings.filterwarnings("ignore", "Error .* persistent compilation cache")
        distributed.look_for_no_tpu()
        execute(main)

    with best_effort("stderr"):  # the exit status stays what it is where nobody can read why
        app.run(main_without_traceback, flags_parser=parse)


def execute(main: Callable[[], None]) -> None:
    """Calls `main`; whatever ends it early becomes a message and an exit status."""
    # Characters that a terminal's encoding lacks are shown as escapes, bytes that are not text can be read.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        fail(str(error))
    except OSError as error:  # a full disk, a file that may not be read
        is_closed = is_output_closed()
        drop_unwritable("stdout")
        if isinstance(error, BrokenPipeError) and is_closed:
            sys.exit(141)
        fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
    except KeyboardInterrupt:
        fail("stopped", status=130)


def parse(argv: list[str]) -> list[str]:
    """absl's flag parser, with short messages for all that can be wrong in flags and config file."""
    if {"--help", "-h", "-help", "--h"} & set(argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.exit(0)
    arguments = sys.argv
    try:
        for arg, following in zip(argv[1:], [*argv[2:], ""]):
            if given := re.fullmatch(r"--?config(=(.*))?", arg):
                check_config_file(given[2] if given[1] else following)
        sys.argv = with_quoted_runs(argv)  # where ml_collections looks for overrides
        return flags.FLAGS(sys.argv)
    except UserError as error:
        fail(str(error), status=2)
    except Exception as error:  # a config file is a program: it can raise anything
        fail(explain(error), status=2)
    finally:
        sys.argv = arguments


# An override of a comparison's run, whose name may be any text: its name, then a group and a field.
RUN_OVERRIDE = re.compile(r"(--?(?:no)?config\.runs)\.(.+?)(\.[a-z]\w*\.[a-z]\w*(?:=.*)?)", re.DOTALL)


def with_quoted_runs(argv: list[str]) -> list[str]:
    """`argv` with the names of runs as ml_collections reads them in overrides, which are Python's expressions:
    --config.runs.lr 0.1.model.d_model=8 becomes --config.runs["lr\\U000000200\\U0000002e1"].model.d_model=8."""
    def quoted(name: str) -> str:
        if name.isidentifier() and not keyword.iskeyword(name):
            return f".{name}"
        return '["' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in name) + '"]'

    found = [(arg, RUN_OVERRIDE.fullmatch(arg)) for arg in argv]
    return [match[1] + quoted(match[2]) + match[3] if match else arg for arg, match in found]


def with_plain_runs(text: str) -> str:
    """A message with the names of runs as they were given."""
    return re.sub(r'(?<=\bruns)\["((?:\w|\\U[0-9a-f]{8})*)"\]',
                  lambda match: "." + ast.literal_eval(f'"{match[1]}"'), text)


def check_config_file(value: str) -> None:
    """Raises UserError if --config=FILE[:ARGUMENT] names no file, with the recipe of the nearest name."""
    local_path("--config", value)
    name, colon, argument = value.partition(":")
    if Path(name).is_file():
        return
    recipes = {path.stem: path for path in Path("configs").rglob("*.py") if path.stem != "base"}
    near = difflib.get_close_matches(Path(name).stem, recipes, n=1)
    raise UserError(f"--config: there is no file {name!r}"
                    + (f"; did you mean {recipes[near[0]]}{colon}{argument}?" if near else ""))


def explain(error: Exception) -> str:
    """What was wrong with the flags or the config file, in one line."""
    text = with_plain_runs(str(error))
    if unset := re.findall(r"Flag (--\w+) must have a value other than None", text):
        return f"{' and '.join(unset)} must be given; --help explains"
    if misspelt := re.search(r'Did you mean "(.*?)" instead of "(.*?)"', text):
        return f"{where(error)}the config has no field {misspelt[2]!r}; did you mean {misspelt[1]!r}?"
    if mistyped := re.match(r"flag (--.+?): .*(int\(\)|to float|boolean)", text):
        return f"{mistyped[1]}: must be {WANTED[mistyped[2]]}"
    if isinstance(error, flags.UnrecognizedFlagError) and "." in error.flagname and "config" in flags.FLAGS:
        return f"there is no flag --{error.flagname}; did you mean --config.{error.flagname}?"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, flags.Error):
        return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    if isinstance(error, (KeyError, AttributeError)) and not where(error):
        return f"the config has no field {error.args[0]!r}"
    return f"{where(error)}{type(error).__name__}: {lines[0] if lines else ''}"


def where(error: Exception) -> str:
    """'file, line N: ' of the user's own code that raised `error`; '' if there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: "
    ours = (__file__, "/site-packages/", "<frozen")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not any(part in frame.filename for part in ours)]
    frames = [frame for frame in frames if not frame.filename.startswith(sys.prefix)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""


def fail(message: str, status: int = 1) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)
