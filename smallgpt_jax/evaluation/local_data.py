"""The benchmarks' original files, for machines without a network, in place of the hub's copies.

Each reader gives the rows that the harness's task expects from the hub. Where only one split of a benchmark
is published with answers, or at hand, that one is used, and few-shot examples come from it too.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.errors import UserError


class LocalTask(NamedTuple):
    """How a task of the harness is read from files."""

    files: tuple[str, ...]  # in --data_dir
    rows: Callable[..., list[dict]]  # of the files' contents
    source: str  # where the files come from
    changes: tuple[tuple[str, object], ...] = ()  # to the harness's config of the task


def json_rows(text: str) -> list[dict]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def hellaswag(text: str) -> list[dict]:
    """As the harness prepares it: the query is the activity, a colon, and the context without the brackets
    that WikiHow's texts have."""
    from lm_eval.tasks.hellaswag.utils import preprocess

    def query(row: dict) -> str:
        return row.get("query") or preprocess(
            f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")

    return [{"query": query(row), "choices": [preprocess(ending) for ending in row["endings"]],
             "label": int(row["label"])} for row in json_rows(text)]


def piqa(items: str, labels: str) -> list[dict]:
    return [{**row, "label": int(label)} for row, label in zip(json_rows(items), labels.split(), strict=True)]


def with_choices(text: str) -> list[dict]:
    """ARC and CommonsenseQA in AI2's form: a question with a stem and a list of labelled choices."""
    return [{"question": row["question"]["stem"], "answerKey": row["answerKey"],
             "choices": {key: [choice[key] for choice in row["question"]["choices"]] for key in ("label", "text")}}
            for row in json_rows(text)]


def anli(text: str) -> list[dict]:
    return [{"premise": row["context"], "hypothesis": row["hypothesis"], "label": "enc".index(row["label"])}
            for row in json_rows(text)]


def wikitext(text: str) -> list[dict]:
    """One row an article; articles begin with a heading of the first level, ` = Title = `."""
    return [{"page": page} for page in split_articles(text)]


def split_articles(text: str) -> Iterator[str]:
    starts = [heading.start() for heading in re.finditer(r"^ = [^=\n]+ = *$", text, re.MULTILINE)]
    for start, end in zip(starts, [*starts[1:], len(text)]):
        yield text[start:end]


TASKS = {
    "hellaswag": LocalTask(("hellaswag_val.jsonl",), hellaswag, "https://github.com/rowanz/hellaswag",
                           (("process_docs", None),)),
    "winogrande": LocalTask(("winogrande_xl_dev.jsonl",), json_rows, "https://winogrande.allenai.org"),
    "commonsense_qa": LocalTask(("commonsense_qa_dev.jsonl",), with_choices,
                                "https://www.tau-nlp.sites.tau.ac.il/commonsenseqa"),
    "anli_r1": LocalTask(("anli_v1.0/R1/test.jsonl",), anli, "https://dl.fbaipublicfiles.com/anli/anli_v1.0.zip"),
    "piqa": LocalTask(("piqa_valid.jsonl", "piqa_valid-labels.lst"), piqa, "https://yonatanbisk.com/piqa"),
    "copa": LocalTask(("copa_val.jsonl",), json_rows, "https://super.gluebenchmark.com/tasks"),
    "arc_easy": LocalTask(("arc_easy_dev.jsonl",), with_choices, "https://allenai.org/data/arc"),
    "lambada_openai": LocalTask(("lambada_openai_test.jsonl",), json_rows,
                                "https://huggingface.co/datasets/EleutherAI/lambada_openai"),
    "wikitext": LocalTask(("wikitext2_valid.txt",), wikitext,
                          "https://huggingface.co/datasets/Salesforce/wikitext"),
}


def check(names: Sequence[str], folder: Path) -> None:
    """Raises UserError for tasks that cannot be read from files, and for files that `folder` lacks: all of them."""
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"--data_dir: cannot be used for {', '.join(unknown)}, only for {', '.join(TASKS)}; leave it "
                        "out to fetch the data from the hub")
    if missing := [f"{file} ({name}, {TASKS[name].source})" for name in names for file in TASKS[name].files
                   if not (folder / file).is_file()]:
        raise UserError(f"--data_dir={folder}: missing {', '.join(missing)}; put them there under these names")


def task_config(name: str, config: dict, folder: Path) -> dict:
    """The harness's config of a task, changed so that its rows come from files in `folder`.

    Raises UserError if they are damaged.
    """
    task = TASKS[name]
    try:
        rows = task.rows(*((folder / file).read_text(encoding="utf-8") for file in task.files))
        if not rows:
            raise ValueError("it is empty")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / task.files[0]}: not the file of {name} ({type(error).__name__}: {error}); get "
                        f"it again from {task.source}") from None
    # `datasets` is what the harness shuffles and maps; it is there where the harness is.
    from datasets import Dataset

    split = Dataset.from_list(rows)
    return {**config, **dict(task.changes), "task": name, "custom_dataset": lambda **_: {"here": split},
            "training_split": None, "validation_split": "here", "test_split": None, "fewshot_split": None}
