"""Whether a model decodes with its cache what its full forward pass computes."""

import dataclasses

import jax
import numpy as np

from smallgpt_jax import models
from smallgpt_jax.errors import UserError
from smallgpt_jax.inference import decoder, layout
from smallgpt_jax.inference.sampling import Sampling

READ = (3, 1, 1)  # tokens of a prompt, then single ones
TOLERANCE = 0.03  # of the largest logit: above the rounding of a layer that computes in bfloat16 whatever the config


def check_decoding(model: models.LanguageModel, params, model_state=None) -> None:
    """Raises UserError if the logits of cached decoding are not those of the full forward pass.

    Parameters and state are as they were trained. Both are computed in float32, for a few random tokens.
    """
    name = f"config.model.architecture={model.config.architecture!r}"
    remedy = ('when context.decode is set, each layer that mixes positions must keep what later tokens need in the '
              'collection "cache": docs/your-own.md has an example')
    model = models.LanguageModel(dataclasses.replace(model.config, dtype="float32"))
    try:
        with jax.default_matmul_precision("highest"):
            difference, keeps_cache = largest_difference(model, params, model_state or {})
    except Exception as error:  # an architecture is a program: it can raise anything
        raise UserError(f"{name}: cannot be decoded token by token ({type(error).__name__}: "
                        f"{(str(error).strip() or '-').splitlines()[0][:200]}); {remedy}") from error
    if not difference <= TOLERANCE:
        raise UserError(
            f"{name}: decoding token by token gives wrong logits (off by {difference:.0%} of the largest): "
            f"{'a layer ignores earlier tokens' if keeps_cache else 'no layer keeps a cache'}; {remedy}")


def largest_difference(model: models.LanguageModel, params, model_state) -> tuple[float, bool]:
    """Returns the largest difference between the logits of both, relative to the largest logit, and whether anything
    was cached."""
    context, vocab_size = model.config.context_length, model.config.vocab_size
    ends = sorted({min(int(end), context) for end in np.cumsum(READ)})
    tokens = np.random.default_rng(0).integers(0, vocab_size, ends[-1]).tolist()
    full_TxV = np.asarray(jax.jit(model.apply)({"params": params, "state": model_state}, np.array([tokens])))[0]
    texts = decoder.Texts(model, layout.pack(model, params, model_state), vocab_size, [tokens])
    differences = []
    for end in ends:
        texts.ids = [tokens[:end]]
        _, logits_BxV = texts.draw_with_logits(Sampling(temperature=None))
        differences.append(np.abs(logits_BxV[0] - full_TxV[end - 1]).max())
    if not np.isfinite(full_TxV).all():  # a diverged run
        return 0.0, True
    return float(np.max(differences) / np.abs(full_TxV).max()), texts.cache_bytes() > 0
