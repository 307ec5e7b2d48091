"""Scores that are kept on disk, so that an interrupted evaluation resumes.

The harness's own cache is a database of pickles, and whoever writes a pickle can run code where it
is read. This one is a file of JSON lines: {"request": a hash, "result": what the model said}.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from smallgpt_jax.storage.atomic import append_line
from smallgpt_jax.storage.json_files import LOSS, TEXT, Kind, read_json_lines

Result = float | tuple[float, bool] | str  # of loglikelihood_rolling, loglikelihood, generate_until


def _is_result(value) -> bool:
    if isinstance(value, list):
        return len(value) == 2 and LOSS.accepts(value[0]) and isinstance(value[1], bool)
    return isinstance(value, str) or LOSS.accepts(value)


_TYPES = {"loglikelihood": list, "loglikelihood_rolling": float, "generate_until": str}
_LINE = {"request": TEXT, "result": Kind("a score or a text", _is_result)}


class ScoreCache:
    """Results by request; a `cache_hook` of the harness, which also finds them again.

    `path` is a local file, or None: nothing is kept. Damaged lines are ignored, so that their
    requests are computed again.
    """

    def __init__(self, path: Path | None = None):
        self._path, self._results = path, {}
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._results = {
                line["request"]: line["result"] for line in read_json_lines(path, _LINE)
            }

    def find(self, kind: str, arguments: Sequence) -> Result | None:
        result = self._results.get(_request_hash(kind, arguments))
        if not isinstance(result, _TYPES[kind]):
            return None
        return tuple(result) if isinstance(result, list) else result

    def add_partial(self, kind: str, arguments: Sequence, result: Result) -> None:
        if self._path:
            line = {"request": _request_hash(kind, arguments), "result": result}
            append_line(self._path, json.dumps(line))


def _request_hash(kind: str, arguments: Sequence) -> str:
    return hashlib.sha256(json.dumps([kind, *arguments]).encode()).hexdigest()
