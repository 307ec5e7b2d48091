"""Tests of the order of events in the training loop. Everything that the loop calls is a fake;
nothing is compiled.
"""

import contextlib
import math
from types import SimpleNamespace

import pytest

from smallgpt_jax.errors import DivergenceError
from smallgpt_jax.run.config import TrainConfig
from smallgpt_jax.run.logger import StepMetrics
from smallgpt_jax.training.loop import train_loop
from smallgpt_jax.training.nonfinite import NonFiniteGuard


class Run:
    """A fake of everything that the training loop calls, such as the logger, checkpoints and
    evaluation.

    The fake methods append what they do to `events`. The train state is the number of updates made
    so far. A stop is requested after step `stop_after`, or during the evaluation after step
    `stop_in_evaluation`. The losses of the steps in `bad_steps` are non-finite.
    """

    def __init__(
        self,
        stop_after=None,
        stop_in_evaluation=None,
        bad_steps=(),
        on_nonfinite="stop",
        max_nonfinite=2,
    ):
        self.events, self.can_save, self.losses = [], False, []
        self._stop_after, self._stop_in_evaluation, self._bad_steps = (
            stop_after,
            stop_in_evaluation,
            bad_steps,
        )
        self._pending = None
        guard = NonFiniteGuard(
            on_nonfinite,
            max_nonfinite,
            lambda step: [step],
            lambda: None,
            log=lambda line: self.events.append("skip"),
        )
        self.check = guard.check

    def loop(self, steps: int, eval_every: int, checkpoint_every: int, first_step: int = 0):
        batches = iter(range(first_step + 1, 1000))
        train = TrainConfig(steps=steps, eval_every=eval_every, checkpoint_every=checkpoint_every)
        self.config = SimpleNamespace(train=train)
        self.batches = batches
        self.logger = self.stop = self.clock = self.profiler = self
        result = train_loop(self, first_step, first_step)
        self.unread_batch = next(batches)
        return result

    def update(self, state, batch):
        assert batch == state + 1, "batch of another step"
        self.events.append(f"update {batch}")
        return state + 1, batch

    # Fakes of the methods of `Logger`.
    def exchange(self, step, metrics):
        previous = self.take() if self._pending else None
        self._pending = metrics
        assert step == metrics
        return previous

    def take(self):
        step, self._pending = self._pending, None
        self.events.append(f"read {step}")
        loss = math.nan if step in self._bad_steps else 1.0
        arrays = {"loss": loss, "grad_norm": 1.0, "skipped": 1.0}
        return StepMetrics(step, arrays, step not in self._bad_steps, loss)

    def log(self, metrics):
        self.events.append(f"log {metrics.step}")

    # Fakes of the methods of `RunClock`.
    def wait_for(self, batches):
        return batches

    @contextlib.contextmanager
    def during(self, phase):
        self.events.append("pause")
        yield
        self.events.append("unpause")

    # Fake of `Profiler.after_step`.
    def after_step(self, step, state):
        assert step == state

    # Fake of `Trainer.save`.
    def save(self, step, state):
        assert step == state
        self.events.append(f"save {step}")

    def log_validation_loss(self, step, state):
        assert step == state
        self.events.append(f"evaluate {step}")
        return step != self._stop_in_evaluation

    # Fake of `StopRequest.is_requested_anywhere`.
    def is_requested_anywhere(self):
        assert self.can_save
        updates = [event for event in self.events if event.startswith("update")]
        return updates[-1] == f"update {self._stop_after}"


def test_metrics_are_read_after_the_next_update_is_dispatched():
    run = Run()
    run.loop(steps=3, eval_every=10, checkpoint_every=10)
    assert run.events[:5] == ["update 1", "update 2", "read 1", "log 1", "update 3"]


