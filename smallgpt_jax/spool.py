"""The files of a run that grow while it runs: metrics, TensorBoard events, traces.

Objects in object storage cannot be appended to. If the workdir is in object storage, these files are therefore on the
local disk and are uploaded whole.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from smallgpt_jax import distributed, object_storage
from smallgpt_jax.files import write_atomically
from smallgpt_jax.formatting import short_reason
from smallgpt_jax.object_storage import is_remote

UPLOAD_SECONDS = 30.0  # maximum time between uploads


class Spool:
    """A local folder, `folder`, whose changed files `upload` copies to `workdir`.

    If `workdir` is local, both folders are the same, and `upload` does nothing. Failed uploads do not end the run:
    `log` is called with a message, and the next upload tries again.
    """

    def __init__(self, workdir: Path, folder: Path, log: Callable[[str], None] = print):
        self.workdir, self.folder, self._log = workdir, folder, log
        self._uploaded: dict[Path, tuple] = {}
        self._lock = threading.Lock()
        self._is_failing = False

    def upload(self) -> None:
        if self.folder == self.workdir:
            return
        with self._lock:
            try:
                for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                    version = path.stat().st_size, path.stat().st_mtime_ns
                    if self._uploaded.get(path) != version:
                        write_atomically(self.workdir / path.relative_to(self.folder), path.read_bytes())
                        self._uploaded[path] = version
                self._is_failing = False
            except Exception as error:  # no network, no permission
                if not self._is_failing:
                    self._log(f"{self.workdir}: metrics could not be uploaded ({short_reason(error)}). Training "
                              "continues; the upload is repeated")
                self._is_failing = True


@contextlib.contextmanager
def open_spool(workdir: Path, continued: Sequence[str], log: Callable[[str], None] = print) -> Iterator[Spool]:
    """Yields the spool of a run. Uploads at least every UPLOAD_SECONDS and on exit.

    The files named in `continued` are first copied from `workdir`, if they exist. Only process 0 has files to upload.
    """
    if not is_remote(workdir) or not distributed.is_primary():
        yield Spool(workdir, workdir, log)
        return
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / workdir.name
        folder.mkdir()
        for name in continued:
            if (workdir / name).exists():
                object_storage.download(workdir / name, folder / name)
        spool, closed = Spool(workdir, folder, log), threading.Event()
        thread = threading.Thread(target=upload_regularly, args=(spool, closed), daemon=True)
        thread.start()
        try:
            yield spool
        finally:
            closed.set()
            thread.join()
            spool.upload()


def upload_regularly(spool: Spool, closed: threading.Event) -> None:
    while not closed.wait(UPLOAD_SECONDS):
        spool.upload()
