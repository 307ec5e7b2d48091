"""Measures the mixers beside attention: training steps, and decoding at several positions.

    python benchmarks/mixers.py

The models are those of configs/llama.py:quickstart with another mixer in all blocks, or in three of four ("hybrid").
Their weights are random, which does not affect speed. The table has, for each mixer, the time of a training step
divided by that of attention, for each of --contexts (all with 2,048 tokens per step), and the time per decoded token at
each of --positions, and divided by that at the first. All models are timed in turn; a time is the least of --rounds.

The last line of standard output is the table as JSON.
"""

import json
import sys
import time

import jax
import numpy as np
from absl import flags

from configs import llama
from smallgpt_jax import cli, models
from smallgpt_jax.data.packing import Batch
from smallgpt_jax.devices import sharding
from smallgpt_jax.inference import layout, timing
from smallgpt_jax.inference.decoder import DecodeSession
from smallgpt_jax.training.program import build_program

_CONTEXTS = flags.DEFINE_list("contexts", ["256", "2048"], "Context lengths of training.")
_POSITIONS = flags.DEFINE_list("positions", ["1024", "16384"], "Positions of the decoded tokens.")
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Timings of each model.", lower_bound=1)

TOKENS = 2048  # per training step
NEW_TOKENS = 33  # the prompt gives the first, and 32 are timed
MIXERS = {"attention": ("attention",), "delta": ("delta",), "mamba": ("mamba",), "conv": ("conv",),
          "hybrid": ("delta", "delta", "delta", "attention")}


def recipe(mixers: tuple[str, ...], context: int):
    config = llama.get_config("quickstart")
    config.model.update(mixers=mixers, context_length=context, mamba_state=32)
    if "attention" not in mixers:
        config.model.update(position="none", num_kv_heads=0)
    config.train.batch_size = max(1, TOKENS // context)
    return config


def random_tokens(config, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, length), np.int32)


def training(mixers: tuple[str, ...], context: int):
    """Returns a function that runs a training step and returns its seconds."""
    config = recipe(mixers, context)
    program = build_program(config, jax.devices()[:1])
    step, state = program.bind(program.compile_train_step()), [program.initial_state()]
    tokens = random_tokens(config, config.train.batch_size, context + 1)
    batch = Batch(jax.device_put(tokens, sharding.batch_sharding(program.mesh)))

    def run() -> float:
        started = time.perf_counter()
        state[0], _ = jax.block_until_ready(step(state[0], batch))
        return time.perf_counter() - started

    return run


def decoding(mixers: tuple[str, ...], position: int):
    """Returns a function that decodes tokens after `position` and returns the seconds per token."""
    config = recipe(mixers, position + NEW_TOKENS)
    model = models.build(**config.model)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: 0.02 * rng.standard_normal(p.shape, np.float32), models.abstract_params(model))
    weights, prompt = layout.pack(model, params), random_tokens(config, 1, position)[0].tolist()

    def run() -> float:
        session = DecodeSession(model, weights, config.model.vocab_size, [list(prompt)])
        session.reserve(NEW_TOKENS)
        sampled_1x1, _ = timing.time_prefill(session)
        calls = timing.time_decoding(session, sampled_1x1, NEW_TOKENS - 1)
        return min(seconds / steps for steps, seconds in calls)

    return run


def least_seconds(make, values: list[str]) -> dict[str, dict[int, float]]:
    """Returns {mixer: {value: seconds}} of the functions make(mixers, value)."""
    found = {name: {} for name in MIXERS}
    for value in map(int, values):
        runs = {name: make(mixers, value) for name, mixers in MIXERS.items()}
        seconds = {name: [] for name in runs}
        for _ in range(_ROUNDS.value + 1):  # the first round is a warm-up
            for name, run in runs.items():
                seconds[name].append(run())
        for name in runs:
            found[name][value] = min(seconds[name][1:])
            print(f"{make.__name__} {value} {name}: {found[name][value] * 1e3:.3f} ms", file=sys.stderr, flush=True)
    return found


def main() -> None:
    steps, tokens = least_seconds(training, _CONTEXTS.value), least_seconds(decoding, _POSITIONS.value)
    rows = [{"mixer": name,
             "training_step_to_attention": {context: s / steps["attention"][context] for context, s in own.items()},
             "decoded_token_seconds": tokens[name],
             "decoded_token_to_first_position": {position: s / next(iter(tokens[name].values()))
                                                 for position, s in tokens[name].items()}}
            for name, own in steps.items()]
    print(json.dumps(rows))


if __name__ == "__main__":
    cli.run(main)
