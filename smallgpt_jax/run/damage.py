"""Tells from the bytes of a checkpoint whether it is damaged. If so, checkpoint.py restores an older
one.

Every other error comes from the machine: the checkpoint may be sound, and must not be moved away.
"""

import errno
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from smallgpt_jax.formatting import find_errno, root_cause
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.storage.object_storage import is_request_error

# A file is missing, or a folder is in its place.
_DAMAGE_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
# orbax and tensorstore raise these for content that they cannot interpret, such as a shape, a JSON
# file or a compressed chunk.
_DAMAGE_TYPES = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    AssertionError,
    EOFError,
)


def is_damage(error: Exception) -> bool:
    """Whether an error in reading a checkpoint shows that the checkpoint is damaged."""
    error = root_cause(error)
    if is_request_error(error):
        return False
    number = find_errno(error)  # of an OSError, or of tensorstore's ValueError with a number
    if number:
        return number in _DAMAGE_ERRNOS
    return isinstance(error, (*_DAMAGE_TYPES, FileNotFoundError))


def find_changed_array(saved: dict) -> str | None:
    """Returns the first array that does not match its saved checksum, or None (collective)."""
    # Sorted, so that all processes compute the checksums, which are collectives, in one order.
    for item in sorted(saved.keys() - {"check"}):
        for name, checksum in bit_checksums(saved[item]).items():
            if saved["check"][item].get(name) != checksum:
                return item + name
    return None


def find_other_shape(item: Path, abstract: Any) -> str:
    """Returns the first array of a saved item whose name or shape is not that of `abstract`, as in
    "head is (512, 16), not (512, 32)"; "" if there is none, or if the item cannot be read.
    """
    try:
        saved = _shapes(ocp.StandardCheckpointHandler().metadata(epath.Path(item)).tree)
    except Exception:  # tensorstore and orbax raise many types of exceptions
        return ""
    expected = _shapes(abstract)
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            return f"{name} is {saved.get(name, 'missing')}, not {expected.get(name, 'missing')}"
    return ""


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in leaves
    }
