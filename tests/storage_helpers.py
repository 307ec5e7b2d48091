"""Locks in object storage with short leases, for tests."""

import socket
import subprocess
import sys

import pytest
from conftest import ROOT

from smallgpt_jax import object_lock

LEASE = {"LEASE_SECONDS": 1.5, "RENEWAL_SECONDS": 0.3, "POLL_SECONDS": 0.05}
HOLD_LOCK = f"""
import sys, time
from smallgpt_jax import files, object_lock
vars(object_lock).update({LEASE})
with files.file_lock(files.as_path("--workdir", sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def short_lease():
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in LEASE.items():
            patch.setattr(object_lock, name, seconds)
        yield


def hold_lock(path) -> subprocess.Popen:
    """Starts a process that holds the lock at `path`; returns when it holds it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(path)], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    return process


def name_of(process: subprocess.Popen) -> str:
    """Returns how a lock names its holder."""
    return f"process {process.pid} on {socket.gethostname()}"
