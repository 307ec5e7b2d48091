"""What counts as damage to a checkpoint: what its bytes show.

Every other error comes from the machine: the checkpoint may be sound, and must not be moved away.
"""

import errno

from smallgpt_jax.formatting import find_errno, root_cause
from smallgpt_jax.run.checksums import bit_checksums
from smallgpt_jax.storage.object_storage import is_request_error

# A file is missing, or a folder is in its place.
DAMAGE_ERRNOS = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
# orbax and tensorstore raise these for content that they cannot interpret, such as a shape, a JSON
# file or a compressed chunk.
DAMAGE_TYPES = (
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
    if number := find_errno(error):  # an OSError, or tensorstore's ValueError with its number
        return number in DAMAGE_ERRNOS
    return isinstance(error, (*DAMAGE_TYPES, FileNotFoundError))


def find_changed_array(saved: dict) -> str | None:
    """Returns the first array in `saved` that does not match its saved checksum, or None
    (collective).
    """
    for item in sorted(saved.keys() - {"check"}):
        sums = bit_checksums(saved[item])
        if changed := [name for name in sums if saved["check"][item].get(name) != sums[name]]:
            return item + changed[0]
    return None
