"""Measures of activations, (T, D) for T positions, and of attention weights A, (T, T)."""

import jax.numpy as jnp


def _residual_to_rank_one(x_TxD):
    """Returns ‖R‖/‖X‖ with R = X − 1·mean_t(X): 0 if all tokens are equal."""
    rest_TxD = x_TxD - jnp.mean(x_TxD, axis=0, keepdims=True)
    return _composite_norm(rest_TxD) / _composite_norm(x_TxD)


def _composite_norm(x_TxD):
    # ‖A‖ = √(‖A‖₁·‖A‖_∞), the norm of Dong et al. (arXiv 2103.03404, section 2.1)
    absolute = jnp.abs(x_TxD)
    largest_column = jnp.max(jnp.sum(absolute, axis=0))
    largest_row = jnp.max(jnp.sum(absolute, axis=1))
    return jnp.sqrt(largest_column * largest_row)


def token_similarity(x_TxD):
    """Returns the mean cosine over all pairs of different positions."""
    # ‖Σ x̂_t‖² = Σ_s Σ_t x̂_s·x̂_t has T·(T − 1) different pairs, and T pairs with themselves
    time, sum_D = len(x_TxD), jnp.sum(_normalized(x_TxD), axis=0)
    return (jnp.sum(jnp.square(sum_D)) - time) / (time * (time - 1))


def neighbour_similarity(x_TxD):
    """Returns the mean cosine of adjacent positions."""
    unit_TxD = _normalized(x_TxD)
    return jnp.mean(jnp.sum(unit_TxD[1:] * unit_TxD[:-1], axis=1))


def _normalized(x_TxD):
    return x_TxD / jnp.linalg.norm(x_TxD, axis=1, keepdims=True)


def effective_rank(matrix):
    """Returns exp(entropy of σ/Σσ) of the singular values σ (Roy & Vetterli, 2007)."""
    values = jnp.linalg.svd(matrix, compute_uv=False)
    return jnp.exp(entropy(values / jnp.sum(values)))


def entropy(p):
    """Returns −Σ p·ln p over the last axis; 0·ln 0 is 0."""
    logarithm = jnp.log(jnp.where(p > 0, p, 1.0))
    return -jnp.sum(jnp.where(p > 0, p * logarithm, 0.0), axis=-1)


def attention_entropy(weights_TxT, window: int = 0):
    """Returns the mean over t ≥ 1 of entropy / ln(number of keys that t can attend to)."""
    reach_T = jnp.arange(1, len(weights_TxT) + 1)
    if window:
        reach_T = jnp.minimum(reach_T, window)
    # a window of one key has the entropy 0 and would be 0 / ln 1
    largest_T = jnp.log(jnp.maximum(reach_T, 2))  # of uniform weights
    return jnp.mean(entropy(weights_TxT)[1:] / largest_T[1:])


def first_weight(weights_TxT):
    """Returns the mean weight of the positions t ≥ 1 on position 0."""
    return jnp.mean(weights_TxT[1:, 0])


def log_determinant(weights_TxT):
    """Returns ln det A = Σ ln a_tt: a causal matrix is triangular."""
    # weights that have underflowed to 0 would make it −∞
    smallest = jnp.finfo(jnp.float32).tiny
    return jnp.sum(jnp.log(jnp.maximum(jnp.diagonal(weights_TxT), smallest)))


STREAM = {
    "residual": _residual_to_rank_one,
    "token_similarity": token_similarity,
    "neighbour_similarity": neighbour_similarity,
    "effective_rank": effective_rank,
}
