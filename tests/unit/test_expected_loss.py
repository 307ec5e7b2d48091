"""Tests of the loss that `plan --results` expects, against trained runs that it has not seen."""

import dataclasses
from types import SimpleNamespace

import pytest
from conftest import ROOT, call

from smallgpt_jax.analysis import record
from smallgpt_jax.planning.expected_loss import expected_loss_message
from smallgpt_jax.run.config import Config, unflatten

RECORD = record.read(ROOT / "docs" / "results" / "scaling.json")
LARGEST = "0.47M"


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """Returns the path of a record without the largest size."""
    path = tmp_path_factory.mktemp("record") / "results.json"
    runs = tuple(run for run in RECORD.runs if run.size != LARGEST)
    record.write(dataclasses.replace(RECORD, runs=runs, predictions=None, held_out=""), path)
    return str(path)


def plan_of(name: str, fields: dict | None = None, parameters: int = 0):
    """Returns the plan of a trained run, with some fields changed."""
    run = next(run for run in RECORD.longest_runs() if run.name == name)
    config = Config.of(unflatten({**run.config, **(fields or {})}))
    estimate = SimpleNamespace(parameters=parameters or run.parameters)
    return SimpleNamespace(config=config, estimate=estimate)


@pytest.mark.parametrize("model", ["gpt", "llama", "pgpt"])
def test_the_loss_of_a_size_that_the_record_lacks(smaller, model):
    """Some seeds had begun to copy, which lowers losses by 0.2; the highest had not."""
    message = expected_loss_message(smaller, plan_of(f"{model}@{LARGEST}"))
    loss, low, high = (float(word) for word in message.replace(",", "").split() if "." in word[:2])
    assert message.endswith(f"(law of {model} in {smaller})")
    trained = [run.loss for run in RECORD.longest_runs(LARGEST) if run.model == model]
    assert low < loss < high and abs(loss - max(trained)) < 0.1


@pytest.mark.parametrize(
    ("name", "fields", "parameters", "reason"),
    [
        ("gpt@0.2M", {"model.context_length": 512}, 0, "gpt of {} has config.model.context_length=256, not 512"),
        (
            "gpt@0.2M", {"data.source": "books.txt", "model.num_heads": 8, "model.mlp_ratio": 4.5}, 0,
            "has config.model.num_heads=2, not 8; config.data.source='python_packages', not 'books.txt'; "
            "config.model.mlp_ratio=4, not 4.5",
        ),
        ("gpt@0.2M", {"data.packing": "best_fit"}, 0, "how much padding config.data.packing='best_fit' leaves"),
        ("gpt@0.2M", {}, 30_000_000, "parameters, too far from 30,000,000"),
        ("gpt@0.2M", {"train.steps": 10**6}, 0, "tokens, too far from 2,048,000,000"),
    ],
)  # fmt: skip
def test_why_the_loss_is_not_known(smaller, name, fields, parameters, reason):
    message = expected_loss_message(smaller, plan_of(name, fields, parameters))
    assert message.startswith("expected loss: not known; ") and reason.format(smaller) in message


def test_width_and_rate_belong_to_the_size(smaller):
    fields = {"model.d_model": 60, "optimizer.learning_rate": 0.1}
    message = expected_loss_message(smaller, plan_of("gpt@0.2M", fields))
    assert message.endswith(f"(law of gpt in {smaller})")


def test_small_differences_of_the_shape_are_named(smaller):
    """The rule of sizes sets them, so nearly every sized recipe has some. Here, 0 are two heads."""
    for fields, differences in (
        (
            {"num_heads": 4, "mlp_ratio": 4.5},
            "num_heads=2, not 4; config.model.mlp_ratio=4, not 4.5",
        ),
        ({"num_kv_heads": 1}, "num_kv_heads=0, not 1"),
    ):
        planned = plan_of("gpt@0.2M", {f"model.{name}": value for name, value in fields.items()})
        message = expected_loss_message(smaller, planned)
        law = f"(law of gpt in {smaller}, which has config.model.{differences}"
        assert message.endswith(f"{law}: the interval does not allow for that)")


def test_the_command_says_how_a_loss_becomes_known():
    config = "--config=configs/gpt.py:tiny", "--config.model.num_layers=1"
    done = call("plan", *config, "--topology=cpu:1", "--price=2")
    assert "expected loss: not known; --results=results.json of a comparison" in done.stdout
    done = call("plan", *config, "--topology=cpu:1", "--inference", "--results=a.json")
    assert done.returncode == 1 and "--results: is about training" in done.stderr
