"""The current rows that `verify` reads from a log of changes: as applied one by one, and in bounded memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.segment import UNREPRESENTABLE
from penstock.destinations.parquet import ParquetDestination, ParquetReader, current
from penstock.schema import TableSchema
from penstock.testing.destinations import ScriptedSource, make_context
from tests.support.examples import examples
from tests.unit.changes.random_changes import KEYED, SCHEMAS, RandomTable


def begin(folder: Path, source: ScriptedSource, schema: TableSchema, rows: list[dict[str, Any]]) -> ParquetDestination:
    destination = ParquetDestination(folder / "lake")
    destination.startup(make_context())
    destination.drop_table_for_copy(schema, "attempt-1")
    destination.write_table_rows(schema, source.copy(schema, rows, ranges=2))
    return destination


def frozen(table: pa.Table) -> Counter[str]:
    """The rows of a table in any order; so are the texts of a row."""
    rows = (
        {name: sorted(cell) if name == UNREPRESENTABLE and cell else cell for name, cell in row.items()}
        for row in table.to_pylist()
    )
    return Counter(repr(sorted(row.items())) for row in rows)


@pytest.mark.trap(25, 26, 27, 29)
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.name)
def test_shares_of_the_keys_have_the_rows_that_changes_one_by_one_leave(
    schema: TableSchema, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a row moves from one share to another while large values of it are omitted."""
    monkeypatch.setattr(current, "SHARE_BYTES", 8_000)
    counts: set[int] = set()
    for seed in range(examples(4)):
        source, table = ScriptedSource(tmp_path / f"segments-{seed}"), RandomTable(schema, Random(seed))
        destination = begin(tmp_path / str(seed), source, schema, table.fill(6))
        for _ in range(5):
            table.transact(source, 12)
            assert destination.write_events(source.batch()).result().tables == {}
        expected = ParquetReader(tmp_path / str(seed) / "lake").read_table(str(schema))
        pinned = destination.pin(schema)
        assert pinned is not None
        counts.add(len(pinned.parts))
        batches = [batch for part in pinned.parts for batch in pinned.reader.read(part)]
        found = pa.Table.from_batches(batches) if batches else expected.slice(0, 0)
        assert frozen(found.select(expected.column_names)) == frozen(expected), seed
    assert max(counts) > 3, "there were several shares"


def peak_of(folder: Path, count: int) -> int:
    """Return the peak memory of Arrow while the rows of a table are read that `count` transactions have changed."""
    source = ScriptedSource(folder / "segments")
    row: dict[str, Any] = {column.name: None for column in KEYED.columns}
    destination = begin(folder, source, KEYED, [row | {"id": number} for number in range(-50, 0)])
    random = Random(count)
    for number in range(count):
        with source.transaction() as transaction:
            for each in range(100):
                # Texts that do not compress, as the limit is for the bytes of files.
                note = random.randbytes(250).hex()
                transaction.insert(KEYED, row | {"id": 100 * number + each, "note": note})
        assert destination.write_events(source.batch()).result().tables == {}
    pinned = destination.pin(KEYED)
    assert pinned is not None
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        found = sum(batch.num_rows for part in pinned.parts for batch in pinned.reader.read(part))
    finally:
        pa.set_memory_pool(before)
    assert found == 100 * count + 50
    return pool.max_memory()


def test_the_peak_is_the_same_for_a_log_of_four_times_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "SHARE_BYTES", 100_000)
    small, large = (peak_of(tmp_path / str(count), count) for count in (5, 20))
    assert large < 1.5 * small
