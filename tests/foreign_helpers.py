"""Mutations of files, as damage or somebody who means harm makes them, and bounds for their
readers.
"""

import bz2
import contextlib
import copy
import gzip
import io
import json
import random
import re
import signal
import zipfile
from pathlib import Path

import pyarrow

SECONDS = 5.0  # of processor time
MEGABYTES = 300  # of memory
HOSTILE = "\x1b[2J\u202e<img src=x>[a](http://example.com)\n\r|"
JUNK = [
    *(None, True, False, 0, -1, 1, 3, 0.5, -0.0, 2**31, 2**53 + 1, 10**30),
    *(1e308, -1e308, float("nan"), float("inf")),
    *("", "x", "1", "../x", "a.b", "\ud800", "\x00", HOSTILE, "x" * 20_000),
    *([], {}, [[]], [None], ["x"] * 3, [1, "x"]),
    *({"": 0}, {"a.b": 1}, {"step": "x"}, {HOSTILE: {}}),
]
# Replaces null in a few documents: nested deeply, thousands of digits, a million values.
LARGE = ["[" * 3000 + "]" * 3000, "9" * 5000, "[" + "[]," * 2**20 + "[]]"]


def mutate(content: bytes, name: str, rng: random.Random) -> bytes:
    """Returns a mutation of a file's content. Compressed content is also mutated inside, and JSON in
    its values.
    """
    suffix = Path(name).suffix
    if suffix in COMPRESSIONS and rng.random() < 0.6:
        decompress, compress = COMPRESSIONS[suffix]
        return compress(mutate(decompress(content), name.removesuffix(suffix), rng))
    if suffix == ".safetensors" and rng.random() < 0.6:
        length = 8 + int.from_bytes(content[:8], "little")
        header = mutate(content[8:length], "header.json", rng)
        return len(header).to_bytes(8, "little") + header + content[length:]
    if suffix in (".pt", ".bin") and content.startswith(b"PK") and rng.random() < 0.6:
        return mutate_pickle(content, rng)
    if suffix in (".json", ".jsonl") and rng.random() < 0.7:
        return mutate_lines(content, rng) if suffix == ".jsonl" else mutate_json(content, rng)
    return mutate_bytes(content, rng)


COMPRESSIONS = {
    ".gz": (gzip.decompress, gzip.compress),
    ".bz2": (bz2.decompress, bz2.compress),
    ".zst": (
        lambda content: pyarrow.input_stream(pyarrow.py_buffer(content), compression="zstd").read(),
        lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
    ),
}


def mutate_pickle(content: bytes, rng: random.Random) -> bytes:
    """Mutates the pickle in a file of PyTorch. The checksums in the archive stay correct."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as archive:
        for name, member in members.items():
            is_pickle = name.endswith("/data.pkl")
            archive.writestr(name, mutate_bytes(member, rng) if is_pickle else member)
    return changed.getvalue()


def mutate_lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    line = lines[number].rstrip()
    lines[number] = rng.choice((mutate_json, mutate_bytes))(line, rng) + b"\n"
    return b"".join(lines)


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    """Replaces, removes, renames and adds values."""
    try:
        document = json.loads(content)
    except ValueError:
        return mutate_bytes(content, rng)
    for _ in range(rng.randrange(1, 4)):
        places = list(places_in(document))
        if not places or rng.random() < 0.03:
            return json.dumps(junk(rng)).encode()
        container, key = rng.choice(places)
        is_object = isinstance(container, dict)
        match rng.randrange(10):
            case 0 | 1:
                del container[key]
            case 2 if is_object:
                container[str(junk(rng))] = container.pop(key)
            case 3 if is_object:
                container["further"] = junk(rng)
            case 4 if not is_object:
                container.insert(key, junk(rng))
            case _:
                container[key] = junk(rng)
    text = json.dumps(document)
    if rng.random() < 0.1:
        text = text.replace("null", rng.choice(LARGE), 1)
    return text.encode()


def junk(rng: random.Random):
    """Returns a copy, because a later mutation may change it."""
    return copy.deepcopy(rng.choice(JUNK))


def places_in(value):
    """Yields (container, key) of every value inside `value`."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places_in(item)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Changes, deletes, repeats or adds a few bytes, or cuts the content."""
    changed = bytearray(content)
    for _ in range(rng.randrange(1, 4)):
        at, length = rng.randrange(len(changed) + 1), rng.randrange(1, 9)
        match rng.randrange(8):
            case 0 | 1:
                changed[at : at + length] = rng.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length] * rng.randrange(1, 100)
            case 4:
                changed[at:at] = b"\xff\x00"
            case 5 if changed:
                changed[min(at, len(changed) - 1)] ^= 1 << rng.randrange(8)
            case 6:
                del changed[at:]
            case 7:
                del changed[:at]
    return bytes(changed)


class Expired(BaseException):
    """A reader took too long."""


@contextlib.contextmanager
def bounded():
    """Raises Expired after SECONDS of processor time. Fails if the memory grows by MEGABYTES."""

    def expire(*_):
        raise Expired

    before = signal.signal(signal.SIGPROF, expire)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    memory = memory_of("VmRSS")
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        grown = memory_of("VmHWM") - memory
        assert grown < MEGABYTES, f"{grown:.0f} MB"


def memory_of(field: str) -> float:
    """Returns a number of megabytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", status)[1]) / 1024
