"""Evaluates a trained model, and writes the results to its workdir."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.benchmarks import Benchmarks
from smallgpt_jax.evaluation.example_file import ExampleFile
from smallgpt_jax.evaluation.model_options import ModelOptions
from smallgpt_jax.evaluation.perplexity import TextFiles
from smallgpt_jax.run.names import EVALUATION_FOLDER
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.paths import as_path


class Evaluation(NamedTuple):
    results: dict[str, Any]  # content of the JSON file
    table: str  # Markdown
    path: Path  # of the JSON file; the table is beside it


def evaluate(
    workdir: str | Path,
    on: str | Sequence[str] | Benchmarks | ExampleFile | TextFiles,
    *,
    limit: float | None = None,
    log_samples: bool = False,
    model: ModelOptions = ModelOptions(),  # noqa: B008 (frozen)
) -> Evaluation:
    """Evaluates a trained model; returns the results, which are also in WORKDIR/evaluations.

    `on` are tasks of lm-evaluation-harness by name ("paper": those of arXiv 2404.14462), the same
    with options (Benchmarks), a file of examples (ExampleFile), or texts (TextFiles). `limit` is
    the most questions per task or, below 1, a fraction of them. With `log_samples`, the results
    have each question and its scores. Texts take neither. Raises UserError.
    """
    # 0 is not "no limit", as some tools read it
    if limit is not None and not 0 < limit < math.inf:
        raise UserError(f"--limit={limit:g}: must be a finite number above 0, or a fraction")
    if isinstance(on, str):
        on = [on]
    if not isinstance(on, Benchmarks | ExampleFile | TextFiles):
        on = Benchmarks(tasks=on)
    folder = as_path("--workdir", workdir)
    name, results, table = on.score(folder, model, limit, log_samples)
    output = folder / EVALUATION_FOLDER
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{name}.json"
    write_atomically(path, json.dumps(results, indent=2, default=str) + "\n")
    # for readers; `compare` reads the JSON alone
    write_atomically(output / f"{name}.md", table)
    return Evaluation(results, table, path)
