"""Bundles: a folder with what a stranger needs to check a record.

| file | content |
|---|---|
| results.json | the record, byte for byte |
| configs/NAME.json | the config of each name |
| environment.json | versions, commits and processors of the runs |
| text.json | source, size and fingerprints of the training text; the text itself is not included |
| requirements.txt | the versions of the libraries, for pip |
| sources/ | the user's own modules that the configs name |
| README.md | the commands that check the record |
| manifest.json | SHA-256 of each of these files |
"""

import hashlib
import importlib.util
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from smallgpt_jax.analysis import record as records
from smallgpt_jax.analysis.record import RESULTS_FILE, Record, grouped
from smallgpt_jax.config.lookup import split_name
from smallgpt_jax.errors import UserError
from smallgpt_jax.formatting import safe_name
from smallgpt_jax.storage.atomic import write_atomically
from smallgpt_jax.storage.json_files import TEXT, Each, read_json
from smallgpt_jax.storage.paths import as_path

MANIFEST_FILE = "manifest.json"
SOURCES_FOLDER = "sources"
FORMAT = 1
_README = """# A record and what is needed to check it

    pip install -r requirements.txt
    python -m smallgpt_jax.compare --verify=. --output=/tmp/check --sample=3

The first command installs the versions of the libraries with which most of the runs were trained.
The second one checks the record and trains some of its runs again (docs/records.md of smallgpt_jax).
The commits of smallgpt_jax are in environment.json. The training text is described in text.json;
it has to be at the place that the configs name.
"""


def write_bundle(results: str | Path, folder: str | Path) -> Path:
    """Writes the bundle of a results.json into a new or empty folder, and returns the folder. Raises
    UserError, also if a module of the user's own package is not found.
    """
    path, folder = as_path("--results", str(results)), as_path("--bundle", str(folder))
    record = records.read(path)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--bundle={folder}: folder is not empty; choose another")
    files = {RESULTS_FILE: path.read_bytes(), **_descriptions(record), **_sources(record)}
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    manifest = {
        "format": str(FORMAT),
        **{name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    write_atomically(folder / MANIFEST_FILE, _json(manifest))  # last: without it, it is no bundle
    return folder


def open_bundle(folder: Path, trust_custom_code: bool) -> Path:
    """Returns the results.json of a bundle. With `trust_custom_code`, its modules can be imported
    from now on. Raises UserError if a file was changed, or a source file added.
    """
    manifest = read_json(folder / MANIFEST_FILE, Each(TEXT), "give a folder of compare --bundle")
    if manifest.pop("format", None) != str(FORMAT) or RESULTS_FILE not in manifest:
        raise UserError(f"{folder}: not a bundle of format {FORMAT}; give its results.json")
    for name, digest in manifest.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{folder / MANIFEST_FILE}: {name!r} is outside the bundle; remove it")
        try:
            content = (folder / name).read_bytes()
        except (OSError, ValueError):  # missing, or a name that no file can have
            content = b""
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{folder / name}: is not the file of the bundle; get the bundle again")
    # An added source file could take the place of a library's module.
    for path in folder.glob(f"{SOURCES_FOLDER}/**/*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and "__pycache__" not in path.parts and name not in manifest:
            raise UserError(f"{path}: is not a file of the bundle; get the bundle again")
    if trust_custom_code and (folder / SOURCES_FOLDER).is_dir():
        sys.path.insert(0, str(folder / SOURCES_FOLDER))
    return folder / RESULTS_FILE


def _descriptions(record: Record) -> dict[str, bytes]:
    """Returns {path: content} of the files that repeat parts of the record for human readers."""
    files = {}
    for name, runs in grouped(record.runs, lambda run: run.name).items():
        # The configs of the shorter runs follow from that of the longest, by the horizon.
        longest = max(runs, key=lambda run: run.horizon)
        files[f"configs/{safe_name(name)}.json"] = _json(
            {"name": name, "seeds": sorted({run.seed for run in runs}), "config": longest.config}
        )
    sessions = [session for run in record.runs for session in run.sessions]
    versions: dict[str, Counter[str]] = defaultdict(Counter)  # {library: sessions by version}
    for session in sessions:
        for library, version in session.versions.items():
            versions[library][version] += 1
    times = [session.time for session in sessions]
    environment = {
        "command": record.command,
        "versions": {library: sorted(counts) for library, counts in versions.items()},
        "devices": sorted({session.device for session in sessions}),
        "processors": _distinct(session.processor for session in sessions),
        "times": [min(times), max(times)] if times else [],
    }
    text = next((run.text for run in record.runs if run.text), None)
    files["environment.json"] = _json(environment)
    files["text.json"] = _json({} if text is None else vars(text))
    files["requirements.txt"] = _requirements(versions).encode()
    files["README.md"] = _README.encode()
    return files


def _requirements(versions: dict[str, Counter[str]]) -> str:
    """Returns requirements for pip: of each library, the version that most sessions had."""
    lines = []
    for library, counts in sorted(versions.items()):
        if library not in ("python", "smallgpt_jax"):  # pip cannot install these
            ((version, _),) = counts.most_common(1)
            lines.append(f"{library}=={version}\n")
    return "".join(lines)


def _distinct(values: Iterable[Any]) -> list:
    """Returns each value once, without empty ones; unlike a set, also of dicts."""
    distinct = []
    for value in values:
        if value and value not in distinct:
            distinct.append(value)
    return distinct


def _sources(record: Record) -> dict[str, bytes]:
    """Returns {path: content} of the modules that configs name, with their packages."""
    modules = set()
    for run in record.runs:
        for field, value in run.config.items():
            # Only fields of these groups can name modules.
            if not field.startswith(("model.", "optimizer.", "train.")):
                continue
            for name in value if isinstance(value, list) else [value]:
                module, attribute = split_name(name)
                if attribute.isidentifier():  # unlike that of gs://bucket/examples.jsonl
                    modules.add(module)
    files = {}
    for module in sorted(modules):
        files |= _module_files(module)
    return files


def _module_files(module: str) -> dict[str, bytes]:
    """Returns {path in the bundle: content} of a module and the rest of its top-level package."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        raise UserError(
            f"{module}: no such module, which the record names; run the command in the folder "
            "that contains it, or add that folder to PYTHONPATH"
        )
    if module.partition(".")[0] == "smallgpt_jax":
        return {}  # whoever checks the record has it
    # Of a.b in root/a/b.py or root/a/b/__init__.py, all of root/a is bundled.
    origin, depth = Path(spec.origin), module.count(".")
    if origin.name == "__init__.py":
        depth += 1
    root = origin.parents[depth]
    top = root / module.partition(".")[0]
    paths = sorted(top.rglob("*.py")) if top.is_dir() else [origin]
    return {
        f"{SOURCES_FOLDER}/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
