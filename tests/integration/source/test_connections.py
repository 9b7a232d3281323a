"""Connections to real servers: how sessions are pinned, and how each failure is named."""

from __future__ import annotations

import logging
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import pq

from penstock.errors import (
    AuthenticationFailed,
    DatabaseMissing,
    PenstockError,
    PermissionDenied,
    ServerUnavailable,
    TlsFailed,
)
from penstock.source import NO_TIMEOUTS, Role, SourceSettings, connect, connect_replication, run_command
from penstock.testing.postgres import PostgresServer

MakeServer = Callable[..., PostgresServer]
PASSWORD = "correct-horse-battery"

OPENERS: list[Callable[[SourceSettings], Any]] = [lambda s: connect(s, Role.CHECK), connect_replication]


@pytest.fixture(params=OPENERS, ids=["statements", "replication"])
def opened(request: pytest.FixtureRequest) -> Callable[[str], PenstockError]:
    """Try to connect in both ways; gives the error."""

    def attempt(url: str) -> PenstockError:
        with pytest.raises(PenstockError) as caught:
            request.param(SourceSettings(url, connect_timeout=5))
        assert caught.value.__cause__ is None
        return caught.value

    return attempt


@pytest.fixture
def role(database: Any) -> Iterator[str]:
    """A role that may log in and nothing else; gives a URL."""
    name = f"r_{database.name}"
    database.execute(f"create role {name} login password '{PASSWORD}'")
    host = SourceSettings(database.dsn).location
    yield f"postgresql://{name}:{PASSWORD}@{host}"
    database.execute(f"drop owned by {name}; drop role {name}")


def show(connection: Any, name: str) -> str:
    return str(connection.execute("select current_setting(%s)", [name]).fetchone()[0])


