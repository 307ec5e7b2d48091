"""Measures the mixers beside attention: training steps, and decoding at several positions.

    python benchmarks/mixers.py

The models are those of configs/llama.py:quickstart with another mixer in all blocks, or in three of
four ("hybrid"). Their weights are random, which does not affect speed. The table has, for each
mixer, the time of a training step divided by that of attention, for each of --contexts (all with
2,048 tokens per step), and the time per decoded token at each of --positions, and divided by that
at the first. All models are timed in turn; a time is the least of --rounds.
"""

import json
import sys

from absl import flags
from measuring import Training, generate, in_turn, random_params, random_tokens, seconds_of

from configs import llama
from smallgpt_jax import cli, models
from smallgpt_jax.inference import layout

_CONTEXTS = flags.DEFINE_list("contexts", ["256", "2048"], "Context lengths of training.")
_POSITIONS = flags.DEFINE_list("positions", ["1024", "16384"], "Positions of the decoded tokens.")
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Timings of each model.", lower_bound=1)

TOKENS = 2048  # per training step
NEW_TOKENS = 33  # the prompt gives the first, and 32 are timed
MIXERS = {
    "attention": ("attention",),
    "delta": ("delta",),
    "mamba": ("mamba",),
    "conv": ("conv",),
    "hybrid": ("delta", "delta", "delta", "attention"),
}


def recipe(mixers: tuple[str, ...], context: int):
    config = llama.get_config("quickstart")
    config.model.update(mixers=mixers, context_length=context, mamba_state=32)
    if "attention" not in mixers:
        config.model.update(position="none", num_kv_heads=0)
    config.train.batch_size = max(1, TOKENS // context)
    return config


def training(mixers: tuple[str, ...], context: int):
    """Returns a function that runs a training step and returns its seconds."""
    step = Training(recipe(mixers, context))
    return lambda: seconds_of(step.run)


def decoding(mixers: tuple[str, ...], position: int):
    """Returns a function that decodes tokens after `position` and returns the seconds per token."""
    model = models.build(**recipe(mixers, position + NEW_TOKENS).model)
    weights = layout.pack(model, random_params(model))
    prompts = random_tokens(1, position, model.config.vocab_size).tolist()
    return lambda: min(
        seconds / steps for steps, seconds in generate(model, weights, prompts, NEW_TOKENS).calls
    )


def least_seconds(make, values: list[str]) -> dict[str, dict[int, float]]:
    """Returns {mixer: {value: seconds}} of the functions make(mixers, value)."""
    found = {name: {} for name in MIXERS}
    for value in map(int, values):
        runs = {name: make(mixers, value) for name, mixers in MIXERS.items()}
        for name, seconds in in_turn(runs, _ROUNDS.value).items():
            found[name][value] = min(seconds)
            print(
                f"{make.__name__} {value} {name}: {found[name][value] * 1e3:.3f} ms",
                file=sys.stderr,
                flush=True,
            )
    return found


def main() -> None:
    steps, tokens = (
        least_seconds(training, _CONTEXTS.value),
        least_seconds(decoding, _POSITIONS.value),
    )
    rows = [
        {
            "mixer": name,
            "training_step_to_attention": {
                context: s / steps["attention"][context] for context, s in own.items()
            },
            "decoded_token_seconds": tokens[name],
            "decoded_token_to_first_position": {
                position: s / next(iter(tokens[name].values()))
                for position, s in tokens[name].items()
            },
        }
        for name, own in steps.items()
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    cli.run(main)
