"""The marker of a lake: a file that names its format, shows that its disk is mounted, and proves that writing is safe.

Two writers must not both commit a version, so a store has to refuse to create an object that exists.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from penstock.destinations.delta.storage import Storage
from penstock.destinations.refusals import cannot_write, unusable
from penstock.durable import restored_folders

FORMAT = 1
MARKER = "_penstock/lake.json"


def mark(storage: Storage) -> None:
    """Create the marker of a new lake; raise if the lake cannot be written safely, or a newer version wrote it."""
    with _writable(storage):
        stored = _read_format(storage)
        content = json.dumps({"format": FORMAT if stored is None else stored}).encode()
        if stored is None:
            storage.put_if_absent(MARKER, content)
        _require_conditional_puts(storage, MARKER, content)


def probe(storage: Storage) -> None:
    """Raise what `mark` would raise, and leave nothing behind."""
    local = storage.local_path("")
    name = f"_penstock_probe-{uuid.uuid4().hex}"
    with _writable(storage), nullcontext() if local is None else restored_folders(local):
        _read_format(storage)
        try:
            storage.put_if_absent(name, b"probe")
            _require_conditional_puts(storage, name, b"probe")
        finally:
            storage.delete([name])


def _read_format(storage: Storage) -> int | None:
    """Return the format of the lake; None if it is new."""
    stored = storage.get(MARKER)
    found = None if stored is None else int(json.loads(stored)["format"])
    if found is not None and found > FORMAT:
        raise unusable(f"{storage.url} was written by a newer version (format {found})", hint="Run that version.")
    return found


def _require_conditional_puts(storage: Storage, path: str, content: bytes) -> None:
    """The object exists; a store that creates it again would let two writers commit the same version."""
    if storage.put_if_absent(path, content):
        raise unusable(
            f"{storage.url}: the store overwrites existing objects in conditional puts",
            hint="Use a store that honours conditional puts (If-None-Match: *), as S3 does.",
        )


@contextmanager
def _writable(storage: Storage) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "The folder must be writable for the user that runs Penstock, on a file system with hard links."
        raise cannot_write(storage.url, error, hint=hint) from error