def test_sessions_are_pinned_whatever_the_role_the_url_and_the_environment_say(
    any_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_database.execute(
        f"alter database {any_database.name} set datestyle = 'SQL, DMY';"
        f"alter database {any_database.name} set extra_float_digits = 0;"
        f"alter database {any_database.name} set bytea_output = 'escape';"
        f"alter database {any_database.name} set statement_timeout = '77s'"
    )
    monkeypatch.setenv("PGDATESTYLE", "German")
    monkeypatch.setenv("PGTZ", "Asia/Tokyo")
    separator = "&" if "?" in any_database.dsn else "?"
    url = f"{any_database.dsn}{separator}options=-c%20intervalstyle%3Diso_8601%20-c%20work_mem%3D7MB"
    expected = {
        "intervalstyle": "postgres",
        "timezone": "UTC",
        "client_encoding": "UTF8",
        "extra_float_digits": "3",
        "bytea_output": "hex",
        "search_path": "pg_catalog",
        "row_security": "off",
        "work_mem": "7MB",
    }
    with connect(SourceSettings(url), Role.CATALOG) as connection:
        assert show(connection, "datestyle").startswith("ISO")
        assert {name: show(connection, name) for name in expected} == expected
        assert show(connection, "application_name") == "penstock:catalog"
        assert show(connection, "statement_timeout") == "77s"
    replication = connect_replication(SourceSettings(url), Role.CAPTURE)
    try:
        for name, value in {**expected, **NO_TIMEOUTS, "application_name": "penstock:capture"}.items():
            assert run_command(replication, f"show {name}", "look") == [(value,)]
        assert str(run_command(replication, "show datestyle", "look")[0][0]).startswith("ISO")
        assert run_command(replication, "IDENTIFY_SYSTEM", "identify")[0][3] == any_database.name
    finally:
        replication.finish()


def test_long_lived_sessions_have_no_time_limit_of_any_kind(any_database: Any) -> None:
    any_database.execute(f"alter database {any_database.name} set idle_session_timeout = '9s'")
    with connect(SourceSettings(any_database.dsn), Role.SNAPSHOT, parameters=NO_TIMEOUTS) as connection:
        names = ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"]
        if any_database.server.major >= 17:
            names.append("transaction_timeout")
        assert {show(connection, name) for name in names} == {"0"}


def test_a_wrong_password_is_named_and_not_told(database: Any, role: str, opened: Any) -> None:
    error = opened(role.replace(PASSWORD, "wrong-horse-battery"))
    assert type(error) is AuthenticationFailed
    assert "wrong-horse" not in str(error) + repr(error) + error.hint
    assert SourceSettings(database.dsn).location in str(error)


def test_a_missing_role_a_missing_database_and_a_missing_password(database: Any, role: str, opened: Any) -> None:
    assert type(opened(role.replace("//r_", "//nobody_"))) is AuthenticationFailed
    assert type(opened(role.replace(f":{PASSWORD}", ""))) is AuthenticationFailed
    assert type(opened(database.dsn.replace(database.name, "no_such_database"))) is DatabaseMissing


def test_a_refused_port_and_an_unknown_host(opened: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    error = opened(f"postgresql://me:{PASSWORD}@127.0.0.1:{port}/d")
    assert type(error) is ServerUnavailable
    assert f"127.0.0.1:{port}/d" in str(error)
    assert type(opened(f"postgresql://me:{PASSWORD}@no-such-host.invalid/d")) is ServerUnavailable


def test_a_server_that_does_not_answer_is_given_up_in_time(opened: Any) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        error = opened(f"postgresql://me:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/d?connect_timeout=2")
    assert type(error) is ServerUnavailable


def test_the_second_host_is_tried_when_the_first_is_down(database: Any) -> None:
    url = database.dsn.replace("@", "@127.0.0.1:1,", 1)
    replication = connect_replication(SourceSettings(url))
    assert replication.status == pq.ConnStatus.OK
    replication.finish()
    with connect(SourceSettings(url), Role.CATALOG) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_role_without_replication_is_refused_with_what_to_grant(role: str) -> None:
    with pytest.raises(PermissionDenied) as caught:
        connect_replication(SourceSettings(role))
    assert "replication" in caught.value.hint


def test_a_missing_privilege_is_named(database: Any, role: str) -> None:
    database.execute("create table secret_table (id int primary key)")
    replication_role = role.split("//")[1].split(":")[0]
    database.execute(f"alter role {replication_role} replication")
    replication = connect_replication(SourceSettings(role))
    try:
        with pytest.raises(PermissionDenied, match="secret_table"):
            run_command(replication, "select * from public.secret_table", "read the table")
        assert run_command(replication, "select 1", "go on") == [("1",)]
    finally:
        replication.finish()


def test_row_level_security_is_an_error_and_not_a_smaller_result(database: Any, role: str) -> None:
    name = role.split("//")[1].split(":")[0]
    database.execute(
        "create table guarded (id int primary key, owner name); alter table guarded enable row level security;"
        f"create policy own on guarded using (owner = current_user); grant select on guarded to {name}"
    )
    replication_settings = SourceSettings(role)
    with connect(replication_settings, Role.COPY) as connection, pytest.raises(Exception, match="row-level security"):
        connection.execute("select * from public.guarded")


def test_a_restart_cuts_connections_with_an_error_that_is_tried_again(make_server: MakeServer) -> None:
    server = make_server()
    settings = SourceSettings(server.dsn())
    replication = connect_replication(settings)
    server.restart()
    with pytest.raises(ServerUnavailable):
        run_command(replication, "IDENTIFY_SYSTEM", "identify the server")
    replication.finish()
    server.stop()
    with pytest.raises(ServerUnavailable):
        connect_replication(settings)


def test_a_statement_that_takes_too_long_is_given_up(database: Any) -> None:
    replication = connect_replication(SourceSettings(database.dsn))
    with pytest.raises(ServerUnavailable, match="in time"):
        run_command(replication, "select pg_sleep(30)", "wait", timeout=0.2)
    replication.finish()


def test_nothing_logs_the_password(database: Any, role: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = SourceSettings(role)
    with connect(settings, Role.CATALOG):
        logging.getLogger("penstock.test").info("connected settings=%r %s", settings, settings)
    with pytest.raises(PermissionDenied) as caught:
        connect_replication(settings)
    logging.getLogger("penstock.test").error("failed", exc_info=caught.value)
    assert PASSWORD not in caplog.text


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two self-signed certificates with their keys: the server's, and that of somebody else."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "other"):
        command = "openssl req -new -x509 -days 2 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost"
        files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    return folder


class TestTls:
    """On Debian's 15; the server of the wheel is built without TLS."""

    @pytest.fixture
    def server(self, make_server: MakeServer, certificates: Path) -> PostgresServer:
        server = make_server(major=15, settings={"ssl": "off"})
        server.write_file("server.crt", (certificates / "server.crt").read_text())
        server.write_file("server.key", (certificates / "server.key").read_text())
        server.execute("alter system set ssl = on")
        server.restart()
        return server

    def test_modes_pass_through(self, server: PostgresServer, certificates: Path, opened: Any) -> None:
        url = server.dsn().replace("127.0.0.1", "localhost")
        good = f"{url}?hostaddr=127.0.0.1&sslmode=verify-full&sslrootcert={certificates / 'server.crt'}"
        for wanted in (f"{url}?sslmode=require", good):
            with connect(SourceSettings(wanted), Role.CATALOG) as connection:
                assert connection.pgconn.ssl_in_use
            replication = connect_replication(SourceSettings(wanted))
            assert replication.ssl_in_use
            replication.finish()
        wrong_authority = good.replace("server.crt", "other.crt")
        wrong_name = good.replace("localhost", "elsewhere.example")
        no_file = good.replace("server.crt", "missing.crt")
        for refused in (wrong_authority, wrong_name, no_file):
            error = opened(refused)
            assert type(error) is TlsFailed, error
            assert server.password not in str(error)

    def test_a_server_that_only_takes_tls_says_so(self, server: PostgresServer, opened: Any) -> None:
        hba = server.data_dir / "pg_hba.conf"
        hba.write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
        server.restart()
        error = opened(f"{server.dsn()}?sslmode=disable")
        assert type(error) is AuthenticationFailed
        assert "sslmode=require" in error.hint

    def test_tls_is_refused_by_a_server_without_it(self, make_server: MakeServer, opened: Any) -> None:
        server = make_server(major=15, settings={"ssl": "off"})
        error = opened(f"{server.dsn()}?sslmode=require")
        assert type(error) is TlsFailed
        assert error.hint
