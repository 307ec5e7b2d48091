"""Evaluates a trained model on benchmarks (lm-evaluation-harness), examples, or texts.

    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=paper
    python -m smallgpt_jax.evaluate --workdir=runs/gpt --tasks=hellaswag,piqa --data_dir=eval_data --limit=500
    python -m smallgpt_jax.evaluate --workdir=runs/tuned --examples=test.jsonl --metrics=accuracy
    python -m smallgpt_jax.evaluate --workdir=runs/gpt --text=book.txt,notes/

`paper` stands for the seven tasks of arXiv 2404.14462: HellaSwag, WinoGrande, CommonsenseQA, ANLI
r1, PIQA, COPA and ARC-Easy; `core` for 19 of DCLM's CORE; `babylm` for BabyLM's minimal pairs, as
files in --data_dir. All other task names are the harness's; the tasks lambada_openai and
wikitext report perplexity. Of texts, the loss, perplexity and bits per byte are measured. Prints a
table of results, and writes the table (Markdown) and the results (JSON) to WORKDIR/evaluations.
"""

import json

from absl import flags

from smallgpt_jax import cli
from smallgpt_jax.errors import UserError
from smallgpt_jax.evaluation.benchmarks import SEED, Benchmarks
from smallgpt_jax.evaluation.evaluation import evaluate
from smallgpt_jax.evaluation.example_file import ExampleFile
from smallgpt_jax.evaluation.model_options import DTYPES, ModelOptions
from smallgpt_jax.evaluation.perplexity import TextFiles
from smallgpt_jax.evaluation.questions import METRICS

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")
_TRUST = cli.define_trust()
_TASKS = flags.DEFINE_list(
    "tasks",
    None,
    "Comma-separated task names; `paper` stands for the seven tasks of arXiv 2404.14462, `core` for "
    "19 tasks of DCLM's CORE, `babylm` for BabyLM's minimal pairs (with --data_dir).",
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
    "seed",
    SEED,
    "Seed for choosing few-shot examples and for sampling texts.",
    lower_bound=0,
    upper_bound=2**32 - 1,
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
_DTYPE = flags.DEFINE_enum("dtype", None, list(DTYPES), "Compute dtype. Default: as in training.")
_EXAMPLES = flags.DEFINE_string(
    "examples",
    None,
    "Instead of --tasks: JSON lines with examples, in the format of the "
    "run's text (config.data.format), or with prompt and completion.",
)
_METRICS = flags.DEFINE_multi_enum(
    "metrics",
    ["exact_match"],
    METRICS,
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
_TEXT = flags.DEFINE_string(
    "text",
    None,
    "Instead of --tasks: files, folders and globs of text, JSON lines or Parquet, separated by "
    "commas. Reports loss, perplexity and bits per byte of each file; see docs/evaluation.md.",
)
_STRIDE = flags.DEFINE_integer(
    "stride",
    None,
    "With --text: tokens between the beginnings of two windows of the model's context length. "
    "Default: half the context length.",
)
_JSON = flags.DEFINE_bool("json", False, "Print the results as one JSON object.")
flags.mark_flag_as_required("workdir")

# (what is evaluated, the flags that only it has)
_FLAGS = (
    (_TASKS, (_DATA_DIR, _NUM_FEWSHOT, _SEED, _GEN_KWARGS)),
    (_EXAMPLES, (_METRICS, _LABELS, _MAX_NEW_TOKENS)),
    (_TEXT, (_STRIDE,)),
)


def main() -> None:
    # a flag of another form would be ignored
    chosen = [flag.name for flag, _ in _FLAGS if flag.value is not None]
    if len(chosen) != 1:
        raise UserError("give one of --tasks, --examples and --text; see --help")
    for flag, specific_flags in _FLAGS:
        for other in specific_flags:
            if flag.value is None and other.present:
                raise UserError(f"--{other.name}: cannot be combined with --{chosen[0]}")
    if _TEXT.value is not None:
        on = TextFiles(_TEXT.value, stride=_STRIDE.value)
    elif _EXAMPLES.value is not None:
        on = ExampleFile(
            _EXAMPLES.value,
            metrics=_METRICS.value,
            labels=_LABELS.value or (),
            max_new_tokens=_MAX_NEW_TOKENS.value,
        )
    else:
        on = Benchmarks(
            tasks=_TASKS.value,
            data_dir=_DATA_DIR.value,
            num_fewshot=_NUM_FEWSHOT.value,
            seed=_SEED.value,
            gen_kwargs=_GEN_KWARGS.value,
        )
    model = ModelOptions(
        step=_STEP.value,
        paths=_PATHS.value,
        skip_blocks=_SKIP_BLOCKS.value,
        dtype=_DTYPE.value,
        batch_tokens=_BATCH_TOKENS.value,
        trust_custom_code=_TRUST.value,
    )
    results, table, path = evaluate(
        _WORKDIR.value,
        on,
        limit=_LIMIT.value,
        log_samples=_LOG_SAMPLES.value,
        model=model,
    )
    print(json.dumps(results, default=str) if _JSON.value else f"{table}\n{path}")


if __name__ == "__main__":
    cli.run(main)
