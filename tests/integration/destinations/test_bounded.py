"""Destinations that keep or pass on every change: their memory does not depend on the size of a transaction."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.batch import EventBatch
from penstock.destinations.base import Destination
from penstock.destinations.http import bodies
from penstock.destinations.http.bodies import BodyFormat, changes_body
from penstock.destinations.parquet import ParquetDestination, ParquetReader, tasks
from penstock.destinations.stdout import StdoutDestination
from penstock.testing.destinations import ScriptedCopy, ScriptedSource, make_context
from tests.unit.changes.random_changes import KEYED


class _Counting(io.TextIOBase):
    """Counts lines and forgets them."""

    lines = 0

    def write(self, text: str) -> int:
        self.lines += text.count("\n")
        return len(text)


def _write(destination: Destination, copy: ScriptedCopy, batch: EventBatch) -> None:
    destination.startup(make_context())
    destination.drop_table_for_copy(KEYED, "attempt-1")
    destination.write_table_rows(KEYED, copy)
    assert destination.write_events(batch).result().tables == {}


def _parquet(folder: Path, copy: ScriptedCopy, batch: EventBatch) -> int:
    _write(ParquetDestination(folder / "lake"), copy, batch)
    return sum(
        file.rows for manifest in ParquetReader(folder / "lake").manifests(str(KEYED)) for file in manifest.files
    )


def _stdout(folder: Path, copy: ScriptedCopy, batch: EventBatch) -> int:
    stream = _Counting()
    _write(StdoutDestination(stream), copy, batch)  # pyright: ignore[reportArgumentType]
    return stream.lines - 2  # begin and commit


def _http(format_: BodyFormat) -> Callable[[Path, ScriptedCopy, EventBatch], int]:
    def write(folder: Path, copy: ScriptedCopy, batch: EventBatch) -> int:
        [table] = batch.tables
        with changes_body(format_, batch, table) as body:
            body.seek(0)
            if format_ is BodyFormat.NDJSON:
                return sum(b'"op":"insert"' in line for line in body)
            count = 0
            while body.tell() < table_bytes(body):
                with pa.ipc.open_stream(pa.PythonFile(_NotClosed(body), "r")) as reader:
                    count += sum(each.num_rows for each in reader)
            return count

    return write


class _NotClosed(io.RawIOBase):
    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


def table_bytes(body: Any) -> int:
    at = body.tell()
    size = body.seek(0, 2)
    body.seek(at)
    return size


WRITERS = {
    "parquet": _parquet,
    "stdout": _stdout,
    "http-arrow": _http(BodyFormat.ARROW),
    "http-ndjson": _http(BodyFormat.NDJSON),
}


def peak_of(folder: Path, name: str, count: int) -> int:
    """Return the peak memory, of Arrow and of Python, when one transaction inserts `count` rows."""
    folder.mkdir()
    source = ScriptedSource(folder / "segments", segment_rows=200)
    copy = source.copy(KEYED, [])
    row: dict[str, Any] = {column.name: None for column in KEYED.columns}
    with source.transaction() as transaction:
        for number in range(count):
            transaction.insert(KEYED, row | {"id": number, "note": "n" * 1000})
    batch, before = source.batch(), pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        assert WRITERS[name](folder, copy, batch) == count
        return pool.max_memory() + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


@pytest.mark.parametrize("name", list(WRITERS))
def test_the_peak_is_the_same_for_four_times_the_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_GROUP_BYTES", 400_000)
    monkeypatch.setattr(bodies, "_IN_MEMORY", 100_000)
    peak_of(tmp_path / "first", name, 200)  # caches and imports
    small, large = (peak_of(tmp_path / str(count), name, count) for count in (1_000, 4_000))
    assert large < 1.5 * small
