"""What is particular to the store in a Postgres database: its schema, other roles, and a server that goes away."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.errors import LeaseHeld, PermissionDenied, ServerUnavailable, StateNewer
from penstock.lsn import Lsn
from penstock.source.connections import SourceSettings
from penstock.source.lineage import Ancestry
from penstock.state import CommandKind, DataSync, Init, PostgresStore, open_store
from penstock.state.postgres import PostgresDatabase
from penstock.state.sql import Migration, load_migrations
from penstock.testing.postgres import PostgresServer
from penstock.testing.stores import LINEAGE, failed
from tests.conftest import Database

NEWEST = load_migrations("postgres")[-1].number
NEXT = Migration(NEWEST + 1, "more", "create table {schema}.more (x integer);\n")
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'penstock:state'"


def test_state_is_readable_for_people(any_database: Database) -> None:
    with open_store(any_database.dsn, "shop") as store:
        store.acquire_lease()
        store.use_lineage(Ancestry(LINEAGE))
        store.update_table_replication_state(16384, Init())
        store.update_table_replication_state(16384, failed(Init()))
        store.upsert_replication_progress(Lsn.parse("16/B374D848"))
        rows = any_database.execute(
            "select s.pipeline_id, s.table_id, s.phase, s.details->>'reason', p.flush_lsn::text, p.lineage->>'slot'"
            " from penstock.table_states s join penstock.replication_progress p using (pipeline_id)"
        )
        assert rows == [("shop", 16384, "errored", "a bad row: 'x' ✗", "16/B374D848", "penstock_slot")]


def test_many_may_open_an_empty_database_at_once(database: Database) -> None:
    def work(number: int) -> int:
        with PostgresStore(database.dsn, f"p{number}") as store:
            return store.acquire_lease().epoch

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [1] * 6
    assert database.execute("select max(version) from penstock.migrations") == [(NEWEST,)]


def test_no_write_uses_a_pipeline(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is suspended in the middle of one would keep its locks for ever: to the server, its session is
    neither idle in a transaction nor running a statement, so that no timeout ends it."""

    def refuse(*_: object) -> None:
        raise AssertionError("a pipeline")

    monkeypatch.setattr(psycopg.Pipeline, "__init__", refuse)
    with PostgresStore(database.dsn, "p") as store:
        store.acquire_lease()
        store.use_lineage(Ancestry(LINEAGE))
        store.update_table_replication_states({number: Init() for number in range(1, 121)})
        store.update_table_replication_states({number: DataSync() for number in range(1, 121)})
        store.upsert_replication_progress(Lsn.parse("0/1"))
        assert store.get_table_replication_states() == {number: DataSync() for number in range(1, 121)}


def test_schemas_are_worlds_of_their_own(database: Database) -> None:
    with (
        PostgresStore(database.dsn, "p", schema='odd "name"') as first,
        PostgresStore(database.dsn, "p", schema="other") as second,
    ):
        first.acquire_lease()
        second.acquire_lease()
        first.update_table_replication_state(1, Init())
        assert second.get_table_replication_states() == {}
    assert database.execute("select to_regnamespace('penstock')") == [(None,)]


def test_newer_state_is_refused(database: Database) -> None:
    PostgresStore(database.dsn).close()
    database.execute("insert into penstock.migrations (version, name) values (7, 'future')")
    with pytest.raises(StateNewer, match="version 7"):
        PostgresStore(database.dsn)


def test_state_in_use_is_not_migrated(database: Database) -> None:
    migrations = [*load_migrations("postgres"), NEXT]
    later = PostgresDatabase(SourceSettings(database.dsn), "other")
    with PostgresStore(database.dsn, "p") as store:
        store.acquire_lease()
        with pytest.raises(LeaseHeld, match="runs pipeline 'p'"):
            later.migrate(migrations)
        store.update_table_replication_state(1, Init())
    later.migrate(migrations)
    later.migrate(migrations)
    later.close()
    assert database.execute("select count(*) from penstock.more") == [(0,)]


def test_who_may_not_create_can_use_what_is_there(database: Database) -> None:
    role = f"limited_{database.name}"
    database.execute(f"create role {role} login password 'secret'")
    try:
        limited = make_conninfo(database.dsn, user=role, password="secret")
        with pytest.raises(PermissionDenied):
            PostgresStore(limited)
        PostgresStore(database.dsn).close()
        database.execute(f"grant usage on schema penstock to {role}")
        database.execute(f"grant select, insert, update, delete on all tables in schema penstock to {role}")
        with PostgresStore(limited) as store:
            store.acquire_lease()
            store.update_table_replication_state(1, Init())
    finally:
        database.execute(f"drop owned by {role}")
        database.execute(f"drop role {role}")


def test_a_connection_that_was_cut_is_made_again(database: Database) -> None:
    with PostgresStore(database.dsn) as store:
        lease = store.acquire_lease()
        store.update_table_replication_state(1, Init())
        assert len(database.execute(CUT)) == 2
        store.update_table_replication_state(1, DataSync())
        database.execute(CUT)
        assert store.load_table_replication_states() == 1
        lease._wanted.set()
        lease.check()
        assert store.get_table_replication_state(1) == DataSync()


def test_a_commit_whose_answer_is_lost_is_not_done_twice(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    lose = {"answers": 0}
    execute = psycopg.Connection.execute

    def execute_and_hang_up(connection, query, *arguments, **options):
        result = execute(connection, query, *arguments, **options)
        if query == "commit" and lose["answers"]:
            lose["answers"] -= 1
            connection.close()
            raise psycopg.OperationalError("the connection is lost")
        return result

    monkeypatch.setattr(psycopg.Connection, "execute", execute_and_hang_up)
    with PostgresStore(database.dsn) as store:
        store.acquire_lease()
        lose["answers"] = 1
        command = store.add_command(CommandKind.PAUSE)
        assert [each.number for each in store.get_commands()] == [command.number]
        lose["answers"] = 1
        store.update_table_replication_state(1, Init())
        assert len(store.get_table_replication_history(1)) == 1
        assert lose["answers"] == 0


def test_a_server_that_restarts_is_waited_for(make_server: Callable[..., PostgresServer]) -> None:
    server = make_server()
    lost = Event()
    with PostgresStore(server.dsn(), retry_seconds=60.0) as store:
        store.acquire_lease(on_lost=lambda _: lost.set())
        store.update_table_replication_state(1, Init())
        server.stop()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(store.update_table_replication_state, 1, DataSync())
            server.start()
            writing.result(timeout=60)
        assert store.get_table_replication_state(1) == DataSync()
        assert not lost.is_set()


def test_a_server_that_is_not_there_is_an_error_in_time(make_server: Callable[..., PostgresServer]) -> None:
    server = make_server()
    with PostgresStore(server.dsn(), retry_seconds=0.2) as store:
        store.acquire_lease()
        server.stop()
        with pytest.raises(ServerUnavailable, match="connect"):
            store.update_table_replication_state(1, Init())
        server.start()
        store.update_table_replication_state(1, Init())


def test_commits_are_durable_whatever_the_role_says(database: Database) -> None:
    database.execute(f'alter database "{database.name}" set synchronous_commit = off')
    database.execute(f"alter database \"{database.name}\" set default_transaction_isolation = 'serializable'")
    database.execute(f'alter database "{database.name}" set default_transaction_read_only = on')
    with PostgresStore(database.dsn) as store:
        store.acquire_lease()
        store.update_table_replication_state(1, Init())
        connection = store.database._connection  # pyright: ignore[reportAttributeAccessIssue]
        assert connection.execute("show synchronous_commit").fetchone() == ("on",)
