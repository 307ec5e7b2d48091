"""Tests of the measurement of wall time, with a fake time."""

from types import SimpleNamespace

from smallgpt_jax.run import clock as run_clock
from smallgpt_jax.run.clock import RunClock


def test_goodput(monkeypatch):
    """Of 100 s, 20 s pass until training starts, 5 s go to data, 10 s to saving and 15 s to
    evaluating.
    """
    time = SimpleNamespace(now=50.0)
    monkeypatch.setattr(run_clock, "time", SimpleNamespace(monotonic=lambda: time.now))

    def batches():
        for seconds in (3.0, 2.0):
            time.now += seconds
            yield seconds

    clock = RunClock()
    time.now += 20
    clock.start_training()
    for batch in clock.wait_for(batches()):
        time.now += 25
        if batch == 3.0:
            with clock.during("save"):
                time.now += 10
            assert clock.lap() == {
                "data_wait_seconds": 3,
                "save_seconds": 10,
                "restart_seconds": 20,
            }
    with clock.during("evaluate"):
        time.now += 15
    assert clock.lap() == {"data_wait_seconds": 2, "save_seconds": 0}
    assert clock.training_seconds() == 55  # including the wait for data
    assert clock.goodput_message() == (
        "goodput 50.0%: 50.0 of 100.0 s in training steps; 20.0 s starting, 5.0 s waiting for "
        "data, 10.0 s saving, 15.0 s evaluating"
    )
    with clock.during("evaluate"):
        time.now += 25
    assert clock.goodput_message().splitlines()[1] == (  # (15 + 25) of 125 s
        "evaluation took 32% of the time; for less, increase config.train.eval_every or decrease "
        "config.train.eval_steps"
    )
