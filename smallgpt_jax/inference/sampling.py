"""Sampling of the next token from logits."""

import math
from numbers import Integral, Real

import jax
import jax.numpy as jnp
from flax import struct

from smallgpt_jax.errors import UserError

_LEAST = 1e-30  # of a temperature and of top_p, so that float32 has them and scaled logits
TEMPERATURE = 0.8  # the default of the command `generate` and of TextModel
_RULES = {  # {field: (type, is valid, message if not)}
    "temperature": (Real, lambda x: 0 <= x < math.inf, "must be a number, at least 0"),
    "top_k": (Integral, lambda x: x >= 1, "must be an integer, at least 1"),
    "top_p": (Real, lambda x: 0 < x <= 1, "must be a number above 0 and at most 1"),
    "repetition_penalty": (Real, lambda x: 0 < x < math.inf, "must be a number above 0"),
}


@struct.dataclass
class Sampling:
    """Applied in the order repetition penalty, temperature, top-k, top-p. None disables."""

    temperature: float | None = 1.0  # samples from softmax(logits / temperature); None or 0: greedy
    # samples only from the k likeliest tokens; a static shape, so each k is a program of its own
    top_k: int | None = struct.field(pytree_node=False, default=None)
    top_p: float | None = None  # samples only from the fewest tokens with this total probability
    # above 1: tokens in the context become less likely; 1: no penalty
    repetition_penalty: float | None = None

    def validated(self) -> "Sampling":
        """Replaces a temperature of 0, or too near to it for float32, and all settings without effect
        by None.
        """
        for field, (kind, is_valid, rule) in _RULES.items():
            value = getattr(self, field)
            if value is not None and not (isinstance(value, kind) and is_valid(value)):
                raise UserError(f"{field}={value!r}: {rule}")
        return self.replace(
            temperature=None if (self.temperature or 0) < _LEAST else self.temperature,
            top_p=None if self.top_p in (None, 1) else max(self.top_p, _LEAST),
            repetition_penalty=None if self.repetition_penalty == 1 else self.repetition_penalty,
        )


@struct.dataclass
class Sampler:
    """Settings, and what a row's random stream depends on: no other row of the batch."""

    seed: jax.Array
    stream_Bx2: jax.Array  # a number of the text, and the position
    sampling: Sampling

    def ahead(self, positions) -> "Sampler":
        stream_Bx2 = self.stream_Bx2.at[:, 1].add(jnp.uint32(positions))
        return self.replace(stream_Bx2=stream_Bx2)


@jax.jit
def sample_tokens(logits_BxV, seen_BxV, sampler: Sampler):
    key = jax.random.key(sampler.seed)

    # a row's numbers do not depend on the other rows, so batches and single texts agree
    def row_key(stream_2):
        return jax.random.fold_in(jax.random.fold_in(key, stream_2[0]), stream_2[1])

    return sample(logits_BxV, seen_BxV, sampler.sampling, jax.vmap(row_key)(sampler.stream_Bx2))


def sample(logits_BxV, seen_BxV, sampling: Sampling, key_B):
    """Returns one token per row, (B,) int32. `seen_BxV` (bool): the tokens in each row's context."""
    logits_BxV = filter_logits(logits_BxV, seen_BxV, sampling)
    if sampling.temperature is not None:
        # Gumbel-max: the largest of logits + Gumbel noise is a sample of softmax(logits)
        logits_BxV += jax.vmap(lambda key: jax.random.gumbel(key, logits_BxV.shape[1:]))(key_B)
    return greedy(logits_BxV)


def greedy(logits_BxV):
    """Returns the first token with the largest logit per row; for a row with NaN, V − 1."""
    # jnp.argmax gives the same, but XLA makes a slow loop of it on CPUs (docs/speed.md)
    last = logits_BxV.shape[1] - 1
    is_largest_BxV = logits_BxV == jnp.max(logits_BxV, axis=1, keepdims=True)
    candidates_BxV = jnp.where(is_largest_BxV, jnp.arange(last + 1)[None], last)
    return jnp.min(candidates_BxV, axis=1).astype(jnp.int32)


def filter_logits(logits_BxV, seen_BxV, sampling: Sampling):
    """Returns the logits to sample from; those of excluded tokens are −∞."""
    if sampling.repetition_penalty is not None:
        # Keskar et al. (arXiv 1909.05858, section 4.1), who divide all: that would make the token
        # of a negative logit more likely
        penalty = sampling.repetition_penalty
        penalized = jnp.where(logits_BxV > 0, logits_BxV / penalty, logits_BxV * penalty)
        logits_BxV = jnp.where(seen_BxV, penalized, logits_BxV)
    if sampling.temperature is None:
        return logits_BxV
    logits_BxV = logits_BxV / sampling.temperature
    vocab_size = logits_BxV.shape[1]
    if sampling.top_k is not None and sampling.top_k < vocab_size:
        largest_BxK, _ = jax.lax.top_k(logits_BxV, sampling.top_k)
        logits_BxV = jnp.where(logits_BxV < largest_BxK[:, -1:], -jnp.inf, logits_BxV)
    if sampling.top_p is not None:  # Holtzman et al. (arXiv 1904.09751, section 3.1)
        logits_BxV = jnp.where(_is_in_nucleus(logits_BxV, sampling.top_p), logits_BxV, -jnp.inf)
    return logits_BxV


def _is_in_nucleus(logits_BxV, top_p):
    """Returns which tokens are the fewest with a total probability of at least `top_p`."""
    sorted_BxV = jnp.sort(logits_BxV, axis=1, descending=True)
    p_BxV = jax.nn.softmax(sorted_BxV)
    # a token is in the set if those before it have less than top_p: the last one crosses it
    is_chosen_BxV = jnp.cumsum(p_BxV, axis=1) - p_BxV < top_p
    least_Bx1 = jnp.min(jnp.where(is_chosen_BxV, sorted_BxV, jnp.inf), axis=1, keepdims=True)
    # of equally likely tokens, only as many as the set has, those with lower ids first
    num_least_Bx1 = jnp.sum(is_chosen_BxV & (sorted_BxV == least_Bx1), axis=1, keepdims=True)
    is_least_BxV = logits_BxV == least_Bx1
    is_first_BxV = jnp.cumsum(is_least_BxV, axis=1) <= num_least_Bx1
    return (logits_BxV > least_Bx1) | (is_least_BxV & is_first_BxV)
