"""How numbers, and libraries' errors, are told to people."""

import os
import re


def duration(seconds: float) -> str:
    """3725 → '1h 02m'; 62 → '1m 02s'; 5 → '5s'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def in_millions(count: int) -> str:
    """3704321 → '3.70 M'; counts below a hundred thousand as they are."""
    return f"{count:,}" if count < 100_000 else f"{count / 1e6:,.2f} M"


def reason(error: Exception) -> str:
    """The gist of what a library says of a failure."""
    if number := system_error(error):
        return os.strerror(number)
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def system_error(error: Exception) -> int | None:
    """The operating system's number of an error, if that is what it comes from."""
    if code := re.search(r"os_error_code='(\d+)'", str(error)):  # tensorstore
        return int(code[1])
    return error.errno if isinstance(error, OSError) else None
