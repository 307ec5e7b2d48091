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
from smallgpt_jax.evaluation import answers, local_data
from smallgpt_jax.evaluation.score_cache import ScoreCache
from smallgpt_jax.formatting import short_reason

# The tasks of arXiv 2404.14462, in the order of its table 2. The number of examples there shows
# that the paper used the validation split of ARC-Easy. The harness prefers a task's test split, so
# _PAPER_SPLITS removes this test split.
PAPER = ("hellaswag", "winogrande", "commonsense_qa", "anli_r1", "piqa", "copa", "arc_easy")
_PAPER_SPLITS = {"arc_easy": {"test_split": None}}
# Examples before each question, of the tasks of DCLM's CORE (arXiv 2406.11794) that the harness
# has. Prompts and metrics are the harness's. It has neither jeopardy nor squad with short answers.
_CORE_SHOTS = {
    "hellaswag": 10,
    "arc_easy": 10,
    "arc_challenge": 10,
    "copa": 0,
    "commonsense_qa": 10,
    "piqa": 10,
    "openbookqa": 0,
    "lambada_openai": 0,
    "wsc273": 0,
    "winogrande": 0,
    "agieval_lsat_ar": 3,
    "boolq": 10,
    "coqa": 0,
    "bigbench_qa_wikidata_generate_until": 10,
    "bigbench_dyck_languages_generate_until": 10,
    "bigbench_cs_algorithms_generate_until": 10,
    "bigbench_operators_generate_until": 10,
    "bigbench_repeat_copy_logic_generate_until": 10,
    "bigbench_language_identification_multiple_choice": 10,
}
# {name in --tasks: {task of the harness: changes of its config}}
PRESETS = {
    "paper": {name: _PAPER_SPLITS.get(name, {}) for name in PAPER},
    "core": {name: {"num_fewshot": shots} if shots else {} for name, shots in _CORE_SHOTS.items()},
}
_BABYLM = "babylm"  # in --tasks; see `local_data.babylm_tasks`
# The harness's folder of each task. Only the folders of the requested tasks are read, because
# reading all folders takes six seconds.
FOLDERS = {
    "hellaswag": "hellaswag",
    "winogrande": "winogrande",
    "commonsense_qa": "commonsense_qa",
    "anli_r1": "anli",
    "piqa": "piqa",
    "copa": "super_glue/copa",
    "arc_easy": "arc",
    "lambada_openai": "lambada",
    "wikitext": "wikitext",
}


@contextlib.contextmanager
def _quiet_logging():
    """Hides Python warnings, and permanently what the libraries log below ERROR."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_quiet_logging()
def evaluate(
    model: Callable[[], Any],
    tasks: Sequence[str],
    data_dir: Path | None = None,
    cache: Path | None = None,
    log_samples: bool = False,
    **settings,
) -> dict:
    """Returns lm-evaluation-harness's results.

    `model` returns the `lm_eval` model; it is called after tasks and data are loaded. `tasks` are
    names of the harness or of PRESETS, or `babylm`. `data_dir` has the benchmarks' original
    files (see `local_data`); None: data comes from the hub. `cache` is a local file with scores,
    from which an interrupted evaluation resumes. With `log_samples`, the results have each question
    and its scores. `settings` are arguments of `lm_eval.simple_evaluate`.
    """
    import lm_eval

    if not tasks:
        raise UserError(
            "--tasks: is empty; give the name of at least one task, or use --tasks=paper"
        )
    changes = _config_changes(tasks)
    manager = task_manager([*changes])
    _require_known_tasks([*changes], manager.all_tasks)
    pairs = local_data.babylm_tasks(data_dir) if _BABYLM in tasks else []
    if data_dir:
        local_data.require_files([*changes], data_dir)
    specs = [_task_spec(name, changes[name], data_dir, manager) for name in changes]
    loaded = load_tasks([*specs, *pairs], manager, data_dir)
    generates = any(task.OUTPUT_TYPE == "generate_until" for task in _single_tasks(loaded))
    if settings.get("gen_kwargs") and not generates:
        raise UserError("--gen_kwargs: none of these tasks generates text; omit it")
    lm = model()
    lm.set_cache_hook(ScoreCache(cache))
    with contextlib.redirect_stdout(io.StringIO()):  # hides the harness's prints
        try:
            # with samples, which `add_answer_bits` needs
            results = lm_eval.simple_evaluate(
                lm, tasks=loaded, task_manager=manager, log_samples=True, **settings
            )
        except ValueError as error:
            if "larger than population" not in str(error):  # random.sample's message
                raise
            raise UserError(
                f"--num_fewshot={settings.get('num_fewshot')}: a task has fewer examples to "
                "choose from; use a smaller number"
            ) from None
    answers.add_answer_bits(results, {task.task_name: task for task in _single_tasks(loaded)})
    if pairs:
        answers.add_means(results, local_data.BABYLM)
    if not log_samples:
        del results["samples"]
    return results


def _config_changes(tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns {task of the harness: changes of its config}, without repetitions."""
    changes: dict[str, dict[str, Any]] = {}
    for task in tasks:
        if task == _BABYLM:  # not a task of the harness
            continue
        for name, of_preset in PRESETS.get(task, {task: {}}).items():
            changes[name] = changes.get(name, {}) | of_preset
    return changes


def _single_tasks(loaded: Sequence) -> list:
    """Returns tasks, and the tasks of groups."""
    tasks = []
    for task in loaded:
        tasks += task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]
    return tasks


def task_manager(names: Sequence[str]):
    """Returns the harness's TaskManager, which reads only what the tasks `names` need."""
    from lm_eval import tasks

    if not set(names) <= FOLDERS.keys():
        return tasks.TaskManager()
    root = Path(tasks.__file__).parent
    return tasks.TaskManager(
        include_defaults=False, include_path=[root / FOLDERS[name] for name in names]
    )


def _require_known_tasks(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*PRESETS, _BABYLM, *known], n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"--tasks: lm-evaluation-harness has no task {name!r}{hint}")


def _task_spec(name: str, changes: dict, data_dir: Path | None, manager) -> str | dict:
    """Returns an argument of `TaskManager.load`: the task's name, or its changed config."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if not data_dir and not changes:
        return name
    config = load_yaml(manager.task_index[name].yaml_path, resolve_func=True, recursive=True)
    config = {key: value for key, value in config.items() if key != "tag"} | changes
    if data_dir:
        return local_data.task_config(name, config, data_dir)
    return {**config, "task": name}


def load_tasks(specs: Sequence[str | dict], manager, data_dir: Path | None) -> list:
    """Returns the harness's tasks, and groups of tasks, with their data. Raises UserError."""
    tasks = []
    for spec in specs:
        name = spec if isinstance(spec, str) else spec["task"]
        try:
            loaded = manager.load([spec])
        except Exception as error:  # from the hub, the network or a task's own code
            remedy = "; without a network, set --data_dir to a folder with the benchmark's files"
            if data_dir:
                remedy = ""
            raise UserError(
                f"--tasks: cannot load the data of {name!r} ({short_reason(error)}){remedy}"
            ) from None
        if name in loaded["groups"]:
            tasks.append(loaded["groups"][name])
        else:
            tasks += loaded["tasks"].values()
    return tasks
