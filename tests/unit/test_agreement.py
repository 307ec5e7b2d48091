"""Tests of messages between processes; here, the processes are threads with a fake of JAX's
service.
"""

import threading

import jax
import pytest
from process_helpers import Service, run_processes  # noqa: F401

from smallgpt_jax.devices import agreement
from smallgpt_jax.devices.agreement import Agreement, PeerError, exchange


def test_texts_are_exchanged(run_processes):  # noqa: F811
    def exchange_twice(number):
        return exchange(f"first {number}"), exchange("")

    assert run_processes(exchange_twice) == [(["first 0", "first 1", "first 2"], [""] * 3)] * 3


def test_a_single_process_needs_no_service():
    Agreement(2).fail("alone")
    assert exchange("alone") == ["alone"]


@pytest.mark.parametrize("failing_phase", [0, 1])
def test_a_failure_ends_the_phases_of_all(run_processes, failing_phase):  # noqa: F811
    """Process 1 fails in a phase while the others wait for its end, or have not come so far."""
    others_wait = threading.Event()

    def save(number):
        agreed = Agreement(2)
        for phase in range(2):
            if number == 1 and phase == failing_phase:
                others_wait.wait(0.1)
                agreed.fail("No space left on device")
                return "failed"
            if number == 2:
                others_wait.wait(0.3)
            agreed.complete_phase()

    one, failed, other = run_processes(save)
    assert failed == "failed"
    assert isinstance(one, PeerError) and isinstance(other, PeerError)
    assert str(one) == str(other) == "process 1: No space left on device"


def test_all_complete_all_phases(run_processes):  # noqa: F811
    finished = []

    def save(number):
        agreed = Agreement(2)
        for phase in range(2):
            finished.append((phase, number))
            agreed.complete_phase()

    assert run_processes(save) == [None] * 3
    assert [phase for phase, _ in finished] == [0, 0, 0, 1, 1, 1]


def test_nobody_waits_for_a_process_that_leaves(run_processes, monkeypatch):  # noqa: F811
    """Process 0, with which the service ends, leaves last."""
    monkeypatch.setattr(agreement, "LEAVING_SECONDS", 20.0)
    left = []

    def work(number):
        if number == 1:
            agreement.leave()
            left.append(number)
            return
        try:
            exchange("")
        finally:
            agreement.leave()
            left.append(number)

    errors = run_processes(work)
    assert str(errors[0]) == str(errors[2]) == "process 1 has exited"
    assert left[0] == 1 and left[-1] == 0


def test_leaving_when_the_service_has_ended(run_processes, monkeypatch):  # noqa: F811
    def fail(*_, **options):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")

    monkeypatch.setattr(Service, "key_value_set", fail)
    monkeypatch.setattr(agreement, "LEAVING_SECONDS", 0.1)
    assert run_processes(lambda _: agreement.leave()) == [None] * 3


def test_errors_of_the_service_are_raised(run_processes, monkeypatch):  # noqa: F811
    def fail(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: process 0 has exited")

    monkeypatch.setattr(Service, "blocking_key_value_get", fail)
    assert all("UNAVAILABLE" in str(error) for error in run_processes(lambda _: exchange("")))


def test_a_thread_does_not_wait_while_python_exits(run_processes, monkeypatch):  # noqa: F811
    monkeypatch.setattr(agreement.threading.main_thread(), "is_alive", lambda: False)
    never, *_ = run_processes(lambda number: exchange("") if number == 0 else None)
    assert isinstance(never, jax.errors.JaxRuntimeError)
