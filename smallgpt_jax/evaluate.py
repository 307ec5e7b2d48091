"""Evaluates a trained model on benchmarks with lm-evaluation-harness, or on a file of examples.

    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=paper
    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=hellaswag,piqa --data_dir=eval_data --limit=500
    python -m smallgpt_jax.evaluate --workdir=runs/tuned --examples=test.jsonl --metrics=accuracy

`paper` stands for the seven tasks of arXiv 2404.14462: HellaSwag, WinoGrande, CommonsenseQA, ANLI
r1, PIQA, COPA and ARC-Easy. All other task names are the harness's; the tasks lambada_openai and
wikitext report perplexity. Prints a table of results, and writes the table (Markdown) and the
harness's results (JSON) to WORKDIR/evaluations.
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

from smallgpt_jax import cli, inference
from smallgpt_jax.data import tokenizers
from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.evaluation import examples, report, run
from smallgpt_jax.evaluation.scoring import Scorer
from smallgpt_jax.formatting import duration
from smallgpt_jax.output import StatusLine
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.run.names import EVALUATION_FOLDER
from smallgpt_jax.run.training_text import training_format
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.cache import cache_folder
from smallgpt_jax.storage.paths import as_path, local_path

SCORING_VERSION = 2  # part of the cache key; increase it when a code change affects the scores

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")
_TRUST = cli.define_trust()
_TASKS = flags.DEFINE_list(
    "tasks",
    None,
    "Comma-separated task names; `paper` stands for the seven tasks of arXiv 2404.14462.",
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir",
    None,
    "Folder with the benchmarks' original files, which are used instead of the Hugging Face hub; "
    "see docs/evaluation.md.",
)
_PATHS = flags.DEFINE_string(
    "paths",
    "all",
    "For pgpt, the paths to evaluate: all, best (the path with the largest weight), or indices "
    "such as 0,1.",
)
_SKIP_BLOCKS = flags.DEFINE_list(
    "skip_blocks", [], "Numbers of blocks to leave out, such as 3,4; see docs/inside.md."
)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint step. Default: the newest.")
_NUM_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot",
    None,
    "Few-shot examples before each question. Default: the number in the task's own config, "
    "usually 0.",
    lower_bound=0,
)
_LIMIT = flags.DEFINE_float(
    "limit",
    None,
    "Maximum number of questions per task. A value below 1 is a fraction of the task's questions.",
    lower_bound=0,
)
_SEED = flags.DEFINE_integer(
    "seed", 1234, "Seed for choosing few-shot examples and for sampling texts."
)
_GEN_KWARGS = flags.DEFINE_string(
    "gen_kwargs",
    None,
    "Settings for tasks that generate text, such as temperature=0.8,do_sample=True.",
)
_LOG_SAMPLES = flags.DEFINE_bool(
    "log_samples", False, "Include each question and its scores in the JSON file."
)
_BATCH_TOKENS = flags.DEFINE_integer(
    "batch_tokens", 8192, "Maximum number of token positions per device in a batch.", lower_bound=1
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16"], "Compute dtype. Default: as in training."
)
_EXAMPLES = flags.DEFINE_string(
    "examples",
    None,
    "Instead of --tasks: JSON lines with examples, in the format of the "
    "run's text (config.data.format), or with prompt and completion.",
)
_METRICS = flags.DEFINE_multi_enum(
    "metrics",
    ["exact_match"],
    examples.METRICS,
    "With --examples; repeatable. accuracy: the answer is the label with the highest likelihood.",
)
_LABELS = flags.DEFINE_multi_string(
    "label",
    None,
    "With --metrics=accuracy: a possible answer; repeatable. Default: "
    "the different answers in the file.",
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 64, "With --examples: maximum length of a generated answer.", lower_bound=1
)
FLAGS = flags.FLAGS
flags.mark_flag_as_required("workdir")
OF_TASKS = ("tasks", "data_dir", "num_fewshot", "seed", "gen_kwargs")
OF_EXAMPLES = ("examples", "metrics", "label", "max_new_tokens")


def main() -> None:
    if (_TASKS.value is None) == (_EXAMPLES.value is None):
        raise UserError("give either --tasks or --examples; see --help")
    for name in OF_TASKS if _EXAMPLES.value else OF_EXAMPLES:
        if FLAGS[name].present:
            raise UserError(
                f"--{name}: cannot be combined with --{'examples' if _EXAMPLES.value else 'tasks'}"
            )
    if _LIMIT.value == 0:
        raise UserError("--limit=0: leaves no questions; use at least 1, or a fraction")
    evaluate_examples() if _EXAMPLES.value else evaluate_tasks()


def load_model() -> inference.TrainedModel:
    trained = inference.load_trained(_WORKDIR.value, _STEP.value, _TRUST.value)
    inference.require_next_tokens(trained.model)
    trained = trained.with_paths(_PATHS.value).without_blocks(_SKIP_BLOCKS.value)
    config = trained.model.config
    return trained._replace(
        model=trained.model.clone(
            config=dataclasses.replace(config, dtype=_DTYPE.value or config.dtype)
        )
    )


def scorer_of(trained: inference.TrainedModel) -> Scorer:
    return Scorer(
        trained.model, trained.params, _BATCH_TOKENS.value, model_state=trained.model_state
    )


def evaluate_examples() -> None:
    trained = load_model()
    model, params, model_state, tokenizer, step = trained
    form, template = training_format(as_path("--workdir", _WORKDIR.value))
    form = "completion" if form == "text" else form
    questions = examples.read_questions(
        _EXAMPLES.value, tokenizer, form, template, model.config.context_length, _LIMIT.value
    )
    progress, found, values = ScoringProgress(), {}, {}
    if "accuracy" in _METRICS.value:
        labels = _LABELS.value or examples.find_labels(questions)
        found["label"] = examples.choose_labels(
            scorer_of(trained), tokenizer, questions, labels, progress
        )
        values["accuracy"] = [
            examples.exact_match(question.answer, label)
            for question, label in zip(questions, found["label"])
        ]
    if set(_METRICS.value) & examples.GENERATED.keys():
        text_model = inference.build_text_model(model, params, tokenizer, model_state)
        found["text"] = examples.generate_answers(
            text_model, questions, _MAX_NEW_TOKENS.value, progress
        )
        values |= {
            name: [
                examples.GENERATED[name](question.answer, text)
                for question, text in zip(questions, found["text"])
            ]
            for name in _METRICS.value
            if name in examples.GENERATED
        }
    results = {
        name: dict(zip(("mean", "standard_error"), examples.mean_and_error(scores)))
        for name, scores in values.items()
    }
    # `compare` reports results of the whole model, in its own dtype, on all examples.
    is_whole = (
        _PATHS.value == "all" and not (_SKIP_BLOCKS.value or _DTYPE.value) and _LIMIT.value is None
    )
    record = {
        "step": step,
        "examples": _EXAMPLES.value,
        "count": len(questions),
        "results": results,
        "is_whole": is_whole,
    }
    if _LOG_SAMPLES.value:
        record["samples"] = [
            {
                "where": question.where,
                "answer": question.answer,
                **{name: column[i] for name, column in (found | values).items()},
            }
            for i, question in enumerate(questions)
        ]
    settings = hashlib.sha256(
        json.dumps([_EXAMPLES.value, _LABELS.value, _MAX_NEW_TOKENS.value]).encode()
    ).hexdigest()
    name = join_name_parts(
        "examples",
        name_of_model(step),
        Path(_EXAMPLES.value).stem[:100],
        *_METRICS.value,
        _LIMIT.value is not None and f"limit{_LIMIT.value:g}",
        settings[:8],
    )
    write_results(name, record, report.examples_table(results, len(questions)))


def evaluate_tasks() -> None:
    try:
        from smallgpt_jax.evaluation.harness import SmallGPT
    except ImportError:
        raise UserError(
            f"lm-evaluation-harness is not installed; run {install_command('eval')}"
        ) from None
    data_dir = local_path("--data_dir", _DATA_DIR.value) if _DATA_DIR.value else None
    if data_dir and not data_dir.is_dir():
        raise UserError(
            f"--data_dir={data_dir}: no such folder; create it, or omit the flag to use the "
            "Hugging Face hub"
        )
    trained = load_model()
    model, params, model_state, tokenizer, step = trained
    is_one_path = _PATHS.value != "all" and model.config.num_paths == 1
    prefix, limit, shots, seed = name_of_model(step), _LIMIT.value, _NUM_FEWSHOT.value, _SEED.value
    results = run.evaluate(
        lambda: SmallGPT(
            scorer_of(trained), params, tokenizer, ScoringProgress(), seed, model_state
        ),
        _TASKS.value,
        data_dir,
        cache=cache_folder() / "scores" / f"{model_fingerprint(trained)}.jsonl",
        num_fewshot=shots,
        limit=int(limit) if limit and limit >= 1 else limit,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
        gen_kwargs=_GEN_KWARGS.value,
        log_samples=_LOG_SAMPLES.value,
    )
    name = join_name_parts(
        prefix,
        "_".join(_TASKS.value)[:80],
        shots is not None and f"{shots}shot",
        limit is not None and f"limit{limit:g}",
        FLAGS["seed"].present and f"seed{seed}",
        _GEN_KWARGS.value,
    )[:200]
    write_results(
        name,
        results,
        report.results_table(
            results, "pgpt, one path" if is_one_path else model.config.architecture
        ),
    )


def name_of_model(step: int) -> str:
    """Returns the part of file names that tells which weights of the run were evaluated, and
    how.
    """
    skipped = "_".join(_SKIP_BLOCKS.value)
    return join_name_parts(
        f"step{step}",
        _PATHS.value != "all" and f"paths{_PATHS.value}",
        skipped and f"without{skipped}",
        _DTYPE.value,
    )


def write_results(name: str, results: dict, table: str) -> None:
    folder = as_path("--workdir", _WORKDIR.value) / EVALUATION_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.json", json.dumps(results, indent=2, default=str) + "\n")
    write_atomically(folder / f"{name}.md", table)
    print(f"{table}\n{folder / name}.json")


def model_fingerprint(trained: inference.TrainedModel) -> str:
    """Returns a hash of all that the scores depend on: equal models of all runs share a cache."""
    variables = [bit_checksums(tree) for tree in (trained.params, trained.model_state) if tree]
    content = [
        SCORING_VERSION,
        repr(trained.model),  # its config, and the blocks that are left out
        *variables,
        tokenizers.fingerprint(trained.tokenizer),
        importlib.metadata.version("lm_eval"),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def join_name_parts(*parts: str | bool | None) -> str:
    return "-".join(re.sub(r"[^\w.-]+", "_", part) for part in parts if part)


class ScoringProgress:
    """Updates one line on a terminal; elsewhere, prints a new line every ten seconds."""

    def __init__(self):
        self._line, self._shown_at, self._started = StatusLine(), 0.0, 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done <= 1 or not self._started:
            self._started = self._shown_at = now
        if done < total and now - self._shown_at < (0.2 if self._line.is_on_terminal else 10):
            return
        self._shown_at = now
        if done >= total:
            return self._line.clear()
        left = (now - self._started) * (total - done) / max(done, 1)
        text = f"{done:,} of {total:,} {what}   {duration(left)} left"
        if self._line.is_on_terminal:
            self._line.show(text)
        else:
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    cli.run(main)
