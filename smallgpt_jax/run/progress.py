"""The progress of a run on standard output."""

import sys


class RunProgress:
    """On a terminal, updates one line in place; elsewhere, and with a label, adds a line per update."""

    def __init__(self, steps: int, label: str = ""):
        """`label` distinguishes runs that print at the same time."""
        self.steps, self._label = steps, label
        self._in_place = sys.stdout.isatty() and not label
        self._open = False

    def update(self, step: int, text: str) -> None:
        self._print(step, text, end="" if self._in_place else "\n")
        self._open = self._in_place

    def print_line(self, step: int, text: str) -> None:
        """Prints a line that later updates do not overwrite."""
        self._print(step, text, end="\n")
        self._open = False

    def message(self, text: str) -> None:
        self._write(text, end="\n")
        self._open = False

    def _print(self, step: int, text: str, end: str) -> None:
        counter = f"step {step:>{len(str(self.steps))}}/{self.steps}"
        self._write(f"{counter}   {text}", end)

    def _write(self, text: str, end: str) -> None:
        labeled = text.replace("\n", f"\n{self._label}")
        # `end` is part of the text: print would write it separately, possibly after the text of another thread.
        print(f"{self._clear()}{self._label}{labeled}{end}", end="", flush=True)

    def _clear(self) -> str:
        return "\r\x1b[K" if self._open else ""
