"""Tests of messages between processes; here, the processes are threads with a fake of JAX's
service.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from smallgpt_jax.devices import agreement
from smallgpt_jax.devices.agreement import Agreement, PeerError, exchange


class Service:
    """Keys and values, as JAX's coordination service has them."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")
            return self._values[key]


class Process(threading.local):
    """What JAX knows of a process, and its count of messages."""

    num_processes = 3
    process_id: int
    client: Service
    count = 0

    def __next__(self):
        self.count += 1
        return self.count


@pytest.fixture
def run_processes(monkeypatch):
    """Returns a function that calls another one, with the number of the process, in three
    processes; it returns their results or exceptions.
    """
    monkeypatch.setattr(agreement, "POLL_SECONDS", 0.01)

    def run(function):
        process, service = Process(), Service()
        monkeypatch.setattr(agreement.distributed, "global_state", process)
        monkeypatch.setattr(agreement, "_NUMBERS", process)

        def call(number):
            process.process_id, process.client = number, service
            return function(number)

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(call, number) for number in range(3)]
            return [future.exception(timeout=20) or future.result() for future in futures]

    return run


def test_texts_are_exchanged(run_processes):
    def exchange_twice(number):
        return exchange(f"first {number}"), exchange("")

    assert run_processes(exchange_twice) == [(["first 0", "first 1", "first 2"], [""] * 3)] * 3


def test_a_single_process_needs_no_service():
    Agreement(2).fail("alone")
    assert exchange("alone") == ["alone"]


@pytest.mark.parametrize("failing_phase", [0, 1])
def test_a_failure_ends_the_phases_of_all(run_processes, failing_phase):
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


def test_all_complete_all_phases(run_processes):
    finished = []

    def save(number):
        agreed = Agreement(2)
        for phase in range(2):
            finished.append((phase, number))
            agreed.complete_phase()

    assert run_processes(save) == [None] * 3
    assert [phase for phase, _ in finished] == [0, 0, 0, 1, 1, 1]


def test_errors_of_the_service_are_raised(run_processes, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: process 0 has exited")

    monkeypatch.setattr(Service, "blocking_key_value_get", fail)
    assert all("UNAVAILABLE" in str(error) for error in run_processes(lambda _: exchange("")))


def test_a_thread_does_not_wait_while_python_exits(run_processes, monkeypatch):
    monkeypatch.setattr(agreement.threading.main_thread(), "is_alive", lambda: False)
    never, *_ = run_processes(lambda number: exchange("") if number == 0 else None)
    assert isinstance(never, jax.errors.JaxRuntimeError)
