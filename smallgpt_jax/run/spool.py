"""The files of a run that grow while it runs: metrics, TensorBoard events, traces.

Objects in object storage cannot be appended to, so these files are on the local disk and are
uploaded whole.
"""

import contextlib
import dataclasses
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from smallgpt_jax.devices import distributed
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.run.names import METRICS_FILE
from smallgpt_jax.storage import object_storage
from smallgpt_jax.storage.atomic import removed_on_error, write_atomically
from smallgpt_jax.storage.object_storage import is_remote
from smallgpt_jax.storage.temporary import new_locked_folder, remove_abandoned

SPOOL_PREFIX = "smallgpt_jax-spool-"
UPLOAD_SECONDS = 30.0  # maximum time between uploads
CLOSING_PAUSES = (1.0, 5.0, 10.0)  # seconds between the last tries, when a run ends


@dataclasses.dataclass
class Spool:
    """A local folder for the files of a run; `workdir` itself, if that is local. A failed upload is
    logged, and tried again with the next one.
    """

    workdir: Path
    folder: Path
    log: Callable[[str], None]

    def __post_init__(self):
        self._uploaded: dict[Path, tuple] = {}  # path → (size, time) of the uploaded version
        self._lock = threading.Lock()
        self._failure = ""  # why the last upload failed

    def upload(self) -> bool:
        """Returns whether `workdir` then has all files."""
        if self.folder == self.workdir:
            return True
        with self._lock:
            # A list: one failure does not keep the other files from being uploaded.
            failures = [self._try_to_upload(path) for path in self._files()]
            failure = next(filter(None, failures), "")
            if failure and not self._failure:
                self.log(
                    f"{self.workdir}: metrics could not be uploaded ({failure}). Training "
                    "continues; the upload is repeated"
                )
            self._failure = failure
            return not failure

    def upload_last(self) -> None:
        """Uploads all files and removes the local folder, which is kept if several tries fail."""
        for pause in (*CLOSING_PAUSES, None):
            if self.upload():
                shutil.rmtree(self.folder.parent, ignore_errors=True)
                return
            if pause is not None:
                time.sleep(pause)
        self.log(f"{self.folder}: not uploaded ({self._failure}); copy it to {self.workdir}")

    def _files(self) -> list[Path]:
        """Returns metrics.jsonl first. Skips *.partial files, which are still being written."""
        files = [
            path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".partial"
        ]
        return sorted(files, key=lambda path: (path != self.folder / METRICS_FILE, path))

    def _try_to_upload(self, path: Path) -> str:
        """Returns the reason for a failure, or ""."""
        try:
            version = path.stat().st_size, path.stat().st_mtime_ns
            if self._uploaded.get(path) != version:
                write_atomically(self.workdir / path.relative_to(self.folder), path.read_bytes())
                self._uploaded[path] = version
        except Exception as error:  # no network, no permission
            if path.exists():  # a file that was removed is no failure
                return short_reason(error)
        return ""


@contextlib.contextmanager
def open_spool(
    workdir: Path, continued: Sequence[str], log: Callable[[str], None] = print
) -> Iterator[Spool]:
    """Yields the spool of a run, with copies of the files `continued`. It uploads regularly and on
    exit.
    """
    if not is_remote(workdir) or not distributed.is_primary():
        yield Spool(workdir, workdir, log)
        return
    with contextlib.ExitStack() as held:
        place = Path(tempfile.gettempdir())
        remove_abandoned(place, SPOOL_PREFIX)
        folder = new_locked_folder(place, SPOOL_PREFIX, held) / workdir.name
        with removed_on_error(folder.parent):
            folder.mkdir()
            for name in continued:
                files = object_storage.list_files(workdir / name)
                object_storage.download(workdir / name, folder / name, files)
        spool = Spool(workdir, folder, log)
        closed = threading.Event()

        def upload_regularly():
            while not closed.wait(UPLOAD_SECONDS):
                spool.upload()

        thread = threading.Thread(target=upload_regularly, daemon=True)
        thread.start()
        try:
            yield spool
        finally:
            closed.set()
            thread.join()
            spool.upload_last()
