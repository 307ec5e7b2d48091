"""Locks in object storage.

A lock is an object that is created only if it does not exist. Its holder renews the lock by writing
the object again every RENEWAL_SECONDS. A lock that is not renewed for LEASE_SECONDS may be taken
over by another process, because its holder has probably died. The other process measures this time
itself, so the clocks of the machines need not agree.

While a process holds a lock, it writes objects only under this lock; see `object_storage.Writer`.
"""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from smallgpt_jax.errors import LockHeldError
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.output import print_error
from smallgpt_jax.storage.object_storage import bucket_of, writer

LEASE_SECONDS = 60.0
RENEWAL_SECONDS = 10.0
POLL_SECONDS = 1.0


def now() -> float:
    # Unlike time.monotonic(), this clock goes on while the machine sleeps: so does the lease.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@contextlib.contextmanager
def object_lock(path: Path, wait: bool) -> Iterator[None]:
    """Holds an exclusive lock, the object at `path`, and removes the object on exit.

    With `wait=False`, raises LockHeldError as soon as another holder renews the lock. Takes over a
    lock that is not renewed within LEASE_SECONDS. Ends this process with status 1 if it cannot
    renew the lock in time, or if another process has taken over the lock, for example while this
    process was suspended.
    """
    lock = Lease(path)
    lock.acquire(wait)
    released = threading.Event()
    renewal = threading.Thread(target=lock.renew_until, args=(released,), daemon=True)
    renewal.start()
    try:
        with writer.under(lock):
            yield
    finally:
        released.set()
        renewal.join()
        lock.release()


class Lease:
    """A lock in object storage. `generation` is the version that this process has written."""

    def __init__(self, path: Path):
        self._path = path
        self._bucket, self._name = bucket_of(path)
        self._holder = f"process {os.getpid()} on {socket.gethostname()}"  # for people
        self._id = uuid.uuid4().hex  # two processes in containers can have the same holder
        self.generation = 0
        self._renewed_at = 0.0
        self._writing = threading.Lock()
        self._is_failing = False
        self._is_released = False

    def acquire(self, wait: bool) -> None:
        old_generation = 0  # generation of the object to replace; 0: none, so it must not exist
        while not self._write(old_generation):
            old_generation = self._wait_until_free(wait)

    def _write(self, old_generation: int, **request) -> bool:
        """Writes the object unless its generation is another; returns whether the lock is held."""
        from google.api_core.exceptions import PreconditionFailed

        while True:
            blob = self._bucket.blob(self._name)
            began = now()  # before the request: others measure the lease from when it arrives
            try:
                blob.upload_from_string(
                    f"{self._holder}\n{self._id}\n", if_generation_match=old_generation, **request
                )
            except PreconditionFailed:
                blob, (_, holder_id) = self._read(**request)
                if holder_id != self._id:
                    return False
                # An earlier write of this process has succeeded, but its answer was lost. It is not
                # known when; others may have seen it long ago. So write again.
                old_generation = blob.generation
                continue
            self.generation, self._renewed_at = blob.generation, began
            return True

    def _read(self, **request):
        """Returns the object, or None, and its two lines: (holder, id of the holder)."""
        from google.api_core.exceptions import NotFound

        while blob := self._bucket.get_blob(self._name, **request):
            with contextlib.suppress(NotFound):  # another version has been written in the meantime
                holder, _, holder_id = blob.download_as_text(**request).strip().partition("\n")
                return blob, (holder or "another process", holder_id)
        return None, ("", "")

    def _wait_until_free(self, wait: bool) -> int:
        """Returns the generation of the object to replace, or 0 if the object was removed."""
        generation = None  # of the lock when it was last seen renewed
        seen_at = polled_at = 0.0
        while True:
            blob, (holder, _) = self._read()
            last_polled_at, polled_at = polled_at, now()
            if blob is None:
                return 0
            is_renewed = blob.generation != generation
            if generation is None:
                self._print_waiting(holder, wait)
            elif is_renewed and not wait:
                raise LockHeldError(holder)
            # After a pause, for example of the network, start the lease anew: renewals may have
            # been missed.
            if is_renewed or polled_at - last_polled_at > RENEWAL_SECONDS:
                generation, seen_at = blob.generation, polled_at
            if polled_at - seen_at > LEASE_SECONDS:
                return generation
            time.sleep(POLL_SECONDS)

    def _print_waiting(self, holder: str, wait: bool) -> None:
        until = f"it renews or loses the lock (at most {LEASE_SECONDS:g} s)"
        if wait:
            until = "it releases or loses the lock"
        print_error(f"{self._path}: locked by {holder}; waiting until {until}")

    def renew_until(self, released: threading.Event) -> None:
        while not released.wait(RENEWAL_SECONDS):
            self.try_to_renew()

    def try_to_renew(self) -> None:
        """Reports a service that does not answer; ends the process before the lease ends."""
        try:
            self.renew()
            self._is_failing = False
        except Exception as error:  # no network, or the service is overloaded: try again later
            if not self._is_recent():
                self._end_process(f"the lock could not be renewed ({short_reason(error)})")
            if not self._is_failing:
                print_error(
                    f"{self._path}: the lock could not be renewed ({short_reason(error)}); trying "
                    f"again every {RENEWAL_SECONDS:g} s"
                )
            self._is_failing = True

    def require(self) -> None:
        """Renews the lock unless this was done recently. See `renew` for errors."""
        # If not, this process was suspended, perhaps in `renew`, or the service did not answer.
        while not (self._is_recent() or self._is_released):
            self.renew()

    def renew(self) -> None:
        """Ends the process if it has lost the lock. Raises an exception if the request fails."""
        with self._writing:
            # Another run in this process may have ended since the caller listed its locks.
            if self._is_released:
                return
            # With a short timeout and no retry, because a hanging request would use up the lease.
            is_held = self._write(self.generation, timeout=RENEWAL_SECONDS / 2, retry=None)
        if not is_held:
            self._end_process(
                "another process has taken over the lock, which this process did not renew for "
                f"{LEASE_SECONDS:g} s"
            )

    def _is_recent(self) -> bool:
        """Whether a request that is sent now can still arrive before the lease ends."""
        return now() - self._renewed_at <= LEASE_SECONDS - 2 * RENEWAL_SECONDS

    def _end_process(self, reason: str) -> None:
        print_error(f"error: {self._path}: {reason}; this process ends without saving")
        os._exit(1)  # an exception would only end the thread that renews the lock

    def release(self) -> None:
        # If the request fails, the lease ends by itself.
        with self._writing, contextlib.suppress(Exception):
            self._is_released = True
            self._bucket.blob(self._name).delete(if_generation_match=self.generation)
