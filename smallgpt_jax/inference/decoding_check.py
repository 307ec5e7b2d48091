"""Compares a model's cached decoding with its full forward pass."""

import functools

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import layout
from smallgpt_jax.models.causality_check import check_causality, in_float32, tolerance
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.custom_code import name_custom_classes

LENGTH = 40  # tokens per row, at most
REMEDY = (
    "in decoding (context.decode), each layer that mixes positions must keep values for later "
    'tokens in the collection "cache"; see the example in docs/your-own.md'
)


def check_decoding(model: models.LanguageModel, params, model_state=None) -> None:
    """Raises UserError if the logits of cached decoding differ from those of the full forward pass,
    both in float32.
    """
    name, model_state = name_custom_classes(model.config), model_state or {}
    model = in_float32(model)
    try:
        with jax.default_matmul_precision("highest"):
            difference, most, keeps_cache = largest_difference(model, params, model_state)
    except Exception as error:  # users' architectures can raise anything
        raise UserError(
            f"{name}: cannot be decoded token by token ({type(error).__name__}: "
            f"{(str(error).strip() or '-').splitlines()[0][:200]}); {REMEDY}"
        ) from error
    if difference <= most:
        return
    check_causality(model, params, model_state)  # what sees later tokens cannot be decoded
    problem = "a cache is wrong" if keeps_cache else "no layer keeps a cache"
    raise UserError(
        f"{name}: decoding token by token gives wrong logits (off by {difference:.2g} of the "
        f"largest logit): {problem}; {REMEDY}"
    )


def largest_difference(
    model: models.LanguageModel, params, model_state
) -> tuple[float, float, bool]:
    """Returns the difference relative to the largest logit, the largest one that rounding may
    cause, and whether any layer keeps a cache.
    """
    calls_Nx2 = ragged_calls(min(LENGTH, model.config.context_length))
    time, is_prefix = int(calls_Nx2.sum(axis=0).max()), model.config.attention_mask == "prefix"
    tokens_2xT = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, time))

    def prefix(length: int):  # the first call has the prefixes
        return np.arange(length)[None] < calls_Nx2[0][:, None] if is_prefix else None

    context = Context(prefix_BxT=prefix(time))
    variables = {"params": params, "state": model_state}
    forward = jax.jit(lambda variables: model.apply(variables, tokens_2xT, context))
    expected_2xTxV = np.asarray(forward(variables))
    if not np.isfinite(expected_2xTxV).all():  # of a run that has diverged
        return 0.0, 0.0, True

    @functools.partial(jax.jit, static_argnames="cache_length")
    def decode(weights, cache, tokens, start_B, length_B, prefix_BxT, cache_length):
        context = Context(
            cache_length=cache_length, start_B=start_B, length_B=length_B, prefix_BxT=prefix_BxT
        )
        variables = {**layout.unpack(weights), "cache": cache}
        return model.apply(variables, tokens, context, mutable=["cache", "calls"])

    weights = layout.pack(model, params, model_state)
    cache, starts_2, differences = {}, np.zeros(2, np.int32), []
    for counts_2 in calls_Nx2:
        places_2xC = starts_2[:, None] + np.arange(counts_2.max())[None]
        padded_2xC = np.take_along_axis(tokens_2xT, np.minimum(places_2xC, time - 1), axis=1)
        logits_2xCxV, kept = decode(
            weights,
            cache,
            padded_2xC,
            starts_2,
            counts_2,
            None if cache else prefix(counts_2.max()),
            cache_length=time,
        )
        cache = kept.get("cache", {})
        for row, (start, count) in enumerate(zip(starts_2, counts_2)):
            expected = expected_2xTxV[row, start : start + count]
            differences.append(np.abs(logits_2xCxV[row, :count] - expected).max(initial=0))
        starts_2 = starts_2 + counts_2
    most = tolerance(forward, variables)
    return (
        float(np.max(differences) / np.abs(expected_2xTxV).max()),
        most,
        layout.num_bytes(cache) > 0,
    )


def ragged_calls(length: int) -> np.ndarray:
    """Returns the numbers of new tokens of two rows per call: a prompt, several tokens from its
    cache, and single tokens, for which one row waits once. (calls, 2) int32.
    """
    counts_Nx2 = np.array(
        [(length // 2, length // 4), (length // 8, length // 4), (1, 1), (0, 1), (1, 1), (1, 1)],
        np.int32,
    )
    counts_Nx2[:2] = np.maximum(counts_Nx2[:2], 1)
    fits_N = (np.cumsum(counts_Nx2, axis=0) <= length).all(axis=1)
    return counts_Nx2[fits_N]
