"""Names that the readers of a comparison share, and groups by them. Imports little, so that
`choose` starts fast.
"""

from collections.abc import Callable, Iterable
from typing import Any

RESULTS_FILE = "results.json"  # in a comparison's folder
RESULTS_FORMAT = 1


def model_of(name: str) -> str:
    """Returns MODEL of the name MODEL@SIZE; of another name, the name."""
    return name.partition("@")[0]


def size_of(name: str) -> str:
    """Returns SIZE of the name MODEL@SIZE; of another name, ""."""
    return name.partition("@")[2]


def grouped(items: Iterable, key: Callable) -> dict[Any, list]:
    """Both the groups and their items are in the order of `items`."""
    groups: dict[Any, list] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
