"""The commands that an answer gives: they train a chosen model, more seeds, or the next run."""

import shlex
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from smallgpt_jax.analysis.record import RESULTS_FILE, Record, Run, model_of
from smallgpt_jax.config.group import AT_START
from smallgpt_jax.config.recipes import load_config
from smallgpt_jax.errors import UserError, command_line

# The recipe of a size sets these to values that suit it.
_OF_SIZE = ("model.vocab_size", "model.context_length", "model.dtype")


def train_again(run: Run, ratio: float, workdir: str) -> str:
    """Returns the command that trains a run of this machine again, with `ratio` times its steps."""
    overrides = []
    if run.config.get("train.trunk"):  # a branch: train it alone, from step 0
        overrides.append("--config.train.trunk=")
    for field in ("train.steps", "optimizer.warmup_steps", "optimizer.decay_steps"):
        steps = run.config.get(field)
        is_number = type(steps) is int and steps > 0  # -1: a fraction of another number of steps
        if ratio != 1 and is_number:
            overrides.append(f"--config.{field}={round(steps * ratio)}")
    return command_line("main", f"--config=run:{run.workdir}", *overrides, f"--workdir={workdir}")


def compare_again(record: Record, *flags: str, without: tuple[str, ...] = ()) -> str:
    """Returns the record's command with further flags, for exactly compare.seeds seeds; "" if it is
    unknown or trains no runs. `without` are the names of flags to leave out.
    """
    try:
        arguments = shlex.split(record.command)
    except ValueError:  # an open quote
        return ""
    is_comparison = arguments[1:3] == ["-m", "smallgpt_jax.compare"]
    if not is_comparison or not any(word.startswith("--config") for word in arguments):
        return ""
    if record.seeds_as_needed:
        flags = (*flags, "--config.compare.most_seeds=0")
    replaced = {*without, *(flag.partition("=")[0] for flag in flags)}
    kept = [flag for flag in _joined(arguments[3:]) if flag.partition("=")[0] not in replaced]
    return command_line("compare", *kept, *flags)


def _joined(arguments: Sequence[str]) -> list[str]:
    """Returns arguments in which a flag and its value, as in --output runs/x, are one."""
    flags: list[str] = []
    for word in arguments:
        if flags and not word.startswith("--") and "=" not in flags[-1]:
            flags[-1] += f"={word}"
        else:
            flags.append(word)
    return flags


def train_name(record: Record, name: str, *flags: str) -> str:
    """Returns the record's command for one name, at the learning rate of its runs; "" as above."""
    flags = (*flags, f"--config.compare.names={name}")
    if record.held_out:  # the runs of one name determine no law
        flags += ("--config.compare.held_out=",)
    if any(model_of(grid) == model_of(name) for grid in record.learning_rates):
        # The rate that the grid has chosen, without training it again.
        config = next(run.config for run in record.runs if run.name == name)
        flags += ("--config.compare.learning_rates=()",)
        for field in ("optimizer.learning_rate", "optimizer.final_learning_rate"):
            flags += (f"--config.runs.{name}.{field}={config[field]}",)
    return compare_again(record, *flags, without=("--results",))


def merge(results: str, output: str) -> str:
    """Returns the command that adds the results of a comparison's folder to a record."""
    both = f"--results={results},{output}/{RESULTS_FILE}"
    return command_line("compare", both, "--output=runs/merged")


# ------------------------------------------------------------------ sized recipes
def train_sized(run: Run, flops: float, workdir: str) -> str:
    """Returns the command that trains the run's architecture on its text, at the size and for the
    steps that suit a budget of training FLOPs (docs/sizes.md); "" if it is too small for that.
    """
    from smallgpt_jax.models import ModelConfig  # imports JAX, as the recipes do

    sized = _sized_recipe(run, f"{flops:.3g}".replace("e+", "e"))
    if sized is None:
        return ""
    recipe, config = sized
    # Fields that follow from the size, whatever it is: the recipe of another size sets them anew.
    following = ModelConfig.shape({"d_model": 64}).keys()
    flags = []
    for field, value in run.config.items():
        group, _, name = field.partition(".")
        is_of_model = group == "model" and field not in _OF_SIZE
        if not is_of_model and field != "data.source":
            continue
        value, of_recipe = _as_flag(value), _as_flag(config[group].get(name))
        is_set_at_start = of_recipe in (str(AT_START), str(float(AT_START)))
        if value == of_recipe or is_set_at_start:
            continue
        flags.append(f"--config.{field}={AT_START if name in following else value}")
    return command_line("main", f"--config={recipe}", *flags, f"--workdir={workdir}")


def _sized_recipe(run: Run, size: str) -> tuple[str, ConfigDict] | None:
    """Returns the recipe of the run's name, or else gpt's, and its config; None below all sizes."""
    for name in (run.model, "gpt"):
        try:
            return f"{name}:{size}", load_config(f"{name}:{size}")
        except UserError:  # a name that only the comparison knows, or a budget below all sizes
            continue
    return None


def _as_flag(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return str(tuple(value)).replace("'", '"')  # shells need no escapes for these quotes
    return str(value)
