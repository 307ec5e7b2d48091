"""sessions.jsonl: devices, versions and commit of each start, resumption or divergence."""

import contextlib
import datetime
import json
from pathlib import Path

import jax

from smallgpt_jax.devices import distributed
from smallgpt_jax.run.names import SESSIONS_FILE
from smallgpt_jax.run.provenance import software
from smallgpt_jax.storage.atomic import append_line
from smallgpt_jax.storage.json_files import (
    NUMBER,
    TEXT,
    Each,
    Kind,
    Optional,
    integer,
    printable_values,
    read_json_lines,
)

# Fields that the readers of sessions.jsonl need.
SESSION = {
    "time": TEXT,
    "device": TEXT,
    "devices": integer(1),
    "argument_bytes": integer(0),
    "temp_bytes": integer(0),
    "versions": Each(TEXT),
    "padding": Kind("a fraction", lambda x: NUMBER.accepts(x) and 0 <= x < 1),
    "first_step": Optional(integer(0)),
    "processor": Optional(Each(TEXT)),
}


def append_session(workdir: Path, facts: dict) -> None:
    if not distributed.is_primary():
        return
    line = {
        **facts,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processes": jax.process_count(),
        **software(),
    }
    # A run must not fail because of this line. Clients of object storage raise many types of
    # exceptions.
    with contextlib.suppress(Exception):
        append_line(workdir / SESSIONS_FILE, json.dumps(line))


def read_sessions(workdir: Path) -> list[dict]:
    """Skips the lines about divergence."""
    return printable_values(read_json_lines(workdir / SESSIONS_FILE, SESSION))


def has_diverged(workdir: Path) -> bool:
    sessions = read_json_lines(workdir / SESSIONS_FILE, {"time": TEXT})
    return bool(sessions) and "diverged" in sessions[-1]
