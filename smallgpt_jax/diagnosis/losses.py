"""Losses of whole models, and of models without some of their blocks. Shapes: N windows, T
positions, L blocks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from smallgpt_jax.inference.single_blocks import prefill, replaced_blocks
from smallgpt_jax.models import LanguageModel
from smallgpt_jax.ops.repeats import is_repeat

_LOGITS = 2**26  # entries that are computed at a time


def token_losses(model: LanguageModel, variables, windows_NxT1, kept_L) -> np.ndarray:
    """Returns −ln p of each next token in nats, (N, T), with the blocks that `kept_L` marks."""
    # the logits, (rows, T, V), take most of the memory
    rows = max(1, _LOGITS // (windows_NxT1[0].size * model.config.vocab_size))
    kept_L = np.asarray(kept_L, bool)
    losses = []
    for start in range(0, len(windows_NxT1), rows):
        batch = windows_NxT1[start : start + rows]
        losses.append(_token_losses(model, variables, batch, kept_L))
    return np.concatenate(losses)


@functools.partial(jax.jit, static_argnames="model")
def _token_losses(model: LanguageModel, variables, windows_BxT1, kept_L):
    # kept_L is an argument: one program leaves out any block
    def replacement(number, block, x_BxTxD):
        return jnp.where(kept_L[number], block(x_BxTxD), x_BxTxD)

    with jax.default_matmul_precision("highest"), replaced_blocks(replacement):
        logits_BxTxV = prefill(model, variables, windows_BxT1[:, :-1])
    target_BxT = jnp.take_along_axis(logits_BxTxV, windows_BxT1[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BxTxV, axis=-1) - target_BxT


def in_context_score(losses_NxT: np.ndarray) -> tuple[float, float]:
    """Returns the mean and standard error over windows of the loss late − early in the window."""
    # Late is the last tenth of the positions, early a tenth around the first (from 5% to 15%). Olsson
    # et al. (arXiv 2209.11895) use the positions 500 and 50 of 512.
    time = losses_NxT.shape[1]
    tenth = max(1, time // 10)
    late_N = losses_NxT[:, -tenth:].mean(axis=1)
    early_N = losses_NxT[:, time // 20 : time // 20 + tenth].mean(axis=1)
    return mean_and_error(late_N - early_N)


def loss_of_repeats(losses_NxT: np.ndarray, windows_NxT1: np.ndarray) -> dict[str, float]:
    """Returns the fraction of targets that continue a repeated pair of tokens (`is_repeat`), and the
    mean losses of these targets and of the others.
    """
    is_repeat_NxT = np.concatenate(
        [is_repeat(jnp.asarray(window[None])) for window in windows_NxT1]
    )

    # a short text may have no repeats
    def mean(losses: np.ndarray) -> float:
        return float(losses.mean()) if len(losses) else np.nan

    return {
        "fraction": float(is_repeat_NxT.mean()),
        "loss": mean(losses_NxT[is_repeat_NxT]),
        "others": mean(losses_NxT[~is_repeat_NxT]),
    }


def mean_and_error(values_N: np.ndarray) -> tuple[float, float]:
    # the spread of one value is unknown
    error = values_N.std(ddof=1) / np.sqrt(len(values_N)) if len(values_N) > 1 else np.nan
    return float(values_N.mean()), float(error)
