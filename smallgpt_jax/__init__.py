"""Trains and compares small decoder-only language models.

    import smallgpt_jax

    run = smallgpt_jax.train("pgpt:quickstart", "runs/pgpt")
    print(run.load().generate("def main("))

These functions do what the commands do, which `python -m smallgpt_jax` lists. They are imported
when they are first used, because importing JAX takes a second.
"""

from __future__ import annotations  # older versions of Python reach `_require_environment`

import importlib
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# {module: public names that it defines}
_MODULES = {
    "training.trained_run": ("train", "TrainedRun"),
    "data.corpus": ("prepare", "prepare_shard"),
    "inference": ("load",),
    "evaluation.evaluation": ("evaluate",),
    "evaluation.benchmarks": ("Benchmarks",),
    "evaluation.example_file": ("ExampleFile",),
    "evaluation.perplexity": ("TextFiles",),
    "evaluation.model_options": ("ModelOptions",),
    "conversion.exporting": ("export", "HuggingFaceExport", "GgufExport", "PeftExport"),
    "conversion.importing": ("import_", "HuggingFaceImport", "GPTVariationsImport", "RunImport"),
    "planning.plan": ("plan", "plan_inference"),
    "diagnosis.diagnosis": ("diagnose",),
    "comparison.comparing": ("compare", "compare_runs", "merge_results", "plan_comparison"),
    "verification.verification": ("verify",),
    "verification.sample": ("Sample",),
    "verification.bundle": ("write_bundle",),
    "verification.gate": ("ask_gate",),
    "report.choosing": ("choose", "choose_next"),
    "errors": ("UserError", "StoppedError"),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_PUBLIC)

if TYPE_CHECKING:  # `as` tells type checkers that the names are public
    from smallgpt_jax.comparison.comparing import compare as compare
    from smallgpt_jax.comparison.comparing import compare_runs as compare_runs
    from smallgpt_jax.comparison.comparing import merge_results as merge_results
    from smallgpt_jax.comparison.comparing import plan_comparison as plan_comparison
    from smallgpt_jax.conversion.exporting import GgufExport as GgufExport
    from smallgpt_jax.conversion.exporting import HuggingFaceExport as HuggingFaceExport
    from smallgpt_jax.conversion.exporting import PeftExport as PeftExport
    from smallgpt_jax.conversion.exporting import export as export
    from smallgpt_jax.conversion.importing import GPTVariationsImport as GPTVariationsImport
    from smallgpt_jax.conversion.importing import HuggingFaceImport as HuggingFaceImport
    from smallgpt_jax.conversion.importing import RunImport as RunImport
    from smallgpt_jax.conversion.importing import import_ as import_
    from smallgpt_jax.data.corpus import prepare as prepare
    from smallgpt_jax.data.corpus import prepare_shard as prepare_shard
    from smallgpt_jax.diagnosis.diagnosis import diagnose as diagnose
    from smallgpt_jax.errors import StoppedError as StoppedError
    from smallgpt_jax.errors import UserError as UserError
    from smallgpt_jax.evaluation.benchmarks import Benchmarks as Benchmarks
    from smallgpt_jax.evaluation.evaluation import evaluate as evaluate
    from smallgpt_jax.evaluation.example_file import ExampleFile as ExampleFile
    from smallgpt_jax.evaluation.model_options import ModelOptions as ModelOptions
    from smallgpt_jax.evaluation.perplexity import TextFiles as TextFiles
    from smallgpt_jax.inference import load as load
    from smallgpt_jax.planning.plan import plan as plan
    from smallgpt_jax.planning.plan import plan_inference as plan_inference
    from smallgpt_jax.report.choosing import choose as choose
    from smallgpt_jax.report.choosing import choose_next as choose_next
    from smallgpt_jax.training.trained_run import TrainedRun as TrainedRun
    from smallgpt_jax.training.trained_run import train as train
    from smallgpt_jax.verification.bundle import write_bundle as write_bundle
    from smallgpt_jax.verification.gate import ask_gate as ask_gate
    from smallgpt_jax.verification.sample import Sample as Sample
    from smallgpt_jax.verification.verification import verify as verify


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'smallgpt_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"smallgpt_jax.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_PUBLIC, "__version__"]


class _Package(types.ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # `import smallgpt_jax.plan`, of a command's module, leaves the function `plan` in place.
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _require_environment() -> None:
    """Exits with a message if this Python is too old or has no JAX."""
    # as outside of the environment that `make` creates
    problem = ""
    if sys.version_info < (3, 11):  # noqa: UP036
        problem = f"is Python {sys.version_info[0]}.{sys.version_info[1]}, older than 3.11"
    elif importlib.util.find_spec("absl") is None or importlib.util.find_spec("jax") is None:
        problem = "has no JAX"
    if not problem:
        return
    activate = os.path.join(os.path.dirname(os.path.dirname(__file__)), ".venv", "bin", "activate")
    if os.path.exists(activate):
        advice = f"activate the environment: source {os.path.relpath(activate)}"
    else:
        advice = "make an environment: make quickstart, or make install"
    print(f"error: {sys.executable} {problem}; {advice}", file=sys.stderr)
    sys.exit(1)


def _is_command() -> bool:
    """Whether Python is looking for the module of `python -m smallgpt_jax.COMMAND`."""
    if sys.argv[:1] != ["-m"]:
        return False
    # The module's name comes before its arguments. Python before 3.10 does not tell it.
    module = getattr(sys, "orig_argv", [__name__])[-len(sys.argv) :][0]
    return module.removeprefix("-m").partition(".")[0] == __name__


if _is_command():
    _require_environment()

    from smallgpt_jax.errors import exit_on_interrupt

    exit_on_interrupt()
