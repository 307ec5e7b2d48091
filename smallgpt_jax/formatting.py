"""Formatting of durations, counts, curves and errors for messages."""

import errno
import itertools
import math
import os
import re
import statistics
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Formats seconds: 3725 → '1h 02m'; 62 → '1m 02s'; 5 → '5s'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def millions(count: int) -> str:
    """Formats a count: 3704321 → '3.70 M'; below 100,000 in full: 3704 → '3,704'."""
    return f"{count:,}" if count < 100_000 else f"{count / 1e6:,.2f} M"


def format_bytes(size: float) -> str:
    """Formats bytes: 3 · 2³⁰ → '3.00 GiB'; 3 · 2²⁰ → '3.0 MiB'."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Returns at most `width` bars, means of consecutive values: [9, 5, 2, 1] → '█▅▂▁'."""
    count = min(width, len(values))
    # the bounds of groups of nearly equal size: of 10 values in 4 groups, 0, 2, 5, 7 and 10
    ends = [i * len(values) // count for i in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(ends)]
    low = min(means)
    spread = (max(means) - low) or 1  # of equal values
    return "".join(BARS[round((mean - low) / spread * (len(BARS) - 1))] for mean in means)


def root_cause(error: BaseException) -> BaseException:
    # Libraries wrap errors: `raise … from error`.
    while error.__cause__:
        error = error.__cause__
    return error


def short_reason(error: BaseException) -> str:
    """Returns the first line of an error, or the operating system's message for its errno."""
    number = find_errno(error)
    if number:
        return os.strerror(number)
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def find_errno(error: BaseException) -> int | None:
    """Returns the number of an error of the operating system, also if a library has wrapped it."""
    text = str(error)
    # As in errors of tensorstore, and of libraries in Rust.
    if code := re.search(r"os_error_code='(\d+)'|\(os error (\d+)\)", text):
        return int(code[1] or code[2])
    if re.fullmatch(r"\d+ requested and \d+ written", text):  # an OSError of NumPy
        return errno.ENOSPC
    return error.errno if isinstance(error, OSError) else None


def parameter_count(total: int, active: int) -> str:
    """Returns "1,234 (567 active)"; `active` is the number of parameters that one token uses."""
    return f"{total:,}" if active == total else f"{total:,} ({active:,} active)"


def aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns the first column on the left, all others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(cells))
    return lines


def short_repr(value) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"


def list_names(names: Iterable[str], limit: int = 20) -> str:
    """Returns "a, b and 3 more" of names that somebody else has chosen."""
    names = [printable(name[:100]) for name in names]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def finite(value: Any) -> Any:
    """Returns a JSON value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """Returns text in one line, without control codes, such as those that move a cursor."""
    if text.isprintable():  # nearly always, and 30 times as fast
        return text
    return "".join(" " if unicodedata.category(char)[0] == "C" else char for char in text)


def escape_markdown(text: str) -> str:
    """Returns text that is no HTML, link or end of a cell in Markdown, whoever has written it."""
    return re.sub(r"\\|\||<(?=[A-Za-z/!?])|\](?=[\[(:])", r"\\\g<0>", printable(text))


def safe_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_.=" else "_" for c in text)
