"""Keys, schema versions and boundaries: no repetition and no cut changes what is captured."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from penstock.capture import AssemblerSettings, CaptureProcess, CaptureSettings
from penstock.changes.steps import Segment, Truncation
from penstock.lsn import Lsn, is_in, reaches
from penstock.spool import SpoolReader
from penstock.spool.folder import SpoolFolder
from penstock.spool.registry import Holds
from penstock.spool.schemas import SchemaVersions
from tests.e2e.support import (
    PUBLICATION,
    insert_things,
    list_in_journal,
    wait_for,
    write_rows,
    write_transaction,
)
from tests.support.oracle import capture_until, check_same
from tests.support.replay import read_spool

PATIENT = {"publish_seconds": 2.0, "longest_publish_seconds": 60.0}
"""Nothing is cut but at the end."""


def versions_of(stream, name: str) -> dict[str, int]:
    """How many schema versions each table has in a spool."""
    spool = read_spool(stream.folder / name)
    files = SchemaVersions(SpoolFolder(stream.folder / name))
    return {versions[-1].name: len(files.names(table_id)) for table_id, versions in spool.schemas.items()}


@pytest.mark.trap(1, 12, 13)
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_tables_that_are_described_again_change_nothing(stream, streaming):
    """ANALYZE, VACUUM, CREATE INDEX, a publication that grows: between and inside of transactions."""
    stream.slot()
    stream.slot("reconnects")
    choose = random.Random(5)
    noise = [
        "analyze things",
        "vacuum (truncate false) others",
        "create index on things (writer)",
        f"alter publication {PUBLICATION} add table unpublished",
        "analyze journal",
        f"alter publication {PUBLICATION} drop table unpublished",
        "alter table things set (fillfactor = 80)",
        "create index on journal (changes)",
    ]
    options = {"work_mem": "64kB", "streaming": streaming}
    with (
        CaptureProcess(stream.settings("reconnects", **options)) as capture,
        stream.database.connect() as writer,
        stream.database.connect() as other,
    ):
        capture.wait_until_streaming()
        for statement in noise:
            write_transaction(writer, 1, choose, big=True)
            with writer.transaction():
                changes = insert_things(writer, 2, 60, 1500, choose)
                with contextlib.suppress(psycopg.errors.LockNotAvailable):
                    other.execute("set lock_timeout = '50ms'")
                    other.execute(statement)
                changes += insert_things(writer, 2, 60, 1500, choose)
                list_in_journal(writer, changes)
            other.execute("set lock_timeout = 0")
            if "publication" not in statement and "index" not in statement:
                other.execute(statement)
            walsender = stream.walsender("reconnects")
            if walsender is not None and choose.random() < 0.6:
                other.execute("select pg_terminate_backend(%s)", [walsender])
        end = stream.flushed_position()
        stream.wait_captured(capture, end)
        assert capture.restarts == 0, "a lost connection is made again by the same process"
    stream.check("reconnects")
    capture_until(stream.settings(**options, **PATIENT), end)
    calm = stream.check("one")
    check_same(calm, read_spool(stream.folder / "reconnects"), "one connection and many")
    for name in ("one", "reconnects"):
        counts = versions_of(stream, name)
        counts.pop("unpublished", None)
        assert counts == {"things": 1, "journal": 1}
    segments = [step for entry in calm.entries for step in entry.steps if isinstance(step, Segment)]
    assert len(segments) == 2, "one segment for each table: no cut because of a description"


def committed_ends(stream, slot: str) -> list[tuple[Lsn, Lsn]]:
    """Start and end of every commit record, by the server's own decoding."""
    rows = stream.database.execute(
        "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1',"
        " 'publication_names', %s)",
        [stream.database.idle_slot(slot), PUBLICATION],
    )
    commits = [bytes(data) for (data,) in rows if bytes(data)[:1] == b"C"]
    return [(Lsn(int.from_bytes(each[2:10], "big")), Lsn(int.from_bytes(each[10:18], "big"))) for each in commits]


