"""Google Cloud Storage: paths that begin with gs://.

Such a path is an `etils.epath.Path`, which has the methods of `pathlib.Path` that read and write
whole files. Objects cannot be appended to, renamed or mapped into memory. A folder is only a common
prefix of the names of objects. Files that need more than this are on the local disk; `download` and
`upload_folder` copy them.

Requires the optional dependencies `[gcs]`. Credentials are Google's application default
credentials.
"""

import asyncio
import contextlib
import functools
import importlib.util
import io
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from smallgpt_jax.errors import UserError, install_command
from smallgpt_jax.formatting import short_reason

SCHEME = "gs://"
_SILENT_SECONDS = 300.0  # a request of gcsfs fails if the service sends nothing for this long
# A conditional write is repeated for this long; locks that count as held last longer.
_RETRY_SECONDS = 20.0
_WRITE_ATTEMPTS = 5
# Exceptions of these modules are failed requests: wrong credentials, no permission, no network.
_CLIENT_MODULES = ("aiohttp.", "gcsfs.", "google.api_core.", "google.auth.", "google.cloud.")
_FAILED_STATUS = re.compile(
    "ABORTED|CANCELLED|DEADLINE_EXCEEDED|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|"
    "UNAVAILABLE"
)


def is_remote(path: str | Path) -> bool:
    return str(path).startswith(SCHEME)


def remote_path(field: str, url: str) -> Path:
    """Sends no request. Raises UserError for a URL not of gs://BUCKET/NAME, or without gcsfs."""
    bucket, *names = url.removeprefix(SCHEME).rstrip("/").split("/")
    is_bucket = re.fullmatch(r"[a-z0-9][a-z0-9._-]+", bucket)
    if not is_bucket or not names or not _are_names(names):
        raise UserError(f"{field}: {url!r} is not a path in a bucket; expected gs://BUCKET/NAME")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(
            f"{field}: {url!r} requires gcsfs, which is not installed; run {install_command('gcs')}"
        )
    file_system()  # configures gcsfs before epath uses it
    return to_epath("/".join([bucket, *names]))


def _are_names(names: Iterable[str]) -> bool:
    # Of files and folders: an object's name may contain anything between two slashes.
    return not {"", ".", ".."} & set(names)


def to_epath(name: str) -> Path:
    from etils import epath

    return epath.Path(SCHEME + name)


@functools.cache
def file_system():
    """Returns the fsspec file system that epath uses too."""
    import aiohttp
    import fsspec

    # Do not cache listings, because other programs and tensorstore also write to the bucket. Set a
    # timeout, because gcsfs sets none. It limits the time without data, not the duration of a
    # request.
    fsspec.config.conf.setdefault("gcs", {}).update(
        use_listings_cache=False,
        requests_timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS
        ),
    )
    # gcsfs logs a traceback for each error that it raises.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    storage = fsspec.filesystem("gcs", finalize_on_close=True)

    # gcsfs's own isdir returns False if the request fails; orbax would then ignore a checkpoint.
    def isdir(path: str) -> bool:
        try:
            return storage.info(path)["type"] == "directory"
        except FileNotFoundError:
            return False

    # All writes pass through here, also those of orbax. A process that has lost its lock must not
    # write.
    async def request(method: str, *args, **options):
        if method not in ("GET", "HEAD"):
            await asyncio.to_thread(writer.require_locks)
        return await send(method, *args, **options)

    storage.isdir = isdir
    send, storage._request = storage._request, request
    return storage


def is_used() -> bool:
    return file_system.cache_info().currsize > 0


@functools.cache
def _client():
    """Returns the client of Google's library, for writes on condition of an object's generation."""
    from google.cloud import storage

    return storage.Client(project=None)  # only requests that create or list buckets need a project


def bucket_of(path: Path):
    """Returns the bucket as an object of Google's library, and the name of `path` in it."""
    name, _, key = str(path).removeprefix(SCHEME).partition("/")
    return _client().bucket(name), key


@contextlib.contextmanager
def name_path_in_errors(place: str) -> Iterator[None]:
    """Raises a UserError that begins with `place` if a request fails in the `with` block."""
    try:
        yield
    except Exception as error:
        if not is_request_error(error) and not isinstance(error, FileNotFoundError):
            raise
        raise UserError(request_error_message(place, error)) from None


def is_request_error(error: Exception) -> bool:
    # gcsfs raises OSError without an errno, tensorstore ValueError with the status of the request.
    if f"{type(error).__module__}.".startswith(_CLIENT_MODULES):
        return True
    if isinstance(error, OSError):
        return error.errno is None and not isinstance(error, FileNotFoundError)
    return isinstance(error, ValueError) and _FAILED_STATUS.search(str(error)) is not None


def request_error_message(place: str, error: Exception) -> str:
    return (
        f"{place}: request failed ({short_reason(error)}); check the name of the bucket, your "
        "permissions and your credentials (gcloud auth application-default login)"
    )


def require_bucket(field: str, path: Path) -> None:
    """Raises UserError if the bucket of `path` does not exist or cannot be listed."""
    with name_path_in_errors(f"{field}={path}"):
        bucket, _ = bucket_of(path)
        next(iter(bucket.list_blobs(max_results=1)), None)


