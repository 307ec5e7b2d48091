"""The fit of L = E + A/N^α + B/D^β (Hoffmann et al., arXiv 2203.15556): loss L, parameters N,
training tokens D.

Given α and β, the best E, A, B ≥ 0 are a linear least-squares problem of three columns. Only α and
β are searched (variable projection, arXiv 2603.22339), for many samples of the data at once: a
bootstrap of thousands of fits takes less than a second.
"""

import itertools
from typing import NamedTuple

import numpy as np

EXPONENTS = (0.02, 3.0)  # range of α and β
STARTS = (0.1, 0.3, 0.6, 1.2)  # of α and β
MAX_STEPS = 60
TOLERANCE = 1e-9  # relative decrease of the squared error at which a fit ends
# Active sets of the columns 1, N^-α, D^-β. The first with the smallest error is used.
COLUMN_SETS = [
    list(columns) for size in (3, 2, 1) for columns in itertools.combinations(range(3), size)
]


class Law(NamedTuple):
    """E, A, B, α and β: a number each, or an array each with one entry per bootstrap sample."""

    irreducible: np.ndarray
    size_factor: np.ndarray
    token_factor: np.ndarray
    size_exponent: np.ndarray
    token_exponent: np.ndarray

    def loss(self, sizes, tokens) -> np.ndarray:
        """Returns the loss at each pair of `sizes` and `tokens`; of bootstrap samples, with shape
        (samples, pairs).
        """
        e, a, b, alpha, beta = (
            np.expand_dims(constant, -1) if np.ndim(constant) else constant for constant in self
        )
        return e + a * np.asarray(sizes, float) ** -alpha + b * np.asarray(tokens, float) ** -beta


class Data(NamedTuple):
    """Points to fit. `sizes` and `tokens` are divided by their geometric means, so that all columns
    are near 1.
    """

    sizes: np.ndarray  # (points,)
    tokens: np.ndarray  # (points,)
    losses: np.ndarray  # (points,)


def fit(sizes, tokens, losses) -> Law:
    data, scales = _scaled(sizes, tokens, losses)
    starts = np.array(list(itertools.product(STARTS, STARTS)))
    exponents, constants, errors = _search(starts, data, np.ones((len(starts), len(data.losses))))
    best = errors.argmin()
    return _unscaled(exponents[best], constants[best], scales)


def bootstrap(law: Law, sizes, tokens, losses, weights: np.ndarray) -> Law:
    """Returns one law per row of `weights`, (samples, points): how often each point is in the
    sample.
    """
    data, scales = _scaled(sizes, tokens, losses)
    starts = np.tile([law.size_exponent, law.token_exponent], (len(weights), 1))
    exponents, constants, _ = _search(starts, data, np.asarray(weights, float))
    return _unscaled(exponents, constants, scales)


def _scaled(sizes, tokens, losses) -> tuple[Data, np.ndarray]:
    sizes, tokens = np.asarray(sizes, float), np.asarray(tokens, float)
    scales = np.exp([np.log(sizes).mean(), np.log(tokens).mean()])
    return Data(sizes / scales[0], tokens / scales[1], np.asarray(losses, float)), scales


def _unscaled(exponents: np.ndarray, constants: np.ndarray, scales: np.ndarray) -> Law:
    factors = constants[..., 1:] * scales**exponents
    return Law(
        constants[..., 0], factors[..., 0], factors[..., 1], exponents[..., 0], exponents[..., 1]
    )


def _search(
    starts: np.ndarray, data: Data, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (exponents, constants, squared errors) of one fit per row of `weights`, by
    Levenberg-Marquardt steps.

    The steps of ln α and ln β are those of all five parameters. After each, the constants are
    solved for exactly.
    """
    bounds = np.log(EXPONENTS)
    logs = np.log(np.clip(starts, *EXPONENTS))
    columns, constants, residuals, errors = _project(logs, data, weights)
    damping, active = np.full(len(logs), 1e-3), np.arange(len(logs))
    for _ in range(MAX_STEPS):
        if not len(active):
            break
        step = _step(
            logs[active],
            data,
            weights[active],
            columns[active],
            constants[active],
            residuals[active],
            damping[active],
        )
        new_logs = np.clip(logs[active] + np.clip(step, -1, 1), *bounds)
        found = _project(new_logs, data, weights[active])
        before, is_better = errors[active], found[-1] < errors[active]
        moved = np.abs(new_logs - logs[active]).max(1)
        for values, new in zip((logs, columns, constants, residuals, errors), (new_logs, *found)):
            values[active[is_better]] = new[is_better]
        damping[active] *= np.where(is_better, 0.1, 5)
        converged = (moved < 1e-6) | (is_better & (before - errors[active] < TOLERANCE * before))
        active = active[~converged]
    return np.exp(logs), constants, errors


def _project(logs: np.ndarray, data: Data, weights: np.ndarray):
    """Returns (columns 1, N^-α, D^-β; the best E, A, B ≥ 0; residuals; weighted squared errors)."""
    alpha, beta = np.exp(logs).T[..., None]
    powers = data.sizes**-alpha, data.tokens**-beta
    columns = np.stack([np.ones_like(powers[0]), *powers], -1)
    weighted = np.swapaxes(columns * weights[..., None], 1, 2)
    constants = _nonnegative(weighted @ columns, weighted @ data.losses)
    residuals = data.losses - (columns @ constants[..., None])[..., 0]
    return columns, constants, residuals, (weights * residuals**2).sum(-1)


def _nonnegative(gram: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Returns, for each sample, the x ≥ 0 with the smallest xᵀ·gram·x − 2·moments·x. Tries all sets
    of columns.
    """
    best, gains = np.zeros_like(moments), np.full(len(moments), -np.inf)
    for columns in COLUMN_SETS:
        part = gram[:, columns][:, :, columns]
        ridge = 1e-13 * np.trace(part, axis1=1, axis2=2)[:, None, None] * np.eye(len(columns))
        found = np.linalg.solve(part + ridge, moments[:, columns, None])[..., 0]
        gain = (found * moments[:, columns]).sum(-1)
        is_better = (found >= 0).all(-1) & (gain > gains)
        gains[is_better], best[is_better] = gain[is_better], 0
        best[np.ix_(is_better, columns)] = found[is_better]
    return best


def _step(
    logs: np.ndarray,
    data: Data,
    weights: np.ndarray,
    columns: np.ndarray,
    constants: np.ndarray,
    residuals: np.ndarray,
    damping: np.ndarray,
) -> np.ndarray:
    """Returns the damped Gauss-Newton steps of ln α and ln β. Constants at their bound 0 stay
    there.
    """
    shape = residuals.shape
    log_data = np.stack(
        [np.broadcast_to(np.log(axis), shape) for axis in (data.sizes, data.tokens)], -1
    )
    by_exponent = -(constants[:, None] * columns)[..., 1:] * log_data * np.exp(logs)[:, None]
    jacobian = np.concatenate([columns * (constants > 0)[:, None], by_exponent], -1)
    weighted = np.swapaxes(jacobian * weights[..., None], 1, 2)
    hessian, gradient = weighted @ jacobian, (weighted @ residuals[..., None])
    diagonal = np.einsum("bii->bi", hessian)
    ridge = damping[:, None] * diagonal + 1e-12 * diagonal.max(-1, keepdims=True)
    return np.linalg.solve(hessian + ridge[..., None] * np.eye(5), gradient)[..., 3:, 0]
