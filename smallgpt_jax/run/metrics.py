"""metrics.jsonl, and its copies in TensorBoard event files and experiment trackers."""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from smallgpt_jax.devices import distributed
from smallgpt_jax.run.names import METRICS_FILE
from smallgpt_jax.run.tensorboard import EventFile
from smallgpt_jax.run.trackers import Tracker
from smallgpt_jax.storage.json_files import (
    NULL,
    NUMBER,
    Each,
    Kind,
    Optional,
    integer,
    one_of,
    parse_lines,
    read_json_lines,
)
from smallgpt_jax.storage.locks import require_locks

_LOGGED = (NULL, NUMBER)  # null: not finite
# The measures of a probe's answers: fraction of the examples without a wrong answer, and fraction
# of right answers. At a further length, their names end with it: exact_match_at_32.
_ANSWERS = EXACT_MATCH, ACCURACY = "exact_match", "accuracy"
# Of multiple-choice questions: bits per byte of the right answer, and how many more the best wrong
# one has (data/questions.py).
ANSWER_BITS, ANSWER_MARGIN = "answer_bits_per_byte", "answer_margin"
LOSS_OF_REPEATS = "loss_of_repeats"  # mean over the targets that copying predicts, in nats
_SPEED = Kind("a speed", lambda value: NUMBER.accepts(value) and value > 1e-9)


def _is_table(value) -> bool:
    """Whether `value` is an array of numbers or nulls, or of equally long arrays of them."""
    try:
        return np.ndim(value) > 0 and np.asarray(value, float).size > 0
    except (ValueError, TypeError, OverflowError):
        return False


# Fields that the readers of metrics.jsonl need.
_TRAIN_LINE = {
    "step": integer(0),
    "split": one_of("train"),
    "loss": _LOGGED,
    "loss_mean": Optional(_LOGGED),
    "tokens_per_second": Optional((NULL, _SPEED)),
    "learning_rate": Optional(_LOGGED),
    "expert_load": Optional(Each(Kind("arrays of numbers", _is_table))),
}
_EVAL_LINE = {
    "step": integer(0),
    "split": one_of("eval"),
    "loss": _LOGGED,
    "bits_per_byte": _LOGGED,
    "targets": integer(1),
}


def answers_in(line: dict) -> dict[str, float]:
    """Returns the measures of answers, of a probe or config.train.eval_examples, in a line."""
    return {
        name: value
        for name, value in line.items()
        if name.startswith((*_ANSWERS, ANSWER_BITS, ANSWER_MARGIN)) and NUMBER.accepts(value)
    }


_LINE = (_TRAIN_LINE, _EVAL_LINE)
_TAIL_BYTES = 2**16  # of the first try to read only the end of a file
MAX_POINTS = 20_000  # of a curve; a plot cannot show more


def read_lines(path: Path) -> list[dict]:
    """Returns the valid lines of a metrics.jsonl; [] if it does not exist."""
    return read_json_lines(path, _LINE)


def read_evaluations(workdir: Path) -> list[dict]:
    return [line for line in read_lines(workdir / METRICS_FILE) if line["split"] == "eval"]


def read_lines_from(path: Path, step: int) -> tuple[int, list[dict]]:
    """Returns the lines of `step` and later steps, and their position in the file, in bytes."""
    if not path.is_file():
        return 0, []
    # The lines are in the order of their steps, so the end of a long file is enough.
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = _TAIL_BYTES
        while True:  # until an earlier line shows that all lines from `step` on are read
            start = max(size - length, 0)
            file.seek(start)
            if start:
                start += len(file.readline())  # a part of a line
            lines = file.readlines()
            earlier = _count_earlier(lines, step)
            if earlier or not start:
                position = start + sum(map(len, lines[:earlier]))
                return position, parse_lines(lines[earlier:], _LINE)
            length *= 8


def _count_earlier(lines: Sequence[bytes], step: int) -> int:
    """Returns the number of lines up to the last one of an earlier step."""
    for count in range(len(lines), 0, -1):
        parsed = parse_lines(lines[count - 1 : count], _LINE)
        if parsed and parsed[0]["step"] < step:
            return count
    return 0


def sample_lines(path: Path) -> list[dict]:
    """Returns all evaluations, and about MAX_POINTS of the other lines, evenly spaced."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        interval = max(sum(1 for _ in file) // MAX_POINTS, 1)
        file.seek(0)
        chosen = (
            line for number, line in enumerate(file) if number % interval == 0 or b'"eval"' in line
        )
        return parse_lines(chosen, _LINE)


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard files on process 0, and sends the lines to a tracker.

    After the start, write errors do not end the run: a failed line is written with the next line; a
    failed event file ends.
    """

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        log: Callable[[str], None] = print,
        start_tracker: Callable[[list[dict]], Tracker] | None = None,
    ):
        self.first_step = first_step
        self._writes = distributed.is_primary()
        if not self._writes:
            return
        self._path = workdir / METRICS_FILE
        self._log = log
        self._pending_lines = ""
        # The tracker also gets the lines after `first_step`, which it cannot remove.
        self._tracker = start_tracker and start_tracker(read_lines(self._path))
        if not self._path.is_dir():  # a folder in its place is an error of writing like any other
            self._remove_lines_after(first_step)  # the run repeats these steps
        self._events = None
        with self._stop_events_on_error():
            self._events = EventFile(workdir, first_step)

    def _remove_lines_after(self, step: int) -> None:
        """Removes later lines, and the part of a line that a killed process has left."""
        require_locks(self._path)
        position, _ = read_lines_from(self._path, step + 1)
        with self._path.open("a+b") as file:
            file.truncate(position)
            file.seek(max(position - 1, 0))
            if file.read() not in (b"", b"\n"):  # somebody has edited the file
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self, step: int, split: str, values: dict[str, float | dict[str, list]]) -> None:
        if not self._writes:
            return
        line = {"step": step, "split": split, "time": round(time.time(), 3), **values}
        scalars = {name: value for name, value in values.items() if not isinstance(value, dict)}
        for name, value in scalars.items():
            if not math.isfinite(value):  # JSON has no NaN
                line[name] = None
        # Lines that could not be written before are written together with this one.
        was_failing = bool(self._pending_lines)
        self._pending_lines += json.dumps(line) + "\n"
        error = self._append()
        if error and not was_failing:
            self._log(
                f"{self._path}: {error.strerror}. Training continues; lines are kept until they "
                "can be written"
            )
        if self._events:
            with self._stop_events_on_error():
                self._events.write(step, split, scalars)
        if self._tracker:
            self._tracker.write(line)

    def _append(self) -> OSError | None:
        require_locks(self._path)
        length = None
        try:
            with self._path.open("a", encoding="utf-8") as file:
                length = file.tell()
                file.write(self._pending_lines)
                file.flush()
                # Without fsync, a power loss could remove lines of steps before the newest
                # checkpoint. The resumed run would not write these lines again.
                os.fsync(file.fileno())
        except OSError as error:
            if length is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, length)  # removes a partially written line
            return error
        self._pending_lines = ""
        return None

    @contextlib.contextmanager
    def _stop_events_on_error(self):
        try:
            yield
        except OSError as error:
            self._events = None
            self._log(f"TensorBoard event file: {error.strerror}. Training continues without it")

    def close(self) -> None:
        if not self._writes:
            return
        error = self._append() if self._pending_lines else None
        if error:
            lost = len(self._pending_lines.splitlines())
            self._log(f"{self._path}: {error.strerror}. The last {lost} lines are lost")
        if self._events:
            with contextlib.suppress(OSError):
                self._events.close()
        if self._tracker:
            self._tracker.close()
