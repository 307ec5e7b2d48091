"""Locks and writes in object storage, in simulated processes with a fake clock; see
simulated_storage.py.
"""

import contextlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")

from google.api_core.exceptions import GoogleAPIError, NotFound, PreconditionFailed
from simulated_storage import Bucket, Lock, Process, Simulation

from smallgpt_jax.storage import object_lock, object_storage

LOCK = Path("bucket/run/.lock")
FILES = [Path("bucket/run/metrics.jsonl"), *(Path(f"bucket/run/{i}") for i in range(4))]


class Run(Process):
    """A process that holds the lock and writes files, each time one more line. It ends after
    `WRITES` writes.
    """

    WRITES = 12

    def __init__(self, simulation, number: int, suspensions: int, clock_stops: bool):
        super().__init__(simulation, clock_stops)
        self.number, self._suspensions = number, suspensions
        self.is_released, self.is_finished, self.lease = False, False, None
        self.writer = object_storage.Writer()
        self.start(self.main)

    def main(self) -> None:
        simulation = self._simulation
        self.lease = object_lock.Lease(LOCK)
        try:
            self.lease.acquire(wait=True)
            contents = {path: simulation.read(str(path))[1].decode() for path in FILES}
        except (GoogleAPIError, TimeoutError):
            return self.exit(1)
        self.start(self.renew)
        with self.writer.under(self.lease):
            for i in range(self.WRITES):
                simulation.sleep(simulation.random.uniform(0, 20))
                if self._suspensions and simulation.random.random() < 0.3:
                    self._suspensions -= 1
                    simulation.at(
                        simulation.time + simulation.random.uniform(0, 3),
                        lambda: self.suspend(simulation.random.uniform(1, 300)),
                    )
                path = simulation.random.choice(FILES)
                contents[path] += f"{self.number} {i}\n"
                with contextlib.suppress(
                    GoogleAPIError, OSError
                ):  # the next write contains the line, too
                    self.writer.write(path, contents[path].encode())
        self.is_released = self.is_finished = True
        self.lease.release()

    def exit(self, status: int) -> None:
        if self.holds_lock() and self.lease._is_recent():
            holder = self._simulation.read(str(LOCK))[1].decode().split()[-1:]
            assert holder != [self.lease._id], "the process has ended although it holds the lock"
        super().exit(status)

    def holds_lock(self) -> bool:
        """Returns whether the process holds the lock, as far as it knows."""
        if self.has_ended or self.is_released or not self.lease or not self.lease.generation:
            return False
        return self.now() - self.lease._renewed_at <= object_lock.LEASE_SECONDS

    def renew(self) -> None:
        while True:
            self._simulation.sleep(object_lock.RENEWAL_SECONDS)
            if self.is_released:
                return
            self.lease.try_to_renew()


class Observer:
    """Asserts for each write that its process does not overwrite its successor.

    If no clock stops, also asserts that at most one process believes that it holds the lock.
    """

    def __init__(self, runs: list[Run], clock_stops: bool):
        self._runs, self._owners, self._newest, self._clock_stops = runs, [], {}, clock_stops

    def on_send(self, name: str, content: bytes) -> None:
        if name != str(LOCK):
            assert writer_of(content, self._runs).holds_lock(), "sent after the lease"

    def on_write(self, name: str, content: bytes) -> None:
        if name == str(LOCK):
            owner = content.decode().split()[-1]
            if self._owners[-1:] != [owner]:
                assert owner not in self._owners
                self._owners.append(owner)
                assert self._clock_stops or not any(
                    run.holds_lock() and run.lease._id != owner for run in self._runs
                )
            return
        rank = self._owners.index(writer_of(content, self._runs).lease._id)
        assert rank >= self._newest.get(name, 0), "a run has overwritten its successor"
        self._newest[name] = rank


def writer_of(content: bytes, runs: list[Run]) -> Run:
    return runs[int(content.decode().splitlines()[-1].split()[0])]


