"""The log: what it says, who gets the next version, and what a writer learns that does not."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.json import read_json

from penstock.destinations.delta import log as log_module
from penstock.destinations.delta.actions import (
    Action,
    CommitInfo,
    Protocol,
    from_json,
    serialize_commit,
    to_json,
)
from penstock.destinations.delta.files import now_milliseconds, write_data_file
from penstock.destinations.delta.log import Committed, DeltaLog, Lost
from penstock.destinations.delta.maintenance.cleanup import write_checkpoint
from penstock.destinations.delta.snapshot import Application, Verdict
from penstock.destinations.delta.storage import LocalStorage
from penstock.errors import DestinationUnavailable, TableRejected
from tests.unit.destinations.delta.lake import LakeTable, make_rows


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "items")


@pytest.fixture
def table(storage: LocalStorage) -> LakeTable:
    table = LakeTable(storage)
    table.create(range(100))
    return table


def test_there_is_no_table_before_its_first_commit(storage: LocalStorage) -> None:
    assert DeltaLog(storage).refresh() is None


def test_a_snapshot_has_files_positions_and_properties(table: LakeTable) -> None:
    table.append(range(100, 150))
    table.delete([5, 120])
    snapshot = table.snapshot
    assert snapshot.version == 2
    assert snapshot.owner == "lake"
    assert snapshot.position(table.application) == 20
    assert snapshot.row_count == 148
    assert table.ids() == [each for each in range(150) if each not in (5, 120)]


def test_a_fresh_reader_sees_what_the_writer_sees(table: LakeTable) -> None:
    table.append(range(100, 150))
    table.delete([5, 120])
    fresh = DeltaLog(table.storage)
    assert fresh.refresh() == table.log.snapshot
    table.delete([6])
    assert fresh.refresh() == table.log.snapshot
    assert fresh.read_removals() == table.log.read_removals()


def test_old_versions_can_be_read(table: LakeTable) -> None:
    for number in range(3):
        table.append([200 + number])
    table.delete([200])
    assert table.ids(table.log.read_at(2)) == [*range(100), 200, 201]
    with pytest.raises(TableRejected, match="version 9"):
        table.log.read_at(9)


@pytest.mark.parametrize("kind", ["one file", "parts", "second version", "second version in JSON"])
def test_all_kinds_of_checkpoints_are_read(table: LakeTable, kind: str) -> None:
    for number in range(4):
        table.append([200 + number])
    table.delete([3, 201])
    before = table.snapshot
    removals = table.log.read_removals()
    assert removals is not None
    assert removals[1]
    deltalake.DeltaTable(table.storage.url).create_checkpoint()
    _rewrite_checkpoint(table.storage.root / "_delta_log", before.version, kind)
    for version in range(before.version + 1):
        (table.storage.root / f"_delta_log/{version:020d}.json").unlink()
    fresh = DeltaLog(table.storage)
    assert fresh.refresh() == before
    assert fresh.read_removals() == removals
    table.append([300])
    assert fresh.refresh() == table.snapshot


def _rewrite_checkpoint(folder: Path, version: int, kind: str) -> None:
    """Write the checkpoint that delta-rs wrote in another way that the protocol has."""
    [single] = folder.glob("*.checkpoint.parquet")
    whole = pq.read_table(single)
    name = "80a083e8-7026-4e79-81be-64bd76c43a11"
    files = whole.filter(pa.compute.or_(whole["add"].is_valid(), whole["remove"].is_valid()))
    rest = whole.filter(pa.compute.and_(whole["add"].is_null(), whole["remove"].is_null()))
    match kind:
        case "parts":
            for number, part in enumerate((files, rest), 1):
                pq.write_table(part, folder / f"{version:020d}.checkpoint.{number:010d}.{2:010d}.parquet")
        case "second version":
            pq.write_table(_sidecar(folder, files, rest), folder / f"{version:020d}.checkpoint.{name}.parquet")
        case "second version in JSON":
            lines = [to_json(action) for action in _actions_of(rest)]
            lines.append({"sidecar": {"path": _write_sidecar(folder, files), "sizeInBytes": 1, "modificationTime": 1}})
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (folder / f"{version:020d}.checkpoint.{name}.json").write_text(text)
        case _:
            return
    single.unlink()


def _write_sidecar(folder: Path, files: pa.Table) -> str:
    (folder / "_sidecars").mkdir()
    pq.write_table(files, folder / "_sidecars" / "part.parquet")
    return "part.parquet"


def _sidecar(folder: Path, files: pa.Table, rest: pa.Table) -> pa.Table:
    sidecar = {"path": _write_sidecar(folder, files), "sizeInBytes": 1, "modificationTime": 1}
    records = [*rest.select(["txn", "metaData", "protocol"]).to_pylist(maps_as_pydicts="strict"), {"sidecar": sidecar}]
    for record in records:
        if record.get("metaData"):
            # A map without entries reads as a structure without members, which Parquet does not have.
            record["metaData"]["format"].pop("options")
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    return read_json(io.BytesIO(text.encode()))


def _actions_of(records: pa.Table) -> list[Action]:
    found = [from_json(record) for record in records.to_pylist()]
    return [action for action in found if action is not None]


def test_a_checkpoint_with_a_part_missing_is_none(table: LakeTable) -> None:
    table.append([200])
    before = table.snapshot
    write_checkpoint(table.storage)
    _rewrite_checkpoint(table.storage.root / "_delta_log", before.version, "parts")
    [part] = (table.storage.root / "_delta_log").glob(f"*.{1:010d}.{2:010d}.parquet")
    part.unlink()
    assert DeltaLog(table.storage).refresh() == before


def test_a_wrong_hint_of_the_last_checkpoint_does_no_harm(table: LakeTable) -> None:
    hint = table.storage.root / "_delta_log/_last_checkpoint"
    for text in ("", "{", '{"version":77,"size":1}', '{"version":"x"}', "[]"):
        hint.write_text(text)
        assert DeltaLog(table.storage).refresh() == table.snapshot


def test_a_reader_that_fell_behind_the_cleaned_log_starts_over(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = DeltaLog(table.storage)
    behind.refresh()
    _move_on_and_clean(table)
    monkeypatch.setattr(log_module, "_STALE_SECONDS", 0.0)
    assert behind.refresh() == table.snapshot


def _move_on_and_clean(table: LakeTable) -> None:
    for number in range(3):
        table.append([200 + number])
    deltalake.DeltaTable(table.storage.url).create_checkpoint()
    for version in range(table.snapshot.version):
        (table.storage.root / f"_delta_log/{version:020d}.json").unlink()


@dataclass(frozen=True)
class SleepyStorage(LocalStorage):
    """Something happens while a put is under way: before it arrives, or before its answer does."""

    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None

    def put_if_absent(self, path: str, content: bytes) -> bool:
        self.before()
        created = super().put_if_absent(path, content)
        self.after()
        return created


@pytest.mark.trap(34)
@pytest.mark.parametrize("when", ["before it looks", "while it puts"])
def test_a_zombie_that_finds_its_number_free_again_has_lost(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def others_move_on() -> None:
        _move_on_and_clean(table)
        for path in (table.storage.root / "_delta_log").iterdir():
            os.utime(path, (time.time() - 60, time.time() - 60))

    puts: list[str] = []
    late = when == "while it puts"
    happens = others_move_on if late else lambda: None
    zombie = LakeTable(SleepyStorage(table.storage.root, before=happens, after=lambda: puts.append("put")))
    snapshot = zombie.snapshot
    add = write_data_file(table.storage, make_rows([999]))
    if not late:
        others_move_on()
    monkeypatch.setattr(log_module, "_STALE_SECONDS", 0.0)
    answer = zombie.log.commit(snapshot, [*zombie.head(), add])
    assert isinstance(answer, Lost)
    assert answer.verdict(zombie.application) is Verdict.SUPERSEDED
    assert answer.snapshot == table.snapshot
    assert len(puts) == late
    assert not (table.storage.root / f"_delta_log/{1:020d}.json").exists()
    assert 999 not in table.ids()


@pytest.mark.trap(34)
def test_a_commit_that_others_have_built_upon_already_is_not_taken_back(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others_go_on() -> None:
        write_checkpoint(table.storage)
        LakeTable(table.storage).append([600])
        write_checkpoint(table.storage)

    sleeper = LakeTable(SleepyStorage(table.storage.root, after=others_go_on))
    add = write_data_file(table.storage, make_rows([500]))
    monkeypatch.setattr(log_module, "_STALE_SECONDS", 0.0)
    assert isinstance(sleeper.log.commit(sleeper.snapshot, [*sleeper.head(), add]), Committed)
    assert table.ids() == [*range(100), 500, 600]
    assert (table.storage.root / f"_delta_log/{1:020d}.json").exists()


@pytest.mark.parametrize("damage", ["cut", "gap", "no beginning"])
def test_a_damaged_log_is_refused(table: LakeTable, damage: str) -> None:
    table.append([200])
    table.append([201])
    log = table.storage.root / "_delta_log"
    match damage:
        case "cut":
            path = log / f"{2:020d}.json"
            path.write_bytes(path.read_bytes()[:-20])
        case "gap":
            (log / f"{1:020d}.json").unlink()
        case _:
            (log / f"{0:020d}.json").unlink()
    with pytest.raises(TableRejected) as caught:
        DeltaLog(table.storage).refresh()
    assert caught.value.hint


def test_a_feature_that_comes_later_is_refused_too(table: LakeTable) -> None:
    reader = DeltaLog(table.storage)
    reader.refresh()
    features = table.snapshot.protocol.writer_features | {"rowTracking"}
    newer = Protocol(3, 7, table.snapshot.protocol.reader_features, features)
    table.storage.put_if_absent(f"_delta_log/{1:020d}.json", serialize_commit([newer]))
    for log in (reader, DeltaLog(table.storage)):
        with pytest.raises(TableRejected, match="rowTracking"):
            log.refresh()


def test_of_many_writers_one_gets_each_version_and_no_commit_is_lost(table: LakeTable) -> None:
    writers = [LakeTable(table.storage) for _ in range(4)]
    start = threading.Barrier(len(writers))

    def append(number: int) -> None:
        writer = writers[number]
        start.wait()
        for count in range(5):
            add = write_data_file(table.storage, make_rows([1000 + 100 * number + count]))
            snapshot = writer.snapshot
            while isinstance(answer := writer.log.commit(snapshot, [*writer.head(), add]), Lost):
                assert answer.verdict(writer.application) is Verdict.OWN_POSITION
                snapshot = answer.snapshot

    threads = [threading.Thread(target=append, args=(number,)) for number in range(len(writers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert table.snapshot.version == 20
    expected = [1000 + 100 * number + count for number in range(4) for count in range(5)]
    assert table.ids() == [*range(100), *expected]


@dataclass(frozen=True)
class DeafStorage(LocalStorage):
    """Puts arrive, but their answers are lost."""

    def put_if_absent(self, path: str, content: bytes) -> bool:
        super().put_if_absent(path, content)
        raise DestinationUnavailable("the answer was lost")


@dataclass(frozen=True)
class RetryingStorage(LocalStorage):
    """The answer to the first put is lost, and the client puts again."""

    def put_if_absent(self, path: str, content: bytes) -> bool:
        super().put_if_absent(path, content)
        return super().put_if_absent(path, content)


@dataclass(frozen=True)
class CutStorage(LocalStorage):
    """Puts do not arrive."""

    def put_if_absent(self, path: str, content: bytes) -> bool:
        raise DestinationUnavailable("out of reach")


@pytest.mark.trap(35)
@pytest.mark.parametrize("kind", [DeafStorage, RetryingStorage])
def test_a_commit_whose_answer_was_lost_is_recognised(table: LakeTable, kind: type[LocalStorage]) -> None:
    writer = LakeTable(kind(table.storage.root))
    add = write_data_file(table.storage, make_rows([500]))
    answer = writer.log.commit(writer.snapshot, [*writer.head(), add])
    assert isinstance(answer, Committed)
    assert answer.snapshot == table.snapshot
    assert table.ids() == [*range(100), 500]


def test_a_commit_that_did_not_arrive_is_an_error(table: LakeTable) -> None:
    writer = LakeTable(CutStorage(table.storage.root))
    with pytest.raises(DestinationUnavailable):
        writer.log.commit(writer.snapshot, writer.head())
    assert table.snapshot.version == 0


@pytest.mark.trap(35)
@pytest.mark.parametrize(
    ("between", "verdict"),
    [
        ("own rows", Verdict.OWN_POSITION),
        ("own copy", Verdict.SUPERSEDED),
        ("own rows and foreign rows", Verdict.FOREIGN),
        ("own rows and own copy", Verdict.SUPERSEDED),
        ("compaction", Verdict.MAINTENANCE),
        ("nothing at all", Verdict.MAINTENANCE),
        ("foreign rows", Verdict.FOREIGN),
        ("other pipeline", Verdict.FOREIGN),
        ("foreign metadata", Verdict.FOREIGN),
        ("foreign columns", Verdict.FOREIGN),
        ("foreign properties", Verdict.MAINTENANCE),
        ("foreign properties and foreign rows", Verdict.FOREIGN),
        ("foreign properties and own rows", Verdict.OWN_POSITION),
    ],
)
def test_a_lost_race_says_what_came_in_between(table: LakeTable, between: str, verdict: Verdict) -> None:
    loser = LakeTable(table.storage)
    snapshot = loser.snapshot
    for event in between.split(" and "):
        _happen(table, event)
    answer = loser.log.commit(snapshot, loser.head())
    assert isinstance(answer, Lost)
    assert answer.verdict(loser.application) is verdict
    assert answer.snapshot == table.snapshot
    assert [commit.version for commit in answer.between] == list(range(1, table.snapshot.version + 1))


def _happen(table: LakeTable, event: str) -> None:
    snapshot = table.snapshot
    [add] = list(snapshot.files.values())[:1]
    info = CommitInfo(now_milliseconds(), "WRITE", engine="another engine")
    rows: Sequence[Action] = ()
    match event:
        case "own rows":
            table.append([700])
            return
        case "own copy":
            table.copy([1], attempt="2")
            return
        case "other pipeline":
            LakeTable(table.storage, pipeline="other").append([700])
            return
        case "compaction":
            rows = [add.removed(1, data_change=False), replace(add, data_change=False)]
        case "foreign rows":
            rows = [write_data_file(table.storage, make_rows([800]))]
        case "foreign metadata":
            configuration = {**snapshot.metadata.configuration, "delta.isolationLevel": "Serializable"}
            rows = [replace(snapshot.metadata, configuration=configuration)]
        case "foreign columns":
            rows = [replace(snapshot.metadata, schema_string=snapshot.metadata.schema_string.replace('"id"', '"ID"'))]
        case "foreign properties":
            configuration = {**snapshot.metadata.configuration, "team": "sales", "delta.logRetentionDuration": "1 day"}
            rows = [replace(snapshot.metadata, configuration=configuration, description="changed")]
        case _:
            pass
    assert isinstance(table.log.commit(snapshot, [info, *rows]), Committed)


def test_a_commit_without_an_id_is_refused(table: LakeTable) -> None:
    with pytest.raises(ValueError, match="CommitInfo"):
        table.log.commit(table.snapshot, [])


@pytest.mark.trap(28)
def test_positions_of_another_lineage_or_attempt_are_not_ours(table: LakeTable) -> None:
    table.append([200])
    for other in ("pipeline", "table", "lineage", "attempt"):
        assert table.snapshot.position(replace(table.application, **{other: "x"})) is None


@pytest.mark.parametrize("part", ["a/b", "", "ü %2F", "penstock"])
def test_an_application_comes_back_from_its_id(part: str) -> None:
    application = Application(part, f"{part}.t", part, part)
    assert Application.parse(application.id) == application
    assert Application.parse("spark/x") is None


@pytest.mark.trap(34)
@pytest.mark.trap(22)
def test_a_new_copy_is_one_commit_on_the_same_log(table: LakeTable) -> None:
    table.delete([1])
    table.copy([7, 8], attempt="2")
    assert table.ids() == [7, 8]
    assert table.snapshot.version == 2
    assert table.ids(table.log.read_at(1)) == [0, *range(2, 100)]
    table.copy([], attempt="3")
    assert table.ids() == []


@pytest.mark.trap(36)
def test_files_of_a_commit_that_were_swept_meanwhile_are_noticed(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = table.snapshot
    rows = write_data_file(table.storage, make_rows([500]))
    marks = table.delete_actions(snapshot, [3])
    monkeypatch.setattr(log_module, "_STALE_SECONDS", 0.0)
    for path in [each.path for each in table.storage.list() if each.path.endswith(".bin")]:
        table.storage.delete([path])
    with pytest.raises(DestinationUnavailable, match="1 files"):
        table.log.commit(snapshot, [*table.head(), *marks])
    table.storage.delete([rows.file])
    with pytest.raises(DestinationUnavailable, match="1 files"):
        table.log.commit(snapshot, [*table.head(), rows])
    assert table.snapshot.version == 0
