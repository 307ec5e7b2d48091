"""Evaluates a trained model on benchmarks with lm-evaluation-harness.

    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=paper
    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=hellaswag,piqa --data_dir=eval_data --limit=500

`paper` stands for the seven tasks of arXiv 2404.14462: HellaSwag, WinoGrande, CommonsenseQA, ANLI r1, PIQA, COPA and
ARC-Easy. All other task names are the harness's; the tasks lambada_openai and wikitext report perplexity. Prints a
table of results, and writes the table (Markdown) and the harness's results (JSON) to WORKDIR/evaluations.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import re
import sys
import time

from absl import flags

from smallgpt_jax import cli, inference
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.evaluation import report, run
from smallgpt_jax.evaluation.scoring import Scorer
from smallgpt_jax.formatting import duration
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.run.names import EVALUATION_FOLDER
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.cache import cache_folder
from smallgpt_jax.storage.object_storage import is_remote
from smallgpt_jax.storage.paths import as_path, local_path

SCORING_VERSION = 2  # part of the cache key; increase it when a code change affects the scores

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")
_TRUST = cli.define_trust()
_TASKS = flags.DEFINE_list("tasks", None, "Comma-separated task names; `paper` stands for the seven tasks of "
                           "arXiv 2404.14462.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder with the benchmarks' original files, which are used "
                                "instead of the Hugging Face hub; see docs/evaluation.md.")
_PATHS = flags.DEFINE_string("paths", "all", "For pgpt, the paths to evaluate: all, best (the path with the "
                             "largest weight), or indices such as 0,1.")
_SKIP_BLOCKS = flags.DEFINE_list("skip_blocks", [], "Numbers of blocks to leave out, such as 3,4; see docs/inside.md.")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint step. Default: the newest.")
_NUM_FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Few-shot examples before each question. Default: the "
                                    "number in the task's own config, usually 0.", lower_bound=0)
_LIMIT = flags.DEFINE_float("limit", None, "Maximum number of questions per task. A value below 1 is a fraction "
                            "of the task's questions.",
                            lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 1234, "Seed for choosing few-shot examples and for sampling texts.")
_GEN_KWARGS = flags.DEFINE_string("gen_kwargs", None, "Settings for tasks that generate text, such as "
                                  "temperature=0.8,do_sample=True.")
_LOG_SAMPLES = flags.DEFINE_bool("log_samples", False, "Include each question and its scores in the JSON file.")
_BATCH_TOKENS = flags.DEFINE_integer("batch_tokens", 8192, "Maximum number of token positions per device in a batch.",
                                     lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Compute dtype. Default: as in training.")
FLAGS = flags.FLAGS
flags.mark_flags_as_required(["workdir", "tasks"])


def main() -> None:
    try:
        from smallgpt_jax.evaluation.harness import SmallGPT
    except ImportError:
        raise UserError(f"lm-evaluation-harness is not installed; run {install_command('eval')}") from None
    data_dir = local_path("--data_dir", _DATA_DIR.value) if _DATA_DIR.value else None
    if data_dir and not data_dir.is_dir():
        raise UserError(f"--data_dir={data_dir}: no such folder; create it, or omit the flag to use the "
                        "Hugging Face hub")
    trained = inference.load_trained(_WORKDIR.value, _STEP.value, _TRUST.value)
    trained = trained.with_paths(_PATHS.value).without_blocks(_SKIP_BLOCKS.value)
    inference.require_next_tokens(trained.model)
    config, params, model_state = trained.model.config, trained.params, trained.model_state
    is_one_path = _PATHS.value != "all" and config.num_paths == 1
    model_name = "pgpt, one path" if is_one_path else config.architecture
    if _DTYPE.value:
        config = dataclasses.replace(config, dtype=_DTYPE.value)
    model = trained.model.clone(config=config)

    folder = as_path("--workdir", _WORKDIR.value) / EVALUATION_FOLDER
    scores = cache_folder() / "scores" if is_remote(folder) else folder  # lm_eval stores scores in a local database
    for created in (folder, scores):
        created.mkdir(parents=True, exist_ok=True)
    skipped = "_".join(_SKIP_BLOCKS.value)
    prefix = join_name_parts(f"step{trained.step}", _PATHS.value != "all" and f"paths{_PATHS.value}",
                             skipped and f"without{skipped}", _DTYPE.value)
    limit = _LIMIT.value
    if limit == 0:
        raise UserError("--limit=0: leaves no questions; use at least 1, or a fraction")
    results = run.evaluate(
        lambda: SmallGPT(Scorer(model, params, _BATCH_TOKENS.value, model_state=model_state), params,
                         trained.tokenizer, ScoringProgress(), _SEED.value, model_state),
        _TASKS.value, data_dir,
        cache=scores / f"cache-{prefix}-{model_fingerprint(params, model_state, trained.tokenizer)}",
        num_fewshot=_NUM_FEWSHOT.value,
        limit=int(limit) if limit and limit >= 1 else limit, random_seed=_SEED.value,
        numpy_random_seed=_SEED.value, torch_random_seed=_SEED.value, fewshot_random_seed=_SEED.value,
        gen_kwargs=_GEN_KWARGS.value, log_samples=_LOG_SAMPLES.value)
    shots = _NUM_FEWSHOT.value
    name = join_name_parts(prefix, "_".join(_TASKS.value)[:80], shots is not None and f"{shots}shot",
                           limit is not None and f"limit{limit:g}", FLAGS["seed"].present and f"seed{_SEED.value}",
                           _GEN_KWARGS.value)[:200]
    write_atomically(folder / f"{name}.json", json.dumps(results, indent=2, default=str) + "\n")
    table = report.results_table(results, model_name)
    write_atomically(folder / f"{name}.md", table)
    print(f"{table}\n{folder / name}.json")


def model_fingerprint(params, model_state, tokenizer) -> str:
    variables = [bit_checksums(tree) for tree in (params, model_state) if tree]
    content = [SCORING_VERSION, *variables, tokenizers.fingerprint(tokenizer), importlib.metadata.version("lm_eval")]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]


def join_name_parts(*parts: str | bool | None) -> str:
    return "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts if part)


class ScoringProgress:
    """Updates one line on a terminal; elsewhere, prints a new line every ten seconds."""

    def __init__(self):
        self._in_place, self._shown_at, self._started = sys.stderr.isatty(), 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done <= 1 or not self._started:
            self._started = self._shown_at = now
        if done < total and now - self._shown_at < (0.2 if self._in_place else 10):
            return
        self._shown_at = now
        left = (now - self._started) * (total - done) / max(done, 1)
        text = f"{done:,} of {total:,} {what}" + (f"   {duration(left)} left" if done < total else "")
        if self._in_place:
            print(f"\r\x1b[K{text}", end="" if done < total else "\r\x1b[K", file=sys.stderr, flush=True)
        elif done < total:
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
