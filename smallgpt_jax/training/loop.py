"""The training loop."""

from typing import Any

import jax


def train_loop(trainer, state, first_step: int) -> tuple[Any, int, bool]:
    """Runs the updates after `first_step` of a `Trainer`. Returns the state, its step, and whether
    the run was stopped.
    """
    # Each iteration
    # 1. dispatches an update;
    # 2. while the update runs, checks and logs the metrics of the previous update;
    # 3. agrees with the other processes on whether to stop;
    # 4. before saving or evaluating, checks and logs the current metrics, so that no non-finite
    #    state is saved;
    # 5. saves, then evaluates, because evaluation can fail or be stopped.
    config, step, stopped = trainer.config.train, first_step, False
    for step, batch in zip(
        range(first_step + 1, config.steps + 1), trainer.clock.wait_for(trainer.batches)
    ):
        with (
            jax.profiler.StepTraceAnnotation("train", step_num=step),
            jax.transfer_guard("disallow"),
        ):
            state, metrics = trainer.update(state, batch)
        trainer.profiler.after_step(step, state)
        trainer.stop.can_save = True
        if (previous := trainer.logger.exchange(step, metrics)) is not None:
            trainer.check(previous)
            trainer.logger.log(previous)

        stopped = trainer.stop.is_requested_anywhere()
        saves = stopped or config.saves(step)
        evaluates = not stopped and config.evaluates(step)
        if saves or evaluates:
            current = trainer.logger.take()
            trainer.check(current)
            trainer.logger.log(current)
        if saves:
            with trainer.clock.during("save"):
                trainer.save(step, state)
        if evaluates:
            stopped = not trainer.log_validation_loss(step, state)
        if stopped:
            break
    return state, step, stopped
