"""When finished ranges of a copy still count: not after anything that moves rows, or that hides a change."""

from __future__ import annotations

import pytest

from penstock.copy import prepare_copy
from penstock.copy.resume import KEYS_AT_ONCE, ResumableCopy, Resuming, key_ranges
from tests.integration.copy.conftest import PUBLICATION, SMALL_RANGES, Source

HARMLESS = [
    "update t set note = note || '.'; delete from t where id < 100; insert into t select 0, 'x'",
    "vacuum t",
    "analyze t",
    "create table more (id int primary key); alter publication pub add table more",
]
HARMFUL = {
    "truncate": ["truncate t"],
    "rewrite": ["vacuum full t"],
    "column": ["alter table t add more int"],
    "column and back": ["alter table t rename note to other", "alter table t rename other to note"],
    "publication": ["alter publication pub drop table t", "alter publication pub add table t where (id > 0)"],
    "filter and back": [
        "alter publication pub set table t where (id > 5)",
        "alter publication pub set table t where (id > 0)",
    ],
    "operations and back": [
        "alter publication pub set (publish = 'insert')",
        "alter publication pub set (publish = 'insert, update, delete, truncate')",
    ],
    "schema and back": ["create schema away; alter table t set schema away", "alter table away.t set schema public"],
    "identity and back": ["alter table t replica identity nothing", "alter table t replica identity default"],
}
"""What people do; the statements are committed one after the other."""


def resumable(source: Source, table: str = "t") -> ResumableCopy | None:
    resuming = Resuming("copy", lambda _schema, _position: ())
    rows = prepare_copy(
        source.snapshot(), source.settings, PUBLICATION, source.oid(table), settings=SMALL_RANGES, resuming=resuming
    )
    return rows.resumable


def fingerprint(source: Source, table: str = "t") -> str:
    found = resumable(source, table)
    source.close()
    assert found is not None
    return found.fingerprint


def test_ranges_count_until_rows_could_move_or_change_unnoticed(source: Source):
    source.execute("create table t (id int primary key, note text)")
    source.execute("insert into t select i, repeat('n', 100) from generate_series(1, 1000) i")
    source.execute("create publication pub for table t where (id > 0)")
    known = fingerprint(source)
    for statement in HARMLESS:
        source.execute(statement)
        assert fingerprint(source) == known, statement
    seen = {known}
    for kind, statements in HARMFUL.items():
        for statement in statements:
            source.execute(statement)
        found = fingerprint(source)
        assert found not in seen, kind
        seen.add(found)
    source.execute("alter publication pub set (publish = 'insert, delete')")
    assert resumable(source) is None


def test_ranges_count_until_partitions_change(source: Source):
    source.execute(
        """
        create table p (id int primary key) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        create table p2 partition of p for values from (10) to (20);
        create publication pub for table p with (publish_via_partition_root);
        insert into p select generate_series(0, 18)
        """
    )
    seen = [fingerprint(source, "p")]
    source.execute("update p set id = 19 where id = 3; delete from p where id = 4")
    assert fingerprint(source, "p") == seen[0]
    for statements in (
        ["alter table p detach partition p2", "alter table p attach partition p2 for values from (10) to (20)"],
        ["truncate only p1"],
        ["create table p3 partition of p for values from (20) to (30)"],
    ):
        for statement in statements:
            source.execute(statement)
        seen.append(fingerprint(source, "p"))
        assert len(set(seen)) == len(seen), statements


@pytest.mark.parametrize("name", ["id", 'the "key"'])
def test_rows_are_read_again_by_their_keys(source: Source, name: str):
    quoted = name.replace('"', '""')
    source.execute(f'create table t ("{quoted}" text collate "C", part int, primary key ("{quoted}", part))')
    source.execute(r"insert into t select repeat('\', i % 3) || '''' || i, i % 7 from generate_series(1, 30000) i")
    source.execute("create publication pub for table t")
    wanted = source.execute(f"select * from t order by 1, 2 limit {KEYS_AT_ONCE + 1}")
    resuming = Resuming("copy", lambda _schema, _position: ())
    rows = prepare_copy(source.snapshot(), source.settings, PUBLICATION, source.oid("t"), resuming=resuming)
    assert rows.resumable is not None
    texts = [[*(row[0] for row in wanted), "absent"], [*(str(row[1]) for row in wanted), "1"]]
    parts = list(key_ranges(rows.resumable.leaves, rows.schema.key, texts))
    found = [row for part in parts for batch in rows.reader.read(part) for row in batch.to_pylist()]
    assert len(parts) == 2
    assert sorted((row[name], row["part"]) for row in found) == sorted(tuple(row) for row in wanted)
