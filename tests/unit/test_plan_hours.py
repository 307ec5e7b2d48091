"""Tests of the hours and the cost of a training, and of the size that hours pay for."""

import json
import math
from types import SimpleNamespace

import pytest
from conftest import call

from smallgpt_jax.devices import chips
from smallgpt_jax.errors import UserError
from smallgpt_jax.planning import hours, topologies


def planned(steps: int, seconds: float | None, devices: int = 8) -> SimpleNamespace:
    estimate = SimpleNamespace(
        estimated_step_seconds=seconds, devices=devices, device_kind="TPU v5e"
    )
    config = SimpleNamespace(train=SimpleNamespace(steps=steps))
    return SimpleNamespace(estimate=estimate, config=config, problem="")


def test_the_cost_of_a_training():
    assert hours.training_hours(planned(7200, 0.5)) == 1.0
    message = hours.cost_message(planned(7200, 0.5), price=2.5)
    assert message.startswith("7,200 steps: 1h 00m on 8 devices, 20.00 at 2.5 per device and hour")
    message = hours.cost_message(planned(100, 1e-3), price=2.5)
    assert "less than a second on 8 devices, less than 0.01 at 2.5" in message
    message = hours.cost_message(planned(7200, None), price=2.5)
    assert (
        "7,200 steps: hours and cost at 2.5 per device and hour not known; the compiled" in message
    )


@pytest.mark.parametrize(
    ("mfu", "chosen", "trials"), [(0.5, 2.84e19, 2), (0.06, 3.41e18, 2), (0.5, 1.7e19, 1)]
)
def test_the_size_for_some_hours(monkeypatch, mfu, chosen, trials):
    """A chip that reaches half of its peak speed: 8 · 98.5e12 FLOP/s for 10 hours are 2.8e19. The
    first trial is at 30%: a smaller model may fit if it does not, a larger one does not.
    """
    tried = []
    fits_below = 1e19 if trials == 1 or mfu < 0.3 else math.inf

    def fake_plan(recipe, topology):
        flops = float(recipe.partition(":")[2])
        tried.append(flops)
        made = planned(1000, flops / (8 * 197e12 * mfu) / 1000)
        made.problem = "" if flops < fits_below else "does not fit"
        return made

    monkeypatch.setattr(hours, "plan", fake_plan)
    monkeypatch.setattr(
        topologies, "topology_devices", lambda name: [SimpleNamespace(device_kind=name)] * 8
    )
    monkeypatch.setattr(chips, "find_chip", chips.CHIPS.get)
    sized = hours.plan_for_hours("configs/gpt.py", "TPU v5e", 10)
    assert sized.recipe == f"configs/gpt.py:{chosen:g}".replace("e+", "e") and len(tried) == trials
    if not sized.plan.problem:
        assert hours.training_hours(sized.plan) == pytest.approx(10, rel=0.05)
    with pytest.raises(UserError, match="needs TPUs or GPUs"):
        hours.plan_for_hours("configs/gpt.py", "cpu:8", 10)


def test_hours_of_zero():
    done = call("plan", "--config=gpt", "--topology=cpu:1", "--hours=0")
    assert (done.returncode, done.stderr) == (2, "error: --hours=0: must be at least 0.01\n")


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--price=nan", "--price=nan: must be a finite number"),
        ("--batch=8", "--batch: is about decoding; add --inference, or remove the flag"),
        ("--results=none.json", "none.json: No such file or directory; expected a results.json"),
    ],
)
def test_flags_are_checked_before_the_compilation(flag, message):
    done = call("plan", "--config=configs/gpt.py:tiny", "--topology=cpu:1", flag)
    assert done.returncode == 1 and not done.stdout and f"error: {message}" in done.stderr


def test_hours_find_the_size_of_a_recipe():
    done = call("plan", "--config=gpt:1M@40", "--topology=v5e:1x1", "--hours=1")
    message = "error: --hours: finds the size of a recipe; remove :1M@40 from --config\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize("flag", ["--hours=10", "--price=2"])
def test_hours_and_prices_are_of_training(flag):
    done = call("plan", "--config=configs/gpt.py:tiny", "--topology=cpu:1", "--inference", flag)
    name = flag.partition("=")[0]
    assert done.returncode == 1 and f"{name}: is about training" in done.stderr


def test_size_and_price_stay_beside_the_json():
    config = "--config=configs/gpt.py:20k", "--config.model.num_layers=1"
    done = call("plan", *config, "--topology=cpu:1", "--json", "--price=2")
    assert done.returncode == 0 and json.loads(done.stdout)["devices"] == 1
    assert "size 20k: 1 × " in done.stderr
    assert "hours and cost at 2 per device and hour not known; CPUs have no estimate" in done.stderr