@contextlib.contextmanager
def open_transactions(stream, count: int):
    """Transactions that only have to commit: their commit records then follow each other without a gap."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(stream.database.connect()) for _ in range(count)]
        for number, connection in enumerate(connections):
            connection.execute("begin")
            list_in_journal(connection, insert_things(connection, number, 2, 10, random.Random(number)))
        yield connections


@pytest.mark.trap(2)
def test_capture_may_begin_at_any_commit(stream):
    """Commits that start where the one before ended are neither lost nor doubled, wherever a capture begins."""
    slot = stream.slot()
    with open_transactions(stream, 10) as connections:
        for connection in connections:
            connection.execute("commit")
    end = stream.flushed_position()
    commits = committed_ends(stream, slot)
    assert len(commits) == 10
    touching = [later[0] == earlier[1] for earlier, later in itertools.pairwise(commits)]
    assert sum(touching) >= 5, "the case at hand"
    for number, (_, boundary) in enumerate(commits):
        path = stream.folder / f"from-{number}"
        capture_until(into(stream.settings(start=boundary, acknowledge=False), path), end)
        found = sorted({int(change.key.commit_lsn) for change in read_spool(path).changes})
        assert found == [start for start, _ in commits if not is_in(start, boundary)]


def into(settings: CaptureSettings, path: Path) -> CaptureSettings:
    """The same with another spool."""
    return replace(settings, spool=replace(settings.spool, path=path))


@pytest.mark.trap(2)
def test_capture_may_stop_after_any_commit(stream):
    """The same spool goes on after each commit; each follows the one before without a gap."""
    slot = stream.slot()
    with open_transactions(stream, 8) as connections:
        for connection in connections:
            connection.execute("commit")
            last = committed_ends(stream, slot)[-1][1]
            assert reaches(capture_until(stream.settings(), last), last)
    starts = [start for start, _ in committed_ends(stream, slot)]
    spool = stream.check()
    assert sorted({int(change.key.commit_lsn) for change in spool.changes}) == starts
    assert len(spool.entries) >= 8


@pytest.mark.trap(3)
def test_position_of_a_reader_is_never_inside_a_transaction(stream):
    """Entries are whole transactions, so whatever a reader advances to, a new spool goes on from there."""
    stream.slot()
    write_rows(stream, 300, 10, per_transaction=3)
    end = stream.flushed_position()
    capture_until(stream.settings(publish_seconds=0.0, longest_publish_seconds=0.0), end)
    spool = read_spool(stream.folder / "one")
    whole = spool.comparable()
    for number, entry in enumerate(spool.entries[:: max(1, len(spool.entries) // 4)]):
        path = stream.folder / f"again-{number}"
        SpoolReader(path).readers.register("reader", entry.end)
        capture_until(into(stream.settings(acknowledge=False), path), end)
        found = read_spool(path)
        assert found.entries[0].begin == entry.end
        assert found.comparable() == [row for row in whole if not is_in(row[0].commit_lsn, entry.end)]


@pytest.mark.trap(1, 32)
@pytest.mark.parametrize("work_mem", ["64kB", "64MB"])
def test_rolled_back_part_of_a_streamed_transaction_leaves_no_trace(stream, work_mem):
    """Rows and truncates of it, before and after what stays, with the ordinals that it would have had alone."""
    stream.slot()
    choose = random.Random(3)
    with stream.database.connect() as connection:
        write_rows(stream, 5, 5)
        with connection.transaction():
            changes = insert_things(connection, 1, 100, 1000, choose)
            connection.execute("savepoint outer_part")
            insert_things(connection, 1, 100, 1000, choose)
            connection.execute("truncate things, others")
            connection.execute("savepoint inner_part")
            insert_things(connection, 1, 100, 1000, choose)
            connection.execute("release inner_part")
            connection.execute("rollback to outer_part")
            changes += insert_things(connection, 1, 100, 1000, choose)
            connection.execute("insert into others values (1, 'kept')")
            connection.execute("truncate others")
            changes += 2
            list_in_journal(connection, changes)
        with connection.transaction():
            changes = insert_things(connection, 1, 3, 1000, choose)
            connection.execute("insert into others values (2, 'kept')")
            list_in_journal(connection, changes + 1)
    capture_until(stream.settings(work_mem=work_mem), stream.flushed_position())
    spool = stream.check()
    truncations = [step for entry in spool.entries for step in entry.steps if isinstance(step, Truncation)]
    assert [(step.table, step.key.ordinal) for step in truncations] == [("public.others", 201)]


@pytest.mark.trap(1, 32)
def test_truncate_that_was_streamed_and_rolled_back_leaves_no_trace(stream):
    """Seen while its sub-transaction is still running, so that the server does send it."""
    stream.slot()
    settings = stream.settings(work_mem="64kB")
    choose = random.Random(4)
    with CaptureProcess(settings) as capture, stream.database.connect() as connection:
        capture.wait_until_streaming()
        write_rows(stream, 5, 5)
        with connection.transaction():
            connection.execute("savepoint part")
            connection.execute("truncate things, others")
            insert_things(connection, 1, 400, 2000, choose)
            wait_for(lambda: list((settings.spool.path / "open").glob("*")), "a streamed run")
            connection.execute("rollback to part")
            list_in_journal(connection, insert_things(connection, 1, 100, 2000, choose))
        stream.wait_captured(capture, stream.flushed_position())
    spool = stream.check()
    assert not [step for entry in spool.entries for step in entry.steps if isinstance(step, Truncation)]


@pytest.mark.trap(32)
@pytest.mark.parametrize("work_mem", ["64kB", "64MB"])
def test_truncate_of_several_tables_stands_between_the_rows_around_it(stream, work_mem):
    """One place in the order for all of them; a cascade names the tables that it reaches."""
    stream.slot()
    stream.database.execute("alter table others add parent bigint references things")
    with stream.database.connect() as connection, connection.transaction():
        choose = random.Random(1)
        changes = insert_things(connection, 1, 80, 1000, choose)
        changes += connection.execute("insert into others select id, 'x', null from things").rowcount
        connection.execute("truncate things restart identity cascade")
        changes += 1 + insert_things(connection, 1, 80, 1000, choose)
        list_in_journal(connection, changes)
    capture_until(stream.settings(work_mem=work_mem), stream.flushed_position())
    spool = stream.check()
    truncations = [step for entry in spool.entries for step in entry.steps if isinstance(step, Truncation)]
    assert {(step.table, step.key.ordinal) for step in truncations} == {("public.things", 160), ("public.others", 160)}
    assert all(step.restart_identity for step in truncations)


@pytest.mark.trap(25, 26, 27)
@pytest.mark.parametrize("work_mem", ["64kB", "64MB"])
def test_large_value_follows_a_chain_of_key_changes(stream, work_mem):
    """1 → 2 → 3 sends "unchanged" each time; the old key is used again in the same transaction."""
    stream.slot()
    stream.database.execute("alter table others alter payload set storage external")
    large = "x" * 100_000
    with stream.database.connect() as connection:
        with connection.transaction():
            connection.execute("insert into others values (1, %s)", [large])
            list_in_journal(connection, 1)
        with connection.transaction():
            connection.execute("update others set id = 2 where id = 1")
            connection.execute("update others set id = 3 where id = 2")
            connection.execute("insert into others values (1, 'another')")
            connection.execute("delete from others where id = 1")
            connection.execute("insert into others values (1, %s)", [large + "y"])
            list_in_journal(connection, 5)
    capture_until(stream.settings(work_mem=work_mem), stream.flushed_position())
    spool = stream.check()
    updates = [change for change in spool.changes if change.table == "public.others" and change.old is not None]
    assert [(change.old[0], change.row[0]) for change in updates if change.old and change.row] == [
        ("1", "2"),
        ("2", "3"),
    ]


@pytest.mark.trap(1)
def test_messages_and_origins_have_no_ordinal(stream):
    """What is not a change does not count, whether it is asked for or not."""
    stream.slot()
    stream.slot("messages")
    origin = f"origin_{stream.database.name}"
    with stream.database.connect() as connection:
        connection.execute("select pg_replication_origin_create(%s)", [origin])
        connection.execute("select pg_replication_origin_session_setup(%s)", [origin])
        for _ in range(3):
            with connection.transaction():
                connection.execute("select pg_logical_emit_message(true, 'ours', 'before')")
                changes = insert_things(connection, 1, 3, 10, random.Random(1))
                connection.execute("select pg_logical_emit_message(true, 'ours', 'between')")
                connection.execute("select pg_logical_emit_message(true, 'theirs', 'between')")
                list_in_journal(connection, changes)
        connection.execute("select pg_logical_emit_message(false, 'ours', 'outside')")
        connection.execute("select pg_replication_origin_session_reset()")
        connection.execute("select pg_replication_origin_drop(%s)", [origin])
    end = stream.flushed_position()
    capture_until(stream.settings(), end)
    asked = AssemblerSettings(message_prefixes=frozenset({"ours"}))
    capture_until(stream.settings("messages", assembler=asked), end)
    check_same(stream.check("one"), stream.check("messages"), "without and with messages")
    messages = read_spool(stream.folder / "messages").messages
    assert [(message.key.ordinal, message.content) for message in messages] == [(0, b"before"), (3, b"between")] * 3


@pytest.mark.trap(14, 15)
def test_columns_are_known_by_their_numbers(stream):
    """Dropped and added again under the same name, and renamed: other columns, the same column."""
    stream.slot()
    with stream.database.connect() as connection:
        for change, row in (
            ("", "1, 'text'"),
            ("alter table others drop payload, add payload text", "2, 'again'"),
            ("alter table others rename payload to renamed", "3, 'renamed'"),
            ("alter table others alter renamed type int using 5", "4, 6"),
        ):
            connection.execute(change)
            connection.execute(f"insert into others values ({row})")
            # A capture that is up to date: what was dropped unseen can no longer be told from the catalog.
            capture_until(stream.settings(), stream.flushed_position())
    spool = read_spool(stream.folder / "one")
    seen = [
        [(column.name, column.attnum, column.type.name) for column in schema.columns[1:]]
        for versions in spool.schemas.values()
        for schema in versions
    ]
    assert [row[0][0] for row in seen] == ["payload", "payload", "renamed", "renamed"]
    assert [row[0][2] for row in seen] == ["text", "text", "text", "int4"]
    assert seen[1][0][1] == seen[2][0][1] == seen[3][0][1] == 3
    assert seen[0][0][1] != 3
    rows = [change.row for change in spool.changes]
    assert rows == [("1", "text"), ("2", "again"), ("3", "renamed"), ("4", "6")]


@pytest.mark.trap(12)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "rolled back"])
def test_description_inside_a_streamed_transaction_counts_for_it_alone(stream, kept):
    """A column that is added in a transaction, or in a part of it that is rolled back, while others go on."""
    stream.slot()
    settings = stream.settings(work_mem="64kB")
    rows = "select id, repeat(md5(id::text), 60) from generate_series(%s::int, %s::int) id"

    def set_aside() -> int:
        return sum(path.stat().st_size for path in (settings.spool.path / "open").glob("*.messages"))

    with CaptureProcess(settings) as capture, stream.database.connect() as connection:
        capture.wait_until_streaming()
        connection.execute("insert into others values (1, 'before')")
        with connection.transaction():
            connection.execute(f"insert into others {rows}", [1000, 1999])
            connection.execute("savepoint part")
            connection.execute("alter table others add extra int")
            connection.execute(f"insert into others select id, t, 7 from ({rows}) t (id, t)", [2000, 2999])
            write_rows(stream, 5, 5)
            wait_for(lambda: set_aside() > 2_500_000, "what was inserted after the column was added")
            if not kept:
                connection.execute("rollback to part")
            width = "id, payload, 8" if kept else "id, payload"
            connection.execute(f"insert into others select {width} from ({rows}) t (id, payload)", [3000, 3999])
        connection.execute("insert into others (id, payload) values (2, 'after')")
        stream.wait_captured(capture, stream.flushed_position())
    found = [change.row or () for change in read_spool(stream.folder / "one").changes if "others" in change.table]
    expected = [("1", 2), *((str(number), 2) for number in range(1000, 2000))]
    if kept:
        expected += [(str(number), 3) for number in range(2000, 4000)] + [("2", 3)]
    else:
        expected += [(str(number), 2) for number in range(3000, 4000)] + [("2", 2)]
    assert [(row[0], len(row)) for row in found] == expected
    if kept:
        assert {row[2] for row in found if len(row) == 3} == {"7", "8", None}


@pytest.mark.trap(14)
def test_older_description_that_comes_again_makes_no_new_version(stream):
    """A capture that begins anew in the same spool reads old descriptions again: the versions stay as they are."""
    stream.slot()
    with stream.database.connect() as connection:
        connection.execute("insert into others values (1, 'text')")
        first = stream.flushed_position()
        capture_until(stream.settings(), first)
        connection.execute("alter table others add extra int")
        connection.execute("insert into others values (2, 'text', 5)")
    end = stream.flushed_position()
    capture_until(stream.settings(), end)
    versions = SchemaVersions(SpoolFolder(stream.folder / "one"))
    [table_id] = read_spool(stream.folder / "one").schemas
    before = versions.names(table_id)
    assert len(before) == 2
    # The spool is a cache: without its log, the same WAL is read again into it.
    for path in (stream.folder / "one" / "log").iterdir():
        path.unlink()
    capture_until(stream.settings(), end)
    assert SchemaVersions(SpoolFolder(stream.folder / "one")).names(table_id) == before
    assert [len(change.row or ()) for change in read_spool(stream.folder / "one").changes] == [2, 3]


@pytest.mark.trap(31)
def test_text_of_an_old_value_is_not_that_of_a_column_with_such_a_name(stream):
    """Both have cells that no date holds, in one row."""
    stream.database.execute(
        f"""
        create table dates (day date, "_old.day" date);
        alter table dates replica identity full;
        alter publication {PUBLICATION} add table dates;
        """
    )
    stream.slot()
    stream.database.execute("insert into dates values ('-infinity', 'infinity')")
    stream.database.execute("update dates set day = '0044-03-15 BC'")
    capture_until(stream.settings(), stream.flushed_position())
    changes = read_spool(stream.folder / "one").changes
    assert [(change.row, change.old) for change in changes] == [
        (("-infinity", "infinity"), None),
        (("0044-03-15 BC", "infinity"), ("-infinity", "infinity")),
    ]


@pytest.mark.trap(17)
@pytest.mark.parametrize("via_root", [True, False], ids=["root", "leaves"])
def test_partitions_with_their_columns_in_another_order(stream, via_root):
    """As their root or as themselves; values stand in the columns whose names they have."""
    stream.database.execute(
        f"""
        create table parted (id bigint, kind int, payload text, primary key (kind, id)) partition by list (kind);
        create table leaf_one partition of parted for values in (1);
        create table leaf_two (gone int, payload text, id bigint not null, more int, kind int not null);
        alter table leaf_two drop gone, drop more;
        alter table parted attach partition leaf_two for values in (2);
        create publication parts for table parted with (publish_via_partition_root = {via_root});
        """
    )
    stream.slot()
    with stream.database.connect() as connection:
        connection.execute("insert into parted values (1, 1, 'one'), (2, 2, 'two')")
        connection.execute("update parted set payload = payload || '!'")
        connection.execute("update parted set kind = 2 where id = 1")
        connection.execute("delete from parted where id = 2")
    end = stream.flushed_position()
    capture_until(stream.settings(publication="parts"), end)
    spool = read_spool(stream.folder / "one")
    names = {versions[-1].name for versions in spool.schemas.values()}
    assert names == ({"parted"} if via_root else {"leaf_one", "leaf_two"})
    live: dict[tuple[str, ...], dict[str, str]] = {}
    for change in spool.changes:
        [schema] = spool.schemas[change.table_id]
        columns = [column.name for column in schema.columns]
        assert change.row is not None
        row = dict(zip(columns, change.row, strict=True))
        old = row if change.old is None else dict(zip(columns, change.old, strict=True))
        if change.operation is not None and change.operation.name != "INSERT":
            del live[old["kind"], old["id"]]
        if change.operation is not None and change.operation.name != "DELETE":
            live[row["kind"], row["id"]] = row
    assert live == {("2", "1"): {"id": "1", "kind": "2", "payload": "one!"}}
    attnums = {
        schema.name: {column.name: column.attnum for column in schema.columns}
        for versions in spool.schemas.values()
        for schema in versions
    }
    if not via_root:
        assert attnums["leaf_two"] == {"payload": 2, "id": 3, "kind": 5}


@pytest.mark.trap(24)
def test_every_published_table_is_spooled_from_the_first_row_of_a_transaction(stream):
    """A hold that is asked for while a streamed transaction is open finds its earlier rows too."""
    stream.slot()
    settings = stream.settings(work_mem="64kB")
    stream.reader().readers.register("follower", stream.confirmed())
    [(table_id,)] = stream.database.execute("select 'things'::regclass::oid::bigint")
    with CaptureProcess(settings) as capture, stream.database.connect() as connection:
        capture.wait_until_streaming()
        with connection.transaction():
            changes = insert_things(connection, 1, 400, 2000, random.Random(1))
            wait_for(lambda: list((settings.spool.path / "open").glob("*")), "a streamed run")
            holds = Holds(SpoolFolder(settings.spool.path))
            holds.request("lake", table_id)
            begin = holds.wait_confirmed("lake", table_id, 60)
            changes += insert_things(connection, 1, 400, 2000, random.Random(2))
            list_in_journal(connection, changes)
        end = stream.flushed_position()
        stream.wait_captured(capture, end)
        stream.reader().readers.advance("follower", end)
        write_rows(stream, 5, 5)
        stream.wait_captured(capture, stream.flushed_position())
    entries = stream.reader().entries(begin, [table_id])
    kept = [step for entry in entries for step in entry.steps if isinstance(step, Segment)]
    rows = [stream.reader().read(step) for step in kept if not is_in(step.first.commit_lsn, begin)]
    assert sum(table.num_rows for table in rows) == 805
