"""An evaluation: tasks in, the harness's results out."""

import contextlib
import difflib
import io
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import local_data
from smallgpt_jax.formatting import reason

# arXiv 2404.14462, table 2, in its order; and the split that its numbers of examples are those of.
PAPER = ("hellaswag", "winogrande", "commonsense_qa", "anli_r1", "piqa", "copa", "arc_easy")
PAPER_SPLITS = {"arc_easy": {"test_split": None}}  # the harness then uses the validation split
# Where the harness keeps some tasks: to read the descriptions of all takes it six seconds.
FOLDERS = {"hellaswag": "hellaswag", "winogrande": "winogrande", "commonsense_qa": "commonsense_qa",
           "anli_r1": "anli", "piqa": "piqa", "copa": "super_glue/copa", "arc_easy": "arc",
           "lambada_openai": "lambada", "wikitext": "wikitext"}


def evaluate(model: Callable[[], Any], tasks: Sequence[str], data_dir: Path | None = None,
             cache: Path | None = None, **settings) -> dict:
    """lm-evaluation-harness's results of the model that `model` makes, an lm_eval LM.

    `tasks` are names that the harness knows; `paper` stands for the paper's seven. With `data_dir` their
    original files are read from there (`local_data`), else they are fetched from the hub. What is
    computed is kept in `cache`, so that an evaluation that was interrupted goes on. `settings` are
    those of lm_eval.simple_evaluate. Raises UserError for unknown tasks, before the model is made,
    and for data that is not there.
    """
    with quiet():
        import lm_eval

        names = spelt_out(tasks)
        manager = task_manager(names)
        check(names, manager.all_tasks)
        if data_dir:
            local_data.check(names, data_dir)
        specs = [specify(name, "paper" in tasks, data_dir, manager) for name in names]
        loaded = load(specs, manager, data_dir)
        lm = model()
        with contextlib.redirect_stdout(io.StringIO()):  # what the harness prints of its own
            return lm_eval.simple_evaluate(
                lm, tasks=loaded, task_manager=manager, use_cache=cache and str(cache), **settings)


def quiet():
    """Neither the harness's log, nor what datasets and the hub say on their way to an error."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    stack = contextlib.ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    return stack


def spelt_out(tasks: Sequence[str]) -> list[str]:
    """The names of tasks, each once."""
    names = list(dict.fromkeys(name for task in tasks for name in (PAPER if task == "paper" else [task])))
    if not names:
        raise UserError("--tasks is empty: name some, or paper")
    return names


def task_manager(names: Sequence[str]):
    """What knows these tasks, and if one of them is not among FOLDERS all that the harness has."""
    from lm_eval import tasks

    if not set(names) <= FOLDERS.keys():
        return tasks.TaskManager()
    root = Path(tasks.__file__).parent
    return tasks.TaskManager(include_defaults=False, include_path=[root / FOLDERS[name] for name in names])


def check(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises UserError for a name that the harness does not know."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise UserError(f"--tasks: lm-evaluation-harness has no task {name!r}"
                            + (f"; the nearest: {', '.join(near)}" if near else ""))


def specify(name: str, of_paper: bool, data_dir: Path | None, manager) -> str | dict:
    """What the harness takes for a task: its name, or a config that differs from its own."""
    from lm_eval.tasks._yaml_loader import load_yaml

    changes = PAPER_SPLITS.get(name, {}) if of_paper else {}
    if not data_dir and not changes:
        return name
    config = load_yaml(manager.task_index[name].yaml_path, resolve_func=True, recursive=True)
    config = {key: value for key, value in config.items() if key != "tag"}
    if data_dir:
        return local_data.task_config(name, config, data_dir)
    return {**config, **changes, "task": name}


def load(specs: Sequence[str | dict], manager, data_dir: Path | None) -> list:
    """The tasks, their data fetched."""
    tasks = []
    for spec in specs:
        name = spec if isinstance(spec, str) else spec["task"]
        try:
            loaded = manager.load([spec])
        except Exception as error:  # of the hub, of the network, of a task's own code
            raise UserError(
                f"--tasks: the data of {name!r} could not be loaded ({reason(error)})."
                + ("" if data_dir else "\nWithout a network: --data_dir=FOLDER with its original files")) from None
        tasks += [loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values()
    return tasks
