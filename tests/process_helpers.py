"""Processes of a run as threads, with a fake of JAX's coordination service."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from smallgpt_jax.devices import agreement, distributed


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

    def key_value_try_get(self, key):
        with self._changed:
            if key not in self._values:
                raise jax.errors.JaxRuntimeError("NOT_FOUND")
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
    jax.devices()  # before JAX sees the fake
    monkeypatch.setattr(agreement, "POLL_SECONDS", 0.01)

    def run(function):
        process, service = Process(), Service()
        monkeypatch.setattr(agreement.distributed, "global_state", process)
        monkeypatch.setattr(agreement, "_NUMBERS", process)
        monkeypatch.setattr(distributed, "is_primary", lambda: process.process_id == 0)
        monkeypatch.setattr(distributed, "is_single_process", lambda: False)

        def call(number):
            process.process_id, process.client = number, service
            return function(number)

        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(call, number) for number in range(3)]
            return [future.exception(timeout=20) or future.result() for future in futures]

    return run
