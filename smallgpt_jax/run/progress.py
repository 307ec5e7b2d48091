"""The progress of a run on standard output."""

import sys


class RunProgress:
    """On a terminal, updates one line in place; elsewhere, adds a line per update."""

    def __init__(self, steps: int):
        self.steps = steps
        self._in_place = sys.stdout.isatty()
        self._open = False

    def update(self, step: int, text: str) -> None:
        self.message(self._counted(step, text), end="" if self._in_place else "\n")

    def print_line(self, step: int, text: str) -> None:
        """Prints a line that later updates do not overwrite."""
        self.message(self._counted(step, text))

    def message(self, text: str, end: str = "\n") -> None:
        clear = "\r\x1b[K" if self._open else ""  # of the line that was updated in place
        # `end` is part of the text: print would write it separately, possibly after the text of
        # another thread.
        print(f"{clear}{text}{end}", end="", flush=True)
        self._open = not end

    def _counted(self, step: int, text: str) -> str:
        return f"step {step:>{len(str(self.steps))}}/{self.steps}   {text}"
