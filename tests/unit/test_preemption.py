"""Tests of stop requests by signals, which the test process sends to itself."""

import os
import signal
import time
import weakref

import pytest

from smallgpt_jax.errors import StoppedError, exit_on_interrupt, raise_on_interrupt
from smallgpt_jax.training import opening, preemption, trainer


@pytest.fixture
def exits(monkeypatch):
    """Replaces os._exit by a function that only records the exit status, and Python's handler of
    Ctrl-C, as a command does. Returns the list of recorded statuses.
    """
    exits = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    exit_on_interrupt()
    raise_on_interrupt()
    monkeypatch.setattr(os, "_exit", exits.append)
    yield exits
    signal.signal(signal.SIGINT, before)


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_second_request_exits(exits, capsys):
    with preemption.handle_signals() as stop:
        assert not stop.is_requested_anywhere()
        stop.can_save = True
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(stop.is_requested_anywhere)
        with pytest.raises(StoppedError, match="stopped after step 7") as stopped:
            stop.raise_stopped(7)
        assert stopped.value.status == 143
        # A repeated SIGTERM does not count as a second request, because the command `timeout` sends
        # SIGTERM to the process and also to its process group.
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # a second request
        wait_for(lambda: exits)
    assert exits == [130]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "SIGTERM: finishing this step and saving; a second SIGTERM stops at once"
    assert second.startswith("second request: stopped without saving")


def test_the_same_signal_later_is_a_second_request(exits, monkeypatch, capsys):
    monkeypatch.setattr(preemption, "REPEAT_SECONDS", 0.0)
    with preemption.handle_signals() as stop:
        stop.can_save = True
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(stop.is_requested_anywhere)
        assert exits == []
        wait_for(lambda: "again to stop at once" in capsys.readouterr().err)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: exits)
    assert exits == [130]


def test_exits_at_once_if_there_is_nothing_to_save(exits, capsys):
    handler = signal.getsignal(signal.SIGTERM)
    with preemption.handle_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: exits)
        assert stop.signal is None
    assert exits == [143]
    assert capsys.readouterr().err == (
        "stopped without saving; rerun the same command to resume from the newest checkpoint, if "
        "there is one\n"
    )
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_request_before_the_run_is_not_lost_in_a_callback(exits, monkeypatch, tmp_path):
    """Python ignores a KeyboardInterrupt in a callback of a library, such as a finalizer."""

    class Interrupted(Exception):
        pass

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # the handler runs here

    def check(*_):
        weakref.finalize(Interrupted(), interrupt)  # is collected, and calls it, at once
        wait_for(lambda: exits)
        raise Interrupted

    monkeypatch.setattr(opening, "config_in_workdir", check)
    with pytest.raises(Interrupted):
        trainer.train_and_evaluate(None, str(tmp_path / "run"))
    assert exits == [130]


def test_the_message_is_the_last_output(exits, capsys, monkeypatch):
    """The main thread is not stopped by the signal, and may print between the message and the end
    of the process.
    """
    monkeypatch.setattr(
        preemption.os, "_exit", lambda status: (print("compiled and ready"), exits.append(status))
    )
    with preemption.handle_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: exits)
    assert exits == [143] and capsys.readouterr().out == ""


def test_in_a_notebook_ctrl_c_is_an_exception(exits):
    """The process has to survive. SIGTERM ends it as before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with preemption.handle_signals() as stop:
        with pytest.raises(KeyboardInterrupt):  # nothing can be saved yet
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        stop.can_save = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_requested_anywhere()
        os.kill(os.getpid(), signal.SIGINT)  # too early to be a second request
        stop._signal_time -= preemption.REPEAT_SECONDS
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert exits == []
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: exits)
    assert exits == [143]
