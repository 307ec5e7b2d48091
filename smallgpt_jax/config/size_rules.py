"""Published rules for batch size, learning rate, warmup and weight decay by the size of a model or
of its data.

A config of a comparison of sizes can use them. They were fitted on models of 20M to 1B parameters
and more, on other data and tokenizers, so for smaller models they are only a start for a grid of
learning rates.

N: parameters, D: training tokens, B: tokens per batch.
"""

import math
from typing import NamedTuple


class OlmoRule(NamedTuple):
    batch_tokens: int
    learning_rate: float
    warmup_tokens: int
    beta2: float


def olmo(parameters: int) -> OlmoRule:
    """OLMo-core's model ladder (github.com/allenai/OLMo-core,
    model_ladder/wsds_chinchilla_run_configurator.py), after Porian et al., arXiv 2406.19146: B =
    2048 · 160 · (N/108M)^⅔ and half the rate 0.0047 · (N/108M)^−⅓, for N without embeddings and D =
    20 · N.
    """
    scale = parameters / 108_000_000
    batch_tokens = round(2048 * 160 * scale ** (2 / 3))
    return OlmoRule(
        batch_tokens,
        0.0047 / 2 * scale ** (-1 / 3),
        parameters,
        0.95 if batch_tokens >= 524_288 else 0.99,
    )


class StepLaw(NamedTuple):
    batch_tokens: float
    learning_rate: float


def step_law(parameters: int, tokens: int) -> StepLaw:
    """Li et al., arXiv 2503.04715: B = 0.58 · D^0.571, rate 1.79 · N^−0.713 · D^0.307, for N
    without embeddings and head. The learning rate decays to 1e-5.
    """
    return StepLaw(0.58 * tokens**0.571, 1.79 * parameters**-0.713 * tokens**0.307)


class Reference(NamedTuple):
    """The hyperparameters that are best for one model."""

    tokens: int
    batch_tokens: int
    learning_rate: float
    weight_decay: float


def nanochat(reference: Reference, tokens: int) -> Reference:
    """Returns the hyperparameters for another number of tokens (github.com/karpathy/nanochat,
    scripts/base_train.py).

    B ∝ D^0.383 (Bergsma et al., arXiv 2505.13738), to the nearest power of two; rate ∝ √B; B/(rate
    · decay · D) is constant (Wang and Aitchison, arXiv 2405.13698).
    """
    batch_tokens = power_of_two(reference.batch_tokens * (tokens / reference.tokens) ** 0.383)
    scale = (batch_tokens / reference.batch_tokens) ** 0.5
    return Reference(
        tokens,
        batch_tokens,
        reference.learning_rate * scale,
        reference.weight_decay * scale * reference.tokens / tokens,
    )


def power_of_two(x: float) -> int:
    """Returns the nearest one in ln(x)."""
    return 2 ** round(math.log2(x))