def test_saving_and_evaluating_at_one_step():
    """If a step is saved and evaluated, the loop reads its metrics, then saves the state, and then
    evaluates it.
    """
    run = Run()
    run.loop(steps=4, eval_every=2, checkpoint_every=2)
    assert run.events == [
        "update 1",
        "update 2",
        "read 1",
        "log 1",
        "read 2",
        "log 2",
        "pause",
        "save 2",
        "unpause",
        "evaluate 2",
        "update 3",
        "update 4",
        "read 3",
        "log 3",
        "read 4",
        "log 4",
        "pause",
        "save 4",
        "unpause",
        "evaluate 4",
    ]


def test_saving_and_evaluating_at_different_steps():
    run = Run()
    assert run.loop(steps=7, eval_every=3, checkpoint_every=2) == (7, 7, False)
    assert [event for event in run.events if event.split()[0] in ("save", "evaluate")] == [
        "save 2",
        "evaluate 3",
        "save 4",
        "save 6",
        "evaluate 6",
        "save 7",
        "evaluate 7",
    ]
    assert run.unread_batch == 8  # the loop has read no batch after that of step 7


def test_a_resumed_run_makes_the_remaining_steps():
    run = Run()
    assert run.loop(steps=7, eval_every=3, checkpoint_every=3, first_step=5) == (7, 7, False)
    assert [event for event in run.events if "update" in event] == ["update 6", "update 7"]
    assert run.events.count("save 7") == run.events.count("evaluate 7") == 1


def test_a_finished_run_does_nothing():
    run = Run()
    assert run.loop(steps=5, eval_every=3, checkpoint_every=3, first_step=5) == (5, 5, False)
    assert run.events == [] and run.unread_batch == 6


@pytest.mark.parametrize("stop_after", [1, 3, 4, 6])
def test_a_stopped_run_saves_and_does_not_evaluate(stop_after):
    """Covers a stop after an ordinary step, a checkpoint step, an evaluation step, and the last
    step.
    """
    run = Run(stop_after=stop_after)
    assert run.loop(steps=6, eval_every=4, checkpoint_every=3) == (stop_after, stop_after, True)
    assert run.events[-5:] == [
        f"read {stop_after}",
        f"log {stop_after}",
        "pause",
        f"save {stop_after}",
        "unpause",
    ]
    assert f"evaluate {stop_after}" not in run.events


@pytest.mark.parametrize("step, is_saved", [(2, False), (4, True)])
def test_a_run_stopped_during_evaluation(step, is_saved):
    run = Run(stop_in_evaluation=step)
    assert run.loop(steps=6, eval_every=2, checkpoint_every=4) == (step, step, True)
    assert run.events[-1] == f"evaluate {step}"
    # The loop saves step 4, a multiple of checkpoint_every, before the evaluation. It does not save
    # step 2: `Session` does so after the loop.
    assert (f"save {step}" in run.events) == is_saved


@pytest.mark.parametrize("bad_step, last_event", [(2, "read 2"), (3, "read 3")])
def test_divergence_ends_the_run_before_anything_is_saved(bad_step, last_event):
    """A non-finite loss ends the run, both at an ordinary step and at a step with a checkpoint.

    Step 2 is ordinary: its metrics are read after step 3 is dispatched. Step 3 has a checkpoint, so
    its metrics are read before its state is saved.
    """
    run = Run(bad_steps=(bad_step,))
    with pytest.raises(DivergenceError, match=f"step {bad_step}: loss nan"):
        run.loop(steps=9, eval_every=3, checkpoint_every=3)
    assert run.events[-1] == last_event
    assert not any("save" in event or "evaluate" in event for event in run.events)


def test_skipped_updates_are_logged_up_to_the_maximum():
    run = Run(bad_steps=(1, 3, 4), on_nonfinite="skip")
    with pytest.raises(DivergenceError, match="2 non-finite updates in a row"):
        run.loop(steps=9, eval_every=9, checkpoint_every=9)
    assert [event for event in run.events if event.split()[0] in ("skip", "log")] == [
        "skip",
        "log 1",
        "log 2",
        "skip",
        "log 3",
    ]
