"""The command that trains a chosen model with a whole budget: a sized recipe (docs/sizes.md)."""

from typing import Any

from ml_collections import ConfigDict

from smallgpt_jax.analysis.record import Run
from smallgpt_jax.config.group import AT_START
from smallgpt_jax.config.recipes import load_config
from smallgpt_jax.errors import UserError, command_line

# The recipe sets these to values that suit the size.
_OF_SIZE = ("model.vocab_size", "model.context_length", "model.dtype")


def sized_command(run: Run, flops: float, workdir: str) -> str:
    """Returns the command that trains the run's architecture on its text, at the size and for the
    steps that suit a budget of training FLOPs; "" if it is too small for that.
    """
    from smallgpt_jax.models import ModelConfig  # imports JAX, as the recipes do

    sized = _recipe(run, f"{flops:.3g}".replace("e+", "e"))
    if sized is None:
        return ""
    recipe, config = sized
    following = ModelConfig.shape({"d_model": 64})  # the names count, not the values
    flags = []
    for field, value in run.config.items():
        group, _, name = field.partition(".")
        is_of_model = group == "model" and field not in _OF_SIZE
        if not is_of_model and field != "data.source":
            continue
        value, of_recipe = _as_flag(value), _as_flag(config[group].get(name))
        if value == of_recipe or of_recipe in (str(AT_START), str(float(AT_START))):
            continue
        flags.append(f"--config.{field}={AT_START if name in following else value}")
    return command_line("main", f"--config={recipe}", *flags, f"--workdir={workdir}")


def _recipe(run: Run, size: str) -> tuple[str, ConfigDict] | None:
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