def simulate(
    monkeypatch, seed: int, is_faulty: bool, suspensions: int, clock_stops: bool
) -> list[Run]:
    """Runs processes, each a restart while the earlier ones may still run, until one of them
    finishes.
    """
    simulation, runs = Simulation(seed, is_faulty), []
    monkeypatch.setattr(object_lock, "now", lambda: simulation.current.process.now())
    monkeypatch.setattr(object_lock, "time", simulation)
    monkeypatch.setattr(object_lock, "threading", SimpleNamespace(Lock=lambda: Lock(simulation)))
    monkeypatch.setattr(
        object_lock,
        "os",
        SimpleNamespace(
            getpid=lambda: len(runs), _exit=lambda status: simulation.current.process.exit(status)
        ),
    )
    for module in (object_lock, object_storage):
        monkeypatch.setattr(module, "bucket_of", lambda path: (Bucket(simulation), str(path)))
    monkeypatch.setattr(object_storage, "retry_policy", lambda: "default")

    def start_another():
        if len(runs) < 6 and not any(run.is_finished for run in runs):
            runs.append(Run(simulation, len(runs), suspensions, clock_stops))
            simulation.at(simulation.time + simulation.random.uniform(1, 150), start_another)

    observer = Observer(runs, clock_stops)
    simulation.on_send, simulation.on_write = observer.on_send, observer.on_write
    start_another()
    simulation.run()
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_faulty, suspensions, clock_stops",
    [(False, 3, False), (True, 2, False), (False, 3, True), (True, 3, True)],
)
def test_a_successor_is_never_overwritten(monkeypatch, is_faulty, suspensions, clock_stops):
    """Asserted by `Observer`. Most of these runs lose their lock; some finish."""
    runs = [
        run
        for seed in (*range(10), 36)  # 36 alone shows a lease that counts from the answer
        for run in simulate(monkeypatch, seed, is_faulty, suspensions, clock_stops)
    ]
    assert len(runs) > 30 and sum(run.is_finished for run in runs) > 3


def test_a_healthy_run_keeps_its_lock(monkeypatch):
    for seed in range(5):
        assert simulate(monkeypatch, seed, False, 0, False)[0].is_finished


def test_a_late_renewal_is_not_a_takeover(monkeypatch):
    """The version that is read has just been replaced by an own renewal, which arrived after its
    answer was due.
    """

    def upload(content, if_generation_match):
        contents.append(content)
        if if_generation_match != 3:
            raise PreconditionFailed("other generation")

    def download():
        if next(reads) == 1:
            raise NotFound("no such generation")
        return contents[-1]

    contents, reads, generations = [], itertools.count(1), itertools.count(2)
    bucket = SimpleNamespace(
        blob=lambda name: SimpleNamespace(upload_from_string=upload, generation=4),
        get_blob=lambda name: SimpleNamespace(
            generation=next(generations), download_as_text=download
        ),
    )
    monkeypatch.setattr(object_lock, "bucket_of", lambda path: (bucket, str(path)))
    lease = object_lock.Lease(LOCK)
    assert lease._write(1) and lease.generation == 4


def test_a_released_lock_is_not_renewed(monkeypatch):
    """A thread may list the locks of the process just before another thread, of a run that ends,
    releases one.
    """

    def upload(content, **request):
        if deleted:
            raise PreconditionFailed("no such generation")

    deleted, ends = [], []
    blob = SimpleNamespace(
        upload_from_string=upload, generation=1, delete=lambda **request: deleted.append(request)
    )
    bucket = SimpleNamespace(blob=lambda name: blob, get_blob=lambda name, **request: None)
    monkeypatch.setattr(object_lock, "bucket_of", lambda path: (bucket, str(path)))
    monkeypatch.setattr(object_lock, "os", SimpleNamespace(getpid=lambda: 1, _exit=ends.append))
    lease = object_lock.Lease(LOCK)
    lease.acquire(wait=False)
    lease.release()
    lease.renew()
    monkeypatch.setattr(object_lock, "now", lambda: lease._renewed_at + object_lock.LEASE_SECONDS)
    lease.require()
    assert deleted and not ends
