"""Fills the tables and numbers of docs/*.md from the records in docs/results/.

    python docs/tables.py
    python docs/tables.py --record=runs/paper/results.json --name=paper

The first form fills all pages again. The second form first writes docs/results/paper.json, a
shortened copy of a comparison's record.

A comment names a record and a block of its report.md; the lines up to the next blank line are that
block:

    <!-- report: {"record": "paper", "heading": "Is every model at its best learning rate?"} -->

A comment `<!-- speeds: ratios -->`, or `machines`, is above a table of the measurements in
docs/results/speed.jsonl.

`record` may be several, as in "scaling+mixers", which are merged. `heading` is missing for blocks
above the first heading. `table` or `paragraph` is the number of the
block under it (default: table 1). `columns` selects columns of a table by their names.

A comment right after a number or name in the text contains the expression that it is the value of,
with a format:

    moe needs 1.4<!-- = scaling.multiplier("moe", 1e12).value as .1f --> times fewer FLOPs

`Values` lists what expressions can use. All other numbers of a page that has such comments must be
code, links, or listed in a comment of their section, which says where they come from:

    <!-- given: 0.10.2, 2026-11-24 (versions and dates of the runs) -->

A paragraph or a table after a comment `no record`, which says why, is exempt up to the next blank
line:

    <!-- no record: measured by diagnose -->

A test compares all of this with the records.
"""

import dataclasses
import functools
import json
import re
import statistics
import textwrap
from pathlib import Path
from typing import Any

from absl import app, flags

