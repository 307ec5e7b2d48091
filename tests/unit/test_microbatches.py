"""Tests of the number of microbatches that fits into the memory of a device."""

import io
import math
import random

import jax
import pytest
from conftest import load_config

from smallgpt_jax.errors import UserError
from smallgpt_jax.run.config import Config
from smallgpt_jax.training import microbatches
from smallgpt_jax.training.build import shared_program


@pytest.mark.parametrize("seed", range(20))
def test_the_fewest_that_fit(seed):
    """As if all numbers were tried, but with few trials. Memory is only nearly a + b/number."""
    rng = random.Random(seed)
    rows = rng.choice([1, 8, 24, 96, 256])
    numbers = [number for number in range(1, rows + 1) if rows % number == 0]
    constant, divided = rng.uniform(0, 8), rng.uniform(1, 200)
    needed = {number: constant + rng.uniform(0.95, 1.05) * divided / number for number in numbers}
    fitting = [number for number in numbers if needed[number] <= 10]
    sizes = microbatches.fewest_that_fit(numbers, needed.__getitem__, limit=10)
    assert len(sizes) <= 5
    if not fitting:
        with pytest.raises(UserError, match="microbatches, the most, a device needs"):
            microbatches.fitting_number(sizes, 10)
        return
    number = microbatches.fitting_number(sizes, 10)
    assert needed[number] <= 10
    fewer = numbers[: numbers.index(number)]
    assert not fewer or sizes[fewer[-1]] > 10


@pytest.mark.parametrize("fewest", [1, 7, 45, 512])
def test_few_numbers_are_tried_if_the_compiler_tells_no_size(fewest):
    numbers = [number for number in range(1, 721) if 720 % number == 0]
    sizes = microbatches.fewest_that_fit(
        numbers, lambda number: math.inf if number < fewest else 9.0, limit=10
    )
    assert len(sizes) <= 6
    assert microbatches.fitting_number(sizes, 10) == min(n for n in numbers if n >= fewest)


def test_a_device_without_free_memory_has_a_limit(monkeypatch):
    monkeypatch.setattr(microbatches.host_memory, "available_bytes", lambda: 0)
    assert microbatches.memory_limit(jax.devices()[0]) == 0
    sizes = microbatches.fewest_that_fit([1, 2], lambda number: 1e9 / number, limit=0)
    with pytest.raises(UserError, match="with 2 microbatches, the most, a device needs"):
        microbatches.fitting_number(sizes, 0)


def step_bytes(config: Config) -> int:
    memory = shared_program(config).compiled_train_step.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return total + memory.output_size_in_bytes - memory.alias_size_in_bytes


@pytest.mark.slow
def test_a_step_on_a_small_device(monkeypatch):
    """The chosen number fits, and one less does not; a resumed run keeps it."""
    fields = {"train__batch_size": 128, "train__microbatches": 0, "model__num_layers": 1}
    config = Config.of(load_config("gpt", **fields))
    limit = step_bytes(config.replace(train={"microbatches": 1})) - 1
    monkeypatch.setattr(microbatches, "memory_limit", lambda device: limit)
    lines, terminal = [], io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    chosen = microbatches.with_microbatches(config, lines.append)
    assert "preparing the first step … 0s" in terminal.getvalue()
    assert chosen.train.microbatches == 2 and step_bytes(chosen) <= limit
    (line,) = lines
    assert line.startswith("2 microbatches per step, the fewest that fit: ")
    monkeypatch.setattr(microbatches, "memory_limit", lambda device: math.inf)
    assert Config.of(load_config("gpt", **fields), chosen).train.microbatches == 2
    assert Config.of(config, chosen).train.microbatches == 2  # as of a comparison's run
