"""Runs lm-evaluation-harness on tasks by name."""

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
from smallgpt_jax.formatting import short_reason

# arXiv 2404.14462, table 2, in its order, and the split whose number of examples it gives.
PAPER = ("hellaswag", "winogrande", "commonsense_qa", "anli_r1", "piqa", "copa", "arc_easy")
PAPER_SPLITS = {"arc_easy": {"test_split": None}}  # the harness then uses the validation split
# Folders of some tasks in the harness, which takes six seconds to read the descriptions of all tasks.
FOLDERS = {"hellaswag": "hellaswag", "winogrande": "winogrande", "commonsense_qa": "commonsense_qa",
           "anli_r1": "anli", "piqa": "piqa", "copa": "super_glue/copa", "arc_easy": "arc",
           "lambada_openai": "lambada", "wikitext": "wikitext"}


def evaluate(model: Callable[[], Any], tasks: Sequence[str], data_dir: Path | None = None,
             cache: Path | None = None, **settings) -> dict:
    """Returns lm-evaluation-harness's results for the lm_eval LM that `model` returns.

    `tasks` are the harness's task names; `paper` stands for the paper's seven. Data comes from the benchmarks' original
    files in `data_dir` (see `local_data`), or from the hub. Scores are stored in `cache`, from which an interrupted
    evaluation resumes. `settings` are those of lm_eval.simple_evaluate. Raises UserError for unknown tasks and missing
    data, before `model` is called, and for more few-shot examples than a task has.
    """
    with quiet_logging():
        import lm_eval

        names = expand_tasks(tasks)
        manager = task_manager(names)
        require_known_tasks(names, manager.all_tasks)
        if data_dir:
            local_data.require_files(names, data_dir)
        specs = [task_spec(name, "paper" in tasks, data_dir, manager) for name in names]
        loaded = load_tasks(specs, manager, data_dir)
        lm = model()
        with contextlib.redirect_stdout(io.StringIO()):  # the harness prints there
            try:
                return lm_eval.simple_evaluate(
                    lm, tasks=loaded, task_manager=manager, use_cache=cache and str(cache), **settings)
            except ValueError as error:
                if "larger than population" not in str(error):  # random.sample's message
                    raise
                raise UserError(f"--num_fewshot={settings.get('num_fewshot')}: a task has fewer other examples; "
                                "use a smaller number") from None


def quiet_logging():
    """Returns a context without warnings; also silences the harness, datasets and the hub below errors."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    stack = contextlib.ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    return stack


def expand_tasks(tasks: Sequence[str]) -> list[str]:
    """Returns the names of the tasks, without duplicates; raises UserError if there are none."""
    names = list(dict.fromkeys(name for task in tasks for name in (PAPER if task == "paper" else [task])))
    if not names:
        raise UserError("--tasks: is empty; name tasks, or paper")
    return names


def task_manager(names: Sequence[str]):
    """Returns a TaskManager of these tasks; of all the harness's tasks if one of them is not in FOLDERS."""
    from lm_eval import tasks

    if not set(names) <= FOLDERS.keys():
        return tasks.TaskManager()
    root = Path(tasks.__file__).parent
    return tasks.TaskManager(include_defaults=False, include_path=[root / FOLDERS[name] for name in names])


def require_known_tasks(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises UserError for a name that the harness does not have."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise UserError(f"--tasks: lm-evaluation-harness has no task {name!r}"
                            + (f"; did you mean {' or '.join(near)}?" if near else ""))


def task_spec(name: str, of_paper: bool, data_dir: Path | None, manager) -> str | dict:
    """Returns the harness's argument for a task: its name, or a modified config."""
    from lm_eval.tasks._yaml_loader import load_yaml

    changes = PAPER_SPLITS.get(name, {}) if of_paper else {}
    if not data_dir and not changes:
        return name
    config = load_yaml(manager.task_index[name].yaml_path, resolve_func=True, recursive=True)
    config = {key: value for key, value in config.items() if key != "tag"}
    if data_dir:
        return local_data.task_config(name, config, data_dir)
    return {**config, **changes, "task": name}


def load_tasks(specs: Sequence[str | dict], manager, data_dir: Path | None) -> list:
    """Returns the tasks with their data; raises UserError if it cannot be loaded."""
    tasks = []
    for spec in specs:
        name = spec if isinstance(spec, str) else spec["task"]
        try:
            loaded = manager.load([spec])
        except Exception as error:  # from the hub, the network or a task's own code
            raise UserError(
                f"--tasks: cannot load the data of {name!r} ({short_reason(error)})"
                + ("" if data_dir else "; without a network, set --data_dir to a folder with its original files")
            ) from None
        tasks += [loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values()
    return tasks
