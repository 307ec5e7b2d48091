"""Templates that render the same content as HTML, Markdown and plain text.

A content template (templates/*.j2) has the words. It calls the macros of a skin, `html.j2`,
`markdown.j2` or `text.j2`, for headings, paragraphs, tables and figures. Every value is escaped:
`autoescape` escapes what is not `Markup`, and `finalize` makes Markup of values in formats other
than HTML.
"""

import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from smallgpt_jax.analysis.findings import CERTAIN, STAKE
from smallgpt_jax.formatting import aligned_rows, escape_markdown, printable
from smallgpt_jax.report import words
from smallgpt_jax.report.words import MISSING

WIDTH = 100  # of terminal text, in characters


@dataclasses.dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: tuple[int, ...] = ()  # rows in bold

    @property
    def alignments(self) -> tuple[str, ...]:
        """Returns "number" for columns with a number and no sentences, "text" for the others."""
        return tuple(_alignment(cells) for _, *cells in zip(self.head, *self.rows))

    @property
    def without_empty_columns(self) -> "Table":
        """The table without columns that are MISSING in all rows; the first column stays."""
        if not self.rows:
            return self
        first, *others = zip(self.head, *self.rows)
        kept = [first, *(column for column in others if set(column[1:]) != {MISSING})]
        head, *rows = zip(*kept)
        return Table(head, tuple(rows), self.marked)


def _alignment(cells: Sequence[str]) -> str:
    has_numbers = any(re.match(r"[-+−]?\.?\d|(over|under) \d", cell) for cell in cells)
    has_sentences = any(":" in cell for cell in cells)
    return "number" if has_numbers and not has_sentences else "text"


def render(template: str, skin: str, **content: Any) -> str:
    """Returns a template (templates/TEMPLATE.j2) as "html", "markdown" or "text"."""
    environment = _environment(skin)
    text = environment.get_template(f"{template}.j2").render(**content).strip() + "\n"
    # Macros begin and end with empty lines, which add up between them.
    return text if skin == "html" else re.sub(r"\n\s*\n\s*\n+", "\n\n", text)


@functools.cache
def _environment(skin: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("smallgpt_jax.report"),
        autoescape=True,
        finalize=functools.partial(_escaped, _ESCAPES[skin]),
        undefined=jinja2.StrictUndefined,  # a misspelt name is an error, not an empty text
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Templates write `value | amount` for words.amount(value).
    environment.filters.update(dict(inspect.getmembers(words, inspect.isfunction)) | _FILTERS)
    environment.globals |= {
        "skin": f"{skin}.j2",
        "choice_level": f"{CERTAIN:.1%}",
        "stake_level": f"{STAKE:.0%}",
    }
    return environment


def _escaped(escape: Callable[[str], str], value: Any) -> Any:
    """Returns a value of a template as text of the format. Markup is escaped already."""
    if value is None or isinstance(value, Markup):
        return value
    return escape(printable(str(value)))


def _markdown(text: str) -> Markup:
    return Markup(escape_markdown(text))


_ESCAPES: dict[str, Callable[[str], str]] = {
    "html": lambda text: text,  # autoescape escapes it
    "markdown": _markdown,
    "text": Markup,
}


# ------------------------------------------------------------------ filters
def _line(markup: Markup) -> Markup:
    """Joins the lines of a paragraph."""
    return Markup(" ".join(str(markup).split()))


def _wrapped(markup: Markup) -> Markup:
    text = str(_line(markup))
    return Markup(textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def _bullet(text: str) -> Markup:
    lines = textwrap.fill(printable(text), WIDTH - 2, break_on_hyphens=False).splitlines()
    return Markup("- " + "\n  ".join(lines))


def _plain(text: str) -> Markup:
    """Returns text for an indented block of code, where nothing needs to be escaped."""
    return Markup(printable(text))


def _aligned(table: Table) -> Markup:
    rows = [list(map(printable, row)) for row in (table.head, *table.rows)]
    return Markup("\n".join(aligned_rows(rows)))


def _markdown_table(table: Table) -> Markup:
    head, *rows = [list(map(escape_markdown, row)) for row in (table.head, *table.rows)]
    for number in table.marked:
        rows[number] = [f"**{cell}**" for cell in rows[number]]
    rule = ["---"] * len(head)
    return Markup("\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows)))


_FILTERS = {
    "line": _line,
    "wrapped": _wrapped,
    "bullet": _bullet,
    "plain": _plain,
    "aligned": _aligned,
    "markdown_table": _markdown_table,
}
