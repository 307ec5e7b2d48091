"""The scores of a run, from the files that `evaluate` has written to its workdir."""

import math
import re
from pathlib import Path
from typing import Any

from smallgpt_jax.run.metrics import ANSWER_BITS
from smallgpt_jax.storage.json_files import (
    BOOLEAN,
    NULL,
    NUMBER,
    OBJECT,
    TEXT,
    Each,
    Optional,
    integer,
    read_json_or_none,
)
from smallgpt_jax.storage.object_storage import is_remote

# The parts of lm-evaluation-harness's results that are read.
_EVALUATION = {
    "results": Each({"sample_len": Optional((NULL, integer(0)))}),
    "n-shot": Optional(OBJECT),
    "n-samples": Optional((NULL, Each({"effective": integer(0), "original": integer(0)}))),
    "config": Optional(OBJECT),
}
# The parts of the results of `evaluate --examples` that are read.
_EXAMPLES = {
    "examples": TEXT,
    "count": integer(1),
    "results": Each({"mean": NUMBER}),
    "is_whole": Optional(BOOLEAN),
}


def read_scores(evaluations: Path, step: int) -> dict[str, float]:
    """Returns {"task metric (settings)": score} of a checkpoint, from the folder of evaluations."""
    return {**_benchmarks(evaluations, step), **_examples(evaluations, step)}


def _benchmarks(evaluations: Path, step: int) -> dict[str, float]:
    """Returns {"task metric (shots, examples)": score} from lm-evaluation-harness's results: of
    acc_norm if present, else acc, and of the bits per byte of right answers.
    """
    # Evaluations of some of pgpt's paths, without some blocks, and with the flag --dtype, are of other
    # models: step100-paths….json, step100-without….json, step100-float32-….json. Of the others, the
    # newest on all examples counts.
    other_model = re.compile(rf"step{step}-(paths|without|float32-|bfloat16-)")
    scores = {}
    for path in sorted(evaluations.glob(f"step{step}-*.json"), key=_modified_at):
        if other_model.match(path.name):
            continue
        evaluation = read_json_or_none(path, _EVALUATION) or {}
        for task, values in evaluation.get("results", {}).items():
            metrics = _finite_metrics(values)
            accuracy = "acc_norm" if "acc_norm" in metrics else "acc"
            for metric in (accuracy, ANSWER_BITS):
                if metric in metrics and not _is_limited(evaluation, task):
                    scores[f"{task} {metric}{_settings(evaluation, task)}"] = metrics[metric]
    return scores


def _examples(evaluations: Path, step: int) -> dict[str, float]:
    """Returns {"file metric (examples)": score} from results of `evaluate --examples`."""
    scores = {}
    # A later file replaces the scores of an earlier one.
    for path in sorted(evaluations.glob(f"examples-step{step}-*.json"), key=_modified_at):
        evaluation = read_json_or_none(path, _EXAMPLES)
        if not evaluation or not evaluation.get("is_whole", False):
            continue  # unreadable, or only of a part of the model or the examples
        file = "/".join(Path(evaluation["examples"]).parts[-2:])
        count = f"{evaluation['count']:,} examples"
        for metric, values in evaluation["results"].items():
            scores[f"{file} {metric} ({count})"] = values["mean"]
    return scores


def _finite_metrics(values: dict[str, Any]) -> dict[str, float]:
    """Returns {"acc": score} of {"acc,none": score}."""
    return {
        key.partition(",")[0]: value
        for key, value in values.items()
        if isinstance(value, float) and math.isfinite(value)
    }


def _modified_at(path: Path) -> float:
    # etils names it otherwise than pathlib
    return path.stat().mtime if is_remote(path) else path.stat().st_mtime


def _is_limited(evaluation: dict, task: str) -> bool:
    """Whether only some of the task's examples were scored."""
    counts = (evaluation.get("n-samples") or {}).get(task)
    if counts:
        return counts["effective"] < counts["original"]
    return evaluation.get("config", {}).get("limit") is not None


def _settings(evaluation: dict, task: str) -> str:
    """Returns a suffix such as " (5-shot, 1,000 examples)", as far as the numbers are recorded."""
    shots = evaluation.get("n-shot", {}).get(task)
    num_examples = evaluation["results"][task].get("sample_len")
    settings = []
    if shots is not None:
        settings.append(f"{shots}-shot")
    if num_examples is not None:
        settings.append(f"{num_examples:,} examples")
    return f" ({', '.join(settings)})" if settings else ""
