"""The content blocks of a report, and their rendering as plain text, Markdown and HTML."""

import base64
import dataclasses
import html
import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure

from smallgpt_jax.formatting import aligned_rows, escape_markdown, printable
from smallgpt_jax.run import plotting

MISSING = "–"
MAX_VALUE = 50  # characters; a column with longer cells has sentences, which are wrapped


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str


@dataclasses.dataclass(frozen=True)
class Paragraph:
    text: str


@dataclasses.dataclass(frozen=True)
class Code:
    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None  # index of a row to mark


@dataclasses.dataclass(frozen=True)
class Plot:
    name: str  # name of the PNG file
    figure: Figure
    caption: str


def printable_block(block):
    """Returns a block of text without control codes, which somebody else may have written into a
    record.
    """
    match block:
        case Heading(text) | Paragraph(text):
            return type(block)(printable(text))
        case Code(text):
            return Code("\n".join(map(printable, text.splitlines())))
        case Table(head, rows, best):
            head, *rows = (tuple(map(printable, row)) for row in (head, *rows))
            return Table(head, tuple(rows), best)
    return block


def with_range(value: float, low: float, high: float, form: str = ".4f") -> str:
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def aligned_table(table: Table) -> str:
    head, *rows = aligned_rows([table.head, *table.rows])
    return "\n".join([head, *(row + "  ← best" * (i == table.best) for i, row in enumerate(rows))])


# ------------------------------------------------------------------ Markdown
def to_markdown(title: str, blocks: Sequence) -> str:
    return "\n\n".join([f"# {escape_markdown(title)}", *map(markdown_of, blocks)]) + "\n"


def markdown_of(block) -> str:
    match block:
        case Heading(text):
            return f"## {escape_markdown(text)}"
        case Paragraph(text):
            return escape_markdown(text)
        case Code(text):
            return "\n".join(f"    {line}" for line in text.splitlines())
        case Plot(name, _, caption):
            return f"![{caption}]({name}.png)"
        case Table(head, rows, best):
            lines = [list(map(escape_markdown, line)) for line in (head, *rows)]
            if best is not None:
                lines[1 + best] = [f"**{cell}**" for cell in lines[1 + best]]
            lines.insert(1, ["---"] * len(head))
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ------------------------------------------------------------------ HTML
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 90rem;
       padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p { max-width: 46rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem; }
figure { margin: 0; width: min(100%, 34rem); } figure img { width: 100%; height: auto; }
figcaption { font-size: .85rem; color: #555; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
.best td { font-weight: bold; background: #e8f2fb; }
th.sentence, td.sentence { text-align: left; white-space: normal; min-width: 24rem; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; }
tr:not(.best) > :first-child { background: #fff; }
pre { background: #f4f4f4; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { font-size: 12px; } .table { overflow: visible; } table { font-size: .6rem; }
               th, td { padding: .2rem; white-space: normal; } th.sentence, td.sentence { min-width: 10rem; }
               figure { break-inside: avoid; } }
"""


def to_html(title: str, blocks: Sequence) -> str:
    def text(block) -> str:
        match block:
            case Heading(text):
                return f"<h2>{html.escape(text)}</h2>"
            case Paragraph(text):
                return f"<p>{html.escape(text)}</p>"
            case Code(text):
                return f"<pre>{html.escape(text)}</pre>"
            case Plot(_, figure, caption):
                image = base64.b64encode(plotting.svg(figure)).decode()
                return (
                    f'<figure><img alt="{html.escape(caption)}" '
                    f'src="data:image/svg+xml;base64,{image}">'
                    f"<figcaption>{html.escape(caption)}</figcaption></figure>"
                )
            case Table(head, rows, best):
                sentences = [max(map(len, column)) > MAX_VALUE for column in zip(head, *rows)]
                lines = [
                    line("th", head, sentences),
                    *(line("td", row, sentences, i == best) for i, row in enumerate(rows)),
                ]
                return '<div class="table"><table>\n' + "\n".join(lines) + "\n</table></div>"

    def line(
        tag: str, cells: Sequence[str], sentences: Sequence[bool], is_best: bool = False
    ) -> str:
        inner = "".join(
            f"<{tag}{' class=sentence' * is_sentence}>{html.escape(cell)}</{tag}>"
            for cell, is_sentence in zip(cells, sentences)
        )
        return f"<tr{' class=best' * is_best}>{inner}</tr>"

    parts = []
    for is_plot, group in itertools.groupby(blocks, lambda block: isinstance(block, Plot)):
        inner = "\n".join(map(text, group))
        parts.append(f'<div class="plots">\n{inner}\n</div>' if is_plot else inner)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )
