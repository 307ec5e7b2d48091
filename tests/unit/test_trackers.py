"""Tests of experiment trackers: a fake of their interface, and the real packages without
network.
"""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT

from smallgpt_jax.errors import UserError
from smallgpt_jax.run import trackers
from smallgpt_jax.run.metrics import MetricsWriter, read_lines
from smallgpt_jax.run.trackers import Tracker


class FakeRun:
    """A run that stores rows in a dict. Refuses steps that are not in increasing order."""

    def __init__(self, rows):
        self.rows = rows
        self.step = max(rows, default=-1) + 1

    def log(self, row, step):
        assert step >= self.step and step not in self.rows
        self.rows[step], self.step = row, step + 1

    def finish(self):
        self.step = None


@pytest.fixture
def rows(monkeypatch):
    """Returns {step: row} of the fake wandb."""
    rows = {}
    ids = set()

    def init(id, **_):
        ids.add(id)
        assert len(ids) == 1, "another run"
        return FakeRun(rows)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    return rows


EVALUATION = {"bits_per_byte": 1.5, "targets": 8}


def session(folder, first_step, lines):
    """Writes lines (step, split, loss) like a run that resumes after `first_step`. Returns the
    writer.
    """
    writer = MetricsWriter(
        folder, first_step, start_tracker=lambda old: Tracker("wandb", folder, {}, old)
    )
    for step, split, loss in lines:
        writer.write(step, split, {"loss": loss} | (EVALUATION if split == "eval" else {}))
    return writer


def expected(folder):
    """Returns {step: row} according to metrics.jsonl."""
    found = {}
    for line in read_lines(folder / "metrics.jsonl"):
        row = found.setdefault(line["step"], {})
        row |= {
            f"{line['split']}/{name}": line[name] for name in ("loss", *EVALUATION) if name in line
        }
    return found


def losses(steps, evaluated=(4, 5)):
    for step in steps:
        yield step, "train", 1 / step
        if step in evaluated:
            yield step, "eval", 2 / step


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_each_step_is_sent_once_across_kills(tmp_path, rows, lost):
    """A run is killed after step 6 and resumes from step 4. The tracker has lost the last `lost`
    rows.
    """
    session(tmp_path, 0, losses(range(1, 7)))
    assert list(rows) == [1, 2, 3, 4, 5]  # step 6 is not sent yet, since an evaluation may follow
    for step in list(rows)[len(rows) - lost :]:
        del rows[step]
    session(tmp_path, 4, losses(range(5, 9))).close()
    assert rows == expected(tmp_path) and list(rows) == list(range(1, 9))


def test_an_evaluation_after_a_stop_is_sent_with_the_next_step(tmp_path, rows):
    session(tmp_path, 0, [(1, "train", 1.0)]).close()
    session(tmp_path, 1, [(1, "eval", 2.0), (2, "train", 3.0)]).close()
    assert rows == {
        1: {"train/loss": 1.0},
        2: {"eval/loss": 2.0, "eval/bits_per_byte": 1.5, "eval/targets": 8, "train/loss": 3.0},
    }


def test_only_numbers_are_sent(tmp_path, rows):
    writer = session(tmp_path, 0, [])
    writer.write(
        1, "train", {"loss": 1.0, "grad_norm": float("nan"), "load": {"block_0": [0.5, 0.5]}}
    )
    writer.close()
    assert rows == {1: {"train/loss": 1.0}}


def test_errors_do_not_end_the_run(tmp_path, rows, monkeypatch):
    messages = []
    monkeypatch.setattr(FakeRun, "log", lambda self, row, step: 1 / 0)
    tracker = Tracker("wandb", tmp_path, {}, [], log=messages.append)
    for step in range(1, 5):
        tracker.write({"step": step, "split": "train", "loss": 1.0})
    tracker.close()
    assert messages == ["wandb: division by zero. Training continues without it"]


def test_a_tracker_must_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    trackers.require_installed("")
    with pytest.raises(
        UserError, match=r"config.train.tracker='trackio': .* -c constraints.txt -e '.\[trackio\]'"
    ):
        trackers.require_installed("trackio")


def test_trackio_is_ended_once(tmp_path, monkeypatch):
    """`run.finish` alone leaves the run for Trackio to end, with the same messages, when the
    process exits.
    """
    ended = []
    run = SimpleNamespace(
        _next_step=0, log=lambda row, step: None, finish=lambda: ended.append("run")
    )
    monkeypatch.setitem(
        sys.modules,
        "trackio",
        SimpleNamespace(init=lambda **_: run, finish=lambda: ended.append("trackio")),
    )
    Tracker("trackio", tmp_path, {}, []).close()
    assert ended == ["trackio"]


SESSION = """
import os, signal, sys
from smallgpt_jax.run.trackers import Tracker
from smallgpt_jax.run.metrics import MetricsWriter
from pathlib import Path
folder, name, first, last, kill = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
writer = MetricsWriter(folder, first, start_tracker=lambda old: Tracker(name, folder, {"a": {"b": (1, 2)}}, old))
for step in range(first + 1, last + 1):
    writer.write(step, "train", {"loss": 1 / step})
    if step % 4 == 0:
        writer.write(step, "eval", {"loss": 2 / step, "bits_per_byte": 1.5, "targets": 8})
if kill == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
writer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_the_real_package_has_the_values_of_metrics_jsonl(tmp_path, name):
    """The package runs offline. The first process is killed after step 6. The second one resumes
    after step 4.
    """
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install -c constraints.txt -e '.[{name}]'")
    folder = tmp_path / "my run"
    folder.mkdir()
    environment = {**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for arguments, status in ((("0", "6", "kill"), -signal.SIGKILL), (("4", "9", ""), 0)):
        result = subprocess.run(
            [sys.executable, "-c", SESSION, folder, name, *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == status and "continues without it" not in result.stdout, result
        printed = result.stdout.splitlines()
        assert len(set(printed)) == len(printed), printed
    read = {"wandb": read_wandb, "trackio": read_trackio}[name]
    run_id = json.loads((folder / "tracker.json").read_text())["id"]
    assert read(tmp_path, folder, run_id) == expected(folder) and len(expected(folder)) == 9


def read_wandb(tmp_path, folder, run_id):
    """Returns {step: row} from wandb's newest offline file."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for data in leveldb_records(
        max(folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb")).read_bytes()
    ):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            assert record.history.step.num not in found
            found[record.history.step.num] = {
                key: row[key] for key in row if not key.startswith("_")
            }
    return found


def leveldb_records(data: bytes):
    """Yields the records of a log in LevelDB's format. The log starts with a header of 7 bytes.

    A record has one or more chunks. A chunk has a checksum (4 bytes), a length (2 bytes), a type (1
    byte) and content. Type 1 is a whole record. Types 2, 3 and 4 are the first, a middle and the
    last chunk of a record. No chunk crosses a multiple of 32,768 bytes.
    """
    position, record = 7, b""
    while position + 7 <= len(data):
        if (room := -position % 32768) and room < 7:
            position += room
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_trackio(tmp_path, folder, run_id):
    """Returns {step: row} of trackio's database; fails if a step is stored twice."""
    command = (
        "import json, trackio; from trackio.sqlite_storage import SQLiteStorage; "
        f"print(json.dumps(SQLiteStorage.get_logs('smallgpt_jax', 'my run-{run_id}')))"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    result = subprocess.run(
        [sys.executable, "-c", command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rows = json.loads(result.stdout.splitlines()[-1])
    found = {row["step"]: {key: row[key] for key in row if "/" in key} for row in rows}
    assert len(found) == len(rows)
    return found
