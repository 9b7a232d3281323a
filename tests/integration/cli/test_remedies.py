"""What errors say to do is done, to the letter, and leads to a healthy pipeline.

`tests/unit/test_remedies.py` demands a test for the remedy of every error. Faults follow each other on one pipeline,
because a start costs more than a fault.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from penstock import errors
from penstock.errors import PenstockError, for_table
from penstock.operations.supervision import START_AGAIN
from penstock.testing.postgres import PostgresServer
from tests.integration.cli.support import PATIENCE, Site

_IN_SOURCE = ("on_lost_slot", "manage_publication", "slot")
_COMMAND = re.compile(r"penstock (run|resume|teardown|check|(?:resync|rollback) [\w.]*\w)")
_SETTING = re.compile(r'(\w+) = ("\w+"|true|false)')
_STATEMENT = re.compile(r"(?:alter|create|grant|select) .*?;")


def hint(result: subprocess.CompletedProcess[str], kind: type[PenstockError] | None = None, status: int = 1) -> str:
    """The remedy that a command printed; that of an error class, if it is given."""
    assert result.returncode == status, (result.stdout, result.stderr)
    found = result.stderr.rpartition("hint: ")[2].strip()
    if kind is not None:
        assert found == kind.default_hint
    return found


def configure(site: Site, key: str, value: str) -> None:
    """Set a key of the config file."""
    path = site.folder / "penstock.toml"
    section = "[source]" if key in _IN_SOURCE else "[types]" if key == "out_of_range" else "[pipeline]"
    text = re.sub(rf"^\s*{key} = .*$", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(text.replace(section, f"{section}\n{key} = {value}"))


def follow(site: Site, remedy: str) -> None:
    """Set the keys, run the statements and then the commands that a remedy names; each has to succeed."""
    for key, value in _SETTING.findall(re.sub(_STATEMENT, "", remedy)):
        configure(site, key, value)
    for statement in _STATEMENT.findall(remedy):
        site.database.execute(statement)
    commands = _COMMAND.findall(remedy)
    assert commands or _STATEMENT.search(remedy), remedy
    for command in commands:
        words = [*command.split(), *{"run": ["--once"], "teardown": ["--yes"]}.get(command, [])]
        result = site.run(*words)
        assert result.returncode == 0, (command, result.stderr)


def check_healthy(site: Site, *tables: str) -> None:
    """All tables are ready and equal, after a change of each."""
    for table in tables or ("orders",):
        site.database.execute(
            f"update {table} set note = note || '.'; insert into {table} select coalesce(max(id), 0) + 1 from {table}"
        )
    assert site.run("run", "--once", "-q").returncode == 0
    assert set(site.phases().values()) == {"ready"}
    for table in tables or ("orders",):
        assert site.rows(table) == site.source_rows(table)


def stopped(site: Site, table: str, kind: type[PenstockError]) -> str:
    """The remedy of a table that has stopped, as `status` prints it."""
    assert site.run("run", "--once", "-q").returncode == 1
    found = json.loads(site.run("tables", "--json").stdout)["tables"]
    (error,) = [each["error"] for each in found if each["table"] == table]
    assert error["solution"] == for_table(kind.default_hint, table), error
    text = " ".join(site.run("status").stdout.split())
    assert error["solution"] in text
    rest = text.partition(error["solution"])[2]
    then = re.match(r" then: (penstock \S+ \S+)", rest)
    return f"{error['solution']} {then[1] if then else ''}"


@contextmanager
def state_of(site: Site) -> Iterator[sqlite3.Connection]:
    path = min(site.folder.glob("**/*.db"), key=lambda each: "other" in str(each))
    with closing(sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)) as connection:
        yield connection


@pytest.mark.remedy("SlotMissing")
def test_a_lost_slot(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("select pg_drop_replication_slot(%s)", [site.database.idle_slot(site.slot)])
    site.database.execute("update orders set note = 'while there was no slot'")
    check = site.run("check", "--json")
    (finding,) = [each for each in json.loads(check.stdout)["checks"] if each["id"] == "slot"]
    assert (check.returncode, finding["severity"]) == (1, "critical")
    refused = site.run("run", "--once")
    assert "is gone, and with it changes" in refused.stderr
    # A command that only a start could carry out is not queued for one that is refused.
    resync = site.run("resync", "*.*")
    assert hint(resync) == hint(refused, errors.SlotMissing) == finding["remedy"]
    follow(site, finding["remedy"])
    check_healthy(site)


@pytest.mark.remedy("SlotLost", "PositionAhead", "LineageChanged", "SlotUnusable")
def test_a_slot_that_moved_a_server_that_went_back_and_other_slots(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    config = (site.folder / "penstock.toml").read_text()
    # Another program moves the slot.
    site.database.execute("update orders set note = 'not captured'")
    site.database.execute(
        "select pg_replication_slot_advance(%s, pg_current_wal_lsn())", [site.database.idle_slot(site.slot)]
    )
    follow(site, hint(site.run("run", "--once"), errors.SlotLost))
    check_healthy(site)
    # The server is restored from a backup: what is stored is in its future.
    (site.folder / "penstock.toml").write_text(config)
    with state_of(site) as state:
        state.execute("update replication_progress set flush_lsn = '00F0000000000000'")
    shutil.rmtree(site.folder / "work/spool")
    follow(site, hint(site.run("run", "--once"), errors.PositionAhead))
    check_healthy(site)
    # Another slot in the config.
    configure(site, "slot", '"another_slot"')
    follow(site, hint(site.run("run", "--once")))
    check_healthy(site)
    # Another database.
    follow(site, "run: penstock teardown")
    with state_of(site) as state:
        assert state.execute("select count(*) from replication_progress").fetchone() == (0,)
    assert site.run("run", "--once", "-q").returncode == 0
    with state_of(site) as state:
        for table in ("replication_progress", "table_positions"):
            state.execute(f"update {table} set lineage = json_replace(lineage, '$.system_identifier', '1')")
    follow(site, hint(site.run("run", "--once"), errors.LineageChanged))
    check_healthy(site)
    # A slot of another program.
    follow(site, "run: penstock teardown")
    site.database.execute("select pg_create_physical_replication_slot(%s)", [site.slot])
    try:
        refused = hint(site.run("run", "--once"), errors.SlotUnusable)
        assert refused == "Choose another slot name, or drop the slot if no other program uses it."
        configure(site, "slot", f'"{site.slot}_2"')
        check_healthy(site)
        follow(site, "run: penstock teardown")
        configure(site, "slot", f'"{site.slot}"')
    finally:
        site.database.execute("select pg_drop_replication_slot(%s)", [site.slot])
    check_healthy(site)


@pytest.mark.remedy("PublicationMissing")
def test_a_publication_that_does_not_exist_or_lacks_a_table(site: Site):
    configure(site, "manage_publication", "false")
    remedy = hint(site.run("run", "--once"))
    follow(site, remedy.partition("Create it: ")[2])
    check_healthy(site, "orders", "items", "nothing")
    site.database.execute("alter publication shop drop table items")
    assert site.run("run", "--once", "-q").returncode == 0
    assert "public.items" not in site.phases()
    site.database.execute("alter publication shop add table items; update items set note = 'unseen'")
    check_healthy(site, "orders", "items")


@pytest.mark.remedy("SpoolCorrupt")
def test_a_damaged_spool_and_a_pause(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("update orders set note = note || '!'")
    for log in (site.folder / "work/spool/log").iterdir():
        log.write_bytes(b"damaged\n" + log.read_bytes())
    remedy = hint(site.run("run", "--once"), errors.SpoolCorrupt)
    assert "delete the spool folder" in remedy
    shutil.rmtree(site.folder / "work/spool")
    follow(site, remedy)
    check_healthy(site)
    assert site.run("pause").returncode == 0
    follow(site, hint(site.run("run", "--once")))
    check_healthy(site)


@pytest.mark.remedy("LeaseHeld", "LeaseLost", "SpoolInUse", "SlotInUse")
def test_a_second_process_waits_for_the_first(site: Site):
    process = site.start("run")
    site.wait_ready(3)
    config = site.folder / "penstock.toml"
    other = site.folder / "other.toml"

    def run_other() -> subprocess.CompletedProcess[str]:
        return site.run("run", "--once", "-c", "other.toml")

    assert "Stop the other process, or wait" in hint(site.run("run", "--once"), errors.LeaseHeld, START_AGAIN)
    other.write_text(config.read_text().replace('"shop"', '"other"').replace('path = "lake"', 'path = "other"'))
    assert "set another spool.path" in hint(run_other(), errors.SpoolInUse)
    other.write_text(other.read_text().replace('"work/spool"', '"other/spool"'))
    assert "stop the other one" in hint(run_other(), errors.SlotInUse, START_AGAIN)
    # Both remedies: another spool and slot of its own, or the other process stops.
    other.write_text(other.read_text().replace(f'"{site.slot}"', f'"{site.slot}_other"'))
    assert run_other().returncode == 0
    assert site.run("teardown", "--yes", "-c", "other.toml").returncode == 0
    with state_of(site) as state:
        state.execute("update pipelines set epoch = epoch + 1, holder = 'somebody'")
    assert process.wait(PATIENCE) == START_AGAIN, site.output(process)
    lost = site.output(process).rpartition("hint: ")[2].strip()
    assert lost == errors.LeaseLost.default_hint
    with state_of(site) as state:
        state.execute("update pipelines set holder = null, expires = null")
    follow(site, lost)
    check_healthy(site)


@pytest.mark.remedy("StateUnusable", "StateUnavailable", "StateNewer")
def test_a_state_that_cannot_be_used(site: Site):
    config = site.folder / "penstock.toml"
    good = config.read_text()
    (site.folder / "file").write_text("")
    config.write_text(f'{good}\n[state]\nurl = "sqlite:///file/state.db"')
    refused = site.run("run", "--once")
    assert refused.returncode == 1
    assert hint(refused)
    config.write_text(good)
    assert site.run("run", "--once", "-q").returncode == 0
    with state_of(site) as state:
        state.execute("begin exclusive")
        remedy = hint(site.run("run", "--once"), errors.StateUnavailable, START_AGAIN)
        assert "End the program that locks the state" in remedy
        state.execute("rollback")
    follow(site, remedy)
    check_healthy(site)
    (path,) = site.folder.glob("**/*.db")
    shutil.copy(path, site.folder / "backup")
    with state_of(site) as state:
        state.execute("pragma user_version = 999")
    assert "restore a backup of the state" in hint(site.run("run", "--once"), errors.StateNewer)
    shutil.copy(site.folder / "backup", path)
    check_healthy(site)


@pytest.mark.remedy(
    "ServerUnavailable",
    "AuthenticationFailed",
    "DatabaseMissing",
    "TlsFailed",
    "NotReady",
    "WalLevelTooLow",
    "wal_level",
    "slot_wal_keep_size",
)
def test_a_server_that_cannot_be_used_yet(make_server: Any, tmp_path: Path):
    server: PostgresServer = make_server(settings={"wal_level": "replica", "max_slot_wal_keep_size": "0"})
    name = server.create_database()
    from tests.conftest import Database

    site = Site(Database(server, name), tmp_path)
    site.database.execute("create table orders (id int primary key, note text); insert into orders values (1, 'a')")
    site.configure()
    dsn = site.database.dsn
    for change, kind, words, status in (
        ({"password": "wrong"}, errors.AuthenticationFailed, "Check the user and password in the source URL", 1),
        ({"dbname": "nowhere"}, errors.DatabaseMissing, "Check the database name", 1),
        ({"sslmode": "require"}, errors.TlsFailed, "Check that sslmode", 1),
        ({"port": 1}, errors.ServerUnavailable, "the host and port are correct", START_AGAIN),
    ):
        url = {"SOURCE_URL": make_conninfo(dsn, **change)}
        assert words in hint(site.run("run", "--once", environment=url), kind, status)
    server.stop()
    assert "Check that the server is running" in hint(site.run("run", "--once"), errors.ServerUnavailable, START_AGAIN)
    server.start()
    for _ in range(2):
        # The first start refuses what `check` calls critical, one after the other.
        refused = site.run("run", "--once")
        assert "the start is refused" in refused.stderr
        remedy = hint(refused)
        findings = json.loads(site.run("check", "--json").stdout)["checks"]
        assert remedy in [each["remedy"] for each in findings if each["severity"] == "critical"]
        for statement in _STATEMENT.findall(remedy):
            site.database.execute(statement)
        if "restart the server" in remedy:
            server.restart()
    check_healthy(site)


@pytest.mark.remedy("ValueOutOfRange", "SchemaNotFollowed", "TableOwned")
def test_tables_that_stopped(site: Site):
    site.database.execute("create table strange (id int primary key, note text, at date)")
    site.database.execute("insert into strange values (1, 'x', 'infinity')")
    delta = '[destination]\ntype = "delta"\npath = "lake"'
    site.configure(destination=delta, more='[types]\nout_of_range = "error"\n[schema_changes]\nrecopy = "stop"')
    remedy = stopped(site, "public.strange", errors.ValueOutOfRange)
    (keep,) = re.findall(r'"(\w+)" loses nothing', remedy)
    configure(site, "out_of_range", f'"{keep}"')
    follow(site, remedy)
    assert site.run("run", "--once", "-q").returncode == 0
    site.database.execute("alter table orders add column extra uuid default gen_random_uuid()")
    site.database.execute("update orders set note = 'changed'")
    follow(site, stopped(site, "public.orders", errors.SchemaNotFollowed))
    assert site.run("run", "--once", "-q").returncode == 0
    assert set(site.phases().values()) == {"ready"}
    # Another pipeline writes to the same folder.
    config = site.folder / "penstock.toml"
    text = config.read_text()
    for old, new in (('id = "shop"', 'id = "other"'), ("work/spool", "other/spool"), (site.slot, f"{site.slot}_other")):
        text = text.replace(old, new)
    (site.folder / "other.toml").write_text(text)
    refused = site.run("run", "--once", "-c", "other.toml")
    assert errors.TableOwned.default_hint in refused.stderr, refused.stderr
    (site.folder / "other.toml").write_text(text.replace('path = "lake"', 'path = "other/lake"'))
    follow_other = site.run("rollback", "*.*", "-c", "other.toml")
    assert follow_other.returncode == 0, follow_other.stderr
    other = site.run("run", "--once", "-c", "other.toml")
    assert other.returncode == 0, other.stderr
    assert site.run("teardown", "--yes", "-c", "other.toml").returncode == 0


@pytest.mark.remedy("HoldBroken")
def test_more_changes_during_a_copy_than_the_spool_may_keep(site: Site):
    slow = '[copy]\nmax_bytes_per_second = "1MB"'
    site.configure(more=slow)
    site.database.execute("create table big as select i id, repeat('y', 500) note from generate_series(1, 8000) i")
    site.database.execute("alter table big add primary key (id)")
    config = site.folder / "penstock.toml"
    good = config.read_text()
    config.write_text(good.replace("min_free_bytes = 0", 'min_free_bytes = 0, copy_max_bytes = "10KB"'))
    process = site.start("run")
    site.wait_output(process, "following publication")
    deadline = time.monotonic() + PATIENCE
    while site.phases().get("public.big") != "errored":
        site.database.execute("update big set note = md5(note) where id <= 1000")
        assert time.monotonic() < deadline, site.phases()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    remedy = stopped(site, "public.big", errors.HoldBroken)
    assert "Raise spool.copy_max_bytes" in remedy
    config.write_text(good)
    follow(site, remedy)
    check_healthy(site, "big")


@pytest.mark.remedy("SnapshotBlocked")
def test_sessions_that_block_a_copy_are_ended_by_the_pid_that_is_printed(site: Site):
    assert site.run("run", "--once", "-q").returncode == 0
    assert site.run("resync", "orders").returncode == 0
    blocker = site.database.connect(autocommit=False)
    blocker.execute("insert into items values (9000, 'late')")
    process = site.start("run")
    with closing(blocker):
        site.wait_output(process, "until these transactions end")
        found = re.search(r"pid (\d+) \(", site.output(process))
        assert found is not None
        assert "pg_terminate_backend(pid)" in errors.SnapshotBlocked.default_hint
        site.database.execute(f"select pg_terminate_backend({found[1]})")
        site.wait_ready(3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    check_healthy(site)
