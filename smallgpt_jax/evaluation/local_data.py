"""Reads benchmark data from the benchmarks' original files, for machines without a network.

Each reader returns rows in the format of the Hugging Face dataset that the harness's task uses.
Each task has a single split; few-shot examples are also taken from this split.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import short_reason, short_repr
from smallgpt_jax.storage.json_files import OBJECT, TEXT, Kind, one_of, parse_json


class _LocalTask(NamedTuple):
    files: tuple[str, ...]  # paths in --data_dir
    read: Callable[..., list[dict]]  # maps the contents of the files to rows
    source: str  # URL of the files


# Schemas of rows. The harness fails on other rows, or counts them as wrong answers.
_WORDS = Kind("a text that is not empty", lambda value: TEXT.accepts(value) and value.strip() != "")
_LAMBADA = {"text": Kind("a text of several words", lambda v: TEXT.accepts(v) and " " in v.strip())}
_WINOGRANDE = {
    "sentence": Kind('a text with "_"', lambda value: TEXT.accepts(value) and "_" in value),
    "option1": _WORDS,
    "option2": _WORDS,
    "answer": one_of("1", "2"),
}
_COPA = {
    "premise": _WORDS,
    "question": one_of("cause", "effect"),
    "choice1": _WORDS,
    "choice2": _WORDS,
    "label": one_of(0, 1),
}
_PIQA = {"goal": TEXT, "sol1": _WORDS, "sol2": _WORDS}
_MULTIPLE_CHOICE = {
    "question": {"stem": TEXT, "choices": [{"label": TEXT, "text": _WORDS}]},
    "answerKey": TEXT,
}
_ANLI = {"context": TEXT, "hypothesis": TEXT, "label": one_of("e", "n", "c")}


def _rows(schema: Any) -> Callable[[str], list[dict]]:
    return lambda text: [row for _, row in _numbered_rows(text, schema)]


def _numbered_rows(text: str, schema: Any = OBJECT) -> list[tuple[int, dict]]:
    """Returns (number of the line, row) of each line that is not blank. Raises ValueError."""
    rows = []
    # not `splitlines`, which also splits at characters that JSON strings may contain, as U+2028
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append((number, parse_json(line.encode(), schema)))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return rows


def hellaswag(text: str) -> list[dict]:
    """`preprocess` removes WikiHow's markup in brackets."""
    from lm_eval.tasks.hellaswag.utils import preprocess

    # some copies of the file have the query instead of its parts
    def query(row: dict) -> str:
        return row.get("query") or preprocess(
            f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        )

    rows = []
    for number, row in _numbered_rows(text):
        choices = [preprocess(ending) for ending in row["endings"]]
        label = int(row["label"])
        if not 0 <= label < len(choices):
            raise ValueError(f"line {number}: label {label} of {len(choices)} endings")
        rows.append({"query": query(row), "choices": choices, "label": label})
    return rows


def piqa(items: str, labels: str) -> list[dict]:
    rows = []
    for (number, row), label in zip(_numbered_rows(items, _PIQA), labels.split(), strict=True):
        if label not in ("0", "1"):
            raise ValueError(f"line {number}: label {short_repr(label)}, expected 0 or 1")
        rows.append({**row, "label": int(label)})
    return rows


def _multiple_choice(text: str) -> list[dict]:
    """Returns the rows of ARC or CommonsenseQA, whose files have AI2's format."""
    rows = []
    for number, row in _numbered_rows(text, _MULTIPLE_CHOICE):
        question = row["question"]
        choices = {
            "label": [choice["label"] for choice in question["choices"]],
            "text": [choice["text"] for choice in question["choices"]],
        }
        if row["answerKey"] not in choices["label"]:
            raise ValueError(f"line {number}: no choice {short_repr(row['answerKey'])}")
        rows.append(
            {"question": question["stem"], "answerKey": row["answerKey"], "choices": choices}
        )
    return rows


def anli(text: str) -> list[dict]:
    return [
        {
            "premise": row["context"],
            "hypothesis": row["hypothesis"],
            "label": "enc".index(row["label"]),  # entailment, neutral, contradiction
        }
        for _, row in _numbered_rows(text, _ANLI)
    ]


def wikitext(text: str) -> list[dict]:
    """Returns one row per article; articles begin with a first-level heading, ` = Title = `."""
    starts = [heading.start() for heading in re.finditer(r"^ = [^=\n]+ = *$", text, re.MULTILINE)]
    ends = [*starts[1:], len(text)]
    return [{"page": text[start:end]} for start, end in zip(starts, ends)]


