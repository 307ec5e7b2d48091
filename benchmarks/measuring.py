"""Functions that several benchmarks use: random tokens and weights, training steps, timing in
turns, tables.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # lets benchmarks and recipes import configs/

from smallgpt_jax import models
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import timing
from smallgpt_jax.inference.decoder import Decoder, DecodeSession
from smallgpt_jax.training.build import build_program
from smallgpt_jax.training.program import Program

PAUSE = 0.3  # seconds in which the idle threads of another program stop spinning


def seconds_of(
    function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Calls `function`, waits for its result and returns its seconds."""
    started = clock()
    jax.block_until_ready(function())
    return clock() - started


def in_turn(
    runs: Mapping[Any, Callable[[], Any]], rounds: int, pause: float = 0.0
) -> dict[Any, list]:
    """Returns {name: results of its calls}. In each round, all are called; a first round only
    compiles and warms up.
    """
    found = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            time.sleep(pause)
            found[name].append(run())
    return {name: results[1:] for name, results in found.items()}


def median_and_ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns the medians of the first and the second numbers, and the median of their ratios first
    / second.
    """
    return (
        *map(statistics.median, zip(*pairs)),
        statistics.median(one / other for one, other in pairs),
    )


def random_tokens(rows: int, length: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (rows, length), np.int32)


def random_params(model: models.LanguageModel):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda p: 0.02 * rng.standard_normal(p.shape, np.float32), models.abstract_params(model)
    )


def random_batch(program: Program) -> Batch:
    c = program.config
    tokens = random_tokens(c.train.batch_size, c.model.context_length + 1, c.model.vocab_size)
    return Batch(jax.device_put(tokens, sharding.batch_sharding(program.mesh)))


class Training:
    """A compiled training step, called again and again with one batch of random tokens."""

    def __init__(self, config, devices: Sequence[jax.Device] | None = None):
        self.program = build_program(config, devices or jax.devices()[:1])
        self.state, self.batch = self.program.initial_state(0), random_batch(self.program)
        started = time.perf_counter()
        self.compiled = self.program.compiled_train_step
        self.compile_seconds = time.perf_counter() - started
        self._step = self.program.bind(config)

    def run(self, steps: int = 1) -> dict[str, jax.Array]:
        """Runs training steps, waits for them and returns the last metrics."""
        metrics = {}
        for _ in range(steps):
            self.state, metrics = self._step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return metrics


class Generation(NamedTuple):
    prefill_seconds: float  # for the prompts and the first new token
    calls: list[
        tuple[int, float]
    ]  # (steps, seconds) of each call of the decoder, for the other tokens
    session: DecodeSession

    @property
    def decode_seconds(self) -> float:
        return sum(seconds for _, seconds in self.calls)


def generate(
    model: models.LanguageModel, weights, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Generation:
    """Generates tokens greedily, at least 2 per prompt. `weights` are packed."""
    session = DecodeSession(Decoder(model, model.config.vocab_size), weights, prompts)
    session.reserve(new_tokens)
    sampled_Bx1, prefill_seconds = timing.time_prefill(session)
    return Generation(
        prefill_seconds, timing.time_decoding(session, sampled_Bx1, new_tokens - 1), session
    )


def require_known(flag: str, names: Iterable[str], known: Sequence[str]) -> None:
    if unknown := set(names) - set(known):
        raise UserError(f"{flag}={', '.join(unknown)}: unknown; choose from {', '.join(known)}")


def table_row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    return "\n".join([table_row(head), "|---" * len(head) + "|", *map(table_row, rows)])