from smallgpt_jax.analysis import choice, record
from smallgpt_jax.analysis.analysis import analyse
from smallgpt_jax.analysis.findings import Choice, Findings, Multiplier, Pair, Standing
from smallgpt_jax.analysis.record import Point, Record, Run
from smallgpt_jax.comparison import merging
from smallgpt_jax.errors import UserError
from smallgpt_jax.report import page as report_page
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
SPEEDS = re.compile(
    r"^(?P<comment><!-- speeds: (?P<name>\w+) -->\n)(?P<content>(?:.+\n)*)", re.MULTILINE
)
VALUE = re.compile(r"(?P<value>[\w.,@%+−-]+)(?P<comment><!-- = (?P<expression>.+?) -->)")
GIVEN = re.compile(r"<!-- given: (?P<numbers>.+?) -->", re.DOTALL)
NO_RECORD = re.compile(r"^<!-- no record: .* -->\n(?:.+\n)*", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w@.-])[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
# What is no claim of a page: comments, code, links, headings.
_NO_CLAIMS = re.compile(
    r"<!--.*?-->|```.*?```|^(?: {4}|\t)[^\n]*$|`[^`]*`|\]\([^)]*\)|^#[^\n]*$|https?://\S+|arXiv \d+\.\d+",
    re.DOTALL | re.MULTILINE,
)
# The folders of an absolute path: /home/me/runs/gpt → gpt. A URL has none.
FOLDERS = re.compile(r"(?<![\w.:/~*-])/(?:[\w.+~@-]+/)+")
LINE_LENGTH = 120
DASH = "–"  # unknown
MAX_POINTS = 12  # of a curve


def render(page: Path) -> str:
    """Returns the text of a page with its blocks and values made again. Raises UserError for a
    wrong comment.
    """
    results = page.parent / "results"

    def block(match: re.Match) -> str:
        try:
            return match["comment"] + _block(json.loads(match["spec"]), results) + "\n"
        except (UserError, ValueError) as error:
            raise UserError(f"{page}: {match['comment'].strip()}: {error}") from None

    def value(match: re.Match) -> str:
        try:
            return _value(match["expression"], results) + match["comment"]
        except Exception as error:  # an expression can raise anything
            message = f"{type(error).__name__}: {error}"
            raise UserError(f"{page}: {match['comment']}: {message}") from None

    def speed_table(match: re.Match) -> str:
        lines = (results / "speed.jsonl").read_text("utf-8").splitlines()
        make_table = _SPEED_TABLES[match["name"]]
        return match["comment"] + make_table(list(map(json.loads, lines))) + "\n"

    return VALUE.sub(value, SPEEDS.sub(speed_table, BLOCK.sub(block, page.read_text())))


# ------------------------------------------------------------------ blocks
def _block(spec: dict, results: Path) -> str:
    unknown = spec.keys() - {"record", "heading", "table", "paragraph", "columns"}
    if unknown:
        raise UserError(f"unknown key {min(unknown)!r}")
    kind = "paragraph" if "paragraph" in spec else "table"
    paths = [results / f"{name}.json" for name in spec["record"].split("+")]
    sections = _sections(*paths)
    heading, number = spec.get("heading", ""), spec.get(kind, 1)
    if heading not in sections:
        raise UserError(
            f"the report has no heading {heading!r}; choose from {', '.join(filter(None, sections))}"
        )
    blocks = [text for text in sections[heading] if text.startswith("|") == (kind == "table")]
    if not 1 <= number <= len(blocks):
        raise UserError(
            f"there are {len(blocks)} {kind}s under {heading or 'the title'!r}, no number {number}"
        )
    text = blocks[number - 1]
    if kind == "paragraph":
        return "\n".join(map(_filled, text.splitlines()))
    return select_columns(text, spec["columns"]) if "columns" in spec else text


def _filled(line: str) -> str:
    """Returns a paragraph, or an item of a list, in lines of LINE_LENGTH."""
    return textwrap.fill(
        line,
        LINE_LENGTH,
        subsequent_indent="  " if line.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


@functools.cache
def _sections(*paths: Path) -> dict[str, list[str]]:
    """Returns {heading: tables and paragraphs} of the report on one or several records."""
    values = values_of(*paths)
    sections: dict[str, list[str]] = {"": []}
    heading = ""
    for block in report_page.markdown(values.record, values.findings).split("\n\n"):
        block = block.strip("\n")
        if block.startswith("## "):
            heading = block.removeprefix("## ")
            sections[heading] = []
        elif block and not block.startswith(("# ", "![", "    ")):
            sections[heading].append(block)
    return sections


def select_columns(table: str, columns: list[str]) -> str:
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    head = [cell.strip() for cell in rows[0]]
    plain = [cell.replace("\\", "") for cell in head]
    for column in columns:
        if column not in plain:
            raise UserError(f"no column {column!r}; choose from {', '.join(plain)}")
    numbers = [plain.index(column) for column in columns]
    return "\n".join("|" + "|".join(row[i] for i in numbers) + "|" for row in rows)


# ------------------------------------------------------------------ speeds
def _ratios(ledger: list[dict]) -> str:
    """Returns the ratios to the faster of the peers: of medians of machines, and of rounds."""
    sizes: dict[tuple, list[dict]] = {}
    for entry in ledger:
        for row in entry["rows"]:
            size = (row["blocks"], row["width"], row["batch"], row["context"], row["dtype"])
            sizes.setdefault(size, []).append(row)
    lines = [
        "| blocks × width, tokens per step | dtype | measurements | median | lowest and highest "
        "median | of all rounds |",
        "|---|---|---|---|---|---|",
    ]
    # float32 before bfloat16
    ordered = sorted(sizes, key=lambda size: (*size[:-1], size[-1] != "float32"))
    for size in ordered:
        blocks, width, batch, context, dtype = size
        medians = [row["ratio"] for row in sizes[size]]
        rounds = [ratio for row in sizes[size] for ratio in row["ratio_range"]]
        lines.append(
            f"| {blocks} × {width}, {batch} × {context} | {dtype} | {len(medians)} "
            f"| {statistics.median(medians):.2f} | {min(medians):.2f} to {max(medians):.2f} "
            f"| {min(rounds):.2f} to {max(rounds):.2f} |"
        )
    return "\n".join(lines)


def _machines(ledger: list[dict]) -> str:
    """Returns a line per measurement, with tokens per second at the quickstart's size."""
    lines = [
        "| date | processor | cores | caches | GFLOP/s, one core and all | gpt, tokens/s "
        "| PyTorch, tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in ledger:
        machine = entry["machine"]
        speed, of_peer = None, None
        for row in entry["rows"]:
            if (row["width"], row["dtype"]) == (128, "float32"):
                speed, of_peer = row["tokens_per_second"], max(row["peers"].values())
        lines.append(
            f"| {entry['date']} | {_processor(machine)} | {machine['cores']} "
            f"| {', '.join(machine['caches'].values()) or DASH} "
            f"| {_rounded(machine['gflops_of_one_core'])}, {_rounded(machine['gflops'])} "
            f"| {_rounded(speed)} | {_rounded(of_peer)} |"
        )
    return "\n".join(lines)


def _processor(machine: dict) -> str:
    numbers = [machine[name] for name in ("family", "model", "stepping")]
    if None in numbers:
        return machine["processor"]
    family, model, stepping = numbers
    return f"{machine['processor']}, family {family}, model {model}, stepping {stepping}"


def _rounded(number: float | None) -> str:
    return DASH if number is None else f"{number:,.0f}"


_SPEED_TABLES = {"ratios": _ratios, "machines": _machines}


# ------------------------------------------------------------------ values
@dataclasses.dataclass(frozen=True)
class Values:
    """What an expression can use of a record."""

    record: Record
    findings: Findings

    def runs(self, name: str, horizon: float = 1.0) -> list[Run]:
        runs = [run for run in self.record.runs if (run.name, run.horizon) == (name, horizon)]
        if not runs:
            raise KeyError(name)
        return runs

    def losses(self, name: str, horizon: float = 1.0) -> dict[int, float]:
        """Returns {seed: loss}."""
        return {run.seed: run.loss for run in self.runs(name, horizon)}

    def loss(self, name: str, horizon: float = 1.0) -> float:
        return statistics.fmean(self.losses(name, horizon).values())

    def deviation(self, name: str, horizon: float = 1.0) -> float:
        """Returns the standard deviation of the losses over seeds."""
        return statistics.stdev(self.losses(name, horizon).values())

    def flops(self, name: str, horizon: float = 1.0) -> float:
        """Returns the training FLOPs."""
        return self.runs(name, horizon)[0].last.flops

    def tokens_per_parameter(self, name: str, horizon: float = 1.0) -> float:
        run = self.runs(name, horizon)[0]
        return run.tokens / run.active_parameters

    def answers(self, name: str, measure: str) -> float:
        """Returns a measure of a probe's answers, such as "accuracy_at_4", mean over the seeds."""
        return statistics.fmean(run.last.answers[measure] for run in self.runs(name))

    def pair(self, model: str, other: str) -> Pair:
        """Returns the verdict on two models of the ranking."""
        pair = self.findings.ranking.pair(model, other)
        if pair is None:
            raise KeyError(f"{model} and {other}")
        return pair

    def choice(self, budget: str, limit: float) -> Choice:
        return choice.choose(self.record, budget, limit)

    def standing(self, model: str, budget: str, limit: float) -> Standing:
        standings = self.choice(budget, limit).contest.standings
        return {one.model: one for one in standings}[model]

    def multiplier(self, model: str, budget: float) -> Multiplier:
        """Returns the multiplier at the budget of the report that is nearest to `budget`."""
        multipliers = [one for one in self.findings.multipliers if one.model == model]
        return min(multipliers, key=lambda one: abs(one.budget - budget))


@functools.cache
def values_of(*paths: Path) -> Values:
    content = record.read(paths[0])
    if len(paths) > 1:
        content = merging.merge([(path, record.read(path)) for path in paths], "")
    return Values(content, analyse(content))


def _value(expression: str, results: Path) -> str:
    """Returns the formatted value of an expression, such as `scaling.loss("gpt@0.2M") as .2f`."""
    code, _, form = expression.partition(" as ")
    names = {name: values_of(path) for name, path in _records(results).items() if name in code}
    return format(eval(code, {**_FUNCTIONS, **names}), form.strip())


_FUNCTIONS = {"mean": statistics.fmean, "abs": abs, "min": min, "len": len}


def _records(results: Path) -> dict[str, Path]:
    """Returns {name in expressions: record}."""
    return {path.stem.replace("-", "_"): path for path in sorted(results.glob("*.json"))}


def unfounded_numbers(text: str) -> list[str]:
    """Returns the numbers of a page that neither a record nor a comment `given` accounts for."""
    numbers = []
    for section in re.split(r"\n(?=#+ )", text):
        given = {
            number
            for match in GIVEN.finditer(section)
            for number in NUMBER.findall(match["numbers"])
        }
        claims = VALUE.sub(" ", NO_RECORD.sub("\n", BLOCK.sub("\n", section)))
        claims = _NO_CLAIMS.sub(" ", claims)
        numbers += [number for number in NUMBER.findall(claims) if number not in given]
    return numbers


# ------------------------------------------------------------------ records
def shorten(content: Record) -> Record:
    """Keeps the evaluations of the losses, and a part of the others."""
    runs = []
    for run in content.runs:
        runs.append(dataclasses.replace(run, curve=thin(run.curve, run.averaged)))
    return dataclasses.replace(content, runs=tuple(runs))


def thin(curve: tuple[Point, ...], averaged: int) -> tuple[Point, ...]:
    """Returns at most MAX_POINTS evaluations before the last `averaged` ones, at equal distances
    from the end.
    """
    before, kept = curve[:-averaged], curve[-averaged:]
    every = -(-len(before) // MAX_POINTS) or 1
    return (*reversed(before[::-1][::every]), *kept)


def add_record(source: Path, target: Path) -> None:
    """Writes a shortened record without the paths of the machine."""
    record.write(shorten(record.read(source)), target)
    content: dict[str, Any] = json.loads(FOLDERS.sub("", target.read_text()))
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    write_atomically(target, text.replace('{"name":', '\n{"name":') + "\n")
    record.read(target)  # raises UserError if the record has become invalid


def main(_) -> None:
    if (_RECORD.value is None) != (_NAME.value is None):
        raise app.UsageError("--record and --name belong together")
    if _RECORD.value is not None:
        RESULTS.mkdir(exist_ok=True)
        add_record(Path(_RECORD.value), RESULTS / f"{_NAME.value}.json")
    for page in sorted(DOCS.glob("*.md")):
        text = render(page)
        if text != page.read_text():
            write_atomically(page, text)
            print(f"{page}: changed")


if __name__ == "__main__":
    app.run(main)
