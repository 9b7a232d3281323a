"""The spool: what is published is whole, what is needed is kept, what is not needed goes."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from penstock.changes.segment import segment_layout
from penstock.changes.steps import Message, Segment, Truncation
from penstock.errors import HoldBroken, PositionGone, SpoolCorrupt, SpoolDiskFull, SpoolError, SpoolInUse
from penstock.lsn import Lsn, OrderKey
from penstock.schema import Column, PostgresType, TableSchema
from penstock.source.lineage import Ancestry, Lineage
from penstock.spool import Holds, SpoolReader, SpoolSettings, SpoolWriter, Stopping
from penstock.spool import writer as writer_module
from penstock.spool.folder import SpoolFolder, append, replace_file

LINEAGE = Lineage("7000000000000000001", 1, "postgres", "penstock")
TEXT = PostgresType(25, "text")
ONE_TRANSACTION = {"transactions": 1, "commit_times": (100, 100)}


def schema(table_id: int = 1, *names: str) -> TableSchema:
    columns = tuple(Column(name, number, TEXT) for number, name in enumerate(names or ("a", "b"), start=1))
    return TableSchema(table_id, "public", f"t{table_id}", columns)


def rows(table: TableSchema, first: int, count: int = 3, text: str = "x") -> pa.Table:
    layout = segment_layout(table)
    values = {
        "_op": [1] * count,
        "_commit_lsn": [first] * count,
        "_ordinal": range(count),
        "_commit_time": [0] * count,
        "_xid": [first] * count,
        "_unchanged": [None] * count,
    } | {column.field_name: [text] * count for column in layout.columns}
    return pa.table({name: pa.array(value, layout.arrow_schema.field(name).type) for name, value in values.items()})


def publish(writer: SpoolWriter, commit: int, *tables: TableSchema, text: str = "x") -> None:
    """One transaction that commits at `commit` and ends eight bytes later."""
    for table in tables or (schema(),):
        content = rows(table, commit, text=text)
        writer.write_rows(table, content, OrderKey(Lsn(commit), 0), OrderKey(Lsn(commit), content.num_rows - 1))
    writer.publish(Lsn(commit + 8), transactions=1, commit_times=(commit, commit))


def settings(path: Path, **changes) -> SpoolSettings:
    return SpoolSettings(**({"path": path / "spool", "min_free_bytes": 0, "position_interval": 0.0} | changes))


@pytest.fixture
def writer(tmp_path):
    writer = SpoolWriter(settings(tmp_path))
    writer.begin_at(Lsn(100), Ancestry(LINEAGE))
    yield writer
    writer.close()


@pytest.fixture
def reader(tmp_path, writer) -> SpoolReader:
    return SpoolReader(tmp_path / "spool")


def reopen(tmp_path, writer) -> SpoolWriter:
    writer.close()
    again = SpoolWriter(settings(tmp_path))
    again.begin_at(again.end, Ancestry(LINEAGE))
    return again


def test_what_is_published_can_be_read(writer, reader):
    writer.write_step(Truncation(1, "public.t1", OrderKey(Lsn(100), 0), 5, 6, cascade=True, restart_identity=False))
    writer.write_step(Message(OrderKey(Lsn(100), 1), 5, 6, "penstock", b"\x00\xff"))
    publish(writer, 100)
    publish(writer, 108, schema(2))
    first, second = reader.entries(Lsn(100))
    assert [type(step) for step in first.steps] == [Truncation, Message, Segment]
    assert first.steps[1].content == b"\x00\xff"
    assert reader.read(second.steps[0]).equals(rows(schema(2), 108))
    assert second.steps[0].memory == rows(schema(2), 108).nbytes
    assert reader.schema(second.steps[0]) == schema(2)
    assert (first.begin, first.end, second.begin, second.end) == (100, 108, 108, 116)
    assert reader.captured == Lsn(116)


def test_a_file_knows_how_many_rows_were_inserted_updated_and_deleted(writer, reader):
    table = schema()
    content = rows(table, 100, count=6)
    operations = pa.array([1, 2, 3, 2, 2, 1], content.schema.field("_op").type)
    content = content.set_column(content.schema.get_field_index("_op"), "_op", operations)
    writer.write_rows(table, content, OrderKey(Lsn(100), 0), OrderKey(Lsn(100), 5))
    writer.publish(Lsn(108), **ONE_TRANSACTION)
    (entry,) = reader.entries(Lsn(100))
    assert entry.steps[0].operations == (2, 3, 1)


def test_entries_by_position_and_table(writer, reader):
    publish(writer, 100, schema(1), schema(2))
    publish(writer, 108, schema(2))
    assert [entry.begin for entry in reader.entries(Lsn(108))] == [108]
    assert reader.entries(Lsn(116)) == []
    # A boundary inside an entry gives the entry.
    assert [entry.begin for entry in reader.entries(Lsn(107))] == [100, 108]
    tables = [[step.table_id for step in entry.steps] for entry in reader.entries(Lsn(100), tables={1})]
    assert tables == [[1], []]


def test_what_is_not_published_is_not_there(tmp_path, writer, reader):
    publish(writer, 100)
    table = schema()
    writer.write_rows(table, rows(table, 108), OrderKey(Lsn(108), 0), OrderKey(Lsn(108), 2))
    assert reader.captured == Lsn(108)
    assert len(list(SpoolFolder(tmp_path / "spool").segments.iterdir())) == 2
    again = reopen(tmp_path, writer)
    assert again.end == Lsn(108)
    assert len(list(SpoolFolder(tmp_path / "spool").segments.iterdir())) == 1
    publish(again, 108)
    assert SpoolReader(tmp_path / "spool").captured == Lsn(116)
    again.close()


@pytest.mark.parametrize("torn", [1, 20, -1])
def test_a_torn_last_line_was_never_there(tmp_path, writer, torn):
    publish(writer, 100)
    publish(writer, 108)
    (part,) = SpoolFolder(tmp_path / "spool").log_parts()
    content = part.read_bytes()
    lines = content.splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-1]) + lines[-1][:torn])
    assert SpoolReader(tmp_path / "spool").captured == Lsn(108)
    again = reopen(tmp_path, writer)
    assert again.end == Lsn(108)
    publish(again, 108)
    assert SpoolReader(tmp_path / "spool").captured == Lsn(116)
    again.close()


def test_damage_in_the_middle_is_an_error(tmp_path, writer):
    publish(writer, 100)
    publish(writer, 108)
    (part,) = SpoolFolder(tmp_path / "spool").log_parts()
    content = bytearray(part.read_bytes())
    content[30] ^= 1
    part.write_bytes(bytes(content))
    with pytest.raises(SpoolCorrupt):
        SpoolReader(tmp_path / "spool").entries(Lsn(100))


def test_a_second_writer_is_refused_and_told_who_writes(tmp_path, writer):
    import os

    with pytest.raises(SpoolInUse) as caught:
        SpoolWriter(settings(tmp_path))
    assert str(os.getpid()) in str(caught.value)


def test_positions_without_changes_move_the_end(writer, reader):
    writer.publish(Lsn(150), transactions=0, commit_times=(0, 0))
    assert reader.captured == Lsn(150)
    writer.publish(Lsn(140), transactions=0, commit_times=(0, 0))
    assert reader.captured == Lsn(150)


@pytest.mark.trap(54)
def test_a_spool_from_before_a_restart_is_filled_again(tmp_path, writer, monkeypatch):
    publish(writer, 100)
    writer.readers.register("lake", Lsn(100))
    writer.close()
    boot = tmp_path / "boot_id"
    boot.write_text("another start")
    monkeypatch.setattr(writer_module, "BOOT_ID", boot)
    again = SpoolWriter(settings(tmp_path))
    assert again.end is None
    assert again.needed_from() == Lsn(100)
    again.close()


def test_files_that_a_power_cut_has_emptied_are_made_again(tmp_path, writer, monkeypatch):
    publish(writer, 100, schema(1), schema(2))
    folder = SpoolFolder(tmp_path / "spool")
    Holds(folder).request("lake", 1)
    writer.close()
    for damaged in (*(folder.schemas / "1").iterdir(), *folder.holds.iterdir()):
        damaged.write_bytes(b"")
    boot = tmp_path / "boot_id"
    boot.write_text("another")
    monkeypatch.setattr(writer_module, "BOOT_ID", boot)
    again = SpoolWriter(settings(tmp_path))
    again.begin_at(Lsn(100), Ancestry(LINEAGE))
    again.tick()
    assert again.schemas.latest(1) is None
    assert again.schemas.latest(2) == schema(2)
    publish(again, 100, schema(1), schema(2))
    assert again.schemas.latest(1) == schema(1)
    again.close()


def test_readers_hold_back_what_they_have_not_passed(tmp_path, writer, reader):
    assert reader.readers.register("lake", Lsn(100)) == Lsn(100)
    assert reader.readers.register("search", Lsn(100)) == Lsn(100)
    publish(writer, 100)
    publish(writer, 108)
    reader.readers.advance("lake", Lsn(116))
    assert writer.tick() == Lsn(100)
    assert len(reader.entries(Lsn(100))) == 2
    assert reader.read(reader.entries(Lsn(100))[0].steps[0]).num_rows == 3
    reader.readers.advance("search", Lsn(108))
    assert writer.tick() == Lsn(108)
    assert reader.read(reader.entries(Lsn(108))[0].steps[0]).num_rows == 3
    assert len(list(SpoolFolder(tmp_path / "spool").segments.iterdir())) == 1
    with pytest.raises(PositionGone):
        reader.read(reader.entries(Lsn(100))[0].steps[0])
    # It counts while it is down, and comes back to where it was.
    assert SpoolReader(tmp_path / "spool").readers.register("search", Lsn(500)) == Lsn(108)


def test_positions_of_readers_only_grow(reader):
    reader.readers.register("lake", Lsn(200))
    reader.readers.advance("lake", Lsn(150))
    assert reader.readers.positions() == {"lake": Lsn(200)}
    reader.readers.unregister("lake")
    assert reader.readers.positions() == {}
    with pytest.raises(SpoolError, match="is not registered"):
        reader.readers.advance("lake", Lsn(300))


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 1 MB, of which a filler takes what it is told."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, *, but: int) -> Path:
    """Take all room on a disk but some bytes."""
    filler = disk / "filler"
    status = os.statvfs(disk)
    filler.write_bytes(bytes(status.f_bavail * status.f_frsize - but))
    return filler


def test_a_disk_that_fills_up_takes_all_or_nothing(tiny_disk):
    fill(tiny_disk, but=16 << 10)
    with pytest.raises(OSError, match="No space left"):
        append(tiny_disk / "file", bytes(64 << 10))


def test_a_disk_that_fills_up_inside_a_line_tears_nothing(tiny_disk):
    writer = SpoolWriter(settings(tiny_disk))
    writer.begin_at(Lsn(100), Ancestry(LINEAGE))
    writer.write_step(Message(OrderKey(Lsn(100), 0), 5, 6, "penstock", bytes(60_000)))
    filler = fill(tiny_disk, but=16 << 10)
    thread = threading.Thread(target=writer.publish, args=(Lsn(108),), kwargs=ONE_TRANSACTION)
    thread.start()
    while not writer.disk.full and thread.is_alive():
        time.sleep(0.01)
    filler.unlink()
    thread.join()
    publish(writer, 108)
    assert [entry.end for entry in SpoolReader(tiny_disk / "spool").entries(Lsn(100))] == [108, 116]
    writer.close()


def test_a_full_disk_does_not_keep_room_from_being_made(tiny_disk):
    writer = SpoolWriter(settings(tiny_disk))
    writer.begin_at(Lsn(100), Ancestry(LINEAGE))
    publish(writer, 100)
    writer.readers.register("apply", Lsn(108))
    holds = Holds(SpoolFolder(tiny_disk / "spool"))
    holds.request("lake", 2)
    fill(tiny_disk, but=0)
    assert writer.tick() == 108
    assert writer.unreleased_bytes == 0
    assert holds.confirmed("lake", 2) is None
    writer.tick()
    assert holds.confirmed("lake", 2) is not None
    writer.close()


def test_a_reader_that_meets_a_full_disk_may_try_again(tiny_disk):
    readers, holds = SpoolReader(tiny_disk / "spool").readers, Holds(SpoolFolder(tiny_disk / "spool"))
    readers.register("lake", Lsn(100))
    filler = fill(tiny_disk, but=0)
    for write in (
        lambda: readers.advance("lake", Lsn(108)),
        lambda: readers.register("other", Lsn(100)),
        lambda: holds.request("lake", 2),
    ):
        with pytest.raises(SpoolDiskFull):
            write()
    assert readers.positions() == {"lake": 100}
    filler.unlink()
    readers.advance("lake", Lsn(108))
    assert readers.positions() == {"lake": 108}


def test_a_position_that_was_put_off_goes_with_its_connection(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(writer_module, "time", SimpleNamespace(monotonic=lambda: now))
    writer = SpoolWriter(settings(tmp_path, position_interval=1.0))
    now = 10.0
    writer.begin_at(Lsn(100), Ancestry(LINEAGE))
    writer.publish(Lsn(200), transactions=0, commit_times=(0, 0))
    writer.discard_unpublished()
    now = 20.0
    writer.flush_position()
    assert writer.end == 100
    publish(writer, 108)
    assert writer.end == 116
    writer.close()


def test_a_full_spool_waits_for_its_readers(tmp_path):
    stop = threading.Event()
    writer = SpoolWriter(settings(tmp_path, max_bytes=10), stop)
    writer.begin_at(Lsn(100), Ancestry(LINEAGE))
    writer.readers.register("lake", Lsn(100))
    # One entry larger than the bound gets through, also as the newest one.
    publish(writer, 100)
    assert writer.is_full
    waiting = threading.Thread(target=writer.wait_for_room)
    waiting.start()
    writer.readers.advance("lake", Lsn(108))
    writer.tick()
    waiting.join(30)
    assert not waiting.is_alive()
    assert writer.unreleased_bytes == 0
    publish(writer, 108)
    stop.set()
    with pytest.raises(Stopping):
        writer.wait_for_room()
    writer.close()


@pytest.mark.trap(24)
def test_changes_of_a_copying_table_are_kept_longer(tmp_path, writer, reader):
    holds = Holds(SpoolFolder(tmp_path / "spool"))
    reader.readers.register("lake", Lsn(100))
    publish(writer, 100, schema(1), schema(2))
    holds.request("lake", 2)
    assert holds.confirmed("lake", 2) is None
    writer.tick()
    begin = holds.confirmed("lake", 2)
    assert begin == Lsn(100)
    publish(writer, 108, schema(1), schema(2))
    reader.readers.advance("lake", Lsn(116))
    writer.tick()
    for entry in reader.entries(begin, tables={2}):
        for step in entry.steps:
            assert reader.read(step).num_rows == 3
    kept = sorted(path.name for path in (tmp_path / "spool" / "segments").glob("*/*"))
    assert kept == ["2-1.parquet", "2-1.parquet"]
    holds.release("lake", 2)
    writer.tick()
    assert list((tmp_path / "spool" / "segments").glob("*/*")) == []


def test_a_stop_does_not_wait_for_a_hold_that_capture_does_not_confirm(tmp_path):
    holds = Holds(SpoolFolder(tmp_path / "spool"))
    (tmp_path / "spool" / "holds").mkdir(parents=True, exist_ok=True)
    holds.request("lake", 1)

    def check() -> None:
        raise Stopping

    with pytest.raises(Stopping):
        holds.wait_confirmed("lake", 1, 600, check)


@pytest.mark.trap(24)
def test_a_copy_over_its_budget_stops_alone(tmp_path):
    writer = SpoolWriter(settings(tmp_path, copy_max_bytes=6_000))
    writer.begin_at(Lsn(100), Ancestry(LINEAGE))
    holds = Holds(SpoolFolder(tmp_path / "spool"))
    writer.readers.register("lake", Lsn(100))
    holds.request("lake", 1)
    holds.request("lake", 2)
    writer.tick()
    publish(writer, 100, schema(1), text="x")
    for commit in range(108, 148, 8):
        publish(writer, commit, schema(2), text="y" * 4000)
    writer.readers.advance("lake", writer.end)
    writer.tick()
    with pytest.raises(HoldBroken):
        holds.confirmed("lake", 2)
    assert holds.confirmed("lake", 1) == Lsn(100)
    kept = sorted(path.name for path in (tmp_path / "spool" / "segments").glob("*/*"))
    assert kept == ["1-0.parquet"]
    writer.close()


def test_parts_of_the_log_go_with_their_entries(tmp_path):
    writer = SpoolWriter(settings(tmp_path, log_part_bytes=600))
    writer.begin_at(Lsn(100), Ancestry(LINEAGE))
    reader = SpoolReader(tmp_path / "spool")
    reader.readers.register("lake", Lsn(100))
    for commit in range(100, 260, 8):
        publish(writer, commit)
    assert len(reader.entries(Lsn(100))) == 20
    parts = SpoolFolder(tmp_path / "spool").log_parts()
    assert len(parts) > 3
    reader.readers.advance("lake", Lsn(228))
    writer.tick()
    left = SpoolFolder(tmp_path / "spool").log_parts()
    assert len(left) < len(parts)
    late = SpoolReader(tmp_path / "spool")
    assert [entry.begin for entry in late.entries(Lsn(228))] == list(range(228, 260, 8))
    with pytest.raises(PositionGone):
        late.entries(Lsn(100))
    again = reopen(tmp_path, writer)
    assert again.end == Lsn(260)
    again.close()


@pytest.mark.trap(14)
def test_a_schema_makes_a_version_only_when_it_changes(tmp_path, writer):
    names = writer.schemas
    first = names.version_for(schema(1, "a"), OrderKey(Lsn(100), 0))
    assert names.version_for(schema(1, "a"), OrderKey(Lsn(200), 3)) == first
    second = names.version_for(schema(1, "a", "b"), OrderKey(Lsn(300), 0))
    assert names.names(1) == [first, second]
    # Read again from an older position, the older version still holds there, and the newer one where it began.
    assert names.version_for(schema(1, "a"), OrderKey(Lsn(150), 0)) == first
    assert names.version_for(schema(1, "a", "b"), OrderKey(Lsn(300), 0)) == second
    again = reopen(tmp_path, writer)
    assert again.schemas.version_for(schema(1, "a", "b"), OrderKey(Lsn(400), 0)) == second
    again.close()


def test_records_are_plain_json_with_a_checksum(tmp_path, writer):
    publish(writer, 100)
    (part,) = SpoolFolder(tmp_path / "spool").log_parts()
    line = part.read_text().splitlines()[-1]
    record = json.loads(line.partition(" ")[2])
    assert record["begin"] == "0/64"
    assert record["steps"][0]["rows"] == 3


@pytest.mark.trap(24)
def test_a_table_that_two_readers_copy_is_kept_until_both_are_done(tmp_path, writer, reader):
    holds = Holds(SpoolFolder(tmp_path / "spool"))
    reader.readers.register("lake", Lsn(100))
    holds.request("lake", 1)
    publish(writer, 100, schema(1))
    writer.tick()
    holds.request("search", 1)
    publish(writer, 108, schema(1))
    writer.tick()
    reader.readers.advance("lake", Lsn(116))
    writer.tick()
    holds.release("search", 1)
    writer.tick()
    assert len(list((tmp_path / "spool" / "segments").glob("*/*"))) == 2
    assert holds.confirmed("lake", 1) == Lsn(100)
    holds.release("lake", 1)
    writer.tick()
    assert list((tmp_path / "spool" / "segments").glob("*/*")) == []


def test_what_a_killed_process_has_held_is_let_go(tmp_path, writer, reader):
    holds = Holds(SpoolFolder(tmp_path / "spool"))
    reader.readers.register("lake", Lsn(100))
    holds.request("lake", 1)
    holds.request("search.two", 2)
    publish(writer, 100, schema(1))
    writer.tick()
    reader.readers.advance("lake", Lsn(108))
    holds.release_all()
    writer.tick()
    assert holds.all() == []
    assert list((tmp_path / "spool" / "segments").glob("*/*")) == []


def test_a_reader_is_not_registered_before_what_is_gone(tmp_path, writer, reader):
    publish(writer, 100)
    publish(writer, 108)
    reader.readers.register("first", Lsn(100))
    reader.readers.register("second", Lsn(100))
    reader.readers.advance("first", Lsn(108))
    writer.tick()
    # Nobody has passed the first entry but one: it is all there.
    assert reader.readers.register("third", Lsn(100)) == 100
    for name in ("second", "third"):
        reader.readers.advance(name, Lsn(108))
    writer.tick()
    with pytest.raises(PositionGone, match="entries before 0/6C are deleted"):
        reader.readers.register("late", Lsn(100))
    assert reader.readers.register("late", Lsn(108)) == 108
    # Whoever is known stays where it is.
    assert reader.readers.register("late", Lsn(100)) == 108


def test_nothing_is_let_go_of_while_a_reader_is_being_registered(tmp_path, writer, reader):
    publish(writer, 100)
    reader.readers.register("first", Lsn(108))
    ticked = threading.Thread(target=writer.tick)
    with reader.readers.locked():
        ticked.start()
        ticked.join(0.3)
        assert ticked.is_alive()
        # As `register` does it.
        replace_file(SpoolFolder(tmp_path / "spool").readers / "late.json", {"position": str(Lsn(100))})
    ticked.join(10)
    assert not ticked.is_alive()
    (entry,) = [entry for entry in reader.entries(Lsn(100)) if entry.steps]
    assert all(Path(step.path).exists() for step in entry.steps)
