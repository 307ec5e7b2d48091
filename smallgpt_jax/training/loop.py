"""The training loop."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from smallgpt_jax.run.checkpoint import Checkpoints
from smallgpt_jax.run.clock import RunClock
from smallgpt_jax.run.config import TrainConfig
from smallgpt_jax.run.logger import Logger
from smallgpt_jax.run.profiler import Profiler
from smallgpt_jax.training.nonfinite import NonFiniteGuard
from smallgpt_jax.training.preemption import StopRequest


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    config: TrainConfig
    batches: Iterable  # on the devices, from the first step on
    update: Callable[[Any, Any], tuple[Any, dict]]  # (state, batch) → (next state, metrics)
    log_validation_loss: Callable[[int, Any], bool]  # (step, state) → False if stopped
    checkpoints: Checkpoints
    logger: Logger
    guard: NonFiniteGuard
    stop: StopRequest
    clock: RunClock
    profiler: Profiler


def train_loop(run: TrainingRun, state, first_step: int) -> tuple[Any, int, bool]:
    """Runs the updates after `first_step`; returns the state, its step, and whether the run was
    stopped.

    Each iteration
    1. dispatches an update;
    2. while the update runs, checks and logs the metrics of the previous update;
    3. agrees with the other processes on whether to stop;
    4. before saving or evaluating, checks and logs the current metrics, so that no non-finite state
       is saved;
    5. saves, then evaluates, because evaluation can fail or be stopped.
    """
    step, stopped = first_step, False
    for step, batch in zip(
        range(first_step + 1, run.config.steps + 1), run.clock.wait_for(run.batches)
    ):
        with (
            jax.profiler.StepTraceAnnotation("train", step_num=step),
            jax.transfer_guard("disallow"),
        ):
            state, metrics = run.update(state, batch)
        run.profiler.after_step(step, state)
        run.stop.can_save = True
        if (previous := run.logger.exchange(step, metrics)) is not None:
            run.guard.check(previous)
            run.logger.log(previous)

        stopped = run.stop.is_requested_anywhere()
        saves = stopped or run.config.saves(step)
        evaluates = not stopped and run.config.evaluates(step)
        if saves or evaluates:
            current = run.logger.take()
            run.guard.check(current)
            run.logger.log(current)
        if saves:
            with run.clock.during("save"):
                run.checkpoints.save(step, state, run.logger.losses)
        if evaluates:
            stopped = not run.log_validation_loss(step, state)
        if stopped:
            break
    return state, step, stopped
