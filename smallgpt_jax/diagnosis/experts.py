"""The load of experts by text and by token. Shapes: N windows, T positions, R tokens of all texts,
K experts per token, E experts.
"""

from collections.abc import Mapping

import numpy as np

_FREQUENT = 20  # occurrences of a token that is listed
_LISTED = 5  # tokens per expert


def load_by_text(experts: Mapping[str, np.ndarray], num_experts: int) -> dict[str, list[float]]:
    """Returns {text: fraction of its choices per expert} from {text: (N, T, K)}."""
    return {
        name: (np.bincount(chosen.ravel(), minlength=num_experts) / chosen.size).tolist()
        for name, chosen in experts.items()
    }


def load_by_token(
    tokens_R: np.ndarray, experts_RxK: np.ndarray, num_experts: int
) -> list[list[tuple[int, float]]]:
    """Returns for each expert the (token, fraction of its occurrences that use the expert) with the
    largest fractions.
    """
    # U different tokens; index_R is the row of each occurrence among them
    tokens, index_R, counts = np.unique(tokens_R, return_inverse=True, return_counts=True)
    uses_UxE = np.zeros((len(tokens), num_experts))
    np.add.at(uses_UxE, (index_R[:, None], experts_RxK), 1)
    # the fractions of rare tokens say little
    is_frequent = counts >= _FREQUENT
    tokens = tokens[is_frequent]
    fractions_UxE = uses_UxE[is_frequent] / counts[is_frequent, None]
    best_UxE = np.argsort(-fractions_UxE, axis=0, kind="stable")[:_LISTED]
    by_expert = []
    for best_U, fractions_U in zip(best_UxE.T, fractions_UxE.T):
        by_expert.append([(int(tokens[i]), float(fractions_U[i])) for i in best_U])
    return by_expert
