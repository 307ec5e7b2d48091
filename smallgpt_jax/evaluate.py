"""Evaluates a trained model on benchmarks, through lm-evaluation-harness.

    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=paper
    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=hellaswag,piqa --data_dir=eval_data --limit=500

`paper` stands for the paper's seven: HellaSwag, WinoGrande, CommonsenseQA, ANLI r1, PIQA, COPA, ARC-Easy.
Any other task of the harness goes by its name; lambada_openai and wikitext are perplexities. The
table is printed and written, with the harness's whole result as JSON, into WORKDIR/evaluations.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import re
import sys
import time
from pathlib import Path

from absl import flags

from smallgpt_jax import cli, inference, models, workdir
from smallgpt_jax.checkpoint import bit_sums
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation import report, run
from smallgpt_jax.evaluation.scoring import Scorer
from smallgpt_jax.files import local_path, write_atomically
from smallgpt_jax.formatting import duration
from smallgpt_jax.models.pgpt import with_paths

SCORING = 1  # changes when scores do

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run.")
_TASKS = flags.DEFINE_list("tasks", None, "Names of tasks, with commas; paper: the paper's seven.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of the benchmarks' original files, read in place of the "
                                "hub's; docs/evaluation.md names them.")
_PATHS = flags.DEFINE_string("paths", "all", "Of a pgpt: all, best (the heaviest), or numbers: 0,1.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint; the newest if unset.")
_NUM_FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Examples in front of each question; unset: as the task "
                                    "says, mostly 0.", lower_bound=0)
_LIMIT = flags.DEFINE_float("limit", None, "Only the first questions of each task; below 1: this share of them.",
                            lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 1234, "Of the choice of few-shot examples.")
_GEN_KWARGS = flags.DEFINE_string("gen_kwargs", None, "For tasks that write text: temperature=0.8,do_sample=True,…")
_LOG_SAMPLES = flags.DEFINE_bool("log_samples", False, "Keep each question with its scores in the JSON file.")
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 8192, "Positions computed at one time on each device.",
                                     lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of products; unset: as in training.")
FLAGS = flags.FLAGS
flags.mark_flags_as_required(["workdir", "tasks"])


def main() -> None:
    try:
        from smallgpt_jax.evaluation.harness import SmallGPT
    except ImportError:
        raise UserError("evaluating needs lm-evaluation-harness: pip install -e '.[eval]'") from None
    data_dir = local_path("--data_dir", _DATA_DIR.value) if _DATA_DIR.value else None
    if data_dir and not data_dir.is_dir():
        raise UserError(f"--data_dir={data_dir}: there is no such folder")
    trained = inference.load_trained(_WORKDIR.value, _STEP.value)
    config, params, of = trained.model.config, trained.params, trained.model.config.architecture
    if _PATHS.value != "all":
        chosen = inference.chosen_paths(trained.model, params, _PATHS.value)
        config, params = with_paths(config, params, chosen)
        of = "pgpt, one path" if len(chosen) == 1 else of
    if _DTYPE.value:
        config = dataclasses.replace(config, dtype=_DTYPE.value)
    model = models.LanguageModel(config)

    folder = Path(_WORKDIR.value).expanduser() / workdir.EVALUATION_FOLDER
    folder.mkdir(exist_ok=True)
    which = file_name(f"step{trained.step}", _PATHS.value != "all" and f"paths{_PATHS.value}", _DTYPE.value)
    limit = _LIMIT.value
    if limit == 0:
        raise UserError("--limit=0: leaves no question")
    results = run.evaluate(
        lambda: SmallGPT(Scorer(model, params, _BATCH_TOKENS.value, model_state=trained.model_state), params,
                         trained.tokenizer, Told(), _SEED.value, trained.model_state),
        _TASKS.value, data_dir,
        cache=folder / f"cache-{which}-{digest(params, trained.model_state, trained.tokenizer)}",
        num_fewshot=_NUM_FEWSHOT.value,
        limit=int(limit) if limit and limit >= 1 else limit, random_seed=_SEED.value,
        numpy_random_seed=_SEED.value, torch_random_seed=_SEED.value, fewshot_random_seed=_SEED.value,
        gen_kwargs=_GEN_KWARGS.value, log_samples=_LOG_SAMPLES.value)
    shots = _NUM_FEWSHOT.value
    name = file_name(which, "_".join(_TASKS.value)[:80], shots is not None and f"{shots}shot",
                     limit is not None and f"limit{limit:g}", FLAGS["seed"].present and f"seed{_SEED.value}",
                     _GEN_KWARGS.value)[:200]
    write_atomically(folder / f"{name}.json", json.dumps(results, indent=2, default=str) + "\n")
    table = report.table(results, of)
    write_atomically(folder / f"{name}.md", table)
    print(f"{table}\n{folder / name}.json")


def digest(params, model_state, tokenizer) -> str:
    """Changes with all that scores depend on: what was computed with something else is not for this model."""
    variables = [bit_sums(tree) for tree in (params, model_state) if tree]
    content = [SCORING, *variables, tokenizers.fingerprint(tokenizer), importlib.metadata.version("lm_eval")]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def file_name(*parts: str | bool | None) -> str:
    """The parts that there are, with hyphens."""
    return "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts if part)


class Told:
    """How far it is, on standard error: in place on a terminal, else a line every ten seconds."""

    def __init__(self):
        self._in_place, self._told, self._started, self._first = sys.stderr.isatty(), 0.0, 0.0, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done <= 1 or not self._started:
            self._started = self._told = now
        if done < total and now - self._told < (0.2 if self._in_place else 10):
            return
        self._told = now
        left = (now - self._started) * (total - done) / max(done, 1)
        text = f"{done:,} of {total:,} {what}" + (f"   {duration(left)} left" if done < total else "")
        if self._in_place:
            print(f"\r\x1b[K{text}", end="" if done < total else "\r\x1b[K", file=sys.stderr, flush=True)
        elif done < total:
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
