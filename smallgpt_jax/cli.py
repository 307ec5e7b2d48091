"""Entry point of all commands: flag parsing, error messages, exit status.

Exit status:
    0    success
    1    failure, explained in one or two lines
    2    wrong usage
    124  no training step has finished for train.stall_seconds
    130  stopped by Ctrl-C
    141  standard output is a pipe whose reader has exited
    143  stopped by SIGTERM
"""

import ast
import contextlib
import difflib
import gc
import io
import keyword
import logging
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable

# Before the other imports: imports and tracing allocate many objects and free few of them. With
# Python's thresholds, searching these objects for garbage takes a quarter of the time of the
# imports. The thresholds apply to the whole process.
gc.set_threshold(50_000, 20, 50)

import absl.logging
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from smallgpt_jax.config import recipes
from smallgpt_jax.errors import StoppedError, UserError, raise_on_interrupt
from smallgpt_jax.formatting import printable
from smallgpt_jax.output import best_effort, drop_unwritable, is_output_closed
from smallgpt_jax.storage import object_storage

MIN_FILES = 64  # a tiny run on one device opens between 32 and 48 at a time
# {part of absl's message for a flag value of the wrong type: description of the right type}
_EXPECTED = {"int()": "an integer", "to float": "a number", "boolean": "true or false"}

# so that --help lists --config as a flag of the command, not of this module
flags.disclaim_key_flags()


class _RecipeParser(flags.ArgumentParser):
    def __init__(self, parser: flags.ArgumentParser):
        self._parser = parser

    def parse(self, argument):
        config = self._parser.parse(argument)
        if isinstance(config, ConfigDict) and "model" in config:
            if any(re.match(r"--?config\.train\.size\b", flag) for flag in sys.argv):
                raise UserError(recipes.SIZE_IS_NAMED)
            _add_fields(config.model)
        return config


def _add_fields(model: ConfigDict) -> None:
    """Adds the fields that flags set and the recipe lacks, if the architecture declares them."""
    values = {}  # of the flags, which are parsed later: only what the config has can be set
    # both forms: --config.model.num_paths=2 and --config.model.num_paths 2
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""]):
        if flag := re.fullmatch(r"--?(?:no)?config\.model\.(\w+)(=.*)?", argument, re.DOTALL):
            name, value = flag.groups()
            values[name] = following if value is None else value[1:]
    lacking = [name for name in values if name not in model]
    if not lacking:
        return
    from smallgpt_jax.models import find_architecture  # here, because it imports JAX

    architecture = find_architecture(values.get("architecture", model.architecture))
    declared = architecture.Config.config_dict()
    with model.unlocked():
        for name in lacking:
            near = difflib.get_close_matches(name, declared, n=1)
            if name in declared:
                model[name] = declared.get_ref(name)  # with its type, also where it has no value
            elif near:  # perhaps a field that only this architecture declares
                raise UserError(f"no config field {name!r}; did you mean --config.model.{near[0]}?")


def define_config():
    """Defines --config, a ConfigDict with all overrides applied, and --trust_custom_code."""
    define_trust()
    config = config_flags.DEFINE_config_file(
        "config",
        None,
        "A recipe: its name or path, such as gpt, gpt:SIZE or configs/gpt.py:SIZE. Override any "
        "field with --config.group.field=value; configs/base.py documents the fields. run:WORKDIR "
        "is the config of an existing run.",
    )
    flag = flags.FLAGS["config"]
    flag.parser = _RecipeParser(flag.parser)
    return config


def define_trust():
    return flags.DEFINE_bool(
        "trust_custom_code",
        False,
        "Import the module of a custom architecture that a workdir or "
        "an export names. This runs its code.",
    )


def run(main: Callable[[], None], uses_jax: bool = True) -> None:
    """Runs a command with the flags of this process, and exits."""

    def checked_main(argv):
        if not flags.FLAGS["verbosity"].present:
            absl.logging.set_verbosity(absl.logging.WARNING)
        if len(argv) > 1:
            fail(f"{argv[1]!r}: unexpected argument; flags start with --", status=2)
        run_command(main, uses_jax)

    # If standard error cannot be written, the exit status must stay the same.
    with best_effort("stderr"):
        app.run(checked_main, flags_parser=parse)


