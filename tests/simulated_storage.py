"""A simulation of processes that share a bucket, with a fake clock and faults.

Each thread of a process is a fiber: a thread that runs only while the simulation waits for it. A
fiber gives up its turn in each request and each sleep. In some periods, the service is faulty:
requests arrive late, in another order than sent, or never; they are refused; their answers are
lost. Processes are suspended as a whole; half of their requests that are under way still arrive,
and half are sent when the process continues.
"""

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace

from google.api_core.exceptions import (
    Forbidden,
    NotFound,
    PreconditionFailed,
    ServiceUnavailable,
    TooManyRequests,
)


class Ended(BaseException):
    """The process of this fiber has ended."""


class Simulation:
    """The clock, the objects of the bucket, and the events to come."""

    def __init__(self, seed: int, is_faulty: bool):
        self.random, self.time, self._healthy_until, self._faulty_until = (
            random.Random(seed),
            0.0,
            0.0,
            0.0,
        )
        self._has_faults, self.error = is_faulty, None
        self.objects: dict[str, tuple[int, bytes]] = {}  # name → generation, content
        self.on_send = self.on_write = lambda name, content: (
            None
        )  # called before a write is sent, and after it arrives
        self.current: Fiber | None = None
        self._events, self._numbers, self._generations = [], itertools.count(), itertools.count(1)

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def run(self) -> None:
        while self._events:
            self.time, _, event = heapq.heappop(self._events)
            event()
            if self.error:
                raise self.error

    def sleep(self, seconds: float) -> None:
        fiber = self.current
        self.at(self.time + seconds, fiber.resume)
        fiber.pause()

    def request(self, action: Callable[[], object], timeout: float):
        """Sends a request of the current fiber and waits for its answer: a result or an
        exception.
        """
        fiber, answers = self.current, []

        def answer(outcome):
            if not answers:
                answers.append(outcome)
                fiber.resume()

        def arrive():
            if fiber.process.suspended_until > self.time and self.random.random() < 0.5:
                return self.at(fiber.process.suspended_until, arrive)
            try:
                outcome = action()
            except (NotFound, PreconditionFailed) as error:
                outcome = error
            if not self.happens(0.3):  # or else the answer is lost
                self.at(self.time + self.delay(), lambda: answer(outcome))

        if self.happens(0.4):
            refusal = self.random.choice((Forbidden, TooManyRequests, ServiceUnavailable))(
                "refused"
            )
            self.at(self.time + self.delay(), lambda: answer(refusal))
        elif not self.happens(0.2):  # or else the request is lost
            self.at(self.time + self.delay(), arrive)
        self.at(self.time + timeout, lambda: answer(TimeoutError("no answer")))
        fiber.pause()
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def happens(self, probability: float) -> bool:
        """Returns True with a probability, if the service is faulty at present."""
        if self.time > self._faulty_until:
            self._healthy_until = self.time + self.random.uniform(10, 150)
            self._faulty_until = self._healthy_until + self.random.uniform(5, 100)
        return (
            self._has_faults
            and self.time > self._healthy_until
            and self.random.random() < probability
        )

    def delay(self) -> float:
        return self.random.uniform(5, 100) if self.happens(0.3) else self.random.uniform(0.01, 0.5)

    def read(self, name: str) -> tuple[int, bytes]:
        return self.objects.get(name, (0, b""))

    def write(self, name: str, content: bytes | None, replaced: int | None) -> int:
        if replaced is not None and self.read(name)[0] != replaced:
            raise PreconditionFailed("other generation")
        if content is None:
            del self.objects[name]
            return 0
        self.objects[name] = next(self._generations), content
        self.on_write(name, content)
        return self.objects[name][0]


class Fiber:
    def __init__(self, simulation: Simulation, process: "Process", main: Callable[[], None]):
        self._simulation, self.process, self._main = simulation, process, main
        self._turn, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self.is_done = False
        threading.Thread(target=self._run, daemon=True).start()
        simulation.at(simulation.time, self.resume)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self._main()
        except Ended:
            pass
        except BaseException as error:
            self._simulation.error = error
        self.is_done = True
        self._over.release()

    def resume(self) -> None:
        """Runs the fiber until it pauses. Called by the simulation. If the process is suspended,
        does so later.
        """
        if self.process.suspended_until > self._simulation.time:
            return self._simulation.at(self.process.suspended_until, self.resume)
        if not self.is_done:
            self._simulation.current = self
            self._turn.release()
            self._over.acquire()

    def pause(self) -> None:
        self._over.release()
        self._turn.acquire()
        if self.process.has_ended:
            raise Ended


class Process:
    """`clock_stops` tells whether its clock stands still while it is suspended, as that of a paused
    virtual machine.
    """

    def __init__(self, simulation: Simulation, clock_stops: bool):
        self._simulation, self._clock_stops = simulation, clock_stops
        self.suspended_until, self.has_ended, self._stopped = 0.0, False, 0.0

    def now(self) -> float:
        return self._simulation.time - self._stopped

    def start(self, main: Callable[[], None]) -> None:
        Fiber(self._simulation, self, main)

    def exit(self, status: int) -> None:
        self.has_ended = True
        raise Ended

    def suspend(self, seconds: float) -> None:
        self.suspended_until = self._simulation.time + seconds
        self._stopped += seconds if self._clock_stops else 0.0


class Lock:
    """Like threading.Lock, for fibers."""

    def __init__(self, simulation: Simulation):
        self._simulation, self._is_held = simulation, False

    def __enter__(self):
        while self._is_held:
            self._simulation.sleep(0.01)
        self._is_held = True

    def __exit__(self, *_):
        self._is_held = False


class Bucket:
    """Has those methods of a bucket of Google's library that locks use. Retries only if there is no
    `retry`.
    """

    def __init__(self, simulation: Simulation):
        self._simulation = simulation

    def _send(self, action: Callable[[], object], timeout: float = 60.0, retry: object = "default"):
        for _ in range(10 if retry else 0):
            try:
                return self._simulation.request(action, timeout)
            except (TimeoutError, TooManyRequests, ServiceUnavailable):
                self._simulation.sleep(1.0)
        return self._simulation.request(action, timeout)

    def get_blob(self, name: str, **options):
        def read() -> bytes:
            present, content = self._simulation.read(name)
            if present != generation:
                raise NotFound("no such generation")
            return content

        generation, _ = self._send(lambda: self._simulation.read(name), **options)
        blob = SimpleNamespace(
            generation=generation,
            download_as_text=lambda **options: self._send(read, **options).decode(),
        )
        return blob if generation else None

    def blob(self, name: str):
        def upload(content, if_generation_match=None, **options):
            content = content.encode() if isinstance(content, str) else content
            self._simulation.on_send(name, content)
            blob.generation = self._send(
                lambda: self._simulation.write(name, content, if_generation_match), **options
            )

        def delete(if_generation_match):
            self._send(lambda: self._simulation.write(name, None, if_generation_match))

        blob = SimpleNamespace(upload_from_string=upload, delete=delete)
        return blob
