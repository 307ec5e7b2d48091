"""The built-in source `python_packages`: Python files of the distributions that constraints.txt
pins.

All machines read the same text. `MANIFEST` lists the distributions with a hash of their files. They
are installed from wheels for all platforms and Python versions (py3-none-any); other wheels contain
files that depend on the machine.
"""

import base64
import csv
import dataclasses
import hashlib
from collections.abc import Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePosixPath

from smallgpt_jax.data.parts import Member, Part, Rules
from smallgpt_jax.data.text_files import TextFile
from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.storage.atomic import write_atomically

PYTHON_PACKAGES = "python_packages"
MANIFEST = Path(__file__).with_name("python_packages.txt")
_EXCLUDED_DISTRIBUTIONS = {
    *("chardet", "idna", "tzdata"),  # mostly tables of numbers, or empty files
    "gguf",  # newer than the text, which published results need unchanged
    # These have no wheel: they are built on each machine.
    *("promise", "rouge_score", "sqlitedict", "word2number"),
}
# Tests, test data and benchmarks. ".." leads out of site-packages, to scripts.
_EXCLUDED_FOLDERS = {"test", "tests", "internal_test_util", "benchmarks", ".."}
# The files of this folder are near copies of each other: a validation document would have copies in
# the training split.
_EXCLUDED_PREFIX = "transformers/models/"
_MAX_NAMED = 4  # distributions in a command


@dataclasses.dataclass(frozen=True)
class PythonPackages(Member):
    """The documents are whole files, in the order of their hashes. Of equal files, one is read."""

    is_local = True

    name: str = PYTHON_PACKAGES

    @cached_property
    def manifest(self) -> str:
        return MANIFEST.read_text("utf-8")

    @cached_property
    def files(self) -> list[TextFile]:
        """Raises UserError if a distribution differs from the manifest. Reads no Python file."""
        pins = {line.split()[0]: line for line in self.manifest.splitlines()}  # "name==version"
        self._require_pinned(pins)
        of_hash = {}
        for pin in pins:
            for file in _files_of(metadata.distribution(pin.split("==")[0])):
                if file.size:
                    of_hash.setdefault(file.version, file)  # of equal files, the first one
        return [of_hash[content_hash] for content_hash in sorted(of_hash)]

    def _require_pinned(self, pins: Mapping[str, str]) -> None:
        """Raises UserError if an installed distribution differs from its pin. `pins`:
        "name==version" → line of `MANIFEST`.
        """
        reasons = {pin: difference(pin, line) for pin, line in pins.items()}
        different = [pin for pin, why in reasons.items() if why]
        if not different:
            return
        more = len(different) - 1
        count = f" ({more} more of the {len(pins)} distributions differ)" if more else ""
        command = f"pip install --force-reinstall --no-deps {' '.join(different)}"
        if len(different) > _MAX_NAMED:
            command = install_command("test")
        raise UserError(
            f"config.data.source={self.name!r}: {reasons[different[0]]}{count}; run {command}"
        )

    @property
    def identity(self) -> list:
        """Needs no installed distribution: a finished store remains usable when they change."""
        return [(self.name, hashlib.sha256(self.manifest.encode()).hexdigest())]

    def parts(self, max_passage: int) -> list[Part]:
        return list(map(_part_of, self.files))


def _files_of(distribution: metadata.Distribution) -> list[TextFile]:
    """Returns the files that are read. Location: name in site-packages; version: hash."""
    record, files = distribution.read_text("RECORD") or "", []
    for name, content_hash, size in csv.reader(record.splitlines()):
        if _is_read(name):
            path = Path(distribution.locate_file(name))
            files.append(TextFile(path, name, int(size or 0), content_hash))
    return files


def _is_read(name: str) -> bool:
    return (
        name.endswith(".py")
        and not name.startswith(_EXCLUDED_PREFIX)
        and not _EXCLUDED_FOLDERS & set(PurePosixPath(name).parts)
    )


def _describe(distribution: metadata.Distribution, name: str) -> str:
    """Returns a line of `MANIFEST`: name==version, number of files and bytes, hash of the files'
    names and hashes.
    """
    files = sorted(_files_of(distribution), key=lambda file: file.location)
    digest, size = hashlib.sha256(), 0
    for file in files:
        digest.update(f"{file.location} {file.version}\n".encode())
        size += file.size
    return f"{name}=={distribution.version} {len(files)} {size} {digest.hexdigest()}"


def difference(pin: str, line: str) -> str:
    """Returns how the installed distribution differs from the `line` of `MANIFEST`, or ""."""
    name, version = pin.split("==")
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return f"{pin} is not installed"
    if installed.version != version:
        return f"{name} {installed.version} is installed, but the text has {version}"
    if _describe(installed, name) != line:
        return f"{pin} is installed with other files than those of its wheel"
    return ""


def _part_of(file: TextFile) -> Part:
    """Reading raises UserError if the content of the file is not that of its wheel."""

    def read(rules: Rules):
        try:
            content = file.path.read_bytes()
        except OSError as error:
            raise UserError(f"{file.path}: {error.strerror}; reinstall its distribution") from None
        if record_hash(content) != file.version:
            raise UserError(
                f"{file.path}: was changed after its installation; reinstall its distribution"
            )
        yield content.decode(errors="replace"), 1.0

    return Part(file.location, file.size, read, (file.version,))


def record_hash(content: bytes) -> str:
    """Returns the hash in the format of RECORD files (packaging.python.org)."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
    return f"sha256={digest.rstrip('=')}"


def make_manifest(constraints: str) -> str:
    """Returns the content of `MANIFEST` for the text of a constraints.txt, whose distributions must
    be installed.
    """
    pins = [
        line.split("==")
        for line in constraints.splitlines()
        if "==" in line and not line.startswith("#")
    ]
    lines = []
    for name, version in sorted(pins, key=lambda pin: pin[0].lower()):
        if name in _EXCLUDED_DISTRIBUTIONS:
            continue
        distribution = metadata.distribution(name)
        if "Tag: py3-none-any" not in (distribution.read_text("WHEEL") or ""):
            continue
        if distribution.version != version:
            raise UserError(
                f"{name} {distribution.version} is installed, but constraints.txt has {version}"
            )
        if _files_of(distribution):
            lines.append(_describe(distribution, name) + "\n")
    return "".join(lines)


def write_manifest(constraints: Path) -> None:
    write_atomically(MANIFEST, make_manifest(constraints.read_text("utf-8")))
