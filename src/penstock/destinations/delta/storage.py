"""Storage for tables: a folder, or an object store (`s3://bucket/lake`), behind one small interface.

Two guarantees make a commit safe. `put_if_absent` creates a file with its whole content for one caller only. And a
write is durable when it returns: a folder syncs the file and the names above it, and an object store answers when it
has stored the object.

    lake = open_storage("s3://lake", {"aws_endpoint": "…"})
    table = lake.child("public/orders")
    table.put_if_absent("_delta_log/00000000000000000000.json", content)

Paths are relative to the storage, with slashes. Storages pickle: tasks open their own files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol, cast

import obstore
import obstore.exceptions as store_errors
import pyarrow as pa
from obstore.store import from_url

from penstock.changes.segment_files import RangedFile
from penstock.destinations.refusals import out_of_reach, require_mounted, unusable
from penstock.durable import aside, sync_folder, write_synced

_LOCAL_SCHEME = "file://"
_RETRY_SECONDS = 20.0
_ENDPOINTS = ("endpoint", "endpoint_url")
_NOT_FOUND = (FileNotFoundError, store_errors.NotFoundError)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a listing."""

    path: str
    bytes: int
    modified: float
    """Seconds since the epoch, by the clock of the store."""


class Storage(Protocol):
    """A place for files."""

    @property
    def url(self) -> str:
        """The location, as other libraries take it."""
        ...

    @property
    def options(self) -> Mapping[str, str]:
        """Options that other libraries need to open the location; may contain secrets."""
        ...

    def child(self, path: str) -> Storage:
        """Return the storage of a folder below."""
        ...

    def get(self, path: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        ...

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        """Return a part of a file, or None if it does not exist."""
        ...

    def put(self, path: str, content: bytes) -> None:
        """Write a file, durably, whether or not it exists."""
        ...

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Create a file with its whole content, durably; return False, and change nothing, if it exists."""
        ...

    def create(self, path: str) -> Any:
        """Context manager: a binary file to write to, durable after the block, absent if the block fails."""
        ...

    def open(self, path: str) -> Any:
        """Return a seekable file for pyarrow; raise `FileNotFoundError` if it does not exist."""
        ...

    def list(self, folder: str = "", *, after: str = "") -> Iterator[StoredFile]:
        """Yield all files below a folder, in no order; with `after`, only those whose path sorts after it."""
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Delete files; missing ones are ignored."""
        ...

    def local_path(self, path: str) -> Path | None:
        """Return the path of a file on this machine; None in an object store."""
        ...


def open_storage(path: str | Path, options: Mapping[str, str] | None = None) -> Storage:
    """Return the storage of a path or URL. Options are those of the object store, as `obstore` names them.

    What they leave out comes from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `AWS_REGION` …).
    """
    text = str(path)
    if text.startswith(_LOCAL_SCHEME):
        text = text.removeprefix(_LOCAL_SCHEME)
    if "://" not in text:
        if options:
            raise unusable(
                "storage options cannot be used with a folder", hint="Remove them, or use a URL like s3://bucket/lake."
            )
        return LocalStorage(Path(text).absolute())
    return ObjectStorage(text.rstrip("/"), dict(options or {}))


@dataclass(frozen=True)
class LocalStorage:
    """A folder that the driver and all tasks see, on a file system with hard links."""

    root: Path
    marker: Path | None = None
    """A file without which no folder is created: if it is missing, the disk is not mounted, and files written to the
    mount point would be lost."""

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def options(self) -> Mapping[str, str]:
        return {}

    def child(self, path: str) -> LocalStorage:
        return LocalStorage(self.root / path, self.marker)

    def get(self, path: str) -> bytes | None:
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        try:
            with (self.root / path).open("rb") as file:
                return os.pread(file.fileno(), length, offset)
        except FileNotFoundError:
            return None

    def put(self, path: str, content: bytes) -> None:
        target = self.root / path
        self.make_folder(target.parent)
        with aside(target) as temporary:
            write_synced(temporary, content)
            os.replace(temporary, target)
        sync_folder(target.parent)

    def put_if_absent(self, path: str, content: bytes) -> bool:
        target = self.root / path
        self.make_folder(target.parent)
        with aside(target) as temporary:
            write_synced(temporary, content)
            # A link appears with the whole content or not at all, and only one writer can create it.
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
        sync_folder(target.parent)
        return True

    @contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        target = self.root / path
        self.make_folder(target.parent)
        try:
            with target.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)

    def open(self, path: str) -> pa.NativeFile:
        return pa.memory_map(str(self.root / path))

    def list(self, folder: str = "", *, after: str = "") -> Iterator[StoredFile]:
        top = self.root / folder
        for parent, _, names in os.walk(top):
            for name in names:
                full = os.path.join(parent, name)
                path = os.path.relpath(full, self.root)
                if path <= after:
                    continue
                try:
                    status = os.stat(full)
                except FileNotFoundError:
                    continue
                yield StoredFile(path, status.st_size, status.st_mtime)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            (self.root / path).unlink(missing_ok=True)

    def local_path(self, path: str) -> Path | None:
        return self.root / path

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents, durably; raise `DestinationUnavailable` if the disk is not mounted."""
        if path.is_dir():
            return
        require_mounted(self.marker)
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_folder(each.parent)


@dataclass(frozen=True)
class ObjectStorage:
    """An object store with conditional puts."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    retry_seconds: float = _RETRY_SECONDS
    """How long a request is retried before it fails."""

    def child(self, path: str) -> ObjectStorage:
        return ObjectStorage(f"{self.url}/{path}", self.options, self.retry_seconds)

    def get(self, path: str) -> bytes | None:
        with self._reachable():
            try:
                return obstore.get(self._store, path).bytes().to_bytes()
            except _NOT_FOUND:
                return None

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        with self._reachable():
            try:
                return obstore.get_range(self._store, path, start=offset, length=length).to_bytes()
            except _NOT_FOUND:
                return None

    def put(self, path: str, content: bytes) -> None:
        with self._reachable():
            obstore.put(self._store, path, content)

    def put_if_absent(self, path: str, content: bytes) -> bool:
        with self._reachable():
            try:
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
            except (store_errors.AlreadyExistsError, store_errors.PreconditionError):
                return False
            return True

    @contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        # An object appears when it is complete; files are small enough to fit into memory.
        sink = pa.BufferOutputStream()
        yield cast("IO[bytes]", sink)
        with self._reachable():
            obstore.put(self._store, path, memoryview(sink.getvalue()).cast("B"))

    def open(self, path: str) -> Any:
        with self._reachable():
            try:
                size = obstore.head(self._store, path)["size"]
            except _NOT_FOUND:
                size = None
        if size is None:
            raise FileNotFoundError(path)

        def read_range(offset: int, length: int) -> bytes:
            content = self.get_range(path, offset, length)
            if content is None:
                raise FileNotFoundError(path)
            return content

        return pa.PythonFile(RangedFile(read_range, size), mode="r")

    def list(self, folder: str = "", *, after: str = "") -> Iterator[StoredFile]:
        with self._reachable():
            for chunk in obstore.list(self._store, prefix=folder or None, offset=after or None):
                for found in chunk:
                    yield StoredFile(found["path"], found["size"], found["last_modified"].timestamp())

    def delete(self, paths: Sequence[str]) -> None:
        with self._reachable():
            for path in paths:
                try:
                    obstore.delete(self._store, path)
                except _NOT_FOUND:
                    continue

    def local_path(self, path: str) -> Path | None:
        return None

    @cached_property
    def _store(self) -> Any:
        options = dict(self.options)
        client: dict[str, Any] = {}
        allowed = options.pop("allow_http", options.pop("aws_allow_http", os.environ.get("AWS_ALLOW_HTTP", "")))
        if allowed.lower() == "true":
            client["allow_http"] = True
        elif any(name.endswith(_ENDPOINTS) and value.startswith("http://") for name, value in options.items()):
            raise unusable(
                f"{self.url}: the endpoint has no TLS (http://)",
                hint='On a network that you trust, set aws_allow_http = "true" in storage_options; else use https.',
            )
        try:
            return from_url(
                self.url,
                config=cast("Any", options),
                client_options=cast("Any", client) or None,
                retry_config={"retry_timeout": timedelta(seconds=self.retry_seconds)},
            )
        except (store_errors.BaseError, ValueError) as error:
            raise unusable(
                f"{self.url} cannot be opened: {type(error).__name__}",
                hint="Use a path, or a URL like s3://bucket/lake with the options that the store needs.",
            ) from error

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (store_errors.PermissionDeniedError, store_errors.UnauthenticatedError) as error:
            raise unusable(
                f"{self.url}: access denied ({type(error).__name__})",
                hint="Check the credentials, and that they may read, write, list and delete below this URL.",
            ) from error
        except _NOT_FOUND as error:
            raise unusable(f"{self.url}: the bucket does not exist", hint="Create it, or check its name.") from error
        except (store_errors.NotSupportedError, NotImplementedError) as error:
            raise unusable(
                f"{self.url}: the store cannot create an object only if it is absent",
                hint="Use a store that supports conditional puts, such as S3.",
            ) from error
        except store_errors.BaseError as error:
            raise out_of_reach(self.url, type(error).__name__) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "options": self.options, "retry_seconds": self.retry_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
