"""How numbers are told to people."""


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
