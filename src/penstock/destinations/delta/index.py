"""Finds rows by key: the index of a data file, and the live rows that a batch replaces.

An index tells which rows of a data file have a key, in a time that depends on the number of keys, not on the size of
the table. It is a file in `_penstock/index/` that is mapped into memory: fingerprints in ascending order, the row
number of each, and, unless keys are integers, their bytes in the same order, because fingerprints may collide.

    magic │ rows │ bytes of keys │ checksum │ boot │ fingerprints (8 each) │ rows (4 each) │ ends of keys (8) │ keys

The file is not synced, so after a power failure its content is undefined. An index written since this machine started
is complete and used without reading all of it; otherwise opening indexes would cost as much as reading the table. Any
other index must match its checksum.

An index is written with its data file, or built from that file's key columns if it is missing. It is a cache: it may be
deleted at any time and does not say which rows are live. Its name identifies its columns, so another key means another
index. In an object store it is stored there, too, and mapped from a local folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.keys import fingerprints
from penstock.destinations.delta.files import LiveFile, RecentlyUsed, dead_rows, read_keys, read_rows
from penstock.destinations.delta.layout import DELETED_AT, TableLayout
from penstock.destinations.delta.storage import LocalStorage, Storage
from penstock.destinations.delta.vectors import Vector
from penstock.destinations.refusals import unknown_row
from penstock.durable import aside
from penstock.private import cache_folder

INDEX_FOLDER = "_penstock/index"
_MAGIC = b"penstck2"
_HEAD = struct.Struct("<8sqqQ16s")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO_BOOT = bytes(16)
_MAPPED_BYTES = 128 << 20
"""Indexes that stay mapped; a table of ten million rows with an integer key has as much."""
_SPARE_COPIES = 64
_FEW = 20


@dataclass(frozen=True, slots=True)
class KeyQuery:
    """The keys to find, without duplicates, sorted by fingerprint."""

    keys: pa.Array
    numbers: NDArray[np.int64]
    """The fingerprints, ascending."""
    order: NDArray[np.int64]
    """The number of the key for each fingerprint."""

    @classmethod
    def of(cls, keys: pa.Array) -> KeyQuery:
        numbers = fingerprints(keys)
        order = np.argsort(numbers)
        return cls(keys, numbers[order], order)


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The keys of one data file."""

    row_count: int
    numbers: NDArray[np.int64]
    rows: NDArray[np.uint32]
    keys: pa.Array | None
    """The keys' bytes, in the same order; None if the numbers are the keys, or if the bytes were not kept."""
    bytes: int
    """Size of the file."""

    def find(self, query: KeyQuery) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return key number and row number of all rows that have one of the keys. Without bytes, some may not match."""
        first = stop = 0
        if self.row_count:
            first = int(np.searchsorted(query.numbers, self.numbers[0]))
            stop = int(np.searchsorted(query.numbers, self.numbers[-1], "right"))
        wanted = query.numbers[first:stop]
        if not len(wanted):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        if len(wanted) <= self.row_count:
            asked, places = _join(wanted, self.numbers)
        else:
            places, asked = _join(self.numbers, wanted)
        found = query.order[first + asked]
        if self.keys is not None and len(places):
            same = pc.equal(self.keys.take(pa.array(places)), query.keys.take(pa.array(found))).to_numpy(
                zero_copy_only=False
            )
            places, found = places[same], found[same]
        return found, self.rows[places].astype(np.int64)


def build_index(keys: pa.Array, *, keep_keys: bool = True) -> bytearray:
    """Return the content of an index. Without `keep_keys` the caller must compare the rows that it finds."""
    numbers = fingerprints(keys)
    order = np.argsort(numbers, kind="stable")
    count = len(numbers)
    rows_at = _HEAD.size + 8 * count
    end = rows_at + 4 * count
    sections: list[memoryview] = []
    if keep_keys and not pa.types.is_integer(keys.type):
        _, ends, content = keys.take(pa.array(order)).buffers()
        # Row numbers have four bytes; the next section starts at a multiple of eight.
        end += -end % 8
        sections = [memoryview(ends).cast("B")[: 8 * (count + 1)], memoryview(content or b"").cast("B")]
    key_bytes = len(sections[-1]) if sections else 0
    # Filled in place: of millions of rows, each copy would take as much memory as the keys.
    index = bytearray(end + sum(map(len, sections)))
    np.take(numbers, order, out=np.frombuffer(index, np.int64, count, _HEAD.size))
    np.frombuffer(index, np.uint32, count, rows_at)[:] = order
    for section in sections:
        index[end : end + len(section)] = section
        end += len(section)
    _HEAD.pack_into(index, 0, _MAGIC, count, key_bytes, zlib.crc32(memoryview(index)[_HEAD.size :]), _boot())
    return index


@dataclass(frozen=True, slots=True)
class IndexFolder:
    """The indexes of a table, for one set of key columns."""

    storage: Storage
    digest: str

    @classmethod
    def of(cls, storage: Storage, columns: Sequence[pa.Field], *, whole: bool = False) -> IndexFolder:
        """Return the folder for keys built from these columns; `whole` as in `row_keys`."""
        text = "\n".join(f"{field.name}\t{field.type}" for field in columns) + ("\nwhole" if whole else "")
        return cls(storage, hashlib.sha256(text.encode()).hexdigest()[:8])

    def path(self, file: str) -> str:
        """Return the path of a data file's index, below the table's folder."""
        return f"{INDEX_FOLDER}/{file}.{self.digest}"

    def write(self, file: str, content: bytes | bytearray) -> None:
        """Store an index; if several tasks do so at the same time, any of them may win."""
        path = self.path(file)
        if self.storage.local_path(path) is None:
            self.storage.put(path, bytes(content))
        self._keep(content, self._mapped(path))

    def open(self, file: str, build: Callable[[], bytes | bytearray]) -> KeyIndex:
        """Return the index of a data file, created by `build` if it does not exist."""
        path = self.path(file)
        mapped = self._mapped(path)
        try:
            return _map_index(str(mapped))
        except (FileNotFoundError, ValueError):
            pass
        content = None if self.storage.local_path(path) is not None else self.storage.get(path)
        if content is not None:
            self._keep(content, mapped)
            with contextlib.suppress(ValueError):
                return _map_index(str(mapped))
        self.write(file, build())
        return _map_index(str(mapped))

    def tidy(self, files: Collection[str]) -> None:
        """Delete this machine's copies of indexes in an object store, except those of these data files."""
        if self.storage.local_path("") is not None:
            return
        folder = self._mapped(INDEX_FOLDER)
        there = os.listdir(folder) if folder.is_dir() else []
        if len(there) > 2 * len(files) + _SPARE_COPIES:
            wanted = {os.path.basename(self.path(file)) for file in files}
            for name in there:
                if name not in wanted:
                    (folder / name).unlink(missing_ok=True)

    def _mapped(self, path: str) -> Path:
        """Return the path from which an index is mapped."""
        local = self.storage.local_path(path)
        if local is not None:
            return local
        place = hashlib.sha256(self.storage.url.encode()).hexdigest()[:16]
        return cache_folder() / place / path

    def _keep(self, content: bytes | bytearray, mapped: Path) -> None:
        if isinstance(self.storage, LocalStorage):
            self.storage.make_folder(mapped.parent)
        else:
            mapped.parent.mkdir(parents=True, exist_ok=True)
        with aside(mapped) as temporary:
            temporary.write_bytes(content)
            os.replace(temporary, mapped)


