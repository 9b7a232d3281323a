"""`penstock tail` as a person meets it: a process with a terminal or a pipe, on a real server."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psycopg
import pytest

from tests.program import Command

FOLLOWING = "following publication"
PATIENCE = 60.0


def _pipe() -> tuple[IO[str], IO[bytes]]:
    reading, writing = os.pipe()
    return open(reading), open(writing, "wb")


class Tail:
    """A running `penstock tail`; lines of both outputs come as events."""

    def __init__(self, dsn: str, folder: Path, *arguments: str, follow: bool = True) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        (reading, output), (reading_errors, errors) = (_pipe() for _ in range(2))
        with output, errors:
            environment = os.environ | {"PENSTOCK_URL": dsn, "TMPDIR": str(folder), "TZ": "UTC"}
            self.process = Command("tail", *arguments, environment=environment, output=output, errors=errors)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._notices: queue.Queue[str | None] = queue.Queue()
        self.errors = ""
        self._threads = [
            threading.Thread(target=self._read, args=(reading, self._lines), daemon=True),
            threading.Thread(target=self._read, args=(reading_errors, self._notices), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if follow:
            self.notice(FOLLOWING)

    def _read(self, stream: Any, lines: queue.Queue[str | None]) -> None:
        with stream:
            for line in stream:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join()

    def line(self) -> str:
        line = self._lines.get(timeout=PATIENCE)
        assert line is not None, f"no more output: {self.rest_of_errors()}"
        return line

    def lines(self, count: int) -> list[str]:
        return [self.line() for _ in range(count)]

    def objects(self, count: int) -> list[dict[str, Any]]:
        return [json.loads(self.line()) for _ in range(count)]

    def notice(self, part: str) -> str:
        """Wait for a sentence on standard error."""
        while True:
            line = self._notices.get(timeout=PATIENCE)
            assert line is not None, f"no such notice: {part}; but: {self.errors}"
            self.errors += line + "\n"
            if part in line:
                return line

    def rest_of_errors(self) -> str:
        while (line := self._notices.get(timeout=PATIENCE)) is not None:
            self.errors += line + "\n"
        return self.errors

    def wait(self) -> int:
        """Its exit status; nothing of it is left in the file system, and it never shows a traceback."""
        code = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join()
        self.rest_of_errors()
        assert "Traceback" not in self.errors, self.errors
        assert list(self.folder.iterdir()) == []
        return code

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()


@pytest.fixture
def shop(database: Any) -> Any:
    """A database with two tables and the publication `p`."""
    database.execute(
        """
        create table orders (id bigint primary key, note text, price numeric(10, 2), at timestamptz);
        create table items (id bigint primary key, n int);
        create publication p for table orders, items;
        """
    )
    return database


@pytest.fixture
def run_tail(tmp_path: Path) -> Iterator[Any]:
    """Start tails; what a failed test leaves is killed."""
    started: list[Tail] = []

    def run(dsn: str, *arguments: str, follow: bool = True) -> Tail:
        started.append(Tail(dsn, tmp_path / f"temporary-{len(started)}", *arguments, follow=follow))
        return started[-1]

    yield run
    for tail in started:
        tail.close()


def slots(database: Any) -> list[str]:
    rows = database.execute("select slot_name from pg_replication_slots where database = %s", [database.name])
    return [row[0] for row in rows]


def wait_without_slots(database: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while slots(database):
        assert time.monotonic() < deadline, slots(database)
        time.sleep(0.05)


def create_slot(database: Any, name: str) -> str:
    name = f"{name}_{os.getpid()}_{database.name[-6:]}"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
    return name


def confirmed(database: Any, slot: str) -> str:
    row = database.execute("select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [slot])
    return row[0][0]


def test_each_change_is_a_line_with_time_operation_table_key_and_columns(shop, run_tail):
    tail = run_tail(shop.dsn, "--publication", "p")
    shop.execute("insert into orders values (1, 'first', 12.50, '2024-01-02 03:04:05+00')")
    shop.execute("update orders set id = 2, note = null where id = 1")
    shop.execute("delete from orders")
    shop.execute("truncate orders, items")
    lines = tail.lines(4)
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3}  ", line) for line in lines)
    assert [re.sub(r"^\S+  ", "", line) for line in lines] == [
        "insert   public.orders  id=1  note='first'  price=12.50  at=2024-01-02 03:04:05Z",
        "update   public.orders  id=1 → 2  note=null  price=12.50  at=2024-01-02 03:04:05Z",
        "delete   public.orders  id=2",
        "truncate public.orders, public.items",
    ]
    assert tail.end() == 0
    assert "4 changes in 4 whole transactions" in tail.errors
    wait_without_slots(shop)


def test_every_version_of_the_server_can_be_followed(any_database, run_tail):
    any_database.execute("create table t (id int primary key); create publication p for table t")
    tail = run_tail(any_database.dsn, "--publication", "p", "--limit", "2")
    any_database.execute("insert into t values (1); delete from t")
    assert [line.split("  ", 1)[1] for line in tail.lines(2)] == ["insert   public.t  id=1", "delete   public.t  id=1"]
    assert tail.wait() == 0
    wait_without_slots(any_database)


@pytest.mark.trap(1, 25, 31)
def test_ndjson_loses_nothing(database, run_tail):
    database.execute(
        """
        create type mood as enum ('sad', 'fine');
        create table t (
            id bigint primary key, amount numeric(30, 10), wide numeric, ratio real, share float8, data bytea,
            at timestamptz, local timestamp, day date, clock time, mood mood, tags text[], doc jsonb, big text
        );
        alter table t alter big set storage external;
        create publication p for table t;
        """
    )
    tail = run_tail(database.dsn, "--publication", "p", "--json")
    database.execute(
        """
        insert into t values (9007199254740993, 12345678901234567890.0123456789, 1e50, 0.1, 'NaN', '\\x00ff',
            'infinity', '2024-02-29 23:59:59.999999', '0044-03-15 BC', '24:00', 'fine', '{a,NULL,"b c"}',
            '{"a": 1.50}', repeat('x', 10000))
        """
    )
    database.execute("update t set id = 2, mood = 'sad'")
    with database.connect(autocommit=False) as connection:
        connection.execute("insert into t (id) values (3)")
        connection.execute("savepoint a")
        connection.execute("insert into t (id) values (4)")
        connection.execute("rollback to a")
        connection.execute("delete from t where id = 3")
    insert, update, again, delete = tail.objects(4)
    assert insert["row"] == {
        "id": 9007199254740993,
        "amount": "12345678901234567890.0123456789",
        "wide": "1" + "0" * 50,
        "ratio": 0.1,
        "share": "NaN",
        "data": "\\x00ff",
        "at": "infinity",
        "local": "2024-02-29T23:59:59.999999",
        "day": "0044-03-15 BC",
        "clock": "24:00:00",
        "mood": "fine",
        "tags": ["a", None, "b c"],
        "doc": '{"a": 1.50}',
        "big": "x" * 10000,
    }
    assert insert["unrepresentable"] == ["at", "day", "clock"]
    assert (insert["op"], insert["schema"], insert["table"], insert["key"]) == ("insert", "public", "t", ["id"])
    assert "unchanged" not in insert
    assert update["unchanged"] == ["big"]
    assert "big" not in update["row"]
    assert (update["old"], update["row"]["id"]) == ({"id": 9007199254740993}, 2)
    assert (again["op"], again["row"]["id"], delete["op"], delete["old"]) == ("insert", 3, "delete", {"id": 3})
    assert [change["ordinal"] for change in (insert, update, again, delete)] == [0, 0, 0, 1]
    assert again["commit_lsn"] == delete["commit_lsn"] > update["commit_lsn"] > insert["commit_lsn"]
    assert again["xid"] == delete["xid"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", insert["commit_time"])
    assert tail.end(signal.SIGTERM) == 0


def test_transactions_show_where_they_begin_and_commit(shop, run_tail):
    tail = run_tail(shop.dsn, "--publication", "p", "--json", "--transactions", "--limit", "2", "-q", follow=False)
    inserted = threading.Event()

    def write() -> None:
        number = 0
        while not inserted.is_set():
            number += 1
            shop.execute(f"begin; insert into orders values ({number}); insert into items values ({number}); commit")
            inserted.wait(0.2)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        objects = tail.objects(4)
    finally:
        inserted.set()
        writer.join()
    assert [found["op"] for found in objects] == ["begin", "insert", "insert", "commit"]
    assert len({(found["commit_lsn"], found["xid"], found["commit_time"]) for found in objects}) == 1
    assert tail.wait() == 0
    assert tail.errors == ""


def test_a_change_is_seen_well_within_a_second(shop, run_tail):
    tail = run_tail(shop.dsn, "--publication", "p")
    delays: list[float] = []
    with shop.connect() as connection:
        for number in range(6):
            connection.execute("insert into items values (%s)", [number])
            started = time.monotonic()
            tail.line()
            delays.append(time.monotonic() - started)
    # The best of several: the machine may be busy with other tests.
    assert min(delays) < 0.5
    assert tail.end() == 0


def test_only_the_tables_asked_for_are_shown(shop, run_tail):
    tail = run_tail(shop.dsn, "--publication", "p", "--tables", "public.it*", "--json")
    shop.execute("insert into orders values (1)")
    shop.execute("begin; insert into orders values (2); insert into items values (7); truncate orders, items; commit")
    insert, truncate = tail.objects(2)
    assert (insert["table"], insert["ordinal"]) == ("items", 1)
    assert truncate["tables"] == ["public.items"]
    assert tail.end() == 0


def test_the_publication_is_created_only_when_asked_for_and_stays(database, run_tail):
    database.execute("create table a (id int primary key); create table b (id int primary key)")
    tail = run_tail(
        database.dsn, "--publication", "mine", "--create-publication", "--table", "a", "--limit", "1", follow=False
    )
    assert "drop publication mine" in tail.notice("created publication mine for 1 table")
    tail.notice(FOLLOWING)
    database.execute("insert into b values (1); insert into a values (1)")
    assert "public.a" in tail.line()
    assert tail.wait() == 0
    tables = "select tablename::text from pg_publication_tables where pubname = 'mine'"
    assert database.execute(tables) == [("a",)]
    again = run_tail(database.dsn, "--publication", "mine", "--create-publication", "--for", "0", "--table", "a")
    assert again.wait() == 0
    assert database.execute(tables) == [("a",)], "one that exists is left alone"


@pytest.mark.trap(2, 3)
def test_a_named_slot_stays_where_it_is_until_acknowledged_by_whole_transactions(shop, run_tail):
    slot = create_slot(shop, "tail")
    shop.execute("insert into items values (1)")
    shop.execute("insert into items values (2), (3)")
    shop.execute("insert into items values (4)")
    before = confirmed(shop, slot)

    def look(*arguments: str) -> tuple[list[int], str]:
        tail = run_tail(shop.dsn, "--publication", "p", "--slot", slot, "--json", *arguments)
        assert tail.wait() == 0
        ids: list[int] = []
        while (line := tail._lines.get(timeout=PATIENCE)) is not None:
            ids.append(json.loads(line)["row"]["id"])
        return ids, tail.errors

    ids, errors = look("--limit", "1")
    assert ids == [1]
    assert confirmed(shop, slot) == before, "a look moves nothing"
    position = re.search(r"--from ([0-9A-F]+/[0-9A-F]+)", errors)
    assert position is not None
    assert look("--limit", "2", "--from", position[1])[0] == [2, 3], "goes on behind the last whole transaction"
    ids, errors = look("--limit", "2", "--acknowledge")
    assert ids == [1, 2]
    assert "1 whole transaction;" in errors
    assert confirmed(shop, slot) != before
    assert look("--limit", "3")[0] == [2, 3, 4], "a transaction that was shown in part comes again"
    assert look("--limit", "3", "--acknowledge")[0] == [2, 3, 4]
    shop.execute("insert into items values (5)")
    assert look("--limit", "1")[0] == [5]


def fails(tail: Tail, *parts: str) -> None:
    """Ends with status 1, an error and a hint, and shows none of the secrets."""
    assert tail.wait() == 1
    assert tail.errors.startswith("error: "), tail.errors
    assert "\nhint: " in tail.errors
    for part in parts:
        assert part in tail.errors
    assert "sesame" not in tail.errors
    assert "keeps trying" not in tail.errors
    assert "WARNING" not in tail.errors, tail.errors


def test_errors_in_what_was_asked_for_are_readable(shop, run_tail):
    slot = create_slot(shop, "tail")
    there = confirmed(shop, slot)
    cases: list[tuple[list[str], tuple[str, ...]]] = [
        ([], ("needs a publication", "this database has: p")),
        (["--publication", "nope"], ("'nope' does not exist", "--create-publication")),
        (["--publication", "p", "--from", "0/1"], ("--from needs --slot", "starts now")),
        (["--publication", "p", "--slot", slot, "--from", "over there"], ("not a position", "16/B374D848")),
        (["--publication", "p", "--slot", slot, "--from", "0/1"], (f"is already at {there}", f"--from {there}")),
        (["--publication", "p", "--slot", slot, "--from", "FF/1"], ("FF/1 is ahead of the server", "--from ")),
        (["--publication", "p", "--slot", "not_there"], ("'not_there' does not exist", "temporary slot")),
        (["--publication", "p", "--table", "order"], ("matches order", "public.orders")),
        (["--publication", "p", "--acknowledge"], ("--acknowledge needs --slot",)),
    ]
    started = [(run_tail(shop.dsn, *arguments, follow=False), parts) for arguments, parts in cases]
    for tail, parts in started:
        fails(tail, *parts)
    assert confirmed(shop, slot) == there


def test_errors_of_the_connection_are_readable_and_keep_secrets(shop, run_tail):
    parameters = psycopg.conninfo.conninfo_to_dict(shop.dsn)
    host, port = parameters["host"], parameters["port"]
    cases = {
        f"postgresql://postgres:sesame@{host}:{port}/{shop.name}": "authentication failed",
        f"postgresql://postgres:sesame@{host}:1/{shop.name}": "refused",
        f"postgresql://postgres:ses@ame/sesame@{host}:x/y": "is not a valid connection string",
    }
    started = [(run_tail(dsn, "--publication", "p", follow=False), part) for dsn, part in cases.items()]
    for tail, part in started:
        fails(tail, part)


@pytest.mark.trap(8)
def test_a_slot_in_use_names_its_reader(shop, run_tail):
    slot = create_slot(shop, "tail")
    shop.execute("insert into items values (1)")
    first = run_tail(shop.dsn, "--publication", "p", "--slot", slot)
    first.line()
    (pid,) = shop.execute("select active_pid from pg_replication_slots where slot_name = %s", [slot])[0]
    fails(run_tail(shop.dsn, "--publication", "p", "--slot", slot, follow=False), f"read by server process {pid}")
    assert first.end() == 0


@pytest.mark.trap(10)
def test_a_lost_slot_is_an_error_with_its_remedy(make_server, run_tail):
    server = make_server(settings={"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"})
    server.execute("create table t (id int primary key); create publication p for table t")
    server.execute("select pg_create_logical_replication_slot('old', 'pgoutput')")
    for number in range(6):
        server.execute(f"insert into t values ({number}); select pg_switch_wal()")
    server.execute("checkpoint")
    tail = run_tail(server.dsn(), "--publication", "p", "--slot", "old", follow=False)
    fails(tail, "slot 'old' is lost", "on_lost_slot")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_it_well_and_leaves_nothing(shop, run_tail, number):
    tail = run_tail(shop.dsn, "--publication", "p")
    shop.execute("insert into items values (1)")
    tail.line()
    assert len(slots(shop)) == 1
    assert tail.end(number) == 0
    wait_without_slots(shop)


def test_a_signal_while_it_starts_ends_it_well(shop, run_tail):
    holder = shop.connect(autocommit=False)
    holder.execute("insert into items values (1)")
    pid = holder.info.backend_pid
    tail = run_tail(shop.dsn, "--publication", "p", follow=False)
    assert f"pid {pid}" in tail.notice("waits for open transactions")
    started = time.monotonic()
    assert tail.end() == 0
    assert time.monotonic() - started < 20, "it does not wait for the transaction that holds the slot up"
    wait_without_slots(shop)
    holder.close()


def test_a_kill_leaves_no_slot(shop, run_tail):
    tail = run_tail(shop.dsn, "--publication", "p")
    shop.execute("insert into items values (1)")
    tail.line()
    tail.close()
    wait_without_slots(shop)


def test_a_reader_that_leaves_ends_it_quietly_even_without_further_changes(shop, tmp_path):
    slot = create_slot(shop, "tail")
    shop.execute("insert into items values (1), (2), (3)")
    tail = f'"{sys.executable}" -m penstock tail --publication p --slot {slot} -q'
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-c", f"{tail} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"PENSTOCK_URL": shop.dsn, "TMPDIR": str(folder)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "id=1" in done.stdout
    assert list(folder.iterdir()) == []


def test_it_ends_although_its_reader_is_stuck(shop, tmp_path):
    slot = create_slot(shop, "tail")
    shop.execute("insert into items select generate_series(1, 20000)")
    receiving, sending = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "tail", "--publication", "p", "--slot", slot, "--json"],
        stdout=sending,
        stderr=subprocess.PIPE,
        env=os.environ | {"PENSTOCK_URL": shop.dsn, "TMPDIR": str(tmp_path)},
    )
    os.close(sending)
    assert os.read(receiving, 1)  # From here on nobody reads: the pipe fills up.
    assert process.stderr is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    os.close(receiving)
    assert list(tmp_path.iterdir()) == []


def test_a_named_slot_is_followed_over_a_restart_of_the_server(make_server, run_tail):
    server = make_server()
    server.execute("create table t (id int primary key); create publication p for table t")
    server.execute("select pg_create_logical_replication_slot('kept', 'pgoutput')")
    tail = run_tail(server.dsn(), "--publication", "p", "--slot", "kept", "--json")
    server.execute("insert into t values (1)")
    assert tail.objects(1)[0]["row"] == {"id": 1}
    server.restart()
    server.execute("insert into t values (2)")
    assert tail.objects(1)[0]["row"] == {"id": 2}, "neither lost nor shown twice"
    tail.notice("is retrying")
    assert tail.end() == 0


def test_a_temporary_slot_ends_with_its_server(make_server, run_tail):
    server = make_server()
    server.execute("create table t (id int primary key); create publication p for table t")
    tail = run_tail(server.dsn(), "--publication", "p")
    server.stop("immediate")
    assert tail.wait() == 1
    assert "\nerror: " in tail.errors
    assert "keeps trying" not in tail.errors


def test_a_config_names_the_publication_and_a_running_pipeline_is_not_disturbed(
    shop: Any, run_tail: Any, tmp_path: Path
) -> None:
    config = tmp_path / "shop.toml"
    config.write_text(
        'pipeline.id = "shop"\nsource = {url = "${PENSTOCK_URL}", publication = "p", slot = "taken"}\n'
        'destination.type = "memory"\n'
    )
    tail = run_tail(shop.dsn, "-c", str(config), "--limit", "1", "--json")
    shop.execute("insert into items values (1, 1)")
    assert tail.objects(1)[0]["table"] == "items"
    assert tail.wait() == 0
    assert "with a temporary slot" in tail.errors
    assert "taken" not in tail.errors
