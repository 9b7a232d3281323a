"""The server class and the fixtures over it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.errors import ConfigError, ServerUnavailable
from penstock.testing.postgres import DatabaseServer, ExistingServer, PostgresServer
from penstock.testing.postgres_binaries import find_binaries
from penstock.testing.server import is_alive, wait_until_gone

MakeServer = Callable[..., PostgresServer]


def test_every_version_decodes_logically(any_database) -> None:
    any_database.execute("create table t (id int primary key)")
    any_database.execute("select pg_create_logical_replication_slot('penstock_version_probe', 'pgoutput')")
    try:
        major = int(any_database.execute("show server_version_num")[0][0]) // 10000
        assert major == any_database.server.major
        assert any_database.execute("show wal_level") == [("logical",)]
    finally:
        any_database.execute("select pg_drop_replication_slot('penstock_version_probe')")


def test_databases_are_fresh_and_vanish_with_all_that_holds_them(database) -> None:
    server, name = database.server, database.name
    assert database.execute("select from pg_class where relnamespace = 'public'::regnamespace") == []
    slot = f"slot_of_{name}"
    database.execute("create publication p for all tables")
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    walsender = psycopg.pq.PGconn.connect(make_conninfo(database.dsn, replication="database").encode())
    answer = walsender.exec_(
        f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names 'p')".encode()
    )
    assert answer.status == psycopg.pq.ExecStatus.COPY_BOTH
    prepared = database.connect()
    prepared.execute("begin; create table t (id int)")
    prepared.execute(f"prepare transaction 'gid_{name}'".encode())
    server.drop_database(name)
    assert server.execute("select from pg_database where datname = %s", [name]) == []
    assert server.execute("select from pg_replication_slots where slot_name = %s", [slot]) == []
    walsender.finish()
    prepared.close()


def test_settings_and_hba_lines_reach_the_server(make_server: MakeServer) -> None:
    server = make_server(
        settings={"wal_sender_timeout": "2s", "cluster_name": "it's a \\ test"},
        hba=["host all nosy 127.0.0.1/32 reject"],
    )
    assert server.execute("show wal_sender_timeout") == [("2s",)]
    assert server.execute("show cluster_name") == [("it's a \\ test",)]
    server.execute("create role nosy login password 'x'")
    with pytest.raises(psycopg.OperationalError, match="rejects connection"):
        psycopg.connect(server.dsn(user="nosy", password="x"))


def test_a_wrong_password_is_refused(server: DatabaseServer) -> None:
    if not isinstance(server, PostgresServer):
        pytest.skip("authentication of a foreign server is its own matter")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(server.dsn(password="wrong"))


@pytest.mark.parametrize("end", ["fast", "immediate", "kill"])
def test_committed_rows_survive_restarts_on_the_same_port(make_server: MakeServer, end: str) -> None:
    server = make_server()
    dsn = server.dsn()
    server.execute("create table t (id int); insert into t values (1)")
    if end == "kill":
        server.kill()
        assert not server.running
        server.start()
    else:
        server.restart(end)  # pyright: ignore[reportArgumentType]
    assert server.dsn() == dsn
    assert server.execute("select id from t") == [(1,)]


def test_a_stopped_server_refuses_connections(make_server: MakeServer) -> None:
    server = make_server()
    server.stop()
    with pytest.raises(psycopg.OperationalError):
        server.connect()
    server.start()
    assert server.execute("select 1") == [(1,)]


def test_a_bad_setting_is_reported_with_the_log_and_leaves_nothing_behind() -> None:
    server = PostgresServer(settings={"wal_level": "nonsense"})
    with pytest.raises(ServerUnavailable, match="nonsense"), server:
        pass
    assert not server.folder.exists()


def test_client_programs_work_beside_the_server(any_server: DatabaseServer) -> None:
    assert isinstance(any_server, PostgresServer)
    for name in ("pg_recvlogical", "pgbench"):
        program = any_server.binaries.program(name)
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        assert any_server.version in answer.stdout
    bench = [str(any_server.binaries.program("pgbench")), "-i", "-s", "1", "-q"]
    name = any_server.create_database()
    try:
        subprocess.run([*bench, any_server.dsn(name)], check=True, capture_output=True)
        assert any_server.execute("select count(*) from pgbench_accounts", database=name) == [(100_000,)]
    finally:
        any_server.drop_database(name)


def test_the_server_dies_with_a_killed_process(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from penstock.testing.postgres import PostgresServer
        server = PostgresServer().start()
        print(server.pid, server.folder, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, folder = process.stdout.readline().split()
        assert is_alive(int(pid))
        process.send_signal(signal.SIGKILL)
    assert wait_until_gone([int(pid)], timeout=60)
    deadline = time.monotonic() + 60
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()


def test_programs_in_a_closed_folder_are_copied_to_where_the_server_user_can_run_them(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root runs the server as another user")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    binaries = find_binaries(18).copy_to(closed)
    with PostgresServer(binaries=binaries) as server:
        assert server.execute("select 1") == [(1,)]
        server.execute("create extension hstore")
        assert server.execute("select count(*) from pg_extension where extname = 'hstore'") == [(1,)]


def test_an_existing_server_is_addressed_as_it_was_given() -> None:
    by_url = ExistingServer("postgresql://u:p%40ss@127.0.0.1:5433/other?sslmode=disable")
    assert by_url.dsn("a b") == "postgresql://u:p%40ss@127.0.0.1:5433/a%20b?sslmode=disable"
    by_words = ExistingServer("host=127.0.0.1 dbname=other").dsn("mine")
    assert conninfo_to_dict(by_words) == {"host": "127.0.0.1", "dbname": "mine"}


def test_a_missing_version_names_the_package_to_install() -> None:
    with pytest.raises(ConfigError) as caught:
        find_binaries(9)
    assert "PENSTOCK_POSTGRES_BIN" in caught.value.hint
