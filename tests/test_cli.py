"""How commands end: in process, with streams of the test's own."""

import io
import sys

import pytest

from smallgpt_jax import cli


class Unwritable(io.RawIOBase):
    def __init__(self, error: OSError):
        self.error = error

    def writable(self):
        return True

    def write(self, data):
        raise self.error


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


@pytest.mark.parametrize("flush", [True, False])  # False: only what is left at the end is written
@pytest.mark.parametrize("error, status, message", [
    (BrokenPipeError(32, "Broken pipe"), 141, ""),
    (OSError(28, "No space left on device"), 1, "error: input or output: No space left on device\n")])
def test_an_output_that_cannot_be_written(monkeypatch, capsys, flush, error, status, message):
    """A reader that has gone has seen enough; a full disk has to be told."""
    unwritable = io.TextIOWrapper(io.BufferedWriter(Unwritable(error)), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", unwritable)
    with pytest.raises(SystemExit) as end:
        cli.execute(lambda: print("text", flush=flush))
    assert (end.value.code, capsys.readouterr().err) == (status, message)
    print("nothing is left that Python would fail to write", flush=True)
    with pytest.raises(OSError, match=error.strerror):
        unwritable.detach().close()


def test_a_pipe_of_the_command_itself_that_breaks_is_an_error(capsys):
    def write_to_a_worker():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(SystemExit) as end:
        cli.execute(write_to_a_worker)
    assert (end.value.code, capsys.readouterr().err) == (1, "error: input or output: Broken pipe\n")