TASKS = {
    "hellaswag": _LocalTask(
        ("hellaswag_val.jsonl",), hellaswag, "https://github.com/rowanz/hellaswag"
    ),
    "winogrande": _LocalTask(
        ("winogrande_xl_dev.jsonl",), _rows(_WINOGRANDE), "https://winogrande.allenai.org"
    ),
    "commonsense_qa": _LocalTask(
        ("commonsense_qa_dev.jsonl",),
        _multiple_choice,
        "https://www.tau-nlp.sites.tau.ac.il/commonsenseqa",
    ),
    "anli_r1": _LocalTask(
        ("anli_v1.0/R1/test.jsonl",), anli, "https://dl.fbaipublicfiles.com/anli/anli_v1.0.zip"
    ),
    "piqa": _LocalTask(
        ("piqa_valid.jsonl", "piqa_valid-labels.lst"), piqa, "https://yonatanbisk.com/piqa"
    ),
    "copa": _LocalTask(("copa_val.jsonl",), _rows(_COPA), "https://super.gluebenchmark.com/tasks"),
    "arc_easy": _LocalTask(
        ("arc_easy_dev.jsonl",), _multiple_choice, "https://allenai.org/data/arc"
    ),
    "lambada_openai": _LocalTask(
        ("lambada_openai_test.jsonl",),
        _rows(_LAMBADA),
        "https://huggingface.co/datasets/EleutherAI/lambada_openai",
    ),
    "wikitext": _LocalTask(
        ("wikitext2_valid.txt",), wikitext, "https://huggingface.co/datasets/Salesforce/wikitext"
    ),
}


# BabyLM's minimal pairs: {group of tasks: folder in --data_dir, with a task per file}
BABYLM = {"babylm_blimp": "blimp_filtered", "babylm_supplement": "supplement_filtered"}


def babylm_tasks(folder: Path | None) -> list[dict]:
    """Returns the harness's configs of BabyLM's minimal pairs, GROUP_FILE."""
    if folder is None:
        raise UserError(
            "--tasks=babylm: needs --data_dir, a folder with "
            f"{' and '.join(BABYLM.values())} of BabyLM's evaluation data"
        )
    tasks = []
    for group, name in BABYLM.items():
        files = sorted((folder / name).glob("*.jsonl"))
        if not files:
            raise UserError(
                f"--data_dir={folder}: missing {name}/*.jsonl (babylm); give the folder full_eval "
                "or fast_eval of BabyLM's evaluation data"
            )
        tasks += [_minimal_pairs(f"{group}_{file.stem}", file) for file in files]
    return tasks


def _minimal_pairs(task: str, file: Path) -> dict:
    """Returns the harness's config of a task: which sentence of a pair is more probable."""
    from datasets import Dataset

    good, bad = "sentence_good", "sentence_bad"
    try:
        pairs = []
        for number, row in _numbered_rows(file.read_text(encoding="utf-8")):
            pairs.append({good: row[good], bad: row[bad]})
            if not all(isinstance(text, str) and text for text in pairs[-1].values()):
                raise ValueError("a sentence is empty or no text")
            if row[good] == row[bad]:  # a tie, which the harness would count as right
                raise UserError(
                    f"{file}, line {number}: {good} and {bad} are equal; correct or remove the line"
                )
        split = Dataset.from_list(pairs)
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{file}: expected JSON lines with {good} and {bad} ({short_reason(error)})"
        ) from None
    return {
        "task": task,
        "custom_dataset": lambda **_: {"here": split},
        "validation_split": "here",
        "output_type": "multiple_choice",
        "doc_to_text": "",
        "doc_to_choice": "{{[sentence_good, sentence_bad]}}",
        "doc_to_target": 0,
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def require_files(names: Sequence[str], folder: Path) -> None:
    """Raises UserError unless the data of all tasks can be read from `folder`."""
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise UserError(
            f"--data_dir: does not support {', '.join(unknown)}, only {', '.join(TASKS)}; leave "
            "the flag out to download the data from the Hugging Face hub"
        )
    # before any is read: all missing files at once, not one per attempt
    missing = []
    for name in names:
        for file in TASKS[name].files:
            if not (folder / file).is_file():
                missing.append(f"{file} ({name}, {TASKS[name].source})")
    if missing:
        raise UserError(
            f"--data_dir={folder}: missing {', '.join(missing)}; add them under these names"
        )


def task_config(name: str, config: dict, folder: Path) -> dict:
    """Returns the harness's `config` of a task, with the rows of files in `folder`."""
    from datasets import Dataset

    task = TASKS[name]
    try:
        texts = [(folder / file).read_text(encoding="utf-8") for file in task.files]
        rows = task.read(*texts)
        if not rows:
            raise ValueError("no rows")
        split = Dataset.from_list(rows)
    # Readers and pyarrow raise these on files of another format.
    except (
        *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
        RuntimeError,  # a NotImplementedError of pyarrow
    ) as error:
        raise UserError(
            f"{folder / task.files[0]}: not the data of {name} ({type(error).__name__}: "
            f"{short_reason(error)}); download it again from {task.source}"
        ) from None
    return {
        **config,
        "task": name,
        "process_docs": None,  # `read` has done it
        # The harness's names of the splits, of which there is one, called "here".
        "custom_dataset": lambda **_: {"here": split},
        "training_split": None,
        "validation_split": "here",
        "test_split": None,
        "fewshot_split": None,
    }
