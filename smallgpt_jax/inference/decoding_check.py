"""Compares a model's cached decoding with its full forward pass."""

import dataclasses

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling
from smallgpt_jax.models.context import Context

CALLS = (3, 1, 1)  # tokens per call: a prompt, then single tokens
# relative to the largest logit; large enough for layers that ignore dtype="float32" and use
# bfloat16
TOLERANCE = 0.03


def check_decoding(model: models.LanguageModel, params, model_state=None) -> None:
    """Raises UserError if the logits of cached decoding differ from those of the full forward pass,
    both in float32.
    """
    name = ", ".join(
        dict.fromkeys(
            f"config.model.{field}={name!r}" for field, name in models.custom_classes(model.config)
        )
    )
    remedy = (
        "in decoding (context.decode), each layer that mixes positions must keep values for later "
        "tokens in the "
        'collection "cache"; see the example in docs/your-own.md'
    )
    model = models.LanguageModel(dataclasses.replace(model.config, dtype="float32"))
    try:
        with jax.default_matmul_precision("highest"):
            difference, keeps_cache = largest_difference(model, params, model_state or {})
    except Exception as error:  # users' architectures can raise anything
        raise UserError(
            f"{name}: cannot be decoded token by token ({type(error).__name__}: "
            f"{(str(error).strip() or '-').splitlines()[0][:200]}); {remedy}"
        ) from error
    if not difference <= TOLERANCE:
        raise UserError(
            f"{name}: decoding token by token gives wrong logits (off by {difference:.0%} of the "
            "largest logit): "
            f"{'a layer ignores earlier tokens' if keeps_cache else 'no layer keeps a cache'}; "
            f"{remedy}"
        )


def largest_difference(model: models.LanguageModel, params, model_state) -> tuple[float, bool]:
    """Returns the difference relative to the largest absolute logit, and whether any layer keeps a
    cache.
    """
    context, vocab_size = model.config.context_length, model.config.vocab_size
    lengths = sorted({min(int(length), context) for length in np.cumsum(CALLS)})
    tokens = np.random.default_rng(0).integers(0, vocab_size, lengths[-1]).tolist()
    is_prefix = model.config.attention_mask == "prefix"  # then the first call has the prefix
    context = Context(prefix_BxT=np.arange(len(tokens))[None] < CALLS[0] if is_prefix else None)
    variables = {"params": params, "state": model_state}
    full_TxV = np.asarray(jax.jit(model.apply)(variables, np.array([tokens]), context))[0]
    session = decoder.DecodeSession(
        model, layout.pack(model, params, model_state), vocab_size, [tokens]
    )
    differences = []
    for length in lengths:
        session.ids = [tokens[:length]]
        _, logits_BxV = session.sample_with_logits(Sampling(temperature=None))
        differences.append(np.abs(logits_BxV[0] - full_TxV[length - 1]).max())
    if not np.isfinite(full_TxV).all():  # the logits of a diverged run cannot be compared
        return 0.0, True
    return float(np.max(differences) / np.abs(full_TxV).max()), session.cache_bytes() > 0
