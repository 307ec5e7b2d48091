"""Markdown tables of evaluation results, beside chance levels and scores of arXiv 2404.14462."""

import math
from collections.abc import Sequence
from typing import Any

from smallgpt_jax.evaluation.lm_eval_tasks import PAPER
from smallgpt_jax.formatting import escape_markdown

# Accuracy of choosing one of a question's options at random, per task of PAPER.
_CHANCE = dict(zip(PAPER, (1 / 4, 1 / 2, 1 / 5, 1 / 3, 1 / 2, 1 / 2, 1 / 4)))
# Accuracies logged by the authors of arXiv 2404.14462, per task of PAPER.
_LOGGED = {
    "gpt": (0.3043, 0.4933, 0.1179, 0.335, 0.5000, 0.51, 0.2228),
    "pgpt": (0.2790, 0.4862, 0.1310, 0.334, 0.5000, 0.54, 0.2246),
    "pgpt, one path": (0.2734, 0.4886, 0.1450, 0.336, 0.5098, 0.59, 0.2456),
    "lgpt": (0.2512, 0.4870, 0.1532, 0.334, 0.5141, 0.52, 0.2456),
    "cgpt": (0.2492, 0.4949, 0.1564, 0.340, 0.5326, 0.51, 0.2561),
}
# the metric of each task in _LOGGED; for tasks not listed here: acc
_LOGGED_METRIC = {"hellaswag": "acc_norm"}
_FOOTNOTE = (
    "¹ Logged by the authors of arXiv 2404.14462 for models of the paper's full size. Only "
    "HellaSwag is comparable. For the other six tasks, their code sums the log-probabilities of "
    "the whole vocabulary at every position and never looks up the option's own tokens. Their "
    "accuracies are near or below chance and do not rank models. Here, as in "
    "lm-evaluation-harness, `acc` scores an option by the log-likelihood of its tokens given the "
    "question; `acc_norm` divides this log-likelihood by the option's length in characters."
)


def examples_table(results: dict[str, dict[str, float]], count: int) -> str:
    lines = ["| metric | examples | value |", "|---|---|---|"]
    for name, result in results.items():
        value = f"{result['mean']:.4f} ± {result['standard_error']:.4f}"
        lines.append(f"| {name} | {count:,} | {value} |")
    return "\n".join(lines) + "\n"


def texts_table(files: Sequence[dict[str, Any]], total: dict[str, Any]) -> str:
    """Returns the Markdown table of `evaluate --text`: one row per file (`measures`), and the total."""
    lines = [
        "| text | documents | tokens | bytes | loss | perplexity | bits per byte |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = [(escape_markdown(file["file"]), file) for file in files]
    for name, row in [*rows, ("total", total)]:
        bits = "" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        lines.append(
            f"| {name} | {row['documents']:,} | {row['tokens']:,} | {row['text_bytes']:,} | "
            f"{row['loss']:.4f} | {row['perplexity']:,.3f} | {bits} |"
        )
    if unencoded := total["unencoded"]:
        lines += [
            "",
            "No bits per byte: the model's tokenizer cannot encode some characters "
            f"({unencoded:,} unknown). The loss and the perplexity are those of its tokens.",
        ]
    return "\n".join(lines) + "\n"


def results_table(results: dict, model_name: str) -> str:
    """Returns the table of the harness's `results`, beside the paper's for `model_name`."""
    # empty for architectures that the paper does not have
    logged = dict(zip(PAPER, _LOGGED.get(model_name, ())))
    lines = [
        f"| task | examples | shots | metric | value | chance | paper's {model_name}¹ |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, values in results["results"].items():
        examples = values.get("sample_len", "")
        if examples:
            examples = f"{examples:,}"
        shots = results["n-shot"].get(name, "")
        for key, value in values.items():
            # keys are such as "acc,none" and "acc_stderr,none"; others are no metrics
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            shown = f"{value:.4f}"
            error = values.get(f"{metric}_stderr,{filter_name}")
            if isinstance(error, float) and math.isfinite(error):
                shown += f" ± {error:.4f}"
            chance = paper = ""
            if metric in ("acc", "acc_norm") and name in _CHANCE:
                chance = f"{_CHANCE[name]:.4f}"
            if name in logged and metric == _LOGGED_METRIC.get(name, "acc"):
                paper = f"{logged[name]:.4f}"
            lines.append(
                f"| {name} | {examples} | {shots} | {metric} | {shown} | {chance} | {paper} |"
            )
    if logged.keys() & results["results"].keys():
        lines += ["", _FOOTNOTE]
    return "\n".join(lines) + "\n"
