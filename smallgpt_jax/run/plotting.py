"""The style of all plots, and image files of figures. Requires matplotlib."""

import io

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter

from smallgpt_jax.formatting import printable

# The palette of Okabe and Ito: people with most kinds of color blindness can tell its colors apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


class NotebookFigure(Figure):
    """A notebook shows it as the result of a cell."""

    def _repr_png_(self) -> bytes:
        return png(self)


def style_axes(axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def png(figure: Figure, dpi: int = 160) -> bytes:
    return render(figure, format="png", dpi=dpi, metadata={"Software": None})


def svg(figure: Figure) -> bytes:
    return render(figure, format="svg", metadata={"Date": None})


def render(figure: Figure, **options) -> bytes:
    file = io.BytesIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names of runs may contain a $
        lines = text.get_text().split("\n")
        text.set_text("\n".join(map(printable, lines)))
    # Without a salt, ids in SVG files are random; equal figures should give equal bytes.
    with matplotlib.rc_context({"svg.hashsalt": "smallgpt_jax"}):
        figure.savefig(file, **options)
    return file.getvalue()