def run_command(main: Callable[[], None], uses_jax: bool = True) -> None:
    # Print characters missing from the terminal's encoding as escapes; accept input that is not
    # UTF-8. In the locale C, Python's standard output would refuse them.
    for stream, errors in ((sys.stdout, "backslashreplace"), (sys.stdin, "surrogateescape")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=errors)
    # It prints its messages itself; absl would repeat them.
    logging.getLogger("huggingface_hub").propagate = False
    try:
        _require_open_files()
        if uses_jax:
            _configure_jax()
        # Garbage collection skips the objects of the imports. Tests run several commands in a
        # process, which need it once.
        if not gc.get_freeze_count():
            gc.freeze()
        raise_on_interrupt()
        main()
        sys.stdout.flush()
    except UserError as error:
        fail(str(error))
    except StoppedError as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
    except KeyboardInterrupt:
        fail("stopped", status=130)
    except Exception as error:
        _explain(error)
        raise


def _explain(error: Exception) -> None:
    """Exits with a message if a user can cause the error; otherwise returns."""
    message = _missing_devices(error)
    if message:
        fail(message)
    if object_storage.is_used() and object_storage.is_request_error(error):
        fail(object_storage.request_error_message("object storage", error))
    if not isinstance(error, OSError):
        return
    # a reader that has exited, such as `head`; other causes: full disk, missing permission
    is_closed = is_output_closed()
    drop_unwritable("stdout")
    if isinstance(error, BrokenPipeError) and is_closed:
        sys.exit(141)
    fail(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _configure_jax() -> None:
    # Here, because they import JAX, which takes longer than a command that does not need it.
    from smallgpt_jax.devices import compilation_cache, distributed, host_memory

    compilation_cache.configure()
    distributed.skip_tpu_search()
    host_memory.configure()


def _missing_devices(error: Exception) -> str:
    if "jax" not in sys.modules:  # an import would take longer than the command
        return ""
    from smallgpt_jax.devices.platform import missing_devices_message

    return missing_devices_message(error)


def _require_open_files() -> None:
    """Raises UserError if the process may open too few files for JAX, a checkpoint and the data."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A process may raise its own limit up to the hard one.
    if soft < MIN_FILES <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_FILES, hard))
    elif soft < MIN_FILES:
        raise UserError(
            f"ulimit -n: this process may open only {soft} files; allow at least {MIN_FILES}"
        )


def require_readable_arguments(argv: list[str]) -> None:
    """Raises UserError for arguments that Python cannot decode, without UTF-8."""
    encoding = sys.getfilesystemencoding()
    for argument in argv:
        if encoding != "utf-8" and not argument.isascii():
            shown = os.fsencode(argument).decode("utf-8", "replace")
            raise UserError(
                f"{shown}: cannot be read in a locale with the encoding {encoding}; set "
                "LC_ALL=C.UTF-8, and do not set PYTHONUTF8=0"
            )


def parse(argv: list[str]) -> list[str]:
    """Exits with a one-line message if a flag or the config file has an error."""
    # before the config file is read, which may have an error
    if {"--help", "-h", "-help", "--h"} & set(argv[1:]):
        app.usage(shorthelp=True, writeto_stdout=True)
        sys.exit(0)
    before = sys.argv
    try:
        require_readable_arguments(argv)
        arguments, recipe = _find_recipe(argv)
        # ml_collections reads the overrides from sys.argv.
        sys.argv = quote_run_names(arguments)
        with recipes.imports_of(recipe) if recipe else contextlib.nullcontext():
            return flags.FLAGS(sys.argv)
    except UserError as error:
        fail(str(error), status=2)
    except Exception as error:  # a config file is a program and can raise anything
        fail(_error_message(error), status=2)
    finally:
        sys.argv = before  # messages repeat the command as the user has written it


# An override of one run of a comparison: --config.runs.NAME.GROUP.FIELD=VALUE, where NAME may be
# any text.
_RUN_OVERRIDE = re.compile(
    r"(--?(?:no)?config\.runs)\.(.+?)(\.[a-z]\w*\.[a-z]\w*(?:=.*)?)", re.DOTALL
)


def quote_run_names(argv: list[str]) -> list[str]:
    """Returns `argv` with quotes around names of runs that are no identifiers."""
    # ml_collections expects such names as Python strings. For the run "lr 0.1", the argument
    # '--config.runs.lr 0.1.model.d_model=8' becomes
    # --config.runs["lr\U000000200\U0000002e1"].model.d_model=8.
    quoted = []
    for argument in argv:
        if override := _RUN_OVERRIDE.fullmatch(argument):
            runs, name, field = override.groups()
            argument = f"{runs}{_subscript(name)}{field}"
        quoted.append(argument)
    return quoted


def _subscript(name: str) -> str:
    if name.isidentifier() and not keyword.iskeyword(name):
        return f".{name}"
    # inside quotes, a name could end them, or contain a dot that separates fields
    escaped = [c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in name]
    return f'["{"".join(escaped)}"]'


def unquote_run_names(text: str) -> str:
    return re.sub(
        r'(?<=\bruns)\["((?:\w|\\U[0-9a-f]{8})*)"\]',
        lambda match: "." + ast.literal_eval(f'"{match[1]}"'),
        text,
    )


def _find_recipe(argv: list[str]) -> tuple[list[str], str]:
    """Returns `argv` with the recipe of --config replaced by its path (`find_recipe`), and this path
    or "".
    """
    replaced, recipe = list(argv), ""
    for i, argument in enumerate(argv):
        if argument in ("--config", "-config") and i + 1 < len(argv):
            recipe = replaced[i + 1] = recipes.find_recipe(argv[i + 1])
        elif config := re.fullmatch(r"(--?config=)(.*)", argument, re.DOTALL):
            recipe = recipes.find_recipe(config[2])
            replaced[i] = config[1] + recipe
    return replaced, recipe


def _error_message(error: Exception) -> str:
    text = unquote_run_names(str(error))
    unset = re.findall(r"Flag (--\w+) must have a value other than None", text)
    if unset:
        return f"{' and '.join(unset)} must be given; see --help"
    if misspelt := re.search(r'Did you mean "(.*?)" instead of "(.*?)"', text):
        meant = _fields_named(misspelt[1]) or repr(misspelt[1])
        return f"{_error_location(error)}no config field {misspelt[2]!r}; did you mean {meant}?"
    if mistyped := re.match(r"flag (--.+?): .*(int\(\)|to float|boolean)", text):
        return f"{mistyped[1]}: expected {_EXPECTED[mistyped[2]]}"
    if bound := re.match(r"flag (--\w+=.*): \S+ is not (?:number|integer) >= (\S+)", text):
        return f"{bound[1]}: must be at least {bound[2]}"
    if isinstance(error, flags.UnrecognizedFlagError):
        if error.flagname.startswith("config."):
            if "config" not in flags.FLAGS:
                return f"--{error.flagname}: this command has no --config; remove the flag"
            return (
                f"--{error.flagname}: cannot override a field without --config; add "
                "--config=RECIPE or remove this flag"
            )
        if fields := _fields_named(error.flagname):
            return f"no flag --{error.flagname}; did you mean {fields}?"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # absl puts a summary first and what is wrong with the flag last
    if isinstance(error, flags.Error):
        return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    if isinstance(error, (KeyError, AttributeError)) and not _error_location(error):
        return _unknown_field_message(error)
    return f"{_error_location(error)}{type(error).__name__}: {lines[0] if lines else ''}"


def _unknown_field_message(error: Exception) -> str:
    # the innermost message is the name alone
    name = error
    while isinstance(name, Exception):  # ml_collections wraps errors
        name = name.args[0]
    name = str(name).strip("'")
    if any(argument.startswith(f"--config.runs.{name}.") for argument in sys.argv):
        return f"--config.runs.{name}: the comparison has no run {name!r}"
    fields = _fields_named(name)
    hint = f"did you mean {fields}?" if fields else "configs/base.py documents the fields"
    return f"no config field {name!r}; {hint}"


def _fields_named(flag: str) -> str:
    """Returns what an unknown flag may mean, or "": --steps → "--config.train.steps"."""
    if "config" not in flags.FLAGS:
        return ""
    if "." in flag:
        return f"--config.{flag}"
    config = flags.FLAGS["config"].value
    if not isinstance(config, ConfigDict):  # --config is not given, or an override has an error
        from configs import base

        config = base.get_config("paper")
    name = flag.replace("-", "_")
    groups = {group: fields for group, fields in config.items() if isinstance(fields, ConfigDict)}
    return " or ".join(
        f"--config.{group}.{name}" for group, fields in groups.items() if name in fields
    )


def _error_location(error: Exception) -> str:
    """Returns 'FILE, line N: ' for the innermost stack frame in the user's code, or ''."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: "
    # frames of this module, of libraries and of Python itself are not the user's
    others = (__file__, "/site-packages/", "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_of_others = any(part in frame.filename for part in others)
        if not is_of_others and not frame.filename.startswith(sys.prefix):
            return f"{frame.filename}, line {frame.lineno}: "
    return ""


def fail(message: str, status: int = 1) -> None:
    # a message may contain what somebody else has written into a file
    lines = map(printable, f"error: {message}".splitlines())
    print("\n".join(lines), file=sys.stderr)
    sys.exit(status)
