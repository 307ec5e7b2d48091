"""The software that a run uses: package versions, and the commit of the package's clone."""

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from smallgpt_jax import __version__

_LIBRARIES = ("jax", "flax", "optax", "grain", "orbax-checkpoint")
CLONE = Path(__file__).parents[2]


def software() -> dict:
    return {"versions": package_versions(), **commit_of(CLONE)}


def package_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "smallgpt_jax": __version__,
        **{name: metadata.version(name) for name in _LIBRARIES},
    }


def source_digest(folders: Sequence[str] = (".",)) -> str:
    """Returns a checksum of the Python files in these folders of the package."""
    package = CLONE / "smallgpt_jax"
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((package / folder).rglob("*.py")):
            content = path.read_bytes()
            # Name and length, so that code cannot move between files without another checksum.
            digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def commit_of(folder: Path) -> dict:
    """Returns {"commit": hash, "dirty": whether tracked files differ}; {} outside a clone."""
    if not (folder / ".git").exists():  # git would search the parent folders for another clone
        return {}
    # prints "HASH" or "HASH-dirty"; without locks, so that other git commands do not fail
    command = "git --no-optional-locks describe --always --dirty --abbrev=40 --exclude=*"
    try:
        git = subprocess.run(
            command.split(), cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    described = git.stdout.strip()
    return {"commit": described.removesuffix("-dirty"), "dirty": described.endswith("-dirty")}
