"""The folder of JAX's persistent compilation cache, which processes and machines can share."""

import hashlib
import os
import platform
import warnings
from pathlib import Path

import jax

from smallgpt_jax.devices.platform import processor, processor_identity
from smallgpt_jax.storage.cache import cache_folder
from smallgpt_jax.storage.paths import as_path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def configure() -> None:
    # keeps a folder that the calling program has set; the empty string means none
    variable = os.environ.get(VARIABLE)
    if variable != "" and jax.config.jax_compilation_cache_dir in (None, variable):
        jax.config.update("jax_compilation_cache_dir", str(folder()))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # JAX's default is 1 s. A run compiles several programs that take between 0.1 s and 1 s on
        # an idle CPU.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # If the cache cannot be read or written, programs are compiled again. No warning is needed.
    warnings.filterwarnings("ignore", "Error .* persistent compilation cache")


def folder() -> Path:
    shared = os.environ.get(VARIABLE)
    # XLA compiles for the host's instruction set, which JAX's cache keys lack
    root = as_path(VARIABLE, shared) if shared else cache_folder() / "compiled"
    return root / processor_kind()


def processor_kind() -> str:
    """Returns a name that is the same on equal processors, such as x86_64-1f3b09c2."""
    fields = processor()
    flags = fields.get("flags", fields.get("Features", ""))  # on x86; on ARM
    described = repr((sorted(processor_identity().items()), flags))
    digest = hashlib.sha256(described.encode()).hexdigest()
    return f"{platform.machine()}-{digest[:8]}"
