"""Tests of docs/tables.py, and of the numbers in the docs that come from the records in
docs/results/.
"""

import json
import re

import pytest
from conftest import ROOT
from test_records import record, run, saved

from docs import tables
from smallgpt_jax.comparison import records, report
from smallgpt_jax.errors import UserError

PAGES = sorted(
    path for path in (ROOT / "docs").glob("*.md") if tables.BLOCK.search(path.read_text())
)
NUMBER = re.compile(r"\d+\.\d{4}(?!\d)")


@pytest.mark.slow
def test_the_tables_of_the_docs_follow_from_the_records():
    """If this fails: python docs/tables.py."""
    assert ROOT / "docs" / "comparison.md" in PAGES
    for page in PAGES:
        assert tables.render(page) == page.read_text(), page
    named = {
        json.loads(found["spec"])["record"]
        for page in PAGES
        for found in tables.BLOCK.finditer(page.read_text())
    }
    assert named == {
        path.stem for path in tables.RESULTS.glob("*.json")
    }  # no record is superfluous


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_the_text_are_in_a_table(page):
    """Applies to numbers with four decimals in sections with a table that was rendered."""
    blocks = " ".join(found["content"] for found in tables.BLOCK.finditer(page.read_text()))
    for section in re.split(r"\n(?=## )", page.read_text()):
        if tables.BLOCK.search(section):
            missing = set(NUMBER.findall(tables.BLOCK.sub("", section))) - set(
                NUMBER.findall(blocks)
            )
            assert not missing, (page, missing)


@pytest.fixture
def page(tmp_path):
    """Returns a page beside the folder of a record of gpt and pgpt with two seeds."""
    saved(
        tmp_path / "results" / "small.json",
        *(
            run(name, seed, loss + seed / 100)
            for seed in (1, 2)
            for name, loss in (("gpt", 3.0), ("pgpt", 2.5))
        ),
    )
    return tmp_path / "page.md"


def test_blocks_are_rendered_again(page):
    columns = '{"record": "small", "columns": ["run", "validation loss", "seeds"]}'
    page.write_text(
        f"# Page\n\nText.\n\n<!-- report: {columns} -->\n\nMore text.\n\n"
        '<!-- report: {"record": "small", "paragraph": 1} -->\nold\n'
    )
    rendered = (
        f"# Page\n\nText.\n\n<!-- report: {columns} -->\n"
        "| run | validation loss | seeds |\n| --- | --- | --- |\n"
        "| **pgpt** | **2.5150 (2.5100 to 2.5200)** | **2** |\n| gpt | 3.0150 (3.0100 to 3.0200) "
        "| 2 |\n\n"
        'More text.\n\n<!-- report: {"record": "small", "paragraph": 1} -->\nEqual tokens.\n'
    )
    assert tables.render(page) == rendered
    page.write_text(rendered.replace("2.5150", "2.4150"))
    assert tables.render(page) == rendered


@pytest.mark.parametrize(
    "spec, message",
    [
        ('{"record": "small", "heading": "Losses"}', "no heading 'Losses'; choose from "),
        (
            '{"record": "small", "heading": "Differences over seeds", "table": 2}',
            "there are 1 tables under 'Differences",
        ),
        (
            '{"record": "small", "columns": ["loss"]}',
            "no column 'loss'; choose from run, validation loss",
        ),
        ('{"record": "small", "rows": 1}', "unknown key 'rows'"),
        ('{"record": "none"}', "none.json: No such file"),
        ('{"record": small}', "Expecting value"),
    ],
)
def test_names_wrong_comments(spec, message, page):
    page.write_text(f"<!-- report: {spec} -->\n")
    with pytest.raises(UserError) as error:
        tables.render(page)
    assert str(error.value).startswith(f"{page}: <!-- report: {spec} -->: ") and message in str(
        error.value
    )


def test_a_shortened_record_gives_the_same_tables(tmp_path):
    """It has no path of the machine, and fewer evaluations."""
    one = run("gpt", 1, 3.0, averaged=3)
    curve = tuple(
        one.curve[0].__class__(**{**vars(one.curve[0]), "step": step, "loss": 9 - step / 100})
        for step in range(1, 101)
    )
    runs = [run("pgpt", 1, 2.9, averaged=3), one.__class__(**{**vars(one), "curve": curve})]
    whole = saved(
        tmp_path / "whole.json",
        *runs,
        command="python -m compare --output=/home/me/runs/a.b --x=y/z",
    )
    tables.add_record(whole, tmp_path / "short.json")
    short = records.read(tmp_path / "short.json")
    assert short.command == "python -m compare --output=a.b --x=y/z"
    assert [point.step for point in short.runs[1].curve] == [*range(7, 98, 9), 98, 99, 100]
    assert {run.workdir for run in short.runs} == {"gpt-seed1", "pgpt-seed1"}
    assert not re.search(r'[=" ]/', (tmp_path / "short.json").read_text())
    before, after = (
        next(
            block
            for block in report.report_blocks(content, None)
            if isinstance(block, tables.Table)
        )
        for content in (record(*records.read(whole).runs), short)
    )
    assert before == after
