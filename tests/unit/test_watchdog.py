"""Tests of the stall watchdog alone, with a limit of 0.2 seconds and without ending the process."""

import itertools
import os
import time
from types import SimpleNamespace

import pytest

from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.training import watchdog
from smallgpt_jax.training.watchdog import Watchdog

LIMIT = 0.2  # seconds


@pytest.fixture
def statuses(monkeypatch):
    """Returns the list of exit statuses with which the process would have ended."""
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


@pytest.fixture
def clock():
    clock = RunClock()
    clock.start_training()
    return clock


def wait_for_data_that_never_comes(clock):
    with clock.during("data_wait"):
        time.sleep(4 * LIMIT)


def test_a_stall_ends_the_process_with_the_stacks_of_its_threads(clock, statuses, capfd):
    began = time.monotonic()
    with Watchdog(clock, LIMIT):
        wait_for_data_that_never_comes(clock)
    assert statuses[0] == 124 and time.monotonic() - began < 2
    error = capfd.readouterr().err
    assert error.startswith(
        "error: no training step has finished for 0.2 seconds (config.train.stall_seconds); "
    )
    assert "in wait_for_data_that_never_comes" in error and "in _watch" in error


def test_steps_keep_a_run_alive(clock, statuses):
    with Watchdog(clock, LIMIT):
        for _ in range(16):
            time.sleep(LIMIT / 4)
            clock.progress += 1
    assert statuses == []


@pytest.mark.parametrize(
    "phase, name", [("restart", "starting"), ("save", "saving"), ("evaluate", "evaluating")]
)
def test_phases_without_steps_may_take_four_times_as_long(clock, statuses, capfd, phase, name):
    with Watchdog(clock, LIMIT):
        with clock.during(phase):
            time.sleep(2 * LIMIT)
        assert statuses == []
        with clock.during(phase):
            time.sleep(6 * LIMIT)
    assert statuses[0] == 124
    assert capfd.readouterr().err.startswith(
        f"error: {name} has taken 0.8 seconds (4 × config.train.stall_seconds); rerun the same "
    )


def test_the_time_of_a_suspension_does_not_count(clock, statuses, monkeypatch):
    """The clock goes on while the process is suspended, here for an hour between any two checks."""
    checks = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: 3600.0 * next(checks))
    monkeypatch.setattr(watchdog, "time", fake)
    with Watchdog(clock, 3.0):
        time.sleep(0.8)  # two checks
    assert next(checks) >= 3 and statuses == []


@pytest.mark.slow
def test_no_limit(clock, statuses):
    with Watchdog(clock, 0):
        time.sleep(LIMIT)
    assert statuses == []
