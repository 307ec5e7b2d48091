"""Renders the tables of docs/*.md from the records in docs/results/.

    python docs/tables.py
    python docs/tables.py --record=runs/paper/results.json --name=paper

The first form renders all tables again. The second form first writes docs/results/paper.json, a
shortened copy of a comparison's record. In a page, a comment names a record and a block of its
report, and the lines up to the next blank line are that block:

    <!-- report: {"record": "paper", "heading": "Learning rates", "table": 1} -->

`heading` is missing for blocks above the first heading. `paragraph` instead of `table` selects a
paragraph. `columns` selects columns of a table by their names. A test compares all blocks with
their records.
"""

import dataclasses
import functools
import json
import re
import textwrap
from pathlib import Path

from absl import app, flags

from smallgpt_jax.comparison import records, report
from smallgpt_jax.comparison.blocks import Heading, Paragraph, Table, markdown_of
from smallgpt_jax.comparison.results import Point
from smallgpt_jax.errors import UserError
from smallgpt_jax.storage.atomic import write_atomically

_RECORD = flags.DEFINE_string(
    "record", None, "results.json of a comparison, to be copied to docs/results/."
)
_NAME = flags.DEFINE_string("name", None, "Name of the copy, without .json.")

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
BLOCK = re.compile(
    r"^(?P<comment><!-- report: (?P<spec>.*) -->\n)(?P<content>(?:.+\n)*)", re.MULTILINE
)
# The folders of an absolute path: /home/me/runs/gpt → gpt. A URL has none.
FOLDERS = re.compile(r"(?<![\w.:/~*-])/(?:[\w.+~@-]+/)+")
LINE_LENGTH = 120
MAX_POINTS = 12  # of a curve


def render(page: Path) -> str:
    """Returns the text of a page with its blocks made again. Raises UserError for a wrong
    comment.
    """

    def block(found: re.Match) -> str:
        try:
            return (
                found["comment"]
                + render_block(json.loads(found["spec"]), page.parent / "results")
                + "\n"
            )
        except (UserError, ValueError) as error:
            raise UserError(f"{page}: {found['comment'].strip()}: {error}") from None

    return BLOCK.sub(block, page.read_text())


def render_block(spec: dict, results: Path) -> str:
    if unknown := spec.keys() - {"record", "heading", "table", "paragraph", "columns"}:
        raise UserError(f"unknown key {min(unknown)!r}")
    kind, selected = (Paragraph, "paragraph") if "paragraph" in spec else (Table, "table")
    blocks = sections(results / f"{spec['record']}.json")
    heading, number = spec.get("heading", ""), spec.get(selected, 1)
    if heading not in blocks:
        raise UserError(
            f"the report has no heading {heading!r}; choose from {', '.join(filter(None, blocks))}"
        )
    found = [block for block in blocks[heading] if isinstance(block, kind)]
    if not 1 <= number <= len(found):
        raise UserError(
            f"there are {len(found)} {selected}s under {heading or 'the title'!r}, no number "
            f"{number}"
        )
    block = found[number - 1]
    if kind is Paragraph:
        return textwrap.fill(
            block.text, LINE_LENGTH, break_long_words=False, break_on_hyphens=False
        )
    return markdown_of(select_columns(block, spec["columns"]) if "columns" in spec else block)


@functools.cache
def sections(path: Path) -> dict[str, list]:
    """Returns {heading: blocks} of the report on a record."""
    found: dict[str, list] = {"": []}
    for block in report.report_blocks(records.read(path), None):
        if isinstance(block, Heading):
            found[block.text] = []
        else:
            found[list(found)[-1]].append(block)
    return found


def select_columns(table: Table, columns: list[str]) -> Table:
    if unknown := [column for column in columns if column not in table.head]:
        raise UserError(f"no column {unknown[0]!r}; choose from {', '.join(table.head)}")
    numbers = list(map(table.head.index, columns))
    return dataclasses.replace(
        table, head=tuple(columns), rows=tuple(tuple(row[i] for i in numbers) for row in table.rows)
    )


def shorten(record: records.Record) -> records.Record:
    """Keeps the evaluations of the losses, and a part of the others."""
    return dataclasses.replace(
        record,
        runs=tuple(
            dataclasses.replace(run, curve=thin(run.curve, run.averaged)) for run in record.runs
        ),
    )


def thin(curve: tuple[Point, ...], averaged: int) -> tuple[Point, ...]:
    """Returns at most MAX_POINTS evaluations before the last `averaged` ones, at equal distances
    from the end.
    """
    before, kept = curve[:-averaged], curve[-averaged:]
    every = -(-len(before) // MAX_POINTS) or 1
    return (*reversed(before[::-1][::every]), *kept)


def add_record(source: Path, target: Path) -> None:
    """Writes a shortened record without the paths of the machine."""
    records.write(shorten(records.read(source)), target)
    content = json.loads(FOLDERS.sub("", target.read_text()))
    write_atomically(
        target,
        json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace(
            '{"name":', '\n{"name":'
        )
        + "\n",
    )
    records.read(target)  # raises UserError if the record has become invalid


def main(_) -> None:
    if (_RECORD.value is None) != (_NAME.value is None):
        raise app.UsageError("--record and --name belong together")
    if _RECORD.value is not None:
        RESULTS.mkdir(exist_ok=True)
        add_record(Path(_RECORD.value), RESULTS / f"{_NAME.value}.json")
    for page in sorted(DOCS.glob("*.md")):
        if (text := render(page)) != page.read_text():
            write_atomically(page, text)
            print(f"{page}: tables changed")


if __name__ == "__main__":
    app.run(main)
