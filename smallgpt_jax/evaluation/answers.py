"""How probable the right answers of the harness's multiple-choice tasks are."""

import math
import statistics
from collections.abc import Iterable
from typing import Any

from smallgpt_jax.data.questions import AnswerBits, answer_bits
from smallgpt_jax.run.metrics import ANSWER_BITS, ANSWER_MARGIN


def add_answer_bits(results: dict[str, Any], tasks: dict[str, Any]) -> None:
    """Adds ANSWER_BITS and ANSWER_MARGIN to the harness's results, which need its samples."""
    for name, samples in results["samples"].items():
        task = tasks.get(name)
        if task is None or task.OUTPUT_TYPE != "multiple_choice":
            continue  # has no right answer among given ones
        questions = {sample["doc_id"]: sample for sample in samples}  # once per filter
        bits = [_answer_bits_of(sample, task) for sample in questions.values()]
        # None: a question without a right or a wrong choice
        bits = [question for question in bits if question is not None]
        if bits:
            values = results["results"][name]
            values |= _mean(ANSWER_BITS, [question.right for question in bits])
            values |= _mean(ANSWER_MARGIN, [question.margin for question in bits])


def _answer_bits_of(sample: dict[str, Any], task) -> AnswerBits | None:
    # Some tasks have further requests, which score the choices without the question.
    count = len(task.doc_to_choice(sample["doc"]))
    answers = [arguments[1] for arguments in sample["arguments"][:count]]
    log_likelihoods = [responses[0][0] for responses in sample["resps"][:count]]
    return answer_bits(log_likelihoods, answers, _right_answers(sample["doc"], task))


def _right_answers(doc: dict[str, Any], task) -> set[int]:
    """As the harness finds them, for tasks with several questions and one answer, too."""
    right = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(right, str):
        choices = task.doc_to_choice(doc)
        return {choices.index(right)} if right in choices else set()
    return set(right) if isinstance(right, list) else {right}


def _mean(metric: str, values: list[float]) -> dict[str, float]:
    error: float | str = "N/A"  # as the harness writes it; NaN is no JSON
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
    return {f"{metric},none": statistics.fmean(values), f"{metric}_stderr,none": error}


def add_means(results: dict[str, Any], groups: Iterable[str]) -> None:
    """Adds the means over the tasks GROUP_…, which count equally, to results of the harness."""
    of_tasks = results["results"]
    means: dict[str, dict[str, Any]] = {}
    for group in groups:
        members = [of_tasks[name] for name in of_tasks if name.startswith(f"{group}_")]
        means[group] = {"sample_len": sum(values["sample_len"] for values in members)}
        for metric in ("acc", ANSWER_BITS, ANSWER_MARGIN):
            errors = [values[f"{metric}_stderr,none"] for values in members]
            has_errors = "N/A" not in errors  # of a task with one question
            means[group][f"{metric},none"] = statistics.fmean(
                values[f"{metric},none"] for values in members
            )
            means[group][f"{metric}_stderr,none"] = (
                math.hypot(*errors) / len(members) if has_errors else "N/A"
            )
    results["results"] = means | of_tasks