def _map_index(path: str) -> KeyIndex:
    """Map an index into memory; the same file always has the same content. Raise `ValueError` if it is not an index."""
    known = _indexes.get((path,))
    if known is None:
        known = _read_index(path)
        _indexes.put((path,), known)
    return known


def _read_index(path: str) -> KeyIndex:
    size = os.stat(path).st_size
    if size < _HEAD.size:
        raise ValueError("not an index")
    # The mapping stays valid when the file is closed, so that many indexes do not need as many open files.
    with pa.memory_map(path) as file:
        content = file.read_buffer()
    magic, count, key_bytes, checksum, boot = _HEAD.unpack_from(content)
    rows_at = _HEAD.size + 8 * count
    keys_at = rows_at + 4 * count
    keys_at += -keys_at % 8
    with_keys = size > rows_at + 4 * count
    if magic != _MAGIC or size != (keys_at + 8 * (count + 1) + key_bytes if with_keys else rows_at + 4 * count):
        raise ValueError("not an index")
    is_whole = boot == _boot() != _NO_BOOT
    if not is_whole and zlib.crc32(content.slice(_HEAD.size)) != checksum:
        raise ValueError("the index is damaged")
    numbers = np.frombuffer(content, np.int64, count, _HEAD.size)
    rows = np.frombuffer(content, np.uint32, count, rows_at)
    if not with_keys:
        return KeyIndex(count, numbers, rows, None, size)
    buffers = [None, content.slice(keys_at, 8 * (count + 1)), content.slice(keys_at + 8 * (count + 1), key_bytes)]
    return KeyIndex(count, numbers, rows, pa.Array.from_buffers(pa.large_binary(), count, buffers), size)


_indexes = RecentlyUsed[KeyIndex](_MAPPED_BYTES, lambda index: index.bytes)


def unmap_indexes() -> None:
    """Unmap all indexes; the next search maps those that it needs again."""
    _indexes.clear()