class Reader(io.RawIOBase):
    """An object that is open for reading. Raises UserError, with its path, if a request fails."""

    # Callers could not tell a failed request from a damaged compressed file: both raise OSError
    # without an errno.

    def __init__(self, path: Path):
        self._path = str(path)
        with name_path_in_errors(self._path):
            self._file = path.open("rb")

    def readinto(self, buffer) -> int:
        with name_path_in_errors(self._path):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if hasattr(self, "_file"):  # __init__ may have failed
            self._file.close()
        super().close()


class RemoteFile(NamedTuple):
    size: int  # bytes
    generation: str  # changes whenever the file is written


def list_files(path: Path, is_pattern: bool = False) -> dict[Path, RemoteFile]:
    """Returns the file at `path`, or all files below it. `is_pattern`: those that match `path`, with
    *, ? or []. Raises UserError if the name of an object is not a path, such as one with "..".
    """
    search = file_system().glob if is_pattern else file_system().find
    files = {}
    for name, info in search(str(path), detail=True).items():
        # Some tools create an empty object, whose name ends with "/", for a folder.
        if info["type"] != "file" or name.endswith("/"):
            continue
        if not _are_names(name.split("/")):  # a copy of it could overwrite any local file
            raise UserError(
                f"{SCHEME}{name}: the name of this object is not a path; rename or remove it"
            )
        files[to_epath(name)] = RemoteFile(int(info["size"]), str(info.get("generation", "")))
    return files


def match(pattern: Path) -> list[Path]:
    """Returns the folders that match `pattern`."""
    matches = file_system().glob(str(pattern), detail=True)
    return [to_epath(name) for name, info in matches.items() if info["type"] == "directory"]


class Writer:
    """Writes objects. `leases` are the locks that this process holds, each an `object_lock.Lease`."""

    # A process that holds a lock may have been suspended, and another process, its successor, may
    # have taken over the lock. The suspended process must then write nothing, even if it wakes up
    # in the middle of `write`. So each write is conditional on the generation of the object that it
    # replaces. This process has either written this generation, or read it before it renewed its
    # locks. All writes of a successor come later, and change the generation.

    def __init__(self):
        self.leases: list = []
        # of the objects that this process has written under its locks
        self._generations: dict[str, int] = {}

    @contextlib.contextmanager
    def under(self, lease) -> Iterator[None]:
        """In the `with` block, this process writes only as long as it holds the lock `lease`."""
        self.leases.append(lease)
        try:
            yield
        finally:
            self.leases.remove(lease)
            self._generations.clear()  # now others may write these objects

    def require_locks(self) -> None:
        """Ends the process if it has lost a lock; raises if this is unknown."""
        for lease in list(self.leases):
            lease.require()

    def write(self, path: Path, content: bytes) -> None:
        """Others see either the old or the new content."""
        if not self.leases:
            file_system().pipe_file(str(path), content)
            return
        # If the condition fails but this process can still renew its locks, it writes again: the
        # other writer was a suspended predecessor, or the answer to an own write was lost.
        for _ in range(_WRITE_ATTEMPTS):
            old_generation = self._generations.pop(str(path), None)
            if old_generation is None:
                # In this order: read the generation, then make sure that the locks are still held.
                old_generation = _generation_of(path)
                for lease in list(self.leases):
                    lease.renew()
            self.require_locks()
            generation = _replace(path, content, old_generation)
            if generation:
                self._generations[str(path)] = generation
                return
        raise OSError(f"{path}: written by other processes at the same time")


writer = Writer()


def _generation_of(path: Path) -> int:
    """Returns 0 if the object does not exist."""
    bucket, name = bucket_of(path)
    blob = bucket.get_blob(name, retry=retry_policy())
    return blob.generation if blob else 0


def _replace(path: Path, content: bytes, old_generation: int) -> int | None:
    """Returns the new generation, or None if the object's generation is not `old_generation`."""
    from google.api_core.exceptions import PreconditionFailed

    bucket, name = bucket_of(path)
    blob = bucket.blob(name)
    try:
        blob.upload_from_string(content, if_generation_match=old_generation, retry=retry_policy())
    except PreconditionFailed:
        return None
    return blob.generation


def retry_policy():
    from google.cloud.storage.retry import DEFAULT_RETRY

    # Google's default repeats a request for two minutes, longer than a lease lasts.
    return DEFAULT_RETRY.with_timeout(_RETRY_SECONDS)


def download(path: Path, target: Path, files: dict[Path, RemoteFile]) -> None:
    """Copies `files`, those of `list_files(path)`, to a local path. Raises UserError for incomplete
    copies and names like ../x.
    """
    for source, file in files.items():
        copy = target / source.relative_to(path)
        if not copy.resolve().is_relative_to(target.resolve()):
            raise UserError(f"{source}: its copy would not be inside {target}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        file_system().get_file(str(source), str(copy))
        if copy.stat().st_size != file.size:
            raise UserError(f"{source}: changed while it was copied; rerun the same command")


def upload_folder(folder: Path, target: Path, last: str) -> None:
    """Writes the file `last` after all others: its readers never see a part of the folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / last]
    for path in files:
        file_system().put_file(str(path), str(target / path.relative_to(folder)))
    # `last` says that the folder is complete, so this is made sure first.
    copies = list_files(target)
    for path in files:
        copy = target / path.relative_to(folder)
        if copy not in copies or copies[copy].size != path.stat().st_size:
            raise UserError(f"{copy}: upload is incomplete; rerun the same command")
    file_system().put_file(str(folder / last), str(target / last))
