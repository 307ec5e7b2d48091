"""Sizes of recipes, such as 30M in `--config=configs/gpt.py:30M`, and the rules that set batch size,
learning rate and weight decay by size. docs/sizes.md gives their sources and errors.
"""

import dataclasses
import math
import re
from typing import Self

from smallgpt_jax.errors import UserError

EXAMPLES = "30M, 30M@40 or 1e17"
TOKENS_PER_PARAMETER = 20.0  # as in Chinchilla (arXiv 2203.15556)
# per token (Kaplan et al., arXiv 2001.08361)
FLOPS_PER_PARAMETER = 6
_UNITS = {"k": 1e3, "M": 1e6, "B": 1e9}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(?:([kKMB])|[eE]\+?(\d\d?))(?:@(\d+(?:\.\d+)?))?")
_MIN_PARAMETERS, _MAX_PARAMETERS = 20e3, 1e12
_MAX_TOKENS_PER_PARAMETER = 1e5


@dataclasses.dataclass(frozen=True)
class Size:
    """A number of active parameters or a budget of training FLOPs; one of them is None."""

    text: str
    parameters: float | None
    flops: float | None
    tokens_per_parameter: float

    @classmethod
    def parse(cls, text: str, where: str = "--config") -> Self:
        match = _PATTERN.fullmatch(text)
        if not match:
            near = text.replace("m", "M").replace("b", "B")
            hint = f"expected a size such as {EXAMPLES}"
            if _PATTERN.fullmatch(near):
                hint = f"did you mean {near}?"
            raise UserError(f"{where}: no size {text!r}; {hint}")
        number, unit, exponent, ratio = match.groups()
        tokens_per_parameter = float(ratio) if ratio else TOKENS_PER_PARAMETER
        if not 0 < tokens_per_parameter <= _MAX_TOKENS_PER_PARAMETER:
            raise UserError(
                f"{where}: size {text!r}: expected between 0 and "
                f"{_MAX_TOKENS_PER_PARAMETER:,.0f} tokens per parameter after @"
            )
        if unit:
            parameters, flops = float(number) * _UNITS[unit.replace("K", "k")], None
        else:
            parameters, flops = None, float(number) * 10.0 ** int(exponent)
        size = cls(text, parameters, flops, tokens_per_parameter)
        if not _MIN_PARAMETERS <= size.estimated_parameters <= _MAX_PARAMETERS:
            raise UserError(f"{where}: size {text!r}: {size._choice}")
        return size

    @property
    def _choice(self) -> str:
        """Returns what to choose in place of this size, in its own unit."""
        if self.parameters is not None:
            return (
                f"a model of {self.parameters:,.0f} parameters; choose a size from 20k to 1000B "
                "parameters"
            )
        bounds = (_MIN_PARAMETERS, _MAX_PARAMETERS)
        flops = [FLOPS_PER_PARAMETER * self.tokens_per_parameter * n**2 for n in bounds]
        least, most = (f"{value:.2g}".replace("e+", "e") for value in flops)
        return (
            f"choose a budget from {least} to {most} FLOPs, for models of 20k to 1000B parameters"
        )

    @property
    def estimated_parameters(self) -> float:
        """Of a budget C, the N with C = 6·N·D for D tokens, before the FLOPs are counted exactly."""
        if self.parameters is not None:
            return self.parameters
        return math.sqrt(self.flops / (FLOPS_PER_PARAMETER * self.tokens_per_parameter))


def vocabulary(parameters: float) -> int:
    """Returns a power of two; up to 1M parameters, that of the records."""
    # Larger models deserve larger vocabularies, whose parameters grow slower than the others (Tao et
    # al., arXiv 2407.13623).
    return max(1024, 2 ** round(math.log2(1024 * (parameters / 0.5e6) ** 0.4)))


def context_length(parameters: float) -> int:
    """Returns that of the records at 3M parameters and below, and that of the paper from 30M on."""
    if parameters < 3e6:
        return 256
    return 512 if parameters < 30e6 else 1024


# The rules below count the parameters of the blocks: without embeddings and head.
_REFERENCE = 108e6  # OLMo-core's
_REFERENCE_BATCH = 2048 * 160  # tokens
_REFERENCE_RATE = 0.0047 / 2
_FLAT_BELOW = 0.11e6
_MIN_BATCH = 2048  # tokens, as in the records
MIN_SEQUENCES = 4  # of a batch, which 4 devices can share
BATCH_EXCESS = 9 / 8  # rounding makes a batch at most this factor larger than the rule's
_HALF_BATCH_BELOW = 1e6
_REFERENCE_DECAY = 0.1


def batch_tokens(block_parameters: float, tokens_per_parameter: float) -> float:
    """Returns `reference_batch`, and below 1M parameters half of it (docs/results/batches.json and
    sizes065.json).
    """
    batch = reference_batch(block_parameters, tokens_per_parameter)
    return batch / 2 if block_parameters < _HALF_BATCH_BELOW else batch


def reference_batch(block_parameters: float, tokens_per_parameter: float) -> float:
    """Returns B = 327,680 · (N/108M)^⅔ for 20 tokens per parameter, and B ∝ D^0.383 for others; at
    least 2,048.
    """
    # D^0.383: Bergsma et al. (arXiv 2505.13738); nanochat
    longer = (tokens_per_parameter / TOKENS_PER_PARAMETER) ** 0.383
    # N^⅔: github.com/allenai/OLMo-core, model_ladder, after Porian et al. (arXiv 2406.19146)
    batch = _REFERENCE_BATCH * (block_parameters / _REFERENCE) ** (2 / 3) * longer
    return max(_MIN_BATCH, batch)


def learning_rate(block_parameters: float, batch: float) -> float:
    """Returns OLMo-core's ½ · 0.0047 at 108M and `reference_batch`; grows with the root of the batch
    (nanochat).
    """
    # Below 0.11M it is constant, as the best rates of docs/results/scaling.json.
    size = max(block_parameters, _FLAT_BELOW) / _REFERENCE
    # Above 108M it falls with the cube root of the size, as OLMo-core's; below, with the fourth root,
    # which meets the best rates of docs/results/rates.json at 0.11M.
    rate = _REFERENCE_RATE * size ** (-1 / 3 if size > 1 else -1 / 4)
    return rate * _batch_scale(block_parameters, batch)


def weight_decay(block_parameters: float, batch: float, tokens_per_parameter: float) -> float:
    # B/(rate · decay · D) is nearly constant, falling with N^0.08 (constant: Wang and Aitchison, arXiv
    # 2405.13698; nanochat), but short runs get twice the usual decay at most.
    scale = _batch_scale(block_parameters, batch) * TOKENS_PER_PARAMETER / tokens_per_parameter
    return _REFERENCE_DECAY * min(scale, 2.0)


def _batch_scale(block_parameters: float, batch: float) -> float:
    return math.sqrt(batch / reference_batch(block_parameters, TOKENS_PER_PARAMETER))
