"""Compiles programs for an estimate, and stores what is read of them in the cache folder."""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax

from smallgpt_jax.devices.compilation_cache import processor_kind
from smallgpt_jax.storage import bounded, json_files
from smallgpt_jax.storage.atomic import atomic_file
from smallgpt_jax.storage.cache import cache_folder

MAX_STORED_BYTES = 200 * 2**20  # a program of 12 blocks takes about 0.5 MB
# On a GPU, XLA times cuBLASLt and Triton for each product and takes the faster. Without one, all
# Triton products would have the same tiles.
OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
# names of environment variables with options begin with these
_VARIABLES = ("JAX_", "LIBTPU_", "TPU_", "XLA_")
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int  # of results in the memory of arguments
    text: str | None  # HLO; None if it cannot be read

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


_SCHEMA = {
    **dict.fromkeys(
        "argument_bytes temp_bytes output_bytes alias_bytes".split(), json_files.integer(0)
    ),
    "text": (json_files.TEXT, json_files.NULL),
}


class Compiler:
    """Compiles for `devices`, which need not be attached."""

    def __init__(self, devices: Sequence[jax.Device], options: dict | None = None):
        """`options` are compiler options of the programs, beside those that an estimate needs."""
        self._devices = devices
        self._options = {**OPTIONS.get(devices[0].platform, {}), **(options or {})}
        self.compilations = 0  # without the programs that are stored

    def compile(self, lowered: jax.stages.Lowered) -> CompiledProgram:
        """Returns the program, which may be stored. Raises JaxRuntimeError, as if it does not fit."""
        path = folder() / f"{self._fingerprint(lowered)}.json.gz"
        stored = load(path)
        if stored:
            return stored
        self.compilations += 1
        program = run_compiler(lowered, self._devices[0].platform, self._options)
        store(path, program)
        return program

    def _fingerprint(self, lowered: jax.stages.Lowered) -> str:
        """Returns a name for everything that determines the result of `compile`."""
        devices = [
            (repr(device), device.device_kind, device.process_index) for device in self._devices
        ]
        variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
        versions = []
        for name in PACKAGES:
            for package in importlib.metadata.distributions(name=name):
                versions.append((package.name, package.version))
        # The text of a program does not say for which devices, by which compiler and with which
        # options it is compiled.
        identity = (
            lowered.as_text(),
            sorted(self._options.items()),
            devices,
            variables,
            self._devices[0].client.platform_version,
            versions,
            processor_kind(),
            code_fingerprint(),
        )
        return hashlib.sha256(repr(identity).encode()).hexdigest()


def run_compiler(lowered: jax.stages.Lowered, platform: str, options: dict) -> CompiledProgram:
    with tempfile.TemporaryDirectory() as dump:
        dumping = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True} if platform == "tpu" else {}
        compiled = lowered.compile(options | dumping)
        text = read_hlo(compiled, Path(dump))
    memory = compiled.memory_analysis()
    return CompiledProgram(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        text,
    )


def read_hlo(compiled: jax.stages.Compiled, dump: Path) -> str | None:
    """Returns the HLO of a program, from the TPU compiler's dump where there is one, or None."""
    # The dump also contains single-kernel programs, which the compiler uses for autotuning.
    if dumped := next(dump.glob("*.jit_*.after_codegen.txt"), None):
        return dumped.read_text("utf-8")
    # This can fail for TPU v5p and v6e, with a stack trace on standard error (libtpu 0.0.51, jaxlib
    # 0.10.2: "async-update instruction should have 1 operands but sees 3").
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None


def folder() -> Path:
    return cache_folder() / "estimates"


@functools.cache
def code_fingerprint() -> str:
    """Returns a hash of the code that runs the compiler and describes GPUs to it."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(sources)).hexdigest()


def load(path: Path) -> CompiledProgram | None:
    """Returns a stored program; None if the file is missing or damaged."""
    try:
        with gzip.open(path) as file:
            content = file.read(bounded.MAX_BYTES + 1)
        program = CompiledProgram(**json_files.parse_json(content, _SCHEMA))
    except (OSError, EOFError, TypeError, ValueError, zlib.error):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the programs that were not used for longest are removed first
    return program


def store(path: Path, program: CompiledProgram) -> None:
    content = json.dumps(dataclasses.asdict(program)).encode()
    # on a full or read-only disk, the program is compiled again next time
    with contextlib.suppress(OSError):
        with atomic_file(path) as partial:
            partial.write_bytes(gzip.compress(content, 6, mtime=0))
        _remove_oldest(path.parent)


def _remove_oldest(folder: Path) -> None:
    """Keeps the files that were used last, of MAX_STORED_BYTES in sum."""
    total = 0
    statuses = [(file, file.stat()) for file in folder.iterdir()]
    for file, status in sorted(statuses, key=lambda item: -item[1].st_mtime):
        total += status.st_size
        if total > MAX_STORED_BYTES:
            file.unlink(missing_ok=True)
