"""A stack: runs of one model whose updates are computed together, in one program.

Each run is trained in a thread of its own, like a single run, with its own workdir, checkpoints,
log and step number. Only its train step is special: a call waits for those of the other runs, and
all of them are then computed at once. A run that ends or fails leaves the stack, and the others
continue.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp

from smallgpt_jax.data.corpus import Corpus
from smallgpt_jax.errors import UserError
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.config import Config
from smallgpt_jax.training import preemption
from smallgpt_jax.training.compiled_steps import CompiledSteps
from smallgpt_jax.training.program import Program, memory_errors_explained
from smallgpt_jax.training.train import open_training


def can_be_stacked(config: Config, other: Config) -> bool:
    """Runs with trackers and profiles, of which a process has one at a time, are trained alone;
    those with a teacher, too, because its newest checkpoint may change.
    """
    trains = config.train, other.train
    return config.compiled_part() == other.compiled_part() and not any(
        train.teacher or train.tracker or train.profile_from for train in trains
    )


def require_one_device(field: str) -> None:
    """On several devices, programs that several threads start could wait for each other's
    collectives.
    """
    if (count := jax.device_count()) > 1:
        raise UserError(
            f"{field}: must be 1 on {count} devices; to use them all, start one process per "
            "device, with the same command"
        )


def train_stack(
    runs: Mapping[Path, Config], places: int, corpus: Corpus
) -> dict[Path, BaseException | None]:
    """Trains at most `places` runs, {workdir: config}. Returns {workdir: error}; None: the run is
    finished.

    Stacks with equal `places` share their program; places without a run cost time, but change no
    number.
    """
    clocks = {folder: RunClock() for folder in runs}
    opened = {folder: open_training(config, folder) for folder, config in runs.items()}
    with preemption.handle_signals() as stop, ThreadPoolExecutor(len(runs)) as pool:
        first = next(iter(opened.values())).program
        with memory_errors_explained(first.config.train, places):
            step = StackedStep(first.steps, places, len(runs))

        def train(folder: Path) -> None:
            with step.leaving():
                program = opened[folder].program
                stacked = StackedProgram(program.config, program.steps, step, clocks[folder])
                opened[folder]._replace(program=stacked).run(
                    corpus, stop, clocks[folder], f"{folder.name}: "
                )

        futures = {folder: pool.submit(train, folder) for folder in runs}
        return {folder: future.exception() for folder, future in futures.items()}


@dataclasses.dataclass(frozen=True)
class StackedProgram(Program):
    step: "StackedStep"
    clock: RunClock

    @property
    def stack(self) -> int:
        return self.step.places

    def start_compilation(self) -> tuple[Future, Future]:
        steps = Future(), Future()
        for future, step in zip(steps, (self.step, self.steps.eval_step)):
            future.set_result(step)
        return steps

    def bind(self, train_step: "StackedStep"):
        return super().bind(functools.partial(train_step, self.clock))


class StackedStep:
    """A train step that is called by `callers` threads, each with the arguments of its own run."""

    def __init__(self, steps: CompiledSteps, places: int, callers: int):
        with ThreadPoolExecutor(1) as pool:
            evaluation = pool.submit(
                lambda: steps.eval_step
            )  # compiled once, before the threads ask for it
            self._compiled = steps.stacked_train_step(places)
            evaluation.result()
        self.places, self.memory_analysis = places, self._compiled.memory_analysis
        self._callers, self._calls, self._lock = callers, [], threading.Lock()

    def __call__(self, clock: RunClock, *arguments):
        result = Future()
        with self._lock:
            self._calls.append((arguments, result))
            self._compute_if_complete()
        # The watchdog of this run must not count the time in which another run evaluates or
        # restores its checkpoint.
        with clock.during("stack_wait"):
            return result.result()

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """On exit, the other callers no longer wait for this one."""
        try:
            yield
        finally:
            with self._lock:
                self._callers -= 1
                self._compute_if_complete()

    def _compute_if_complete(self) -> None:
        if not self._calls or len(self._calls) < self._callers:
            return
        calls, self._calls = self._calls, []
        try:
            states, *others = zip(*(arguments for arguments, _ in calls))
            free = self.places - len(calls)
            # Copies fill the free places, because the states are donated.
            copies = tuple(jax.tree.map(jnp.copy, states[0]) for _ in range(free))
            results = self._compiled(
                states + copies, *(values + values[:1] * free for values in others)
            )
            for (_, result), *found in zip(calls, *results):
                result.set_result(tuple(found))
        except Exception as error:  # every thread raises it
            for _, result in calls:
                result.set_exception(error)
