"""Tests of docs/tables.py, and of the numbers in the docs that come from the records in
docs/results/.
"""

import re
from pathlib import Path

import pytest
from comparison_helpers import run, saved
from conftest import ROOT

from docs import tables
from smallgpt_jax.analysis import record
from smallgpt_jax.analysis.record import Point
from smallgpt_jax.errors import UserError

PAGES = [
    path
    for path in sorted((ROOT / "docs").glob("*.md"))
    if any(form.search(path.read_text()) for form in (tables.BLOCK, tables.VALUE, tables.SPEEDS))
]
# Pages on which every number comes from a record, or is listed with where it comes from.
FOUNDED = [ROOT / "docs" / "results.md"]


@pytest.mark.slow
def test_the_tables_and_values_of_the_docs_follow_from_the_records():
    """If this fails: python docs/tables.py."""
    assert ROOT / "docs" / "comparison.md" in PAGES
    for page in PAGES:
        assert tables.render(page) == page.read_text(), page
    # All records can be read and have choices; most of them are analysed by now, and not again.
    for path in (ROOT / "docs" / "results").glob("*.json"):
        if '"reference":' not in path.read_text():
            continue  # another kind of result
        values = tables.values_of(path)
        assert values.record.runs
        for choice in values.findings.choices:
            assert choice.chosen is None or choice.refusal is None


@pytest.mark.parametrize("page", FOUNDED, ids=lambda page: page.name)
def test_each_number_of_a_page_is_founded(page):
    assert tables.unfounded_numbers(page.read_text()) == []


@pytest.fixture
def page(tmp_path) -> Path:
    """Returns a page beside the folder of a record of gpt and pgpt with two seeds."""
    runs = [
        run(name, seed, loss + seed / 100)
        for seed in (1, 2)
        for name, loss in (("gpt", 3.0), ("pgpt", 2.5))
    ]
    saved(tmp_path / "results" / "a-record.json", *runs)
    return tmp_path / "page.md"


def test_blocks_are_made_again(page):
    spec = '{"record": "a-record", "heading": "Runs", "columns": ["run", "last loss"]}'
    before = f"# Page\n\nText.\n\n<!-- report: {spec} -->\n\nMore text.\n"
    page.write_text(before)
    rendered = tables.render(page)
    assert rendered == before.replace(
        " -->\n",
        " -->\n| run | last loss |\n| --- | --- |\n| gpt | 3.0100 |\n| pgpt | 2.5100 |\n"
        "| gpt | 3.0200 |\n| pgpt | 2.5200 |\n",
        1,
    )
    page.write_text(rendered.replace("2.5100", "2.4100"))
    assert tables.render(page) == rendered
    page.write_text('<!-- report: {"record": "a-record", "paragraph": 3} -->\nold\n')
    assert "2026-11-23" in tables.render(page) and "old" not in tables.render(page)


def test_values_are_made_again(page):
    text = 'It has {0}<!-- = a_record.loss("pgpt") as .3f -->, not {1}<!-- = mean([1, 4]) -->.\n'
    page.write_text(text.format("2.4", "x"))
    assert tables.render(page) == text.format("2.515", "2.5")
    page.write_text("1<!-- = a_record.loss('llama') -->\n")
    with pytest.raises(UserError, match=r"page.md: <!-- = a_record.loss\('llama'\) -->: KeyError"):
        tables.render(page)


def test_numbers_without_a_source_are_listed():
    text = (
        "# Results of 2026\n\nAt 0.2M, moe needs **1.4** times fewer FLOPs, "
        "3<!-- = x.loss --> in `1.5` and [a](b2.md#3).\n\n"
        '<!-- report: {"record": "x"} -->\n| 7.5 |\n| 8.5 |\n\n'
        "<!-- no record: by hand -->\n| 9.5 |\n\n    python -m x --n=3\n\n## Next\n\njax 0.10.2, 1,024 tokens, −0.5 and "
        "1e13\n"
        "<!-- given: 0.10.2 (version), 1e13 (budget) -->\n"
    )
    assert tables.unfounded_numbers(text) == ["0.2", "1.4", "1,024", "−0.5"]
    text += "<!-- given: 1,024, −0.5 -->"
    assert tables.unfounded_numbers(text) == ["0.2", "1.4"]


@pytest.mark.parametrize(
    "spec, message",
    [
        ('{"record": "a-record", "heading": "Losses"}', "no heading 'Losses'; choose from "),
        (
            '{"record": "a-record", "heading": "Runs", "table": 2}',
            "there are 1 tables under 'Runs', no number 2",
        ),
        (
            '{"record": "a-record", "heading": "Runs", "columns": ["loss"]}',
            "no column 'loss'; choose from run, seed",
        ),
        ('{"record": "a-record", "rows": 1}', "unknown key 'rows'"),
        ('{"record": "none"}', "none.json: No such file"),
        ('{"record": a-record}', "Expecting value"),
    ],
)
def test_names_wrong_comments(spec, message, page):
    page.write_text(f"<!-- report: {spec} -->\n")
    with pytest.raises(UserError) as error:
        tables.render(page)
    assert str(error.value).startswith(f"{page}: <!-- report: {spec} -->: ")
    assert message in str(error.value)


def test_a_shortened_record_has_no_paths_and_fewer_evaluations(tmp_path):
    curve = tuple(Point(step, step, None, None, 9 - step / 100, 1.5, 512) for step in range(1, 101))
    runs = [run("pgpt", 1, 2.9, averaged=3), run("gpt", 1, 3.0, averaged=3, curve=curve)]
    command = "python -m compare --output=/home/me/runs/a.b --x=y/z"
    whole = saved(tmp_path / "whole.json", *runs, command=command)
    tables.add_record(whole, tmp_path / "short.json")
    short = record.read(tmp_path / "short.json")
    assert short.command == "python -m compare --output=a.b --x=y/z"
    assert [point.step for point in short.runs[1].curve] == [*range(7, 98, 9), 98, 99, 100]
    assert {run.workdir for run in short.runs} == {"gpt-seed1", "pgpt-seed1"}
    assert not re.search(r'[=" ]/', (tmp_path / "short.json").read_text())
    losses, before = ([one.loss for one in content.runs] for content in (short, record.read(whole)))
    assert losses == before
