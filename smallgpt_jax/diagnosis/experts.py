"""The load of experts by text and by token. Shapes: N windows, T positions, K experts per token, E
experts.
"""

from collections.abc import Mapping

import numpy as np

FREQUENT = 20  # occurrences of a token that is listed
LISTED = 5  # tokens per expert


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

    Only tokens with at least FREQUENT occurrences count.
    """
    tokens, index_R, counts = np.unique(tokens_R, return_inverse=True, return_counts=True)
    uses = np.zeros((len(tokens), num_experts))
    np.add.at(uses, (np.repeat(index_R, experts_RxK.shape[1]), experts_RxK.ravel()), 1)
    is_frequent = counts >= FREQUENT
    tokens, fractions = tokens[is_frequent], uses[is_frequent] / counts[is_frequent, None]
    best = np.argsort(-fractions, axis=0, kind="stable")[:LISTED]
    return [
        [(int(tokens[i]), float(fractions[i, expert])) for i in best[:, expert]]
        for expert in range(num_experts)
    ]
