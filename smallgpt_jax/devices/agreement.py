"""Messages between the processes of a run, by JAX's coordination service.

Unlike collectives, they need no device: a thread can exchange them while the devices train, and so
can processes that differ in their devices or code. All processes call `exchange` and create
`Agreement`s in the same order.
"""

import contextlib
import itertools
import threading
import time

import jax
from jax._src import distributed  # JAX has no public access to the service's keys and values

POLL_SECONDS = 2.0  # between two looks at whether a process is about to exit
# For which process 0, which runs the service, waits for the others: also those of a busy machine.
LEAVING_SECONDS = 15.0
REPLY_SECONDS = 0.5  # in which the service's replies arrive, and those that got one exit
_NUMBERS = itertools.count()  # names of the messages


class PeerError(Exception):
    """Another process has failed; the message names it and says why."""


def num_processes() -> int:
    """Like jax.process_count(), but does not initialize the devices."""
    return distributed.global_state.num_processes


def process_index() -> int:
    return distributed.global_state.process_id


def exchange(text: str) -> list[str]:
    """Returns the texts of all processes, in their order (collective)."""
    return _exchange(f"exchange/{next(_NUMBERS)}", text)


def leave() -> None:
    """Prepares the end of this process while others may go on."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0, and the service, may be gone
        _send("leaving", "")
    # The service ends with process 0, and would abort those that are about to report their error.
    if process_index() > 0:
        return
    end = time.monotonic() + LEAVING_SECONDS
    for process in range(1, num_processes()):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            seconds = max(end - time.monotonic(), 0.001)
            client = distributed.global_state.client
            client.blocking_key_value_get(_key("leaving", process), round(1000 * seconds))
    time.sleep(REPLY_SECONDS)


class Agreement:
    """Phases that all processes complete, or none (collective; in any thread)."""

    def __init__(self, num_phases: int):
        self._name = f"agreement/{next(_NUMBERS)}"
        self._num_phases = num_phases
        self._phase = 0

    def complete_phase(self) -> None:
        """Waits until all have completed the next phase. Raises PeerError if one has failed."""
        failures = _exchange(f"{self._name}/{self._phase}", "")
        self._phase += 1
        for process, failure in enumerate(failures):
            if failure:
                raise PeerError(f"process {process}: {failure}")

    def fail(self, reason: str) -> None:
        """Ends the others' waiting, whichever phase they are in."""
        for phase in range(self._num_phases):
            _send(f"{self._name}/{phase}", reason)


def _exchange(name: str, text: str) -> list[str]:
    if num_processes() == 1:
        return [text]
    _send(name, text)
    return [_receive(name, process) for process in range(num_processes())]


def _key(name: str, process: int) -> str:
    return f"smallgpt_jax/{name}/{process}"


def _send(name: str, text: str) -> None:
    if num_processes() > 1:
        client = distributed.global_state.client
        client.key_value_set(_key(name, process_index()), text, allow_overwrite=True)


def _receive(name: str, process: int) -> str:
    """Waits without a limit. Raises PeerError if the other process leaves."""
    client = distributed.global_state.client
    while True:
        try:
            return client.blocking_key_value_get(_key(name, process), round(1000 * POLL_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            # At its exit, Python waits for threads, and one of them may be waiting here.
            is_exiting = not threading.main_thread().is_alive()
            if is_exiting or "DEADLINE_EXCEEDED" not in str(error):
                raise
        # if it has died instead, the service ends this process, too
        if _has_left(process):
            raise PeerError(f"process {process} has exited")


def _has_left(process: int) -> bool:
    try:
        distributed.global_state.client.key_value_try_get(_key("leaving", process))
    except jax.errors.JaxRuntimeError:  # NOT_FOUND
        return False
    return True
