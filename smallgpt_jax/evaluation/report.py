"""Markdown table of evaluation results: scores, standard errors, chance levels, and the scores of arXiv 2404.14462."""

import math

# Accuracy of choosing one of a question's options at random.
CHANCE = {"hellaswag": 1 / 4, "winogrande": 1 / 2, "commonsense_qa": 1 / 5, "anli_r1": 1 / 3, "piqa": 1 / 2,
          "copa": 1 / 2, "arc_easy": 1 / 4}
# Accuracies logged by the authors of arXiv 2404.14462.
LOGGED = {
    "gpt": dict(hellaswag=.3043, winogrande=.4933, commonsense_qa=.1179, anli_r1=.335, piqa=.5000, copa=.51,
                arc_easy=.2228),
    "pgpt": dict(hellaswag=.2790, winogrande=.4862, commonsense_qa=.1310, anli_r1=.334, piqa=.5000, copa=.54,
                 arc_easy=.2246),
    "pgpt, one path": dict(hellaswag=.2734, winogrande=.4886, commonsense_qa=.1450, anli_r1=.336, piqa=.5098,
                           copa=.59, arc_easy=.2456),
    "lgpt": dict(hellaswag=.2512, winogrande=.4870, commonsense_qa=.1532, anli_r1=.334, piqa=.5141, copa=.52,
                 arc_easy=.2456),
    "cgpt": dict(hellaswag=.2492, winogrande=.4949, commonsense_qa=.1564, anli_r1=.340, piqa=.5326, copa=.51,
                 arc_easy=.2561)}
LOGGED_METRIC = {"hellaswag": "acc_norm"}  # metric of each task's scores in LOGGED; for tasks not listed here: acc
FOOTNOTE = (
    "¹ Logged by the authors of arXiv 2404.14462 for models of the paper's full size. Only HellaSwag is comparable. "
    "For the other six tasks, their code sums the log-probabilities of the whole vocabulary at every position and "
    "never looks up the option's own tokens. Their accuracies are near or below chance and do not rank models. Here, "
    "as in lm-evaluation-harness, `acc` scores an option by the log-likelihood of its tokens given the question; "
    "`acc_norm` divides this log-likelihood by the option's length in characters.")


def examples_table(results: dict[str, dict[str, float]], count: int) -> str:
    return "\n".join(["| metric | examples | value |", "|---|---|---|", *(
        f"| {name} | {count:,} | {found['mean']:.4f} ± {found['standard_error']:.4f} |"
        for name, found in results.items())]) + "\n"


def results_table(results: dict, model_name: str) -> str:
    logged = LOGGED.get(model_name, {})
    lines = [f"| task | examples | shots | metric | value | chance | paper's {model_name}¹ |",
             "|---|---|---|---|---|---|---|"]
    for name, values in results["results"].items():
        examples = values.get("sample_len", "")
        shots = results["n-shot"].get(name, "")
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            shown = f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) and math.isfinite(error) else "")
            is_accuracy = metric in ("acc", "acc_norm")
            paper = logged.get(name) if metric == LOGGED_METRIC.get(name, "acc") else None
            lines.append(
                f"| {name} | {f'{examples:,}' if examples else ''} | {shots} | {metric} | {shown} | "
                f"{f'{CHANCE[name]:.4f}' if is_accuracy and name in CHANCE else ''} | "
                f"{'' if paper is None else f'{paper:.4f}'} |")
    is_compared = any(name in logged for name in results["results"])
    return "\n".join([*lines, "", FOOTNOTE if is_compared else ""]).strip() + "\n"
