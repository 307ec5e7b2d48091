"""What a run logs: a line on the terminal, `metrics.jsonl`, TensorBoard files."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from smallgpt_jax import processes
from smallgpt_jax.files import write_atomically

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard files, in which each step then stands once; process 0 does.

    Lines of steps after `first_step`, from a run that went on after its last checkpoint, are
    removed: those steps are made again. Nothing that then happens to these files ends the run: a line that
    cannot be written is written with the next one; TensorBoard's file is then given up. `say` is called when
    that begins, and at the end if lines are lost.
    """

    def __init__(self, workdir: Path, first_step: int, say: Callable[[str], None] = print):
        self._writes = processes.is_first()
        if not self._writes:
            return
        self._path, self._say, self._waiting = workdir / METRICS_FILE, say, ""
        kept = [line for line in read_lines(self._path) if line["step"] <= first_step]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = EventsWriter(str(workdir / "events"))
        # What older files say of later steps does not count.
        self._write_event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, split: str, values: dict[str, float]) -> None:
        """Adds a line, with the time in Unix seconds."""
        if not self._writes:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "split": split, "time": round(time.time(), 3), **finite}
        was_waiting, self._waiting = bool(self._waiting), self._waiting + json.dumps(line) + "\n"
        trouble = self._append()
        if trouble and not was_waiting:
            self._say(f"{self._path}: {trouble.strerror}. Training goes on; what is to be written waits")
        summary = Summary(value=[Summary.Value(tag=f"{split}/{name}", simple_value=value)
                                 for name, value in values.items()])
        self._write_event(step=step, summary=summary)

    def _append(self) -> OSError | None:
        """Writes the lines that wait; returns what kept it from that."""
        length = None
        try:
            with self._path.open("a") as file:
                length = file.tell()
                file.write(self._waiting)
                file.flush()
                os.fsync(file.fileno())  # a checkpoint outlives a loss of power, so do the lines before it
        except OSError as error:
            if length is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, length)  # not half a line
            return error
        self._waiting = ""
        return None

    def _write_event(self, **fields) -> None:
        """Directly, not through tensorboardX's thread, which waits for ever once a write has failed."""
        if not self._events:
            return
        try:
            self._events.write_event(Event(wall_time=time.time(), **fields))
            self._events.flush()
        except OSError as error:
            self._events = None
            self._say(f"TensorBoard's file cannot be written: {error.strerror}. Training goes on without it")

    def close(self) -> None:
        if not self._writes:
            return
        if self._waiting and (trouble := self._append()):
            self._say(f"{self._path}: {trouble.strerror}. Its last {len(self._waiting.splitlines())} lines are lost")
        if self._events:
            with contextlib.suppress(OSError):
                self._events.close()


def read_lines(path: Path, keys: set[str] = frozenset({"step", "split"})) -> list[dict]:
    """The objects in a metrics.jsonl, or such a file; none if it is not there. Lines cut short or damaged, which have
    not all the `keys`, are left out."""
    lines = []
    for text in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and keys <= line.keys():
                lines.append(line)
    return lines


class Stopwatch:
    """Counts the seconds of training: those inside `with paused():` are left out."""

    def __init__(self):
        self._started, self._paused = time.monotonic(), 0.0

    def seconds(self) -> float:
        return time.monotonic() - self._started - self._paused

    @contextlib.contextmanager
    def paused(self):
        started = time.monotonic()
        yield
        self._paused += time.monotonic() - started


class Progress:
    """The line that shows how a run goes: rewritten in place on a terminal, else one a call."""

    def __init__(self, steps: int):
        self._steps = steps
        self._in_place = sys.stdout.isatty()
        self._open = False

    def update(self, step: int, text: str) -> None:
        self._print(step, text, end="" if self._in_place else "\n")
        self._open = self._in_place

    def stay(self, step: int, text: str) -> None:
        """Prints a line that later ones do not overwrite."""
        self._print(step, text, end="\n")
        self._open = False

    def note(self, text: str) -> None:
        """Prints a line about something other than a step."""
        print(f"{self._clear()}{text}", flush=True)
        self._open = False

    def _print(self, step: int, text: str, end: str) -> None:
        counter = f"step {step:>{len(str(self._steps))}}/{self._steps}"
        print(f"{self._clear()}{counter}   {text}", end=end, flush=True)

    def _clear(self) -> str:
        return "\r\x1b[K" if self._open else ""
