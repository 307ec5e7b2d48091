"""How commands end: in process, with streams of the test's own."""

import contextlib
import io
import os
import sys

import pytest

from smallgpt_jax import cli


def test_characters_that_the_encoding_lacks_are_shown_as_escapes(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    cli.execute(lambda: print("0.25 ± 0.01"))
    assert written.getvalue() == rb"0.25 \xb1 0.01" + b"\n"


def test_bytes_that_are_not_text_reach_the_command(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), encoding="utf-8"))
    lines = []
    cli.execute(lambda: lines.append(sys.stdin.readline()))
    assert lines == ["a\udcffb\n"]


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("is_buffered", [True, False])  # if so, only what is left at the end is written
@pytest.mark.parametrize("output, status, message", [
    (closed_pipe, 141, ""), (full_disk, 1, "error: input or output: No space left on device\n")])
def test_an_output_that_cannot_be_written(monkeypatch, capsys, is_buffered, output, status, message):
    """A reader that has gone has seen enough; a full disk has to be told."""
    raw = io.FileIO(output(), "wb")
    unwritable = io.TextIOWrapper(io.BufferedWriter(raw) if is_buffered else raw, write_through=not is_buffered)
    monkeypatch.setattr(sys, "stdout", unwritable)
    with pytest.raises(SystemExit) as end:
        cli.execute(lambda: print("text"))
    assert (end.value.code, capsys.readouterr().err) == (status, message)
    sys.stdout.flush()  # as Python does at the end: nothing is left that it would fail to write
    with contextlib.suppress(OSError):
        unwritable.close()


def test_a_pipe_of_the_command_itself_that_breaks_is_an_error(capsys):
    def write_to_a_worker():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as end:
        cli.execute(write_to_a_worker)
    assert (end.value.code, capsys.readouterr().err) == (1, "error: input or output: Broken pipe\n")
