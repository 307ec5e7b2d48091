"""Compares a model's cached decoding with its full forward pass."""

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import layout
from smallgpt_jax.models.causality_check import check_causality, in_float32, tolerance
from smallgpt_jax.models.context import Context
from smallgpt_jax.models.custom_code import name_custom_classes

_LENGTH = 40  # tokens per row, at most
_REMEDY = (
    "in decoding (context.decode), each layer that mixes positions must keep values for later "
    'tokens in the collection "cache"; see the example in docs/your-own.md'
)


def check_decoding(model: models.LanguageModel, params, model_state) -> None:
    """Raises UserError if cached decoding differs from the full forward pass, both in float32."""
    # float32, where rounding is small against what a wrong cache causes
    name = name_custom_classes(model.config)
    model_state = model_state or {}
    model = in_float32(model)
    try:
        with jax.default_matmul_precision("highest"):
            difference, tolerated, keeps_cache = _largest_difference(model, params, model_state)
    except Exception as error:  # users' architectures can raise anything
        first_line = (str(error).strip() or "-").splitlines()[0]
        raise UserError(
            f"{name}: cannot be decoded token by token ({type(error).__name__}: "
            f"{first_line[:200]}); {_REMEDY}"
        ) from error
    # NaN is not less, so it is refused
    if difference <= tolerated:
        return
    check_causality(model, params, model_state)  # what sees later tokens cannot be decoded
    problem = "a cache is wrong" if keeps_cache else "no layer keeps a cache"
    raise UserError(
        f"{name}: decoding token by token gives wrong logits (off by {difference:.2g} of the "
        f"largest logit): {problem}; {_REMEDY}"
    )


def _largest_difference(
    model: models.LanguageModel, params, model_state
) -> tuple[float, float, bool]:
    """Returns the difference relative to the largest logit, the largest one that rounding may
    cause, and whether any layer keeps a cache.
    """
    # Two rows of different lengths, in calls of several tokens and of single ones: what is wrong in
    # a cache usually shows only where rows are padded, or after a second call.
    calls_Nx2 = ragged_calls(min(_LENGTH, model.config.context_length))
    time = int(calls_Nx2.sum(axis=0).max())
    tokens_2xT = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, time))

    def prefix(length: int):
        """Each row's tokens of the first call are its prefix."""
        if model.config.attention_mask != "prefix":
            return None
        return np.arange(length)[None] < calls_Nx2[0][:, None]

    variables = {"params": params, "state": model_state}
    context = Context(prefix_BxT=prefix(time))
    forward = jax.jit(lambda variables: model.apply(variables, tokens_2xT, context))
    expected_2xTxV = np.asarray(forward(variables))
    if not np.isfinite(expected_2xTxV).all():  # a diverged run: there is nothing to compare
        return 0.0, 0.0, True

    @jax.jit
    def decode(weights, cache, tokens_2xC, context: Context):
        variables = {**layout.unpack(weights), "cache": cache}
        return model.apply(variables, tokens_2xC, context, mutable=["cache", "calls"])

    weights = layout.pack(model, params, model_state)
    cache, starts_2, differences = {}, np.zeros(2, np.int32), []
    for counts_2 in calls_Nx2:
        padded = counts_2.max()
        places_2xC = starts_2[:, None] + np.arange(padded)[None]
        # a place beyond the text is padding, whose token does not matter
        tokens_2xC = np.take_along_axis(tokens_2xT, np.minimum(places_2xC, time - 1), axis=1)
        context = Context(
            cache_length=time,
            start_B=starts_2,
            length_B=counts_2,
            prefix_BxT=None if cache else prefix(padded),
        )
        logits_2xCxV, changed = decode(weights, cache, tokens_2xC, context)
        cache = changed.get("cache", {})
        for row, (start, count) in enumerate(zip(starts_2, counts_2)):
            expected_CxV = expected_2xTxV[row, start : start + count]
            differences.append(np.abs(logits_2xCxV[row, :count] - expected_CxV).max(initial=0))
        starts_2 = starts_2 + counts_2
    difference = float(np.max(differences) / np.abs(expected_2xTxV).max())
    return difference, tolerance(forward, variables), layout.num_bytes(cache) > 0


def ragged_calls(length: int) -> np.ndarray:
    """Returns the numbers of new tokens of two rows per call, (calls, 2) int32."""
    # a prompt, several tokens after it, and single tokens, for which one row waits once
    counts_Nx2 = np.array(
        [(length // 2, length // 4), (length // 8, length // 4), (1, 1), (0, 1), (1, 1), (1, 1)],
        np.int32,
    )
    counts_Nx2[:2] = np.maximum(counts_Nx2[:2], 1)
    fits_N = (np.cumsum(counts_Nx2, axis=0) <= length).all(axis=1)
    return counts_Nx2[fits_N]