@cache
def _boot() -> bytes:
    """Identify the current boot of this machine; `_NO_BOOT` if the system does not reveal it."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return _NO_BOOT


def _join(few: NDArray[np.int64], many: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return all pairs of positions with equal numbers in two ascending arrays."""
    low = np.searchsorted(many, few)
    hit = np.flatnonzero(many[np.minimum(low, len(many) - 1)] == few)
    low = low[hit]
    behind = low + 1
    if not (many[np.minimum(behind, len(many) - 1)] == few[hit])[behind < len(many)].any():
        return hit, low
    # Some numbers occur more than once.
    counts = np.searchsorted(many, few[hit], "right") - low
    inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(hit, counts), np.repeat(low, counts) + inside


@dataclass(frozen=True, slots=True)
class FileMatch:
    """The live rows of one file that have one of the keys."""

    file: LiveFile
    row_count: int
    """Number of rows in the whole file."""
    dead: Vector
    """The rows that were already dead."""
    keys: NDArray[np.int64]
    """The number of each row's key."""
    rows: NDArray[np.int64]


def find_rows(
    storage: Storage,
    layout: TableLayout,
    files: Sequence[LiveFile],
    keys: pa.Array,
    limits: NDArray[np.int64] | None = None,
    dead_by_path: Mapping[str, Vector] | None = None,
) -> list[FileMatch]:
    """Return the live rows of keys. With `limits`, return only that many of each, and raise if there are fewer.

    `dead_by_path` has the dead rows of files that have lost more rows than the log says.
    """
    columns = layout.match_columns
    if not columns or not len(keys):
        return []
    folder = index_folder(storage, layout)
    query = KeyQuery.of(keys)
    left = None if limits is None else limits.copy()
    found: list[FileMatch] = []
    for file in files:
        index = _open(storage, layout, folder, file.file)
        codes, rows = index.find(query)
        if not len(rows):
            continue
        dead = (dead_by_path or {}).get(file.path)
        dead = dead_rows(storage, file) if dead is None else dead
        alive = _alive(rows, dead, index.row_count)
        codes, rows = codes[alive], rows[alive]
        if left is not None and len(rows):
            same = _are_same(storage, layout, file.file, keys, codes, rows)
            codes, rows = _limit(codes[same], rows[same], left)
        if len(rows):
            found.append(FileMatch(file, index.row_count, dead, codes, rows))
    if left is not None and left.any():
        raise unknown_row(str(layout.source), f"{int(left.sum())} changed or deleted rows do not exist")
    return found


def index_folder(storage: Storage, layout: TableLayout) -> IndexFolder:
    """Return the folder of a table's indexes."""
    columns = [layout.schema.field(name) for name in layout.match_columns]
    return IndexFolder.of(storage, columns, whole=not layout.key)


def prepare_index(storage: Storage, layout: TableLayout, file: str) -> None:
    """Create the index of a file before a batch needs it."""
    if layout.key and layout.match_columns:
        _open(storage, layout, index_folder(storage, layout), file)


def _open(storage: Storage, layout: TableLayout, folder: IndexFolder, file: str) -> KeyIndex:
    def build() -> bytearray:
        return build_index(read_keys(storage, file, layout), keep_keys=bool(layout.key))

    return folder.open(file, build)


def _alive(rows: NDArray[np.int64], dead: Vector, row_count: int) -> NDArray[np.bool_]:
    if not len(dead):
        return np.ones(len(rows), np.bool_)
    if len(dead) < _FEW * len(rows):
        return dead.alive(row_count)[rows]
    # Few rows of a file with many dead ones: do not check all of these.
    return np.isin(rows, Vector.of(rows).difference(dead).rows().astype(np.int64))


def _are_same(
    storage: Storage,
    layout: TableLayout,
    file: str,
    keys: pa.Array,
    codes: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return which rows really match and are not soft-deleted."""
    numbers, places = np.unique(rows, return_inverse=True)
    there = read_keys(storage, file, layout, numbers)
    same = pc.equal(there.take(pa.array(places)), keys.take(pa.array(codes))).to_numpy(zero_copy_only=False)
    if DELETED_AT in layout.schema.names and DELETED_AT not in layout.columns:
        deleted = read_rows(storage, file, layout.schema, [DELETED_AT], numbers).column(0)
        same = same & deleted.is_null().to_numpy()[places]
    return same


def _limit(
    codes: NDArray[np.int64], rows: NDArray[np.int64], left: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return as many rows of each key as remain to be found, and reduce that number."""
    order = np.argsort(codes, kind="stable")
    codes, rows = codes[order], rows[order]
    starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1])) if len(codes) else np.zeros(0, np.int64)
    ranks = np.arange(len(codes)) - np.repeat(starts, np.diff(np.append(starts, len(codes))))
    keep = ranks < left[codes]
    np.subtract.at(left, codes[keep], 1)
    return codes[keep], rows[keep]
