"""Locks in object storage with short leases, for tests."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import ROOT

from smallgpt_jax.storage import object_lock

LEASE = {"LEASE_SECONDS": 3.0, "RENEWAL_SECONDS": 0.5, "POLL_SECONDS": 0.05}
HOLD_LOCK = f"""
import sys, time
from smallgpt_jax.storage import object_lock
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.locks import file_lock
from smallgpt_jax.storage.paths import as_path
vars(object_lock).update({LEASE})
with file_lock(as_path("--workdir", sys.argv[1])):
    print("held", flush=True)
    if sys.argv[2:] == ["unreachable"]:
        def fail(*_, **__):
            raise OSError("no network")
        object_lock.Lease._write = fail
    while sys.argv[2:] == ["writes"]:
        write_atomically(as_path("--workdir", sys.argv[1]).with_name("file"), "written by the holder")
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def short_lease():
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in LEASE.items():
            patch.setattr(object_lock, name, seconds)
        yield


@pytest.fixture
def faults(emulated_storage):
    """Returns a function that sets faults of the emulator, see gcs_emulator.py.

    It returns a function that returns the number of requests that each of them has hit so far.
    """
    import requests

    url = os.environ["STORAGE_EMULATOR_HOST"] + "/faults"

    def set_faults(*rules: dict):
        requests.post(url, json=rules).raise_for_status()
        return lambda: requests.get(url).json()

    yield set_faults
    set_faults()


@contextlib.contextmanager
def hold_lock(path, *options: str) -> Iterator[subprocess.Popen]:
    """Yields a process that holds the lock at `path`; kills it on exit.

    With the option "unreachable", it cannot renew the lock. With "writes", it writes the object
    `file` all the time.
    """
    command = [sys.executable, "-c", HOLD_LOCK, str(path), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def name_of(process: subprocess.Popen) -> str:
    """Returns the name of a process, as in the lock that it holds."""
    return f"process {process.pid} on {socket.gethostname()}"
